"""What a scan says of a module, and an independent observer that says where the first bad value arises."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overflow_lab

Judged = tuple[str, str | None, str | None]
OK: Judged = ("ok", None, None)
LOW = ("float16", "bfloat16")


def judged(model: nn.Module, **inputs: torch.Tensor) -> dict[str, Judged]:
    """Return (verdict, module, operation) of a scan for each half precision."""
    found = overflow_lab.scan(model.eval(), inputs, precisions=LOW).to_dict()["verdicts"]
    return {name: _said(found[name]) for name in LOW}


def _said(verdict: dict[str, Any]) -> Judged:
    origin = verdict["origin"] or {}
    return verdict["verdict"], origin.get("module"), origin.get("op")


def ran(model: nn.Module, dtype: torch.dtype, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the first output of a copy of a model that was cast by `.to(dtype)`, in float64."""
    low = copy.deepcopy(model).eval().to(dtype)
    with torch.no_grad():
        return next(t for t in tree_leaves(low(**cast(inputs, dtype))) if isinstance(t, torch.Tensor)).double()


def cast(inputs: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return copies of the inputs, the floating ones in `dtype`."""
    return {name: t.to(dtype, copy=True) if t.is_floating_point() else t.clone() for name, t in inputs.items()}


def off(model: nn.Module, dtype: torch.dtype, **inputs: torch.Tensor) -> float:
    """Return the relative error of a half precision's output against float64's; inf where it is not finite alike."""
    got, wanted = ran(model, dtype, **inputs), ran(model, torch.float64, **inputs)
    kept = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), kept):
        return math.inf
    return float((got - wanted)[kept].norm() / wanted[kept].norm())


class Watch(TorchDispatchMode):
    """Notes, as (module, operation), the first non-finite result of finite operands and constants."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.path = [""]
        self.first: tuple[str, str] | None = None

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        good = all(_finite(item) for item in given)
        result = op(*args, **(kwargs or {}))
        unset = "empty" in str(op)
        if self.first is None and good and not unset and not all(_finite(item) for item in tree_leaves(result)):
            self.first = (self.path[-1], ".".join(str(op).split(".")[:2]))
        return result


def _finite(item: Any) -> bool:
    if isinstance(item, float):
        return math.isfinite(item)
    return not isinstance(item, torch.Tensor) or bool(torch.isfinite(item).all())


def first_bad(model: nn.Module, dtype: torch.dtype, **inputs: torch.Tensor) -> tuple[str, str] | None:
    """Return where a plain run of the cast model makes its first bad value: what an oracle without shadows can see."""
    low, watch = copy.deepcopy(model).eval().to(dtype), Watch()
    for name, module in low.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: watch.path.append(name))
        module.register_forward_hook(lambda *_: (watch.path.pop(), None)[1])
    with torch.no_grad(), watch:
        low(**cast(inputs, dtype))
    return watch.first
