"""What float32's own program does: the constants of its operations and the bad values that it makes on purpose.

The shadow follows the low-precision program. Where that program is another one than float32's (an eps from `finfo`, a
clamp for float16 alone, a mask constant), the shadow cannot know it; the two programs side by side can.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.decisions import Decisions
from overflow_lab.capture.shadow.shadows import has_shadow
from overflow_lab.capture.shadow.sites import Ordinals, SiteKey


class ProgramLog(TorchDispatchMode):
    """Watches a program, by site: `scalars` of operations, what made `bad` values of good ones, what was `drawn`.

    `decisions` are all that it takes from floating values, in order.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path: Callable[[], str] = str
        self.ordinals = Ordinals()
        self.scalars: dict[SiteKey, tuple[float, ...]] = {}
        self.bad: set[SiteKey] = set()
        self.drawn: dict[SiteKey, torch.Tensor] = {}
        self.decisions = Decisions()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = op(*args, **kwargs)
        facts = operations.facts_of(op)
        if facts.views:
            return result
        name = facts.name
        key = (self.path(), name, self.ordinals.next(name))
        self.scalars.setdefault(key, operations.scalars_in(args, kwargs))
        if facts.draws:
            self.drawn.setdefault(key, operations.glimpse(result))
        if facts.decides and any(has_shadow(t) for t in operations.tensors_in((args, kwargs))):
            # Copies: the program may write into its own masks.
            self.decisions.keep([t.clone() for t in operations.tensors_in(result) if not has_shadow(t)])
        if not facts.unset and any(
            has_shadow(t) and t.numel() and not bool(torch.isfinite(t).all()) for t in operations.tensors_in(result)
        ):
            self.bad.add(key)
        return result
