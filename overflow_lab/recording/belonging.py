"""What belongs together: recordings of the same model, run in the same way, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from overflow_lab.errors import UsageError
from overflow_lab.recording import BatchRow, ModuleRow, PrecisionRow, Recording, ShareRow, TensorRow

# Facts of the subject and options that make another program, or other answers, of the same weights.
_FACTS = ("class", "task", "attn_implementation")
_OPTIONS = ("generate", "num_beams", "max_new_tokens", "level")


def name_of(recording: Recording, number: int) -> str:
    """Return how a message calls a recording: by its file, or by its place among those given."""
    return os.path.basename(recording.path) if recording.path else f"recording {number + 1}"


def check(recordings: Sequence[Recording]) -> None:
    """Raise UsageError, in one line, where the recordings are not all of one model, run in the same way."""
    names = [name_of(recording, number) for number, recording in enumerate(recordings)]
    first = recordings[0]
    for name, other in zip(names[1:], recordings[1:], strict=True):
        both = f"{names[0]} and {name}"
        _same_precisions(names[0], first, name, other)
        _same(both, first.header.subject, other.header.subject, _FACTS)
        _same(both, first.header.options, other.header.options, _OPTIONS)
        _same_model(names[0], first, name, other)
    _same_shares(names, recordings)


def _same_precisions(a: str, first: Recording, b: str, other: Recording) -> None:
    mine, theirs = set(first.header.precisions), set(other.header.precisions)
    for whole, lacking, missing in ((a, b, mine - theirs), (b, a, theirs - mine)):
        if missing:
            named = ", ".join(sorted(missing))
            raise UsageError(f"{lacking} lacks {named}, which {whole} has; scan both in the same precisions.")


def _same(both: str, mine: Mapping[str, Any], theirs: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Compare facts, where both know them."""
    for key in keys:
        if key in mine and key in theirs and mine[key] != theirs[key]:
            values = f"{mine[key]!r} in one and {theirs[key]!r} in the other"
            raise UsageError(f"{both} do not belong together: {key} is {values}; scan both alike.")


def _same_model(a: str, first: Recording, b: str, other: Recording) -> None:
    """Compare modules, weights and executions; one that did not finish may lack some."""
    for what, rows in (("module", _modules), ("weight", _weights), ("precision", _executions)):
        mine, theirs = rows(first), rows(other)
        whole = rows is not _executions
        if missing := sorted(mine.keys() - theirs.keys()) if whole and other.complete else []:
            raise UsageError(f"{b} has no {what} {missing[0]}, which {a} has: they are not of one model.")
        if missing := sorted(theirs.keys() - mine.keys()) if whole and first.complete else []:
            raise UsageError(f"{a} has no {what} {missing[0]}, which {b} has: they are not of one model.")
        apart = next((name for name in mine if name in theirs and mine[name] != theirs[name]), None)
        if apart is not None:
            raise UsageError(
                f"{a} and {b} are not of one model: the {what} {apart} differs; merge recordings of the same weights."
            )


def _modules(recording: Recording) -> dict[str, Any]:
    return {row.path or "(root)": (row.class_name, row.parameters, row.aliases) for row in recording.of(ModuleRow)}


def _weights(recording: Recording) -> dict[str, Any]:
    """Return what is exact in the ranges of weights: their sums depend on the machine in their last bits."""
    return {row.name: (row.role, row.dtype, tuple(row.shape), *_exact(row)) for row in recording.of(TensorRow)}


def _exact(row: TensorRow) -> tuple[Any, ...]:
    found = row.range
    return (found.count, found.nan, found.zero, found.min, found.max, found.smallest, dict(found.exponents))


def _executions(recording: Recording) -> dict[str, Any]:
    return {row.precision: (row.dtype, row.cast, row.kept) for row in recording.of(PrecisionRow)}


def precisions_of(recordings: Sequence[Recording]) -> list[str]:
    """Return all precisions that were asked for or run, those that a scan adds of itself among them."""
    asked = [name for recording in recordings for name in recording.header.precisions]
    run = [row.precision for recording in recordings for row in recording.of(PrecisionRow)]
    return list(dict.fromkeys([*asked, *run]))


def share_of(recording: Recording) -> tuple[int, int] | None:
    """Return (rank, ranks) of a recording of a share, None for one of a whole scan."""
    options = recording.header.options
    return (int(options["rank"]), int(options["ranks"])) if "ranks" in options else None


def _same_shares(names: Sequence[str], recordings: Sequence[Recording]) -> None:
    """Refuse what cannot be one scan: shares of several, the same one twice, shares beside whole recordings."""
    shares = [share_of(recording) for recording in recordings]
    if all(share is None for share in shares):
        return
    if None in shares:
        whole = names[shares.index(None)]
        raise UsageError(f"{whole} is no share of a scan, the others are; merge the shares first, then that with it.")
    known = [share for share in shares if share is not None]
    if len({ranks for _, ranks in known}) > 1:
        raise UsageError(f"{names[0]} is one of {known[0][1]} shares, not all others are; give those of one scan.")
    twice = next((n for n, share in enumerate(known) if share in known[:n]), None)
    if twice is not None:
        raise UsageError(f"{names[known.index(known[twice])]} and {names[twice]} are both rank {known[twice][0]}'s.")
    ends = [row for recording in recordings for row in recording.of(ShareRow)]
    if len(set(ends)) > 1:
        raise UsageError(
            "the shares are of different inputs, so that they cannot be one scan; let every process walk the same "
            "inputs in the same order (a seed for what is shuffled)."
        )
    _check_places(row for recording in recordings for row in recording.of(BatchRow))


def _check_places(rows: Iterable[BatchRow]) -> None:
    places: dict[int, tuple[int, int]] = {}
    for row in rows:
        if places.setdefault(row.batch, (row.first, row.inputs)) != (row.first, row.inputs):
            raise UsageError(f"batch {row.batch + 1} holds other inputs in another share; give the shares of one scan.")
