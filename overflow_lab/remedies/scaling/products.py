"""Products that are taken apart afterwards: a fused projection for queries, keys and values has three exponents.

`x @ W` is split along the axis of W's rows in GPT-2, Phi-3 and many vision models. Each of the parts may have a factor
of its own; so what a product scales by is settled only when somebody uses it as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from overflow_lab.capture.shadow import operations
from overflow_lab.remedies.scaling.calls import scales
from overflow_lab.remedies.scaling.expressions import ZERO, Expression, Knob, plus

if TYPE_CHECKING:
    from overflow_lab.remedies.scaling.trace import ScaleTrace

# Beyond this a value is the lowest or highest number of a format, put there as a mask: it has no size.
MASK = 1e30
_SAMPLE = 8192

_RESHAPED = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape", "aten._reshape_alias"})


@dataclass(frozen=True)
class Leaf:
    """A weight as it is, or `turned`: its transposed matrix."""

    name: str
    turned: bool = False


@dataclass
class Product:
    """What a weight makes of something of the exponent `inner`.

    Its `axis` runs along the dimension `dim` of the weight, `unit` of whose indices belong to each of its own.
    """

    weight: str
    dim: int
    bias: str | None
    inner: Expression
    axis: int
    unit: int = 1
    dtype: str = ""
    size: tuple[float, float] = (0.0, 0.0)
    settled: Expression | None = None

    def whole(self, trace: ScaleTrace) -> Expression:
        """Return the exponent of all of it."""
        if self.settled is None:
            self.settled = plus(self.inner, {trace.whole(self.weight): 1.0})
            if self.bias is not None:
                trace.equations.equal({trace.whole(self.bias): 1.0}, self.settled)
            trace.equations.saw(self.settled, self.dtype, *self.size)
        return self.settled

    def part(self, trace: ScaleTrace, tensor: torch.Tensor, first: int, last: int) -> Expression:
        """Return the exponent of what `tensor` is: the indices `first` to `last` of the axis."""
        first, last = first * self.unit, last * self.unit
        knob = Knob("part", self.weight, self.dim, first, last)
        trace.equations.parts.setdefault(knob.name, set()).add(knob)
        made = plus(self.inner, {knob: 1.0})
        if self.bias is not None:
            beside = Knob("part", self.bias, 0, first, last)
            trace.equations.parts.setdefault(beside.name, set()).add(beside)
            trace.equations.equal({beside: 1.0}, made)
        trace.equations.saw(made, self.dtype, *size_of(tensor))
        return made


def size_of(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the largest magnitude, and the median magnitude of the others, of the finite values that are no mask.

    Zeros are left out of the median, which is that of a sample: a few large channels say nothing about the rest, and
    the rest is what is flushed first. 0, 0 where there is no such value.
    """
    if not tensor.numel():
        return 0.0, 0.0
    values = tensor.detach().abs().float()
    if not bool(values.amax() < MASK):  # NaN compares false
        values = values[values < MASK]
    if not values.numel():
        return 0.0, 0.0
    sample = values.reshape(-1)[:: max(1, values.numel() // _SAMPLE)]
    sample = sample[sample > 0]
    return float(values.amax()), float(sample.median()) if sample.numel() else 0.0


def slice_of(tensor: torch.Tensor, knob: Knob) -> torch.Tensor:
    """Return the part of a weight that a knob is about."""
    return tensor.narrow(knob.dim, knob.first, knob.last - knob.first) if knob.kind == "part" else tensor


def follow(trace: ScaleTrace, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Give a view the exponent of what it looks at."""
    source = next((t for t in operations.tensors_in((args, kwargs)) if scales(t)), None)
    if source is None or (trace.is_constant(source) and trace.of(source) is ZERO):
        return
    given = operations.arguments(op, args, kwargs)
    known = trace.peek(source)
    name = operations.name_of(op)
    views = operations.tensors_in(result)
    if isinstance(known, Leaf):
        moved = _turned(known, name, given, source)
        if moved is not None:
            trace.give(views[0], moved)
            return
    if isinstance(known, Product) and known.settled is None:
        if _taken_apart(trace, known, name, given, (source, views)):
            return
        kept = _moved(known, name, given, source, views[0])
        if kept is not None:
            trace.give(views[0], kept)
            return
    expression = trace.of(source)
    for view in views:
        trace.give(view, expression)


def _turned(leaf: Leaf, name: str, given: dict[str, Any], source: torch.Tensor) -> Leaf | None:
    """Return the leaf that a view of a weight still is: a transposed matrix, or the same."""
    if name in ("aten.detach", "aten.alias"):
        return leaf
    swapped = name == "aten.t" or (name in ("aten.transpose", "aten.permute") and _is_swap(given))
    return Leaf(leaf.name, not leaf.turned) if swapped and source.dim() == 2 else None


def _is_swap(given: dict[str, Any]) -> bool:
    if "dims" in given:
        return [d % 2 for d in given["dims"]] == [1, 0]
    return bool(given["dim0"] % 2 != given["dim1"] % 2)


def _taken_apart(
    trace: ScaleTrace, made: Product, name: str, given: dict[str, Any], seen: tuple[torch.Tensor, list[torch.Tensor]]
) -> bool:
    """Return whether a view takes parts along the product's axis, which are given exponents of their own."""
    source, views = seen
    if "dim" not in given or given["dim"] % max(source.dim(), 1) != made.axis:
        return False
    if name in ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unbind"):
        at = 0
        for view in views:
            width = 1 if name == "aten.unbind" else view.shape[made.axis]
            trace.give(view, made.part(trace, view, at, at + width))
            at += width
        return True
    if name == "aten.select":
        index = given["index"] % source.shape[made.axis]
        trace.give(views[0], made.part(trace, views[0], index, index + 1))
        return True
    if name == "aten.slice" and given.get("step", 1) == 1:
        size = source.shape[made.axis]
        first = 0 if given.get("start") is None else given["start"]
        first = max(0, first + size if first < 0 else first)
        width = views[0].shape[made.axis]
        if width == size:
            return False
        trace.give(views[0], made.part(trace, views[0], first, first + width))
        return True
    return False


def _moved(made: Product, name: str, given: dict[str, Any], source: torch.Tensor, view: torch.Tensor) -> Product | None:
    """Return the product with its axis where a view has moved it; None where it cannot be followed."""
    if name in _RESHAPED:
        place = _reshaped(source, view, made.axis)
        if place is None:
            return None
        axis, unit = place
    elif name in ("aten.transpose", "aten.permute"):
        order = list(range(source.dim()))
        if name == "aten.permute":
            order = [d % source.dim() for d in given["dims"]]
        else:
            a, b = given["dim0"] % source.dim(), given["dim1"] % source.dim()
            order[a], order[b] = order[b], order[a]
        axis, unit = order.index(made.axis), 1
    elif name in ("aten.detach", "aten.alias") or (
        name == "aten.slice" and view.shape[made.axis] == source.shape[made.axis]
    ):
        axis, unit = made.axis, 1
    else:
        return None
    return replace(made, axis=axis, unit=made.unit * unit)


def _reshaped(source: torch.Tensor, view: torch.Tensor, axis: int) -> tuple[int, int] | None:
    """Return where the axis is after a reshape, and how many of its indices one index there stands for."""
    before = math.prod(source.shape[:axis])
    at = next((i for i in range(view.dim()) if math.prod(view.shape[:i]) == before and view.shape[i] > 1), None)
    if at is None:
        return None
    size, new = source.shape[axis], view.shape[at]
    if size % new or math.prod(view.shape[at:]) != math.prod(source.shape[axis:]):
        return None
    return at, size // new
