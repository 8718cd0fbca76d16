"""Where what a recording saw stands in the whole: its batches and clocks, as one process would have counted them."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from overflow_lab.recording import BatchRow, ErrorRow, LookRow, RangeRow, Recording, RunRow
from overflow_lab.recording.belonging import precisions_of, share_of

REFERENCE = "float32"


@dataclass(frozen=True)
class Placed:
    """A recording with the functions that give its batches and clocks their places in the whole."""

    recording: Recording
    batch: Callable[[int], int]
    clock: Callable[[str, int], int]

    def rows(self) -> list[Any]:
        """Return the rows of the recording, dated as those of the whole."""
        looks = {look.name: self._dated(look).name for look in self.recording.of(LookRow)}
        return [self._dated(row, looks) for row in self.recording.rows]

    def _dated(self, row: Any, looks: dict[str, str] | None = None) -> Any:
        changed: dict[str, Any] = {}
        if isinstance(row, (RangeRow, ErrorRow)):
            changed["order"] = self.clock(row.precision, row.order)
        if isinstance(row, RangeRow) and row.first_bad is not None:
            bad = row.first_bad
            clock = self.clock(row.precision, bad.clock)
            changed["first_bad"] = dataclasses.replace(bad, clock=clock, batch=self.batch(bad.batch))
        if hasattr(row, "batch"):
            changed["batch"] = self.batch(row.batch)
        look = getattr(row, "look", None)
        if look is not None and looks is not None:
            changed["look"] = looks.get(look, look)
        return dataclasses.replace(row, **changed) if changed else row


def placed(recordings: Sequence[Recording]) -> list[Placed]:
    """Return the recordings in their places: shares of one scan side by side, others one after the other."""
    if share_of(recordings[0]) is None:
        return _in_turn(recordings)
    ordered = sorted(recordings, key=lambda recording: share_of(recording) or (0, 0))
    return _side_by_side(ordered)


def _in_turn(recordings: Sequence[Recording]) -> list[Placed]:
    made, batches = [], 0
    clocks: dict[str, int] = {}
    for recording in recordings:
        made.append(Placed(recording, _shifted(batches), _later(dict(clocks))))
        batches += _batches(recording)
        for precision in precisions_of([recording]):
            clocks[precision] = clocks.get(precision, 0) + _ticks(recording, precision)
    return made


def _shifted(by: int) -> Callable[[int], int]:
    return lambda batch: batch + by


def _later(by: dict[str, int]) -> Callable[[str, int], int]:
    return lambda precision, clock: clock + by.get(precision, 0)


def _batches(recording: Recording) -> int:
    """Return how many batches float32 has run."""
    return max((row.batches for row in recording.of(RunRow) if row.precision == REFERENCE), default=0)


def _ticks(recording: Recording, precision: str) -> int:
    """Return how far the clock of a precision went; where no row counts it, to what was seen last."""
    counted = sum(row.ticks for row in recording.of(RunRow) if row.precision == precision)
    seen = [row for row in recording.of(RangeRow) if row.precision == precision]
    last = max((max(row.order, row.first_bad.clock if row.first_bad else 0) + 1 for row in seen), default=0)
    return max(counted, last)


def _side_by_side(recordings: Sequence[Recording]) -> list[Placed]:
    """Date each share by the batches of all: those that are missing take no time."""
    rows = sorted((row for recording in recordings for row in recording.of(BatchRow)), key=lambda row: row.batch)
    precisions = precisions_of(recordings)
    whole = {name: _Clock([row for row in rows if row.precision == name]) for name in precisions}
    made = []
    for recording in recordings:
        rank, ranks = share_of(recording) or (0, 1)
        own = {name: _Clock([r for r in recording.of(BatchRow) if r.precision == name]) for name in precisions}
        made.append(Placed(recording, _shifted(0), _translated(own, whole, rank, ranks)))
    return made


class _Clock:
    """When each batch of one precision began, by the clock of these batches alone."""

    def __init__(self, rows: Sequence[BatchRow]) -> None:
        ordered = sorted(rows, key=lambda row: row.batch)
        self.batches = [row.batch for row in ordered]
        self.begins = [0, *accumulate(row.ticks for row in ordered)]

    def began(self, batch: int) -> int:
        """Return when `batch` began, or would have."""
        return self.begins[bisect.bisect_left(self.batches, batch)]


def _translated(own: dict[str, _Clock], whole: dict[str, _Clock], rank: int, ranks: int) -> Callable[[str, int], int]:
    def translate(precision: str, clock: int) -> int:
        mine = own.get(precision)
        if mine is None:
            return clock
        place = bisect.bisect_right(mine.begins, clock) - 1
        # Behind the last batch that is written down stands the one that this share was at when it ended.
        last = mine.batches[-1] + ranks if mine.batches else rank
        batch = mine.batches[place] if place < len(mine.batches) else last
        return whole[precision].began(batch) + clock - mine.begins[place]

    return translate
