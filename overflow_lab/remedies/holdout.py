"""Inputs that the search for a remedy never sees: it is proven on them too."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overflow_lab.subjects.containers import map_tensors, tensors
from overflow_lab.subjects.module import as_batches
from overflow_lab.subjects.subject import Batch, Subject
from overflow_lab.subjects.tensors import CountedBatches, fresh_batches, usable_device

if TYPE_CHECKING:
    import torch

# One in so many inputs is held back; a single batch is taken apart only where as many samples are left.
SHARE = 4


@dataclass(frozen=True)
class Split:
    """A subject whose inputs are those of the search, and one whose inputs are held back; None where there are none."""

    search: Subject
    held: Subject | None


def split(subject: Subject, given: Any = None, *, built_in: Callable[[], Subject | None] | None = None) -> Split:
    """Return a subject with some of its inputs held back.

    `given` are the inputs to hold back, of the kinds that `scan` takes; without them those of the subject that
    `built_in()` returns, if any; and without those, the last quarter of the subject's own batches, or of the samples
    of its only batch where all tensors of that have one row for each.
    """
    if given is not None:
        device = getattr(subject.batches, "device", None) or usable_device("cpu")
        return Split(subject, dataclasses.replace(subject, batches=fresh_batches(as_batches(given), device)))
    other = built_in() if built_in is not None else None
    if other is not None:
        return Split(subject, dataclasses.replace(subject, batches=other.batches))
    return _last_quarter(subject)


def _last_quarter(subject: Subject) -> Split:
    count = sum(1 for _ in subject.batches)
    if count == 1:
        return _of_samples(subject)
    kept = count - max(1, count // SHARE)
    if kept < 1:
        return Split(subject, None)
    return Split(
        dataclasses.replace(subject, batches=_Part(subject.batches, 0, kept)),
        dataclasses.replace(subject, batches=_Part(subject.batches, kept, count)),
    )


def _of_samples(subject: Subject) -> Split:
    """Take the only batch apart, where each of its tensors has a row for each sample."""
    batch = next(iter(subject.batches))
    found = tensors([dict(batch.inputs), batch.positional], "input")
    whole = all(tensor.dim() and tensor.shape[0] == batch.samples for _, tensor in found)
    if not found or not whole or batch.samples < SHARE:
        return Split(subject, None)
    kept = batch.samples - max(1, batch.samples // SHARE)
    device = found[0][1].device
    first, last = _rows(batch, 0, kept), _rows(batch, kept, batch.samples)
    return Split(
        dataclasses.replace(subject, batches=CountedBatches((first,), device)),
        dataclasses.replace(subject, batches=CountedBatches((last,), device)),
    )


def _rows(batch: Batch, first: int, last: int) -> Batch:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first:last]

    return Batch(
        inputs={name: map_tensors(cut, value) for name, value in batch.inputs.items()},
        positional=map_tensors(cut, batch.positional),
        samples=last - first,
        tokens=batch.tokens * (last - first) // max(batch.samples, 1),
        texts=batch.texts[first:last],
    )


@dataclass(frozen=True)
class _Part:
    """Some of the batches of a subject, by their numbers; walked as often as those can be."""

    batches: Iterable[Batch]
    first: int
    last: int

    def __iter__(self) -> Iterator[Batch]:
        for number, batch in enumerate(self.batches):
            if number >= self.last:
                return
            if number >= self.first:
                yield batch

    def __len__(self) -> int:
        return self.last - self.first


def samples(subject: Subject | None) -> int:
    """Return how many inputs a subject has."""
    return 0 if subject is None else sum(batch.samples for batch in subject.batches)
