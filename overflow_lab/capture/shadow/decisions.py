"""What a program decides from floating values (choices, truths, whole numbers), and by how much it is off."""

from __future__ import annotations

from typing import Any

import torch

from overflow_lab.capture.devices import widened
from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.shadows import Shadows, has_shadow
from overflow_lab.capture.shadow.step import Step

# Elements of decisions that are kept to tell which operation changed them.
_MOST = 1 << 22
# Scores as large as this are masks, no scores: `generate` gives -1e9 to beams that have not begun.
_MASKED = 1e6
# From where to where, around a whole number, values are rounded to it; for `trunc` that depends on its sign.
_REACH = {"aten.round": (-0.5, 0.5), "aten.floor": (0.0, 1.0), "aten.ceil": (-1.0, 0.0), "aten.trunc": (-1.0, 1.0)}


class Decisions:
    """The decisions of one run in order, kept within bounds; two runs of one program compare one by one."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self._elements = 0

    def keep(self, decided: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keep these, and return them."""
        if self._elements < _MOST:
            self.kept += decided
            self._elements += sum(tensor.numel() for tensor in decided)
        return decided


def decided_in(step: Step, result: Any) -> list[torch.Tensor]:
    """Return the integers and truths that an operation takes from floating values."""
    if not step.reads or not step.facts.decides:
        return []
    return [t for t in operations.tensors_in(result) if not has_shadow(t)]


def margin(step: Step, mine: torch.Tensor, theirs: torch.Tensor, shadows: Shadows) -> float | None:
    """Return the largest margin by which the shadow makes the other decisions, in units of its values' rms.

    `mine` are the program's decisions and `theirs` the shadow's, of one shape. Of a choice among scores the margin is
    how much better the shadow finds its own choice than the program's, against the scores of that one choice; of a
    comparison, how far its two sides are apart; of a bucket or a whole number made of a value, how far that is from
    becoming the program's. None where that is not to be told.
    """
    values = shadows.of(step.reads[0])
    if values.is_complex():
        return None
    values = widened(values)
    lost: torch.Tensor | None
    if step.name in operations.DECIDING:
        lost = _preferred(step, values, mine, theirs)
    elif step.name in operations.COMPARING:
        lost = _apart(step, values, shadows)
    elif step.name in operations.SORTING_IN:
        lost = _from_bucket(step, mine, shadows)
    else:
        lost = _from_whole(step, values, mine, shadows)
    if lost is None or lost.shape != mine.shape:
        return None
    found = lost[(mine != theirs) & torch.isfinite(lost)]
    return float(found.max()) if found.numel() else None


def rounded(step: Step, low: torch.Tensor, shadows: Shadows) -> torch.Tensor | None:
    """Return how far a shadow is from being rounded to the program's whole numbers `low`, in units of its rms.

    A later cast decides by them, but no longer sees how near it was. None where the operation does not round so, or
    where it rounds both to the same.
    """
    below, above = _REACH.get(step.name, (0.0, 0.0))
    if below == above or step.kwargs.get("decimals") or torch.equal(low.to(shadows.wide(low.dtype)), shadows.of(low)):
        return None
    values, whole = widened(shadows.of(step.reads[0])), widened(low)
    if step.name == "aten.trunc":
        return _in_units(_outside(values, *_cut(whole)), _rms(values))
    return _in_units(_outside(values, whole + below, whole + above), _rms(values))


def _preferred(step: Step, values: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return by how much the shadow's scores are better at its own choice than at the program's."""
    dim = operations.arguments(step.op, step.args, step.kwargs).get("dim")
    if dim is None or values.ndim == 0:
        flat = values.reshape(-1)
        lost = flat[theirs.reshape(-1)] - flat[mine.reshape(-1)]
        return _in_units(lost.abs(), _rms(flat)).view_as(mine)
    at_mine, at_theirs = (values.gather(dim, i if i.ndim == values.ndim else i.unsqueeze(dim)) for i in (mine, theirs))
    return _in_units((at_theirs - at_mine).abs(), _rms(values, dim)).view_as(mine)


def _apart(step: Step, values: torch.Tensor, shadows: Shadows) -> torch.Tensor:
    """Return how far the two sides of a comparison are apart."""
    one, other = (_wide(side, shadows) for side in step.args[:2])
    return _in_units((one - other).abs(), _rms(values))


def _from_bucket(step: Step, mine: torch.Tensor, shadows: Shadows) -> torch.Tensor | None:
    """Return how far values are from the program's buckets; None where the borders are not plainly in order."""
    given = operations.arguments(step.op, step.args, step.kwargs)
    borders, values = given.get("boundaries", given.get("sorted_sequence")), given["self"]
    plain = isinstance(borders, torch.Tensor) and borders.ndim == 1 and given.get("sorter") is None
    if not plain or not isinstance(values, torch.Tensor):
        return None
    borders, values = _wide(borders, shadows), _wide(values, shadows)
    end = borders.new_full((1,), torch.inf)
    borders = torch.cat([-end, borders, end])
    whole = mine.long()
    return _in_units(_outside(values, borders[whole], borders[whole + 1]), _rms(values))


def _from_whole(step: Step, values: torch.Tensor, mine: torch.Tensor, shadows: Shadows) -> torch.Tensor | None:
    """Return how far values are from those that a cast makes the program's whole numbers, or truths, of.

    Values that were whole before have no distance of their own: there the rounding that made them so is asked.
    """
    if mine.shape != values.shape:
        return None
    memory = shadows.memory(step.reads[0])
    if memory.rounded is not None and memory.rounded[0] == memory.made and memory.rounded[1].shape == mine.shape:
        return memory.rounded[1]
    if mine.dtype == torch.bool:
        return _in_units(values.abs(), _rms(values))
    seen = torch.isfinite(step.reads[0]) & (values != values.trunc())
    return _in_units(_outside(values, *_cut(widened(mine))), _rms(values)).where(seen, torch.nan)


def _wide(value: Any, shadows: Shadows) -> Any:
    """Return a tensor's shadow in the widest dtype, or a plain number as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return widened(shadows.of(value) if has_shadow(value) else value)


def _cut(whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of the values that are cut towards zero to these whole numbers."""
    return torch.where(whole > 0, whole, whole - 1), torch.where(whole < 0, whole, whole + 1)


def _outside(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.maximum(low - values, values - high).clamp(min=0.0)


def _in_units(lost: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(lost == 0, lost, lost / scale)


def _rms(values: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """Return the root mean square, along one dimension that is kept or of all, of what is neither bad nor masked."""
    kept = values.abs() < _MASKED
    squares = torch.where(kept, values, 0.0).square()
    if dim is None:
        return (squares.sum() / kept.sum()).sqrt()
    return (squares.sum(dim, keepdim=True) / kept.sum(dim, keepdim=True)).sqrt()
