"""Parameters, buffers and inputs: their ranges before the cast, and what the cast lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.devices import widest
from overflow_lab.capture.statistics import Tape
from overflow_lab.formats import FORMATS
from overflow_lab.ranges import Range
from overflow_lab.recording import CastRow, TensorRow
from overflow_lab.subjects.containers import is_readable, tensors
from overflow_lab.subjects.offload import Resolve, is_offloaded

# A few weights that become subnormal are in every float16 model, and lose a bit or two each; more are worth a row.
SUBNORMAL_SHARE = 0.01

# Elements of a tensor and its cast that are compared at once: torch does so few on one thread, in its cache.
_COMPARED = 1 << 15

Named = tuple[str, str, torch.Tensor]


def _itself(_name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def named_tensors(model: nn.Module) -> Iterator[Named]:
    """Yield (role, name, tensor) of each parameter and buffer once, floating ones only.

    A tensor that is offloaded is on the meta device; see `subjects.offload.resolver` for its values.
    """
    offloaded = is_offloaded(model)
    for role, found in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in found:
            if tensor.is_floating_point() and (is_readable(tensor) or (tensor.is_meta and offloaded)):
                yield role, name, tensor


def named_inputs(inputs: Mapping[str, Any]) -> list[Named]:
    """Return the floating tensors among the inputs of a call, in the form of named tensors."""
    found = [(name, t) for key, value in inputs.items() for name, t in tensors(value, key)]
    return [("input", name, t) for name, t in found if t.is_floating_point()]


def tensor_rows(found: list[Named], tape: Tape, values: Resolve = _itself) -> list[TensorRow]:
    """Return the range row of each named tensor; `values` gives those that are offloaded, one after the other."""
    measured = [tape.measure(values(name, tensor).to(tape.device)) for _, name, tensor in found]
    rows = tape.drain()
    return [
        TensorRow(name, _module(role, name), role, _dtype(tensor), tuple(tensor.shape), rows.row(row))
        for (role, name, tensor), row in zip(found, measured, strict=True)
    ]


def cast_rows(
    precision: str,
    before: list[TensorRow],
    originals: list[Named],
    cast: list[Named],
    *,
    values: tuple[Resolve, Resolve] = (_itself, _itself),
) -> list[CastRow]:
    """Return a row for each tensor that lost something in the cast.

    Tensors are matched by role and name: a model may have made buffers in its first run. `values` gives those of the
    originals, and of the cast ones, that are offloaded.
    """
    wide, low = ({(role, name): tensor for role, name, tensor in named} for named in (originals, cast))
    rows = []
    for row in before:
        original, tensor = (named.get((row.role, row.name)) for named in (wide, low))
        if original is None or tensor is None or tensor.dtype == original.dtype or tensor.shape != original.shape:
            continue
        target = _dtype(tensor)
        if can_lose(row.range, target):
            made = _compare(precision, row, values[0](row.name, original), values[1](row.name, tensor))
            few = made.to_subnormal <= SUBNORMAL_SHARE * made.elements
            rows += [] if few and not (made.to_infinity or made.to_zero) else [made]
    return rows


def can_lose(found: Range, target: str) -> bool:
    """Return whether a cast to the format `target` can make infinities, zeros or subnormals of values in this range."""
    fmt = FORMATS.get(target)
    if fmt is None or found.absmax is None:
        return False
    smallest = found.smallest if found.smallest is not None else fmt.smallest_normal
    return found.absmax > fmt.max or smallest < fmt.smallest_normal


def _compare(precision: str, row: TensorRow, original: torch.Tensor, low: torch.Tensor) -> CastRow:
    """Count what one cast lost, block by block: in the processor's cache, and without memory of a tensor's size."""
    a, b = original.detach().reshape(-1), low.detach().to(original.device).reshape(-1)
    blocks = zip(a.split(_COMPARED), b.split(_COMPARED), strict=True)
    infinite, zeroed, subnormal, lost = torch.stack([_lost(x, y) for x, y in blocks]).sum(0).tolist()
    return CastRow(
        precision=precision,
        name=row.name,
        module=row.module,
        role=row.role,
        from_dtype=row.dtype,
        to_dtype=_dtype(low),
        elements=a.numel(),
        to_infinity=int(infinite),
        to_zero=int(zeroed),
        to_subnormal=int(subnormal),
        absmax=row.range.absmax or 0.0,
        energy_lost=lost / row.range.sum_of_squares if row.range.sum_of_squares else 0.0,
    )


def _lost(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return [to infinity, to zero, to subnormal, squares of what became zero] of a block and its cast."""
    wide = widest(a.device)
    size = b.abs()
    zeroed = (size == 0) & (a != 0)
    few = a[zeroed].to(wide)
    tiny = (size < torch.finfo(b.dtype).smallest_normal) & (size != 0)
    tiny &= a.abs() >= torch.finfo(a.dtype).smallest_normal
    infinite = torch.isinf(b) & torch.isfinite(a)
    counts = torch.stack([mask.sum() for mask in (infinite, zeroed, tiny)])
    return torch.cat([counts.to(wide), few.square().sum()[None]])


def _module(role: str, name: str) -> str:
    """Return the module that holds a parameter or buffer; an input is the root's, whatever its name."""
    return "" if role == "input" else name.rpartition(".")[0]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
