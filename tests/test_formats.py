"""Formats against ml_dtypes, numpy, torch and arithmetic in fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, FloatFormat, get_format, headroom_bits, integer_limit, round_to

ML_DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
ENUMERABLE = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
Floats = npt.NDArray[np.float64]


def every_value(name: str) -> Floats:
    """All codes of an 8- or 16-bit format, in order of the code."""
    code = np.uint8 if name.startswith("float8") else np.uint16
    codes = np.arange(2 ** (8 * np.dtype(code).itemsize), dtype=code)
    with np.errstate(invalid="ignore"):  # signalling NaNs are among them
        return np.asarray(codes.view(ML_DTYPES[name]), dtype=np.float64)


def non_negative_grid(name: str) -> Floats:
    """The finite values from zero up, in order, and the first one that the format no longer has."""
    values = every_value(name)
    finite = values[np.isfinite(values) & ~np.signbit(values)]
    return np.append(finite, 2 * finite[-1] - finite[-2])


def same(actual: npt.ArrayLike, expected: npt.ArrayLike) -> None:
    """Equal as numbers, as NaN, and in the sign of zero."""
    left, right = np.asarray(actual, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    np.testing.assert_array_equal(left, right)
    numbers = ~np.isnan(left)
    np.testing.assert_array_equal(np.signbit(left[numbers]), np.signbit(right[numbers]))


def by_fractions(value: float, fmt: FloatFormat) -> float:
    """Rounding as its definition reads: the nearer neighbour on the grid, the even one of two."""
    if not math.isfinite(value) or value == 0:
        return math.nan if math.isinf(value) and not fmt.has_infinity else value
    exact = abs(Fraction(value))
    exponent = max(fmt.min_exponent, math.frexp(value)[1] - 1)
    step = Fraction(2) ** (exponent - fmt.mantissa_bits)
    result = round(exact / step) * step  # Fraction rounds half to even
    if result > Fraction(fmt.max):
        return math.copysign(math.inf, value) if fmt.has_infinity else math.nan
    return math.copysign(float(result), value)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_limits_agree_with_torch_finfo(name: str) -> None:
    fmt, info = FORMATS[name], torch.finfo(getattr(torch, name))
    assert (fmt.max, fmt.smallest_normal, fmt.eps) == (info.max, info.smallest_normal, info.eps)
    assert fmt.bits == info.bits


@pytest.mark.parametrize("name", ML_DTYPES)
def test_limits_agree_with_ml_dtypes_finfo(name: str) -> None:
    fmt, info = FORMATS[name], ml_dtypes.finfo(ML_DTYPES[name])  # type: ignore[no-untyped-call]
    assert fmt.smallest_subnormal == float(info.smallest_subnormal)
    assert (fmt.mantissa_bits, fmt.exponent_bits) == (info.nmant, info.nexp)
    assert fmt.precision == info.nmant + 1
    assert fmt.min_exponent == info.minexp
    assert fmt.max_exponent == math.floor(math.log2(float(info.max)))


def test_tf32_has_the_range_of_float32_and_the_precision_of_float16() -> None:
    tf32 = FORMATS["tf32"]
    assert tf32.smallest_normal == FORMATS["float32"].smallest_normal
    assert tf32.eps == FORMATS["float16"].eps
    assert tf32.max == float(np.uint32(0x7F7FE000).view(np.float32))
    assert tf32.smallest_subnormal == float(np.uint32(0x00002000).view(np.float32))


@pytest.mark.parametrize("name", ENUMERABLE)
def test_has_infinity_says_whether_a_code_is_infinite(name: str) -> None:
    assert FORMATS[name].has_infinity == bool(np.isinf(every_value(name)).any())


@pytest.mark.parametrize("name", ENUMERABLE)
def test_every_code_rounds_to_itself(name: str) -> None:
    values = every_value(name)
    same(round_to(values, FORMATS[name]), values)


@pytest.mark.parametrize("name", ENUMERABLE)
def test_every_midpoint_goes_to_the_even_code_and_what_is_beside_it_to_the_nearer(name: str) -> None:
    fmt, grid = FORMATS[name], non_negative_grid(name)
    low, high, middle = grid[:-1], grid[1:], (grid[:-1] + grid[1:]) / 2
    code_of_low = np.arange(len(low))  # non-negative codes are in order of value
    beyond = np.inf if fmt.has_infinity else np.nan
    low, high = (np.where(side > fmt.max, beyond, side) for side in (low, high))
    for sign in (1.0, -1.0):
        same(round_to(sign * middle, fmt), sign * np.where(code_of_low % 2 == 0, low, high))
        same(round_to(sign * np.nextafter(middle, 0), fmt), sign * low)
        same(round_to(sign * np.nextafter(middle, np.inf), fmt), sign * high)


@pytest.mark.parametrize("name", ENUMERABLE)
def test_every_midpoint_and_its_float32_neighbours_round_as_ml_dtypes(name: str) -> None:
    grid = non_negative_grid(name)
    middle = ((grid[:-1] + grid[1:]) / 2).astype(np.float32)
    # ml_dtypes converts float64 by way of float32, so only float32 points are a fair question.
    points = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    with np.errstate(over="ignore"):
        expected = points.astype(ML_DTYPES[name]).astype(np.float64)
    same(round_to(points, FORMATS[name]), expected)


@pytest.mark.parametrize("name", [n for n in ENUMERABLE if n != "float8_e4m3fn"])
def test_every_other_16_bit_code_rounds_as_torch_does(name: str) -> None:
    source = every_value("bfloat16" if name == "float16" else "float16")
    expected = torch.from_numpy(source).to(torch.float32).to(getattr(torch, name)).to(torch.float64)
    same(round_to(source, FORMATS[name]), expected.numpy())


@pytest.mark.parametrize("name", FORMATS)
@given(value=st.floats(width=64))
def test_any_float64_is_rounded_once(name: str, value: float) -> None:
    expected = by_fractions(value, FORMATS[name])
    same(round_to(np.array([value]), FORMATS[name]), [expected])


@pytest.mark.parametrize("name", FORMATS)
@given(value=st.floats(width=32), nudge=st.sampled_from([-1, 0, 1]))
def test_a_float64_beside_a_float32_is_rounded_once(name: str, value: float, nudge: int) -> None:
    beside = math.nextafter(value, nudge * math.inf) if nudge and math.isfinite(value) else value
    same(round_to(np.array([beside]), FORMATS[name]), [by_fractions(beside, FORMATS[name])])


def test_a_value_just_above_a_tie_is_not_rounded_by_way_of_float32() -> None:
    tie = 1 + 2.0**-11
    above = math.nextafter(tie, 2.0)
    assert float(np.float16(np.float32(above))) == 1.0  # the trap: two roundings
    assert round_to(np.array([above]), FORMATS["float16"])[0] == 1 + 2.0**-10


@given(bits=st.integers(0, 2**32 - 1))
def test_tf32_agrees_with_integer_rounding_of_float32_bits(bits: int) -> None:
    value = np.array([bits], dtype=np.uint32).view(np.float32).astype(np.float64)
    if not np.isfinite(value[0]):
        same(round_to(value, FORMATS["tf32"]), value)
        return
    # Drop 13 bits, to nearest even; a carry runs into the exponent and, at the top, into infinity.
    kept = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
    same(round_to(value, FORMATS["tf32"]), np.array([kept], dtype=np.uint32).view(np.float32))


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "tf32", "float8_e5m2"])
def test_the_overflow_threshold_is_half_a_step_above_the_largest(name: str) -> None:
    fmt = FORMATS[name]
    threshold = fmt.max + math.ldexp(fmt.eps, fmt.max_exponent) / 2
    points = np.array([threshold, np.nextafter(threshold, 0), -threshold, np.inf, np.finfo(np.float64).max])
    same(round_to(points, fmt), [np.inf, fmt.max, -np.inf, np.inf, np.inf])


def test_float8_e4m3fn_overflows_to_nan() -> None:
    points = np.array([448.0, 464.0, np.nextafter(464.0, 500.0), -1e9, np.inf, np.nan])
    same(round_to(points, FORMATS["float8_e4m3fn"]), [448.0, 448.0, np.nan, np.nan, np.nan, np.nan])


def test_signed_zeros_stay_and_tiny_values_keep_their_sign() -> None:
    rounded = round_to(np.array([0.0, -0.0, -1e-30]), FORMATS["float16"])
    same(rounded, [0.0, -0.0, -0.0])


def test_shape_is_kept_and_the_argument_is_not_changed() -> None:
    values = np.full((2, 0, 3), 1.1, dtype=np.float32)
    assert round_to(values, FORMATS["float16"]).shape == (2, 0, 3)
    scalar = np.array(70_000, dtype=np.int64)
    assert round_to(scalar, FORMATS["float16"]) == np.inf
    assert scalar == 70_000


@pytest.mark.parametrize("name", FORMATS)
def test_integers_are_exact_up_to_the_limit_and_not_beyond(name: str) -> None:
    fmt, limit = FORMATS[name], integer_limit(FORMATS[name])
    below = np.unique(np.linspace(0, limit, 5000).round())
    same(round_to(below, fmt), below)
    assert round_to(np.array([limit + 1]), fmt)[0] != limit + 1


def test_known_integer_limits() -> None:
    assert integer_limit(get_format("fp16")) == 2048
    assert integer_limit(get_format("bf16")) == 256
    assert integer_limit(get_format("fp32")) == 2**24


@pytest.mark.parametrize(("short", "name"), [("fp32", "float32"), ("fp16", "float16"), ("bf16", "bfloat16")])
def test_short_names_are_accepted(short: str, name: str) -> None:
    assert get_format(short) is get_format(name) is FORMATS[name]


def test_an_unknown_format_names_itself_and_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'int8'.*float32.*float8_e5m2.*bf16"):
        get_format("int8")


def test_formats_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        FORMATS["float32"] = FORMATS["float16"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        FORMATS["float32"].mantissa_bits = 3  # type: ignore[misc]


def test_headroom_counts_doublings() -> None:
    fp16 = FORMATS["float16"]
    assert headroom_bits(65504.0, fp16) == 0.0
    assert headroom_bits(65504.0 / 8, fp16) == 3.0
    assert headroom_bits(65504.0 * 4, fp16) == -2.0
    assert headroom_bits(math.nextafter(65504.0, math.inf), fp16) < 0


def test_headroom_of_zero_is_infinite_and_of_non_finite_values_minus_infinite() -> None:
    fp16 = FORMATS["float16"]
    assert headroom_bits(0.0, fp16) == math.inf
    assert [headroom_bits(x, fp16) for x in (math.inf, -math.inf, math.nan)] == [-math.inf] * 3
    assert headroom_bits(5e-324, FORMATS["float32"]) == pytest.approx(128 + 1074)
