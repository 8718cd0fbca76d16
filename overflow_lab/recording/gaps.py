"""What is missing from a merged recording: shares that were lost, inputs that no precision or not every one has run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from overflow_lab.recording import BatchRow, BlindSpotRow, Footer, Recording, ShareRow
from overflow_lab.recording.belonging import name_of, precisions_of, share_of

# So many stretches of missing inputs are named; a share of many batches has as many.
_NAMED = 8

Stretch = tuple[int, int | None]


def footer_of(recordings: Sequence[Recording]) -> Footer:
    """Return how the whole ended: complete only where each recording is, and no share is missing."""
    reasons = list(_reasons(recordings))
    if not reasons:
        return Footer("complete")
    failed = any(recording.status == "failed" for recording in recordings)
    return Footer("failed" if failed else "interrupted", "; ".join(reasons))


def _reasons(recordings: Sequence[Recording]) -> Iterator[str]:
    shares = [share_of(recording) for recording in recordings]
    for number, recording in enumerate(recordings):
        share, ended = shares[number], recording.footer
        who = name_of(recording, number) if share is None else _rank(*share)
        if ended is None:
            yield f"{who} was killed" if share else f"{who} did not finish"
        elif ended.status != "complete":
            yield f"{who} ended early ({ended.error or ended.status})"
    for rank in _absent(recordings):
        yield f"{_rank(rank, (shares[0] or (0, 1))[1])} left no recording"


def _rank(rank: int, ranks: int) -> str:
    return f"rank {rank} of {ranks}"


def _absent(recordings: Sequence[Recording]) -> list[int]:
    shares = [share for share in map(share_of, recordings) if share is not None]
    return sorted(set(range(shares[0][1])) - {rank for rank, _ in shares}) if shares else []


def gap_rows(recordings: Sequence[Recording]) -> list[BlindSpotRow]:
    """Return a blind spot for each precision that lacks inputs, or one for all that lack the same."""
    reasons = list(_reasons(recordings))
    if not reasons:
        return []
    if share_of(recordings[0]) is None:
        return [BlindSpotRow("", f"{reason}: the inputs that it had not run are missing") for reason in reasons]
    missing = {name: _missing(recordings, name) for name in precisions_of(recordings)}
    why = "; ".join(reasons)
    if len(set(missing.values())) == 1:
        return [BlindSpotRow("", f"{why}: {_said(next(iter(missing.values())), recordings)}")]
    return [BlindSpotRow("", f"{why}: {_said(gaps, recordings)}", name) for name, gaps in missing.items() if gaps]


def _missing(recordings: Sequence[Recording], precision: str) -> tuple[Stretch, ...]:
    """Return the stretches of inputs, from 0 and up to the end exclusive, that a precision has not run."""
    rows = (row for recording in recordings for row in recording.of(BatchRow) if row.precision == precision)
    total = next((row.inputs for recording in recordings for row in recording.of(ShareRow)), None)
    return tuple(_complement(sorted((row.first, row.first + row.inputs) for row in rows), total))


def _complement(covered: Iterable[tuple[int, int]], total: int | None) -> Iterator[Stretch]:
    reached = 0
    for begin, end in covered:
        if begin > reached:
            yield reached, begin
        reached = max(reached, end)
    if total is None or reached < total:
        yield reached, total


def _said(gaps: Sequence[Stretch], recordings: Sequence[Recording]) -> str:
    """Return the missing inputs in words, counted from 1."""
    if not gaps:
        return "all inputs had been run"
    named = [_stretch(*gap) for gap in gaps[:_NAMED]]
    more = f" and {len(gaps) - _NAMED} more stretches" if len(gaps) > _NAMED else ""
    total = next((row.inputs for recording in recordings for row in recording.of(ShareRow)), None)
    return f"inputs {', '.join(named)}{more}{f' of {total}' if total is not None else ''} were not run"


def _stretch(begin: int, end: int | None) -> str:
    if end is None:
        return f"{begin + 1} and all after it"
    return str(end) if end == begin + 1 else f"{begin + 1}-{end}"
