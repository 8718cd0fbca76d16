"""Which operations would have to be kept in float32: one run of the program that follows values which do not fit."""

from __future__ import annotations

from typing import Any

import torch

from overflow_lab.capture.shadow import operations
from overflow_lab.remedies.islands.members import Member, Members
from overflow_lab.remedies.islands.operations import WideMode, cast, up


class Discovery(WideMode):
    """Notes the operations whose results do not fit, and those that are given such a result.

    Each operation is done as the program does it. Where that makes bad values of good ones (or raises), it is done
    again in float32 and noted; the result stays wide where it does not fit into the low dtype, and whatever is given
    it is noted too, until a result fits.
    """

    def __init__(self, low: torch.dtype, chosen: Members = frozenset()) -> None:
        super().__init__(low, chosen)
        self.found: set[Member] = set()

    def calculate(self, op: Any, name: str, args: Any, kwargs: Any, held: list[torch.Tensor]) -> Any:
        """Do an operation, and follow what does not fit."""
        member = Member(self.path[-1] if self.path else "", name)
        if member in self.chosen:
            return self._followed(member, op, args, kwargs)
        if held and self.as_asked(args, kwargs):
            return self.hold(op(*args, **kwargs), asked=True)
        if not all(self._fits(item) for item in held):
            return self._followed(member, op, args, kwargs)
        args, kwargs = self.narrow(args), self.narrow(kwargs)
        try:
            result = op(*args, **kwargs)
        except Exception:  # no kernel, or dtypes that clash: then in float32
            return self._followed(member, op, args, kwargs)
        if not any(t.dtype == self.low and _is_bad(t) for t in operations.tensors_in(result)):
            return result
        wide_args, wide_kwargs = up((args, kwargs))
        wide = operations.tensors_in(op(*wide_args, **wide_kwargs))
        same = zip(operations.tensors_in(result), wide, strict=True)
        if any(bool((torch.isfinite(w) & ~torch.isfinite(r)).any()) for r, w in same if r.is_floating_point()):
            return self._followed(member, op, args, kwargs)
        return result

    def _followed(self, member: Member, op: Any, args: Any, kwargs: Any) -> Any:
        self.found.add(member)
        result = self.wide_result(op, member.op, args, kwargs)
        fits = self._fits
        return operations.mapped(
            result, lambda item: cast(item, self.low) if self.is_wide(item) and fits(item) else item
        )

    def _fits(self, item: torch.Tensor) -> bool:
        return bool(torch.equal(torch.isfinite(cast(item, self.low)), torch.isfinite(item)))


def _is_bad(tensor: torch.Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())
