"""How a value scales when the weights do: an exponent of two, as a linear form in the exponents of the weights.

Multiply each weight w by 2**e(w). A value v of the model then becomes v * 2**E(v), where E(v) is linear in the e(w) as
long as every operation on the way is homogeneous: a product adds the exponents of its factors, a square root halves
one, a sum wants those of its terms to be equal. A softmax, a GELU or the output wants zero. The linear equations that
an observed run imposes in this way are a complete description of the rescalings that leave a function as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weight", "part", "shifted", "constant", "free"]


@dataclass(frozen=True, order=True)
class Knob:
    """Something whose exponent may be chosen.

    A "weight" is a parameter or a saved buffer by its name, a "part" the slice `first` to `last` of its dimension
    `dim`; "shifted" a weight that is used only as `weight + shift` (the norms of Gemma); a "constant" the attribute of
    a module, "path:attribute", or "=value" where no attribute holds it; "free" a tensor of zeros, which any factor
    leaves as it is.
    """

    kind: Kind
    name: str
    dim: int = 0
    first: int = 0
    last: int = 0
    shift: float = 0.0

    @property
    def nameless(self) -> bool:
        """Whether this is a constant that no attribute holds, so that nobody can change it."""
        return self.kind == "constant" and self.name.startswith("=")


Expression = Mapping[Knob, float]
ZERO: Expression = {}


def plus(a: Expression, b: Expression, *, times: float = 1.0) -> Expression:
    """Return a + times * b."""
    if not b or times == 0.0:
        return a
    total = dict(a)
    for knob, factor in b.items():
        total[knob] = total.get(knob, 0.0) + times * factor
        if total[knob] == 0.0:
            del total[knob]
    return total


def scaled(a: Expression, times: float) -> Expression:
    """Return times * a."""
    return {} if times == 0.0 else {knob: times * factor for knob, factor in a.items()}


def frozen(a: Expression) -> frozenset[tuple[Knob, float]]:
    """Return an expression as a key."""
    return frozenset(a.items())


def value_of(a: Expression, exponents: Mapping[Knob, int]) -> float:
    """Return the exponent that an expression has, given those of the knobs (0 where none is given)."""
    return sum(factor * exponents.get(knob, 0) for knob, factor in a.items())
