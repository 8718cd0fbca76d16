"""One operation of the program as the shadow run sees it, before and after it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.capture import devices
from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.judge import HALVES, LOW
from overflow_lab.capture.shadow.operations import Facts
from overflow_lab.capture.shadow.shadows import has_shadow, why_not, wide
from overflow_lab.capture.shadow.sites import SiteKey


@dataclass
class Step:
    """One operation as it is about to run, with what is known of its operands."""

    op: Any
    facts: Facts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: list[torch.Tensor]
    writes: list[torch.Tensor]
    key: SiteKey
    bad: set[int]
    flush: set[SiteKey]
    error: float
    scalars: tuple[float, ...]
    before: list[tuple[torch.Tensor, torch.Tensor]]
    local: float | None = None

    @property
    def name(self) -> str:
        """The operation's name without its overload."""
        return self.facts.name


def unlike(step: Step) -> str:
    """Return why an operation cannot be replayed: its kind, or that of an operand; "" where it can."""
    if step.facts.whole:
        return "an operator of a higher order is seen as one"
    for tensor in operations.tensors_in((step.args, step.kwargs)):
        if (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized) and not has_shadow(tensor):
            return f"an operand is {why_not(tensor)}"
    return ""


def random_state(step: Step) -> torch.Tensor:
    """Return the state of the generator that an operation on these tensors would draw from."""
    generator = operations.generator_in(step.kwargs)
    if generator is not None:
        return generator.get_state()
    given = operations.tensors_in((step.args, step.kwargs))
    # One that makes tensors out of nothing is told where.
    device = given[0].device if given else torch.device(step.kwargs.get("device") or "cpu")
    return devices.random_state(device)


def in_float32(step: Step) -> Any:
    """Do an operation in float32, and return its result in the dtype that it should have had; write what it writes."""
    asked = next((i for i in operations.leaves((step.args, step.kwargs)) if isinstance(i, torch.dtype)), None)
    low = asked or next((t.dtype for t in step.reads if t.dtype in LOW), torch.float32)

    def up(item: Any) -> Any:
        if isinstance(item, torch.Tensor) and has_shadow(item):
            return item.to(wide(item.dtype))
        return wide(item) if isinstance(item, torch.dtype) and item in LOW else item

    args, kwargs = operations.mapped((step.args, step.kwargs), up)
    made = step.op(*args, **kwargs)
    copies = operations.written(step.facts, args, kwargs)
    for own, copy in zip(step.writes, copies, strict=True):
        own.copy_(copy)
    owners = {id(copy): own for own, copy in zip(step.writes, copies, strict=True)}

    def down(item: Any) -> Any:
        if id(item) in owners:
            return owners[id(item)]
        return item.to(low) if isinstance(item, torch.Tensor) and item.dtype == torch.float32 else item

    return operations.mapped(made, down)


def is_low(step: Step) -> bool:
    """Return whether an operation has to do with half precision: in what it reads, or in the dtype it is asked for."""
    asked = any(item in HALVES for item in operations.leaves((step.args, step.kwargs)) if isinstance(item, torch.dtype))
    return asked or any(t.dtype in HALVES for t in step.reads)
