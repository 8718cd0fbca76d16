"""`overflow-lab scan` under `torchrun` or `accelerate launch`: each process scans its share, rank 0 tells of all."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from overflow_lab.capture.team import PATIENCE, Place, Team, join
from overflow_lab.cli import options as opt
from overflow_lab.cli.places import check_writable, place, stem_of
from overflow_lab.cli.progress import watched
from overflow_lab.cli.show import exit_code, print_json, print_text
from overflow_lab.errors import OverflowLabError, RecordingFormatError, ScanInterrupted, UsageError

if TYPE_CHECKING:
    from overflow_lab.recording import Recording

# A launcher leaves 30 s between its SIGTERM and its SIGKILL; the others write their last row in less than one.
_GRACE = 10.0
_REFUSED = ("fix", "repro", "resume")
DONE, USAGE, ENDED_EARLY = 0, 2, 3


def shared_scan(here: Place, model: str, params: Mapping[str, Any]) -> int:
    """Scan this process's share; at rank 0 then wait for the others, merge, report and print.

    Returns the exit code. Other ranks print nothing but how they failed.
    """
    with watched(quiet=True):
        team = join(here)
    if here.rank:
        try:
            return _follow(team, model, params)
        finally:
            team.leave()
    plan = ""
    try:
        target, kept = _plan(model, params)
        plan = os.path.abspath(kept)
        team.agree(plan)
        return _lead(team, model, params, target=target, kept=kept)
    finally:
        if not plan:
            team.agree(plan)
        team.end()
        team.leave(within=_GRACE)


def _plan(model: str, params: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the report and the recording to write. Raises UsageError where they, or parts of an earlier scan, are."""
    asked = next((name for name in _REFUSED if params.get(name)), None)
    if asked is not None:
        raise UsageError(f"--{asked} works in one process; scan with all of them first, then {asked} with one.")
    overwrite = bool(params.get("overwrite"))
    target = place(params.get("report"), stem_of(model), ".html", overwrite=overwrite)
    kept = place(params.get("recording"), target.stem, ".jsonl.gz", overwrite=overwrite)
    check_writable(target)
    check_writable(kept)
    old = sorted(kept.parent.glob(_part(kept, "*", "*").name))
    if old and not overwrite:
        raise UsageError(
            f"{old[0]} is of an earlier scan that was not merged; `overflow-lab merge` its parts, or give --overwrite."
        )
    for path in old:
        path.unlink()
    return target, kept


def _part(kept: Path, rank: object, ranks: object) -> Path:
    """Return where a process writes what it records: beside the recording that is made of it."""
    name = kept.name.removesuffix(".gz").removesuffix(".jsonl")
    return kept.with_name(f"{name}.rank{rank}-of-{ranks}{kept.name[len(name) :]}")


def _follow(team: Team, model: str, params: Mapping[str, Any]) -> int:
    """Scan a share; where that goes wrong stay until rank 0 is done: a launcher ends all when one fails."""
    kept = team.agree()
    if not kept:
        return USAGE
    part = _part(Path(kept), team.place.rank, team.place.ranks)
    with Signals() as signals, team.alive():
        try:
            ended, code = _scanned(team.place, model, params, part, signals), ENDED_EARLY
        except UsageError as error:  # every process says so, and one is enough
            ended, code = str(error), USAGE
        team.end(ended)
        if not ended:
            return DONE
        if code == ENDED_EARLY:
            sys.stderr.write(f"overflow-lab: {team.place}: {ended} What was recorded is in {part}.\n")
        team.wait_for([0], lambda: signals.asked if signals.asked else math.inf)
    return code


def _lead(team: Team, model: str, params: Mapping[str, Any], *, target: Path, kept: Path) -> int:
    """Scan a share, wait for the others within bounds, and make one recording, report and verdict of what is there."""
    ranks, began = team.place.ranks, time.monotonic()
    parts = [_part(kept, rank, ranks) for rank in range(ranks)]
    with Signals() as signals, team.alive():
        ended = _scanned(team.place, model, params, parts[0], signals)
        latest = time.monotonic() + max(PATIENCE, time.monotonic() - began)
        others = range(1, ranks)
        lost = team.wait_for(others, lambda: min(latest, signals.asked + _GRACE) if signals.asked else latest)
        found = _merged(parts, kept, ended)
        said = {rank: team.said(rank) for rank in others if rank not in lost}
        return _told(found, params, target=target, kept=kept, parts=parts, said=said)


def _scanned(here: Place, model: str, params: Mapping[str, Any], part: Path, signals: Signals) -> str:
    """Scan a share into its own recording and return what ended it early, empty where nothing did."""
    quiet = bool(params.get("quiet")) or here.rank > 0
    options = opt.subject_options(params)
    if options.get("device") == "cuda":
        options["device"] = f"cuda:{here.local}"
    wanted = params.get("precision") or ("float16", "bfloat16")
    try:
        with signals.raised(), watched(quiet=quiet) as bars:
            import overflow_lab

            share = (here.rank, here.ranks)
            overflow_lab.scan(model, precisions=wanted, recording=part, progress=bars, share=share, **options)
    except ScanInterrupted as error:
        return str(error)
    except KeyboardInterrupt:
        return "interrupted."
    except SystemExit as error:  # not our exit, and not our exit code
        return f"the model ended the process (sys.exit({error.code!r})); take that out and try again."
    return ""


def _merged(parts: Sequence[Path], kept: Path, ended: str) -> Recording:
    """Merge what the processes have written."""
    from overflow_lab.recording import load
    from overflow_lab.recording.merging import merge

    found = []
    for part in parts:
        with contextlib.suppress(UsageError, RecordingFormatError):  # killed before its first row was whole
            found.append(load(part))
    if not found:
        raise ScanInterrupted(ended or "no process has recorded anything.")
    try:
        return merge(found, recording=kept)
    except OverflowLabError as error:
        raise ScanInterrupted(f"{error} What each process recorded is in {parts[0].parent}.") from error


def _told(
    found: Recording,
    params: Mapping[str, Any],
    *,
    target: Path,
    kept: Path,
    parts: Sequence[Path],
    said: Mapping[int, str | None],
) -> int:
    """Write the report, print the verdict, and return the exit code. Raises ScanInterrupted where not all is there."""
    from overflow_lab.analysis import analyze
    from overflow_lab.report import write_report

    diagnosis = analyze(found)
    try:
        write_report(found, diagnosis, target)
    except UsageError as error:
        raise ScanInterrupted(str(error), str(kept)) from error
    if params.get("as_json"):
        print_json(found, diagnosis, recording_path=kept, report_path=target)
    else:
        print_text(found, diagnosis, quiet=bool(params.get("quiet")))
        if not params.get("quiet"):
            typer.echo(f"\nreport     {target}\nrecording  {kept}\nagain      overflow-lab report {kept}")
    if not found.complete:
        why = [found.footer.error or found.status if found.footer else found.status]
        why += [f"rank {rank} says: {text}" for rank, text in said.items() if text and text not in why[0]]
        raise ScanInterrupted(f"not all of the scan is there: {'; '.join(why)}.".replace("..", "."), str(kept))
    for part in parts:
        part.unlink(missing_ok=True)
    return exit_code(diagnosis, str(params.get("fail_on", "never")))


class Signals:
    """Keeps SIGTERM and Ctrl-C from ending the process before it has told what it knows.

    `asked` is when one came (0 where none did), by `time.monotonic`; within `raised` it is KeyboardInterrupt, too.
    """

    def __init__(self) -> None:
        self.asked = 0.0
        self._raising = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *ended: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Let a signal end what is done inside."""
        self._raising = True
        try:
            yield
        finally:
            self._raising = False

    def _note(self, number: int, frame: object) -> None:
        self.asked = self.asked or time.monotonic()
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt
