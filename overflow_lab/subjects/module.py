"""A module in memory and its inputs as a subject. The module itself is never touched: each load is a copy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.errors import UsageError, one_line
from overflow_lab.subjects.containers import tensors
from overflow_lab.subjects.offload import cast_offloaded, is_offloaded
from overflow_lab.subjects.subject import Batch, Generation, Subject
from overflow_lab.subjects.tensors import (
    WIDE_AND_NARROW,
    fresh_batches,
    parameter_count,
    stored_dtype,
    usable_device,
)

KINDS_OF_INPUT = "a dict of keyword inputs, a tuple of positional ones, a tensor, a Batch, or a list of these"


@dataclass(frozen=True)
class Copies:
    """Loads copies of `module`, cast; where it cannot be copied, `build` makes another one.

    `load(None)` copies and brings half and double precision to float32 (float8, integers and complex numbers stay);
    `load(dtype)` copies and casts by `.to(dtype)`, as a user would.
    """

    module: torch.nn.Module
    device: torch.device
    build: Callable[[], torch.nn.Module] | None = None

    def __call__(self, dtype: torch.dtype | None) -> torch.nn.Module:
        """Return a copy of the module on the device. Raises UsageError, in one line, when it cannot be copied."""
        copied = self._copy()
        if is_offloaded(copied):
            cast_offloaded(copied, dtype)
            return copied
        copied = copied.to(self.device)
        if dtype is not None:
            return copied.to(dtype)
        copied._apply(lambda tensor: tensor.float() if tensor.dtype in WIDE_AND_NARROW else tensor)
        return copied

    def _copy(self) -> torch.nn.Module:
        try:
            return copy.deepcopy(self.module)
        except Exception as error:
            if self.build is not None:
                return self.build()
            raise UsageError(
                f"{type(self.module).__name__} cannot be copied ({one_line(error, limit=160)}), and a scan needs "
                "copies; scan a function that builds it: overflow_lab.scan('file.py:function')"
            ) from error


def from_module(
    module: torch.nn.Module,
    inputs: Any,
    *,
    name: str | None = None,
    device: str = "cpu",
    generation: Generation | None = None,
    build: Callable[[], torch.nn.Module] | None = None,
) -> Subject:
    """Return the subject of `module`, called with `inputs`: a dict of keyword inputs, a tuple of positional ones, one
    tensor, a `Batch`, or a list or other iterable of these, one for each call.

    An iterator that can be walked only once is read into memory first. `build` makes a further module where `module`
    cannot be copied. Raises UsageError when the module or the inputs are of no such kind.
    """
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"a torch.nn.Module is needed, not {type(module).__name__}; give a model, or the name of one")
    place = usable_device(device)
    title = name or type(module).__name__
    notes = ("the module is in training mode: dropout and batch statistics are active",) if module.training else ()
    return Subject(
        name=title,
        kind="module",
        load=Copies(module, place, build),
        batches=fresh_batches(as_batches(inputs), place),
        generation=generation,
        facts={
            "class": type(module).__name__,
            "parameters": parameter_count(module),
            "dtype": stored_dtype(module),
            "inputs_source": "given",
        },
        notes=notes,
    )


def as_batches(inputs: Any) -> Iterable[Batch]:
    """Return `inputs` as batches, re-iterable; UsageError when they are of no kind that can be called with, or none."""
    single = _batch(inputs)
    if single is not None:
        return (single,)
    if isinstance(inputs, str | bytes) or not isinstance(inputs, Iterable):
        raise UsageError(f"the inputs are of type {type(inputs).__name__}; give {KINDS_OF_INPUT}")
    # An iterator is used up by the first precision; a DataLoader starts anew for each.
    source = tuple(inputs) if iter(inputs) is inputs else inputs
    if isinstance(source, list | tuple) and not source:
        raise UsageError(f"the inputs are empty ({type(inputs).__name__}); give at least one batch")
    if isinstance(source, list | tuple):  # wrong kinds are found now, not in the middle of a scan
        return tuple(_numbered(number, item) for number, item in enumerate(source))
    return _Batches(source)


@dataclass(frozen=True)
class _Batches:
    source: Iterable[Any]

    def __iter__(self) -> Iterator[Batch]:
        for number, item in enumerate(self.source):
            yield _numbered(number, item)


def _numbered(number: int, item: Any) -> Batch:
    # Inside a list, a list is what a DataLoader makes of a tuple of positional inputs.
    batch = _batch(tuple(item) if isinstance(item, list) else item)
    if batch is None:
        raise UsageError(f"batch {number} is of type {type(item).__name__}; give {KINDS_OF_INPUT}")
    return batch


def _batch(value: Any) -> Batch | None:
    if isinstance(value, Batch):
        return value
    if isinstance(value, torch.Tensor):
        value = (value,)
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise UsageError(f"the inputs have the key {wrong!r}, which is no string; name keyword inputs by strings")
        return Batch(inputs=dict(value), samples=_samples(value), tokens=_tokens(value))
    if isinstance(value, tuple):
        return Batch(positional=value, samples=_samples(value))
    return None


def _samples(value: Any) -> int:
    """Count the rows of the first tensor that has any dimension: the batch comes first in nearly every model."""
    return next((t.shape[0] for _, t in tensors(value, "input", caches=False) if t.dim() > 0), 1)


def _tokens(inputs: Mapping[str, Any]) -> int:
    mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        return int((mask != 0).sum())
    return ids.numel() if isinstance(ids, torch.Tensor) else 0
