"""Modules that no run called, in any of several recordings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overflow_lab.recording import BlindSpotRow, ModuleRow, RangeRow, Recording

_REASON = " was never called"


def uncalled_row(path: str, class_name: str) -> BlindSpotRow:
    """Return the blind spot of a module that was never called, nor anything below it."""
    return BlindSpotRow(path, f"{class_name}{_REASON}")


def is_uncalled(row: BlindSpotRow) -> bool:
    """Return whether a blind spot is such a one."""
    return row.reason.endswith(_REASON)


def uncalled(recordings: Sequence[Recording]) -> list[BlindSpotRow]:
    """Return the blind spots of what none of the recordings called, the topmost modules only.

    A recording that did not finish does not say what it never called; then what it has a range of was called.
    """
    finished = [_named(recording) for recording in recordings if recording.complete]
    if not finished:
        return []
    silent = finished[0]
    for named in finished[1:]:
        silent = _both(silent, named)
    for recording in recordings:
        if not recording.complete:
            called = {row.module for row in recording.of(RangeRow)}
            silent = _without(silent, called, recording.of(ModuleRow))
    return [uncalled_row(path, name) for path, name in silent.items()]


def _named(recording: Recording) -> dict[str, str]:
    rows = (row for row in recording.of(BlindSpotRow) if is_uncalled(row))
    return {row.module: row.reason.removesuffix(_REASON) for row in rows}


def _both(a: dict[str, str], b: dict[str, str]) -> dict[str, str]:
    """Return the topmost modules that lie within one of each."""
    within = {path: name for path, name in a.items() if any(_inside(path, above) for above in b)}
    return within | {path: name for path, name in b.items() if any(_inside(path, above) for above in a)}


def _without(silent: dict[str, str], called: set[str], modules: Iterable[ModuleRow]) -> dict[str, str]:
    """Return the topmost modules within `silent` below which nothing was called."""
    made: dict[str, str] = {}
    for row in modules:
        known = any(_inside(row.path, above) for above in silent) and not any(_inside(row.path, top) for top in made)
        if known and not any(_inside(name, row.path) for name in called):
            made[row.path] = row.class_name
    return made


def _inside(path: str, above: str) -> bool:
    return path == above or above == "" or path.startswith(above + ".")
