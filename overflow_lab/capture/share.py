"""The share of one process in a scan that several divide: every so-many-th batch, and where it stands in the whole."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from overflow_lab.recording import BatchRow, ShareRow
from overflow_lab.subjects import Batch
from overflow_lab.subjects.containers import tensors

# A process of several that is killed loses what it did since its last so many batches.
SHARE_BATCHES = 8

# Of a longer tensor an even spread of so many bytes is told from others', so that pictures cost little.
_HASHED = 1 << 20


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
                self._hash = digest(batch, self._hash)
            if number % self.ranks == self.rank:
                yield number, batch
        self._ended = True

    def batch_row(self, precision: str, number: int, ticks: int) -> BatchRow:
        """Return the row of a batch that a precision has run."""
        first, end = self._places[number], self._places[number + 1]
        return BatchRow(precision, number, first, end - first, ticks)

    def end_row(self) -> ShareRow | None:
        """Return what there was to divide; None where that is not known, or nothing was divided."""
        if not (self.divided and self._ended):
            return None
        return ShareRow(len(self._places) - 1, self._places[-1], self._hash)


def digest(batch: Batch, before: str = "") -> str:
    """Return the SHA-256, in hexadecimal, of a batch's tensors (names, dtypes, shapes, bytes) and what came before."""
    made = hashlib.sha256(before.encode())
    for name, tensor in tensors((dict(batch.inputs), batch.positional), "input"):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        step = max(1, flat.numel() * flat.itemsize // _HASHED)
        made.update(flat[::step].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()
