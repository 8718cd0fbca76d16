"""One call of an operation, as the rules of scaling look at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from overflow_lab.capture.shadow import operations
from overflow_lab.remedies.scaling.expressions import ZERO, Expression, Knob

if TYPE_CHECKING:
    from overflow_lab.remedies.scaling.trace import ScaleTrace


def scales(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds values that may have a scale, and no integers or truths."""
    return tensor.is_floating_point() or tensor.is_complex()


@dataclass
class Call:
    """One call of an operation: `given` are its arguments by name, `results` its floating results."""

    trace: ScaleTrace
    name: str
    given: dict[str, Any]
    path: str
    results: list[torch.Tensor]

    @property
    def short(self) -> str:
        """The operation's name without "aten." and the underscore of the in-place form."""
        return self.name.rpartition(".")[2].removesuffix("_")

    def of(self, name: str) -> Expression:
        """Return the exponent of an argument: that of a tensor, zero for a number or where there is none."""
        value = self.given.get(name)
        return self.trace.of(value) if isinstance(value, torch.Tensor) and scales(value) else ZERO

    def floats(self) -> list[torch.Tensor]:
        """Return all floating (or complex) tensors among the arguments."""
        return [t for t in operations.tensors_in(self.given) if scales(t)]

    def whole_numbers(self) -> list[torch.Tensor]:
        """Return the tensors of integers and truths that are terms beside floating ones, and no indices or masks."""
        terms = [self.given.get(name) for name in ("self", "other", "src", "tensors")]
        return [t for t in operations.tensors_in(terms) if not scales(t)]

    def number(self, name: str) -> float | None:
        """Return an argument that is a plain number."""
        value = self.given.get(name)
        return float(value) if isinstance(value, (int, float)) else None

    def zero(self, expression: Expression) -> None:
        """Demand that an exponent be 0."""
        self.trace.equations.zero(expression)

    def equal(self, a: Expression, b: Expression) -> None:
        """Demand that two exponents be the same."""
        self.trace.equations.equal(a, b)

    def attribute(self, value: float, word: str) -> Expression:
        """Return the knob of the running module's attribute that holds `value` and has `word` in its name.

        Where there is none, that of a constant which nobody can reach.
        """
        module = self.trace.modules.get(self.path)
        held = {n: v for n, v in (vars(module) if module is not None else {}).items() if word in n and type(v) is float}
        name = next((n for n, v in held.items() if value in (v, _in_float32(v))), "")
        knob = Knob("constant", f"{self.path}:{name}" if name else f"={value!r}")
        self.trace.equations.constants[knob.name] = held.get(name, value)
        return {knob: 1.0}


def _in_float32(value: float) -> float:
    """Return a number as float32 has it, which is what torch's own RMS norm makes of its eps."""
    return float(torch.tensor(value, dtype=torch.float32))
