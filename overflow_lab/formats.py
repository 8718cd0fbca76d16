"""Number formats as data: limits, precision, and exact rounding, with numpy alone.

Sources: IEEE 754-2019 (float32, float16); Kalamkar et al., 2019 (bfloat16); the OCP 8-bit floating point
specification, revision 1.0, 2023 (float8_e4m3fn, float8_e5m2); NVIDIA's A100 white paper, 2020 (tf32).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from overflow_lab.errors import UsageError


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating point format: sign, `exponent_bits`, `mantissa_bits` explicit bits.

    The exponent bias is 2**(exponent_bits - 1) - 1. With `has_infinity` the top exponent is kept for infinities and
    NaN (IEEE 754); without it only the all-ones code is NaN, and the top exponent holds numbers (the OCP "fn" formats).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True

    @property
    def bits(self) -> int:
        """Bits of a code, sign included (tf32 has 19, stored in 32)."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def precision(self) -> int:
        """Significant bits, the implicit one included."""
        return self.mantissa_bits + 1

    @property
    def bias(self) -> int:
        """What is added to the exponent of a normal number to store it."""
        return int(2 ** (self.exponent_bits - 1)) - 1

    @property
    def max_exponent(self) -> int:
        """floor(log2(max))."""
        return self.bias if self.has_infinity else self.bias + 1

    @property
    def min_exponent(self) -> int:
        """log2(smallest_normal)."""
        return 1 - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        below_two = 1 if self.has_infinity else 2
        return math.ldexp(2 - below_two * self.eps, self.max_exponent)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value that has all `precision` bits."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    @property
    def eps(self) -> float:
        """The distance from 1 to the next larger value, as in `torch.finfo`; the rounding unit is half of it."""
        return math.ldexp(1.0, -self.mantissa_bits)


FORMATS: Mapping[str, FloatFormat] = MappingProxyType(
    {
        fmt.name: fmt
        for fmt in (
            FloatFormat("float32", exponent_bits=8, mantissa_bits=23),
            FloatFormat("float16", exponent_bits=5, mantissa_bits=10),
            FloatFormat("bfloat16", exponent_bits=8, mantissa_bits=7),
            FloatFormat("tf32", exponent_bits=8, mantissa_bits=10),
            FloatFormat("float8_e4m3fn", exponent_bits=4, mantissa_bits=3, has_infinity=False),
            FloatFormat("float8_e5m2", exponent_bits=5, mantissa_bits=2),
        )
    }
)

SHORT_NAMES: Mapping[str, str] = MappingProxyType({"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"})


def get_format(name: str) -> FloatFormat:
    """Return the format called `name`; fp32, fp16 and bf16 are accepted as short names.

    Raises:
        UsageError: there is no such format.
    """
    fmt = FORMATS.get(SHORT_NAMES.get(name, name))
    if fmt is None:
        known = ", ".join([*FORMATS, *SHORT_NAMES])
        raise UsageError(f"unknown number format {name!r}; known are {known}")
    return fmt


def headroom_bits(absmax: float, fmt: FloatFormat) -> float:
    """Return how many more doublings `absmax` can take before `fmt` overflows: log2(fmt.max / absmax).

    Zero magnitude gives +inf; a non-finite `absmax` gives -inf; negative headroom means that it does not fit.
    """
    if not math.isfinite(absmax):
        return -math.inf
    if absmax == 0:
        return math.inf
    ratio = fmt.max / abs(absmax)
    # The quotient keeps the sign right one ulp above the limit; float64 subnormals overflow it, and have bits to spare.
    return math.log2(ratio) if math.isfinite(ratio) else math.log2(fmt.max) - math.log2(abs(absmax))


def integer_limit(fmt: FloatFormat) -> int:
    """Return the n up to which every integer is exact in `fmt`: 2**precision (2048 in float16, 256 in bfloat16)."""
    return int(2**fmt.precision)


def round_to(values: npt.NDArray[Any], fmt: FloatFormat) -> npt.NDArray[np.float64]:
    """Return `values` rounded once to `fmt`, to nearest, ties to even, as float64 of the same shape.

    `values` is any real array; it is taken as float64 first, so integers beyond 2**53 are rounded twice. Subnormals
    are rounded as IEEE 754 says; signed zeros and NaN stay. What is beyond the largest finite value after rounding
    becomes inf, or NaN in a format without infinity (float8_e4m3fn, as ml_dtypes; torch saturates there instead, and
    would hide the only event that we look for).
    """
    wide = np.asarray(values, dtype=np.float64)
    beyond = np.inf if fmt.has_infinity else np.nan
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        # x = f * 2**e with 0.5 <= f < 1. Every step but `rint` is a scaling by a power of two, hence exact.
        exponent = np.frexp(wide)[1] - 1
        quantum = np.maximum(exponent, fmt.min_exponent) - fmt.mantissa_bits
        rounded = np.ldexp(np.rint(np.ldexp(wide, -quantum)), quantum)
    rounded = np.where(np.isfinite(wide), rounded, wide)
    return np.where(np.abs(rounded) > fmt.max, np.copysign(beyond, rounded), rounded)
