"""Functions that refuse a dtype before any operation is dispatched: `torch.quantile`, `torch.fft`, `Tensor.numpy`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from overflow_lab.capture.shadow.judge import HALVES
from overflow_lab.capture.shadow.shadows import wide

# Called with the function's name, its exception, and the clock before the repetition in float32.
Refused = Callable[[str, Exception, int], None]


class Refusals(TorchFunctionMode):
    """Repeats, in float32, a function that refuses its dtypes in half precision, and tells `refused` about it."""

    def __init__(self, refused: Refused, clock: Callable[[], int]) -> None:
        super().__init__()
        self._refused, self._clock = refused, clock

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return function(*args, **kwargs)
        except Exception as error:
            halves = _halves(args, kwargs)
            if isinstance(error, torch.OutOfMemoryError) or not halves:
                raise
            since = self._clock()
            up = tree_map(_up, (args, kwargs))
            try:
                result = function(*up[0], **up[1])
            except Exception:
                raise error from None  # it fails in float32 too: the model's own doing
            self._refused(getattr(function, "__name__", str(function)), error, since)
            return tree_map(lambda item: _down(item, halves[0]), result)


def _halves(args: Any, kwargs: Any) -> list[torch.dtype]:
    """Return the half-precision dtypes among the arguments."""
    found = [t.dtype for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return [torch.float16 if dtype == torch.complex32 else dtype for dtype in found if dtype in HALVES]


def _down(item: Any, dtype: torch.dtype) -> Any:
    return item.to(dtype) if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item


def _up(item: Any) -> Any:
    return item.to(wide(item.dtype)) if isinstance(item, torch.Tensor) and item.dtype in HALVES else item
