"""What a cast to a format loses, told from a tensor's range alone, and which losses are worth telling."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from overflow_lab.formats import FORMATS, FloatFormat
from overflow_lab.ranges import Range
from overflow_lab.recording import CastRow, TensorRow

# A few weights that become zero or subnormal are in every float16 model; this share of a tensor is worth a warning.
LOST_SHARE = 0.01


def worst_first(rows: Iterable[CastRow]) -> list[CastRow]:
    """Return casts in the order of what they lose: infinities, then energy, then zeros, then subnormals."""
    return sorted(rows, key=lambda r: (-r.to_infinity, -r.energy_lost, -r.to_zero, -r.to_subnormal))


def severity_of(rows: Sequence[CastRow]) -> str:
    """Return how bad the casts of all weights to one format are: "error", "warning" or "none".

    An element that becomes infinite is an error; a tensor of which a hundredth becomes zero or subnormal a warning.
    """
    if any(row.to_infinity for row in rows):
        return "error"
    return "warning" if any(row.to_zero + row.to_subnormal >= LOST_SHARE * row.elements > 0 for row in rows) else "none"


def unsettled(found: Range, fmt: FloatFormat) -> bool:
    """Return whether a range leaves open how many elements are too large: some are near the largest value."""
    return found.beyond(fmt) and fmt.max_exponent in found.exponents


def too_large(found: Range, fmt: FloatFormat) -> int:
    """Return how many finite elements have a larger exponent than the format's largest value."""
    return sum(n for exponent, n in found.exponents.items() if exponent > fmt.max_exponent)


def cast_of(tensor: TensorRow, precision: str, *, to_infinity: int, rounding: float | None) -> CastRow:
    """Return what the cast of a tensor to the format `precision` loses.

    Exact but for `to_infinity` and `rounding`, which the caller has counted: elements below half of the smallest
    subnormal become zero, other ones below the smallest normal subnormal (a few of these round up to it). `energy_lost`
    is estimated, see `Range.flushed_energy`. What a subnormal of the tensor's own format loses further is not counted.
    """
    fmt, own = FORMATS[precision], FORMATS.get(tensor.dtype)
    narrower = own is None or fmt.min_exponent > own.min_exponent
    zero = tensor.range.flushed(fmt) if narrower else 0
    return CastRow(
        precision=precision,
        name=tensor.name,
        module=tensor.module,
        role=tensor.role,
        from_dtype=tensor.dtype,
        to_dtype=precision,
        elements=tensor.range.count,
        to_infinity=to_infinity,
        to_zero=zero,
        to_subnormal=tensor.range.subnormal(fmt) - zero if narrower else 0,
        absmax=tensor.range.absmax or 0.0,
        energy_lost=tensor.range.flushed_energy(fmt) if narrower else 0.0,
        rounding=rounding,
    )
