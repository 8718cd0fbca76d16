"""Chooses the exponents: an integer linear program over the equations of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from overflow_lab.formats import FORMATS, FloatFormat
from overflow_lab.remedies.scaling.equations import Equations, Key, Size
from overflow_lab.remedies.scaling.expressions import Knob

# What a missing bit costs (of the least headroom, above the smallest normal number, of ample headroom), and what a step
# of one weight's exponent does. A shifted weight that is scaled down comes near
# to minus the shift, and with each step one bit of what is left is lost in the cast.
_OVERFLOW, _UNDERFLOW, _ROOM, _STEP, _SHIFTED_STEP = 1000.0, 10.0, 10.0, 0.01, 10.0
# Exponents beyond this leave float32 too.
_FARTHEST = 40
# How far above the smallest normal number the bulk of the values is kept, in bits.
_ABOVE_SMALLEST = 4.0
SECONDS = 20.0


@dataclass(frozen=True)
class Solution:
    """The exponents of the knobs (those that are 0 left out), and how many bits of the least headroom are missing."""

    exponents: Mapping[Knob, int]
    missing: float


def solve(
    equations: Equations, *, least: float, ample: float, fixed: Set[Knob], tied: Mapping[Knob, Knob]
) -> Solution | None:
    """Return the exponents that leave the function as it is and give each value `least` bits of headroom, if they can.

    Among these, they give `ample` bits where that costs no precision, keep values from being flushed to zero, and
    change as few weights by as little as they can. `fixed` knobs stay at 0; those of `tied` take the exponent of
    another. None where no solution was found in time.

    Mixed-integer linear programming by HiGHS (Huangfu and Hall, 2018), through scipy.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    table = _Table(equations, fixed, tied)
    if not table.knobs:
        return None
    table.build(least, ample)
    lower, upper = table.bounds()
    result = milp(
        c=np.array(table.costs),
        integrality=np.array(table.integers),
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(table.matrix(), np.array(table.low), np.array(table.high)),
        options={"time_limit": SECONDS, "mip_rel_gap": 1e-3},
    )
    if result.x is None:
        return None
    chosen = {knob: round(result.x[table.column[table.root(knob)]]) for knob in equations.knobs if table.moves(knob)}
    moved = {knob: e for knob, e in chosen.items() if e and knob.kind != "free"}
    # A weight that is used as a whole too was made equal to its parts: these would be scaled twice.
    once = {knob: e for knob, e in moved.items() if knob.kind != "part" or Knob("weight", knob.name) not in moved}
    return Solution(once, table.missing(result.x))


class _Table:
    """The rows and columns of the program; columns are knobs, their magnitudes, and bits that are missing."""

    def __init__(self, equations: Equations, fixed: Set[Knob], tied: Mapping[Knob, Knob]) -> None:
        self.equations, self.fixed, self.tied = equations, fixed, tied
        self.knobs = [k for k in equations.knobs if self.moves(k) and k not in tied]
        self.column = {knob: number for number, knob in enumerate(self.knobs)}
        self.costs = [0.0] * len(self.knobs)
        self.integers = [1] * len(self.knobs)
        self.low: list[float] = []
        self.high: list[float] = []
        self._entries: list[tuple[int, int, float]] = []
        self._overflows: list[int] = []

    def moves(self, knob: Knob) -> bool:
        """Return whether a knob's exponent may be other than 0."""
        return self.root(knob) not in self.fixed and knob not in self.fixed

    def root(self, knob: Knob) -> Knob:
        """Return the knob whose exponent one takes."""
        return self.tied.get(knob, knob)

    def build(self, least: float, ample: float) -> None:
        """Write all rows."""
        for key in sorted(self.equations.zeros, key=sorted):
            self._row(self._terms(key), 0.0, 0.0)
        for (key, dtype), size in sorted(
            self.equations.sizes.items(), key=lambda item: (sorted(item[0][0]), item[0][1])
        ):
            if dtype in FORMATS:  # a wider one has room enough
                self._fit(key, FORMATS[dtype], size, (least, ample))
        for knob in self.knobs:
            if knob.kind != "free":
                magnitude = self._new(_SHIFTED_STEP if knob.kind == "shifted" else _STEP)
                at = self.column[knob]
                self._row({magnitude: 1.0, at: -1.0}, 0.0, math.inf)
                self._row({magnitude: 1.0, at: 1.0}, 0.0, math.inf)

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the least and the greatest value of each column."""
        knobs, others = len(self.knobs), len(self.costs) - len(self.knobs)
        return np.array([-_FARTHEST] * knobs + [0.0] * others), np.array([_FARTHEST] * knobs + [np.inf] * others)

    def matrix(self) -> object:
        """Return the rows as a sparse matrix."""
        from scipy.sparse import coo_array

        rows, columns, values = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        return coo_array((values, (rows, columns)), shape=(len(self.low), len(self.costs))).tocsr()

    def missing(self, x: np.ndarray) -> float:
        """Return the most bits of headroom that a value lacks."""
        return max((float(x[at]) for at in self._overflows), default=0.0)

    def _fit(self, key: Key, fmt: FloatFormat, size: Size, headroom: tuple[float, float]) -> None:
        """Ask that the largest value have headroom, and the bulk of the values lie above the smallest normal number."""
        terms = self._terms(key)
        if size.absmax <= 0.0:
            return
        for bits, cost in zip(headroom, (_OVERFLOW, _ROOM), strict=True):
            room = math.log2(fmt.max) - bits - math.log2(size.absmax)
            short = self._new(cost)
            self._row({**_negative(terms), short: 1.0}, -room, math.inf)
            if cost == _OVERFLOW:
                self._overflows.append(short)
        if terms and size.median > 0.0:
            below = self._new(_UNDERFLOW)
            lowest = math.log2(fmt.smallest_normal) + _ABOVE_SMALLEST - math.log2(size.median)
            self._row({**terms, below: 1.0}, lowest, math.inf)

    def _terms(self, key: Key) -> dict[int, float]:
        terms: dict[int, float] = {}
        for knob, factor in key:
            if self.moves(knob):
                at = self.column[self.root(knob)]
                terms[at] = terms.get(at, 0.0) + factor
        return {at: factor for at, factor in terms.items() if factor}

    def _new(self, cost: float) -> int:
        self.costs.append(cost)
        self.integers.append(0)
        return len(self.costs) - 1

    def _row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        if terms:
            self._entries += [(len(self.low), at, factor) for at, factor in terms.items()]
            self.low.append(low)
            self.high.append(high)


def _negative(terms: Mapping[int, float]) -> dict[int, float]:
    return {at: -factor for at, factor in terms.items()}
