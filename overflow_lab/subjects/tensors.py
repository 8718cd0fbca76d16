"""Batches copied anew, and facts about modules and devices, that all kinds of subjects share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import cast

import torch

from overflow_lab.errors import UsageError, one_line
from overflow_lab.subjects.containers import map_tensors
from overflow_lab.subjects.subject import Batch

WIDE_AND_NARROW = (torch.float16, torch.bfloat16, torch.float64)


def fresh(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` with its tensors copied to `device` and its floats in float32.

    A model that writes into its inputs (a first ReLU in place) must not change what the next precision gets, nor what
    belongs to the user.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float32 if tensor.dtype in WIDE_AND_NARROW else tensor.dtype
        copied = tensor.detach().to(device=device, dtype=dtype, copy=True)
        return copied.requires_grad_(tensor.requires_grad)

    return Batch(
        inputs={name: map_tensors(copy, value) for name, value in batch.inputs.items()},
        positional=map_tensors(copy, batch.positional),
        samples=batch.samples,
        tokens=batch.tokens,
        texts=batch.texts,
    )


@dataclass(frozen=True)
class FreshBatches:
    """Batches that are copied anew each time they are walked, with their floats in float32 on `device`."""

    batches: Iterable[Batch]
    device: torch.device

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield fresh(batch, self.device)


class CountedBatches(FreshBatches):
    """Fresh batches of which it is known how many there are, so that progress has an end."""

    def __len__(self) -> int:
        return len(cast("Sized", self.batches))


def fresh_batches(batches: Iterable[Batch], device: torch.device) -> FreshBatches:
    """Return `batches` copied anew each time they are walked; with a length if, and only if, they have one."""
    counted = isinstance(batches, list | tuple)
    return (CountedBatches if counted else FreshBatches)(batches, device)


def usable_device(name: str) -> torch.device:
    """Return the device called `name`; UsageError if there is no such kind, or none in this machine."""
    try:
        device = torch.device(name)
        torch.empty(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        reason = one_line(error, limit=120)
        raise UsageError(f"device {name!r} cannot be used here ({reason}); try --device cpu") from error
    return device


def parameter_count(module: torch.nn.Module) -> int:
    """Return the number of elements of all parameters, shared ones once; uninitialised (lazy) ones count 0."""
    lazy = torch.nn.parameter.is_lazy
    return sum(p.numel() for p in module.parameters() if not lazy(p))


def stored_dtype(module: torch.nn.Module) -> str | None:
    """Return the floating dtype that holds most elements of the parameters (such as "float32"); None without any."""
    sizes: dict[str, int] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point() and not torch.nn.parameter.is_lazy(parameter):
            name = str(parameter.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + parameter.numel()
    return max(sizes, key=lambda name: sizes[name]) if sizes else None
