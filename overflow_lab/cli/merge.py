"""`overflow-lab merge A B ...`: recordings made apart become one. Needs neither the model nor torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from overflow_lab.cli import options as opt
from overflow_lab.cli.places import place
from overflow_lab.cli.show import check_fail_on, exit_code, print_json, print_text
from overflow_lab.errors import ScanInterrupted, UsageError

Recordings = Annotated[
    list[Path],
    typer.Argument(help="Recordings of one model, over other inputs or by other processes.", show_default=False),
]
Merged = Annotated[
    Path | None,
    typer.Option(
        "--recording",
        "-o",
        metavar="OUT",
        help="The recording to write [default: reports/FIRST-merged.jsonl.gz].",
        show_default=False,
    ),
]


def merge(
    recordings: Recordings,
    recording: Merged = None,
    as_json: opt.AsJson = False,
    fail_on: opt.FailOn = "never",
    overwrite: opt.Overwrite = False,
    quiet: opt.Quiet = False,
) -> int:
    """Make one recording of several: what one process would have recorded over all their inputs.

    Needs neither the model nor torch.
    """
    check_fail_on(fail_on)
    if len(recordings) < 2:
        raise UsageError("merge needs two recordings or more; give those of other inputs, or of other processes.")
    stem = recordings[0].name.removesuffix(".gz").removesuffix(".jsonl")
    kept = place(recording, f"{stem}-merged", ".jsonl.gz", overwrite=overwrite)
    from overflow_lab.analysis import analyze
    from overflow_lab.recording.merging import merge as merged

    found = merged(recordings, recording=kept)
    diagnosis = analyze(found)
    if as_json:
        print_json(found, diagnosis, recording_path=kept, report_path=None)
    else:
        print_text(found, diagnosis, quiet=quiet)
        if not quiet:
            typer.echo(f"\nrecording  {kept}\nagain      overflow-lab report {kept}")
    if not found.complete:
        error = found.footer.error if found.footer else None
        raise ScanInterrupted(f"not all of the scan is there: {error or found.status}.", str(kept))
    return exit_code(diagnosis, fail_on)
