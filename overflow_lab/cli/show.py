"""What both commands print at their end: the verdict as JSON or as text, the files, and the next command."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from overflow_lab.cli.options import FAIL_ON
from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from overflow_lab.analysis import Diagnosis
    from overflow_lab.recording import Recording


def print_json(
    recording: Recording, diagnosis: Diagnosis, *, recording_path: Path | None, report_path: Path | None
) -> None:
    """Print exactly one JSON object on standard output."""
    from overflow_lab.report.exports import to_json

    made = to_json(
        recording,
        diagnosis,
        recording_path=None if recording_path is None else str(recording_path),
        report_path=None if report_path is None else str(report_path),
    )
    sys.stdout.write(json.dumps(made, indent=2, allow_nan=False) + "\n")


def print_text(recording: Recording, diagnosis: Diagnosis, *, quiet: bool) -> None:
    """Print the verdicts and the worst sites, or the remedies in their place; with `quiet` no sites."""
    from overflow_lab.recording import ProofRow
    from overflow_lab.report import terminal
    from overflow_lab.report.terminal_proofs import remedies

    proofs = bool(recording.of(ProofRow))
    print_rich(terminal.render(recording, diagnosis, brief=quiet or proofs))
    if proofs:
        print_rich(remedies(recording))


def print_rich(shown: RenderableType) -> None:
    """Print on standard output what fits its width."""
    try:
        Console(highlight=False).print(shown)
    except SystemExit:  # rich's answer to a closed pipe, with 1, which here would mean a verdict at --fail-on
        raise BrokenPipeError from None


def check_fail_on(fail_on: str, choices: Sequence[str] = FAIL_ON) -> None:
    """Refuse a severity that does not exist, before any work is done."""
    if fail_on not in choices:
        raise UsageError(f"--fail-on is {fail_on!r}; choose {', '.join(choices[:-1])} or {choices[-1]}.")


def exit_code(diagnosis: Diagnosis, fail_on: str) -> int:
    """Return 1 where a verdict is at or above `fail_on`."""
    from overflow_lab.analysis.results import SEVERITIES

    if fail_on == "never":
        return 0
    return int(SEVERITIES.index(diagnosis.worst) >= SEVERITIES.index(fail_on))
