"""What an interrupted scan has to know to go on: how far it came, on which inputs, and what it had seen by then."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.errors import UsageError
from overflow_lab.recording import Header, ProgressRow, TensorRow
from overflow_lab.subjects import Batch
from overflow_lab.subjects.containers import tensors

# Of a longer tensor the ends and an even spread of elements are told from others', so that pictures cost little.
_HASHED = 1 << 20


@dataclass
class Walk:
    """Walks batches once, counting them and their inputs, and hashing their tensors into one digest."""

    batches: Iterator[Batch]
    number: int = 0
    inputs: int = 0
    digest: str = ""

    def __iter__(self) -> Iterator[tuple[int, Batch]]:
        return self

    def __next__(self) -> tuple[int, Batch]:
        batch = next(self.batches)
        number, self.number = self.number, self.number + 1
        self.inputs += batch.samples
        self.digest = batch_digest(batch, self.digest)
        return number, batch

    def skip(self, done: ProgressRow, name: str) -> None:
        """Pass over the batches that were run. Raises UsageError where they are other ones than those of `name`."""
        while self.number < done.batches:
            if next(self, None) is None:
                raise UsageError(
                    f"{name} was made of {done.inputs:,} inputs or more, and here are {self.inputs:,}; "
                    "give the inputs that it was begun with."
                )
        if self.digest != done.digest:
            raise UsageError(
                f"the first {done.inputs:,} inputs are not those that {name} was made of; give the same, or scan anew."
            )


def batch_digest(batch: Batch, before: str = "") -> str:
    """Return the SHA-256, in hexadecimal, of a batch's tensors (names, dtypes, shapes, bytes) and what came before."""
    made = hashlib.sha256(before.encode())
    for name, tensor in tensors((dict(batch.inputs), batch.positional), "input"):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
        step = max(1, flat.numel() * flat.itemsize // _HASHED)
        made.update(flat[::step].contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def check_same_header(now: Header, then: Header, name: str, *, defaults: Mapping[str, Any]) -> None:
    """Raise UsageError where a scan that is to go on is another one by its model, precisions, options or version.

    An option that is not named has its value in `defaults`. Where the inputs are read from may differ: they themselves
    are compared.
    """
    if now.overflow_lab != then.overflow_lab:
        raise UsageError(f"{name} was made by overflow-lab {then.overflow_lab}, this is {now.overflow_lab}; scan anew.")
    for what, old, new in (
        ("the model's", _model(then), _model(now)),
        ("the", {"precisions": list(then.precisions)}, {"precisions": list(now.precisions)}),
        ("the option", {**defaults, **then.options}, {**defaults, **now.options}),
    ):
        apart = next((key for key in {**old, **new} if old.get(key) != new.get(key)), None)
        if apart is not None:
            values = f"{old.get(apart)!r} there and {new.get(apart)!r} here"
            raise UsageError(f"{name} is of another scan: {what} {apart} is {values}; give the same, or scan anew.")


def _model(header: Header) -> dict[str, Any]:
    return {key: value for key, value in header.subject.items() if key not in ("notes", "inputs_source")}


def check_same_weights(now: Iterable[TensorRow], then: Iterable[TensorRow], name: str) -> None:
    """Raise UsageError where the weights are not those that the recording called `name` was made with.

    Compared are shapes and what is exact in their ranges: a sum depends on the machine in its last bits.
    """
    mine, theirs = (dict(map(_exactly, rows)) for rows in (now, then))
    if mine != theirs:
        apart = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        raise UsageError(
            f"the model is not the one that {name} was made of: {apart[0]} differs; give the same, or scan anew."
        )


def _exactly(row: TensorRow) -> tuple[str, Any]:
    found = row.range
    exact = (found.count, found.nan, found.zero, found.min, found.max, found.smallest, dict(found.exponents))
    return row.name, (row.role, row.dtype, tuple(row.shape), exact)


def check_same_state(state: Mapping[str, Any], expected: Mapping[str, Any], name: str) -> None:
    """Raise UsageError where the scan is asked for something that the recording was not made with."""
    for key, value in expected.items():
        if state.get(key) != value:
            raise UsageError(
                f"{name} was made with {key} {state.get(key)!r}, not {value!r}; give the same, or scan anew."
            )
