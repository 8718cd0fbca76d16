"""The range of the values at a site: extremes, counts, sums and a histogram of base-2 exponents, mergeable by `+`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from overflow_lab.formats import FloatFormat

# The key of `Range.exponents` that holds the magnitudes below float32's smallest normal, 2**-126.
LOWEST_EXPONENT = -127


@dataclass(frozen=True)
class Range:
    """Statistics of all values that were seen at one site.

    `count` is the number of elements, of which `nan`, `posinf`, `neginf` and `zero` are special. `min` and `max` are
    over the finite values, `smallest` is the smallest nonzero finite magnitude; each is None when no such value was
    seen. `sum` and `sum_of_squares` are over the finite values. `exponents` maps floor(log2(abs(x))) of the finite
    nonzero values to their number; magnitudes below 2**-126 share the key -127.
    """

    count: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    zero: int = 0
    min: float | None = None
    max: float | None = None
    smallest: float | None = None
    sum: float = 0.0
    sum_of_squares: float = 0.0
    exponents: Mapping[int, int] = field(default_factory=dict)

    @property
    def nonfinite(self) -> int:
        """Number of NaN and infinite elements."""
        return self.nan + self.posinf + self.neginf

    @property
    def finite(self) -> int:
        """Number of finite elements."""
        return self.count - self.nonfinite

    @property
    def absmax(self) -> float | None:
        """Largest finite magnitude, or None where no element was finite."""
        if self.min is None or self.max is None:
            return None
        return max(abs(self.min), abs(self.max))

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements, or None where there are none."""
        return math.sqrt(self.sum_of_squares / self.finite) if self.finite else None

    def subnormal(self, fmt: FloatFormat) -> int:
        """Return how many elements are nonzero and below `fmt`'s smallest normal value."""
        return sum(n for exponent, n in self.exponents.items() if exponent < fmt.min_exponent)

    def flushed(self, fmt: FloatFormat) -> int:
        """Return about how many nonzero elements round to zero in `fmt`.

        Magnitudes up to half of the smallest subnormal round to zero, so whole exponents below that half are counted.
        """
        half = math.frexp(fmt.smallest_subnormal)[1] - 2
        return sum(n for exponent, n in self.exponents.items() if exponent < half)

    def flushed_energy(self, fmt: FloatFormat) -> float:
        """Return the share of the sum of squares that rounds to zero in `fmt`, from 0 to 1.

        Estimated from the histogram: a magnitude in [2**e, 2**(e+1)) counts as 1.5 * 2**e.
        """
        if self.sum_of_squares <= 0.0:
            return 0.0
        half = math.frexp(fmt.smallest_subnormal)[1] - 2
        lost = sum(n * 2.25 * 4.0**exponent for exponent, n in self.exponents.items() if exponent < half)
        return min(1.0, lost / self.sum_of_squares)

    def beyond(self, fmt: FloatFormat) -> bool:
        """Return whether a finite value was seen that does not fit in `fmt`."""
        absmax = self.absmax
        return absmax is not None and absmax > fmt.max

    def __add__(self, other: Range) -> Range:
        """Return the range of the values of both."""
        return Range(
            count=self.count + other.count,
            nan=self.nan + other.nan,
            posinf=self.posinf + other.posinf,
            neginf=self.neginf + other.neginf,
            zero=self.zero + other.zero,
            min=_extreme(min, self.min, other.min),
            max=_extreme(max, self.max, other.max),
            smallest=_extreme(min, self.smallest, other.smallest),
            sum=self.sum + other.sum,
            sum_of_squares=self.sum_of_squares + other.sum_of_squares,
            exponents=dict(sorted((Counter(self.exponents) + Counter(other.exponents)).items())),
        )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-ready dict; keys whose value is zero or absent are left out."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        kept: dict[str, Any] = {name: value for name, value in plain.items() if value not in (0, None)}
        for name in _MAYBE:
            value = getattr(self, name)
            if value is not None:
                kept[name] = value
        if self.exponents:
            kept["exponents"] = {str(exponent): n for exponent, n in self.exponents.items()}
        return kept

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Range:
        """Rebuild a range from what `to_json` returned."""
        values = {name: row[name] for name in (*_PLAIN, *_MAYBE) if name in row}
        return cls(**values, exponents={int(k): int(v) for k, v in row.get("exponents", {}).items()})


_PLAIN = ("count", "nan", "posinf", "neginf", "zero", "sum", "sum_of_squares")
_MAYBE = ("min", "max", "smallest")


def _extreme(choose: Any, a: float | None, b: float | None) -> float | None:
    """Return the smaller or larger of two values, either of which may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return float(choose(a, b))
