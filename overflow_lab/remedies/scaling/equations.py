"""What a run says about scaling: the equations that keep the function, and the sizes of the values."""

from __future__ import annotations

from dataclasses import dataclass, field

from overflow_lab.remedies.scaling.expressions import Expression, Knob, frozen, plus

Key = frozenset[tuple[Knob, float]]


@dataclass
class Size:
    """How large the values of one exponent and one dtype get: their largest magnitude, their least median."""

    absmax: float = 0.0
    median: float = 0.0

    def add(self, absmax: float, median: float) -> None:
        """Take in further values; a median of 0 says nothing."""
        self.absmax = max(self.absmax, absmax)
        self.median = min(self.median or median, median or self.median)


@dataclass
class Equations:
    """Collects, over all runs: `zeros` are expressions that must be 0; `sizes` the magnitudes, by exponent and dtype.

    `constants` are the values of module attributes that may change with a scale (an eps, a softmax scaling), by
    "path:attribute"; `parts` the slices of each weight whose products were taken apart.
    """

    zeros: set[Key] = field(default_factory=set)
    sizes: dict[tuple[Key, str], Size] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    parts: dict[str, set[Knob]] = field(default_factory=dict)

    def zero(self, expression: Expression) -> None:
        """Demand that an exponent be 0."""
        if expression:
            self.zeros.add(frozen(expression))

    def equal(self, a: Expression, b: Expression) -> None:
        """Demand that two exponents be the same."""
        self.zero(plus(a, b, times=-1.0))

    def saw(self, expression: Expression, dtype: str, absmax: float, median: float) -> None:
        """Take in the size of a value."""
        self.sizes.setdefault((frozen(expression), dtype), Size()).add(absmax, median)

    @property
    def knobs(self) -> list[Knob]:
        """All knobs, in a fixed order."""
        found = {knob for key in self.zeros for knob, _ in key}
        return sorted(found | {knob for key, _ in self.sizes for knob, _ in key})
