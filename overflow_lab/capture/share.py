"""The share of one process in a scan that several divide: every so-many-th batch, and where it stands in the whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from overflow_lab.capture.resume import batch_digest
from overflow_lab.capture.runs import Reference
from overflow_lab.recording import BatchRow, ShareRow
from overflow_lab.subjects import Batch

# A process of several that is killed loses what it did since its last so many batches.
SHARE_BATCHES = 8


@dataclass
class Share:
    """Takes batches `rank`, `rank` + `ranks`, ... of those that it walks; the boundaries are those of one process.

    All batches are made in every process, which hashes them: so that a merge knows that all have walked the same.
    """

    rank: int = 0
    ranks: int = 1
    _places: list[int] = field(default_factory=lambda: [0])
    _hash: str = ""
    _ended: bool = False

    @property
    def divided(self) -> bool:
        """Whether there are others."""
        return self.ranks > 1

    def of(self, batches: Iterable[Batch]) -> Iterator[tuple[int, Batch]]:
        """Yield the batches of this share, with their numbers among all."""
        for number, batch in enumerate(batches):
            if self.divided:
                self._places.append(self._places[-1] + batch.samples)
                self._hash = batch_digest(batch, self._hash)
            if number % self.ranks == self.rank:
                yield number, batch
        self._ended = True

    def rows(
        self, precision: str, chunk: Iterable[Reference], ticks: Mapping[tuple[str, int], int]
    ) -> Iterator[BatchRow]:
        """Yield a row for each batch that a precision has run, with its `ticks`; none where nothing is divided."""
        for number in (reference.number for reference in chunk if self.divided):
            first, end = self._places[number], self._places[number + 1]
            took = sum(n for (_, batch), n in ticks.items() if batch == number)
            yield BatchRow(precision, number, first, end - first, took)

    def end_row(self) -> ShareRow | None:
        """Return what there was to divide; None where that is not known, or nothing was divided."""
        if not (self.divided and self._ended):
            return None
        return ShareRow(len(self._places) - 1, self._places[-1], self._hash)
