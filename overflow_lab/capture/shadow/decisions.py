"""What a program decides from floating values (choices, truths, whole numbers), and by how much it is off."""

from __future__ import annotations

from typing import Any

import torch

from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.shadows import Shadows, has_shadow
from overflow_lab.capture.shadow.step import Step

# Elements of decisions that are kept to tell which operation changed them.
_MOST = 1 << 22


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
    how much better the shadow finds its own choice than the program's; of a comparison, how far its two sides are
    apart; of a whole number made of a value, how far that is from becoming the program's. None where there is none.
    """
    values = shadows.of(step.reads[0]).double()
    changed = mine != theirs
    if step.name in operations.DECIDING:
        lost = _preferred(step, values, mine, theirs)
    elif step.name in operations.COMPARING:
        sides = [shadows.of(t).double() if has_shadow(t) else t for t in operations.tensors_in(step.args[:2])]
        other = sides[1] if len(sides) > 1 else step.args[1]
        lost = (sides[0] - other).abs()
    elif mine.dtype != torch.bool and mine.shape == values.shape:
        lost = _from_whole(values, mine)
    else:
        return None
    if lost is None or lost.shape != mine.shape:
        return None
    scale = values[torch.isfinite(values)].square().mean().sqrt()
    found = lost[changed & torch.isfinite(lost)]
    return float(found.max() / scale) if found.numel() and float(scale) > 0 else None


def _preferred(step: Step, values: torch.Tensor, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor | None:
    """Return by how much the shadow's scores are better at its own choice than at the program's."""
    given = operations.arguments(step.op, step.args, step.kwargs)
    dim = given.get("dim")
    if dim is None or values.ndim == 0:
        flat, dim = values.reshape(-1), 0
        at_mine, at_theirs = flat[mine.reshape(-1)].view_as(mine), flat[theirs.reshape(-1)].view_as(theirs)
        return (at_theirs - at_mine).abs()
    kept = [index if index.ndim == values.ndim else index.unsqueeze(dim) for index in (mine, theirs)]
    at_mine, at_theirs = (values.gather(dim, index) for index in kept)
    return (at_theirs - at_mine).abs().view_as(mine)


def _from_whole(values: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return how far values are from those that a cast makes these whole numbers of: it cuts towards zero."""
    low = torch.where(whole > 0, whole, whole - 1).double()
    high = torch.where(whole < 0, whole, whole + 1).double()
    return torch.maximum(low - values, values - high).clamp(min=0.0)
