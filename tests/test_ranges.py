"""Ranges: their arithmetic, against numpy, and that they add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from overflow_lab.formats import FORMATS
from overflow_lab.ranges import LOWEST_EXPONENT, Range

FLOATS = hnp.arrays(np.float32, st.integers(0, 40), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


def range_of(values: np.ndarray) -> Range:
    """The slow obvious range of an array, in float64."""
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    nonzero = np.abs(finite[finite != 0])
    exponents: dict[int, int] = {}
    for magnitude in nonzero:
        exponent = max(math.frexp(magnitude)[1] - 1, LOWEST_EXPONENT)
        exponents[exponent] = exponents.get(exponent, 0) + 1
    return Range(
        count=values.size,
        nan=int(np.isnan(wide).sum()),
        posinf=int(np.isposinf(wide).sum()),
        neginf=int(np.isneginf(wide).sum()),
        zero=int((finite == 0).sum()),
        min=float(finite.min()) if finite.size else None,
        max=float(finite.max()) if finite.size else None,
        smallest=float(nonzero.min()) if nonzero.size else None,
        sum=float(finite.sum()),
        sum_of_squares=float((finite**2).sum()),
        exponents=dict(sorted(exponents.items())),
    )


def same(a: Range, b: Range) -> bool:
    """Equal, sums up to rounding."""
    close = math.isclose(
        a.sum, b.sum, rel_tol=1e-9, abs_tol=1e-9 * math.sqrt(a.sum_of_squares * max(a.count, 1)) + 1e-300
    )
    squares = math.isclose(a.sum_of_squares, b.sum_of_squares, rel_tol=1e-9)
    exact = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "smallest", "exponents")
    return close and squares and all(getattr(a, name) == getattr(b, name) for name in exact)


@given(FLOATS, FLOATS)
def test_two_ranges_add_up_to_the_range_of_both(a: np.ndarray, b: np.ndarray) -> None:
    assert same(range_of(a) + range_of(b), range_of(np.concatenate([a, b])))


@given(FLOATS)
def test_a_range_survives_json(values: np.ndarray) -> None:
    made = range_of(values)
    assert Range.from_json(made.to_json()) == made


@given(FLOATS)
def test_absmax_and_rms_are_those_of_the_finite_values(values: np.ndarray) -> None:
    made, finite = range_of(values), values[np.isfinite(values)].astype(np.float64)
    if not finite.size:
        assert made.absmax is None
        assert made.rms is None
        return
    assert made.absmax == np.abs(finite).max()
    assert made.rms == pytest.approx(np.sqrt((finite**2).mean()))


def test_an_empty_range_is_the_zero_of_addition() -> None:
    made = range_of(np.array([1.0, -3.0, np.inf, 0.0]))
    assert made + Range() == made
    assert Range() + made == made


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_subnormal_and_flushed_counts_agree_with_a_count_of_the_values(name: str) -> None:
    fmt = FORMATS[name]
    # Powers of two from far below the format to far above it: where the histogram's whole exponents lose nothing.
    exponents = np.arange(-126, 20)
    made = range_of((2.0**exponents).astype(np.float32))
    assert made.subnormal(fmt) == int((2.0**exponents < fmt.smallest_normal).sum())
    assert made.flushed(fmt) == int((2.0**exponents < fmt.smallest_subnormal / 2).sum())


def test_the_energy_of_flushed_values_is_a_share_of_the_whole() -> None:
    small, large = np.full(10**4, 1.5 * 2.0**-27), np.array([1.5 * 2.0**-20])
    made = range_of(np.concatenate([small, large]).astype(np.float32))
    exact = (small**2).sum() / ((small**2).sum() + (large**2).sum())
    assert made.flushed_energy(FORMATS["float16"]) == pytest.approx(exact)
    assert made.flushed_energy(FORMATS["bfloat16"]) == 0.0
    assert Range().flushed_energy(FORMATS["float16"]) == 0.0


def test_a_value_beyond_a_format_is_seen() -> None:
    assert range_of(np.array([65520.0])).beyond(FORMATS["float16"])
    assert not range_of(np.array([65504.0, np.inf])).beyond(FORMATS["float16"])
    assert not Range().beyond(FORMATS["float16"])
