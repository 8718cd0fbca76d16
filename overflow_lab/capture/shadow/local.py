"""The local error of an operation: against the same operation, done wide on the program's own operands.

What an operation adds by itself stands so beside what it inherits: its `error` is against the shadow, which has
neither. This is the distinction that NSan (Courbet, 2021) and Herbgrind (Sanchez-Stern et al., 2018) draw.

To do everything a third time would nearly double the cost of a shadow run. So a site is measured in its first calls
only, and where an operation treats the rows of its first dimension alike and apart, on some of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.capture.shadow import judge, operations
from overflow_lab.capture.shadow.shadows import Shadows, has_shadow
from overflow_lab.capture.shadow.step import Step

# A loop, or a generation, does the same again and again.
MEASURED_CALLS = 2
# Elements of a result on which an error is measured well enough.
_ELEMENTS = 1 << 16
# Operations that treat each row by itself, and which of their arguments hold rows.
_ROWS = {
    "aten.mm": (0,),
    "aten.addmm": (1,),
    "aten.bmm": (0, 1),
    "aten._softmax": (0,),
    "aten._log_softmax": (0,),
    "aten.native_layer_norm": (0,),
    "aten.convolution": (0,),
    "aten.mean": (0,),
    "aten.sum": (0,),
    "aten._to_copy": (0,),
    "aten._scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "aten._scaled_dot_product_flash_attention": (0, 1, 2),
}
# Of a product, which arguments hold the columns of the result in their last dimension: enough are measured, too.
_COLUMNS = {"aten.mm": (1,), "aten.addmm": (0, 2)}
_MOST_COLUMNS = 512
# These move values and round none.
_MOVES = frozenset({"aten.embedding", "aten.cat", "aten.clone", "aten.index", "aten.index_select", "aten.gather",
                    "aten.stack", "aten.neg", "aten.roll", "aten.flip"})  # fmt: skip


@dataclass(frozen=True)
class OwnOperands:
    """An operation's arguments with the program's own values, widened; the first rows and columns where not None."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    columns: int | None

    def measured(self, result: torch.Tensor) -> torch.Tensor:
        """Return the part of the program's result that these give."""
        part = result if self.rows is None else result[: self.rows]
        return part if self.columns is None else part[..., : self.columns]


def own_operands(step: Step, shadows: Shadows) -> OwnOperands | None:
    """Return what an operation is given, None where it only moves values; what it writes to is copied."""
    if step.name in _MOVES and len({t.dtype for t in step.reads}) == 1:
        return None
    rows, chosen = _sample(step)
    wide = [step.args[i] for i in _COLUMNS.get(step.name, ())] if rows is not None else []
    columns = _MOST_COLUMNS if wide else None

    def up(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and has_shadow(item):
            part = item[:rows] if any(item is row for row in chosen) else item
            part = part[..., :columns] if any(item is column for column in wide) else part
            return part.to(shadows.wide(item.dtype), copy=any(item is written for written in step.writes))
        low = isinstance(item, torch.dtype) and (item.is_floating_point or item.is_complex)
        return shadows.wide(item) if low else item

    args, kwargs = operations.mapped((step.args, step.kwargs), up)
    return OwnOperands(args, kwargs, rows, columns)


def _sample(step: Step) -> tuple[int | None, list[torch.Tensor]]:
    """Return how many rows to measure, None for all, and the arguments that hold them."""
    places = _ROWS.get(step.name, ())
    if step.facts.pointwise:
        found = [t for t in step.args if isinstance(t, torch.Tensor)]
        most = max((t.ndim for t in found), default=0)
        chosen = [t for t in found if t.ndim == most and t.shape[:1] != (1,)]
    else:
        chosen = [step.args[i] for i in places if i < len(step.args)]
    if not chosen or step.kwargs.get("out") is not None or not _apart(step, chosen[0]):
        return None, []
    length, elements = chosen[0].shape[0], max(t.numel() for t in (*chosen, *step.writes))
    rows = max(1, _ELEMENTS * length // max(elements, 1))
    same = all(isinstance(t, torch.Tensor) and has_shadow(t) and len(t) == length for t in chosen)
    beside = any(isinstance(item, torch.Tensor) for item in operations.leaves(step.kwargs))  # a mask has rows, too
    return (rows, chosen) if same and rows < length and not beside else (None, [])


def _apart(step: Step, tensor: Any) -> bool:
    """Return whether an operation leaves the rows of the first dimension apart."""
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
        return False
    if step.name == "aten.addmm":
        return isinstance(step.args[0], torch.Tensor) and step.args[0].ndim == 1
    if step.name in ("aten.mean", "aten.sum", "aten._softmax", "aten._log_softmax"):
        dims = step.args[1] if len(step.args) > 1 else step.kwargs.get("dim")
        over = {d % tensor.ndim for d in ([dims] if isinstance(dims, int) else dims or [0])}
        return 0 not in over
    return step.name != "aten.native_layer_norm" or tensor.ndim > len(step.args[1])


def local_error(step: Step, result: Any, own: OwnOperands | None) -> float | None:
    """Return the largest relative error of a result against what its own operands give; None where they give none."""
    if own is None:
        return 0.0
    try:
        made, _ = operations.replay(step.op, step.name, own.args, own.kwargs, result)
    except Exception:  # an operation that the wide dtype lacks: its error against the shadow is not known either
        return None
    copies = [tensor for tensor in operations.written(step.facts, own.args, own.kwargs) if has_shadow(tensor)]
    pairs = [*zip(step.writes, copies, strict=True), *((low, high) for _, low, high in operations.pairs(result, made))]
    pairs = [(own.measured(low), high) for low, high in pairs]
    same = [(low, high) for low, high in pairs if low.shape == high.shape and low.itemsize > 1]
    return max((judge.compare(low, high).error for low, high in same), default=None)
