"""Compares a result with its shadow: error, bad values, flushed values, wrong values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from overflow_lab.capture.devices import widened
from overflow_lab.capture.statistics.compare import compared

# A finite value that came of a bad one is wrong when it is off by more than this share of its own shadow, plus this
# share of the root mean square of the shadow around it: far above any rounding, below what a clamp or silent zero does.
_OFF, _OFF_RMS = 0.05, 0.05
LOW = (torch.float16, torch.bfloat16)
HALVES = (*LOW, torch.complex32)


@dataclass(frozen=True)
class Comparison:
    """How a result stands to its shadow; `new` masks elements that are bad though their shadow is finite.

    `zeroed` counts zeros whose shadow is none, `flushed` those of them that are below the dtype's smallest normal.
    """

    error: float
    absmax: float
    flushed: int = 0
    zeroed: int = 0
    nonfinite: int = 0
    new: torch.Tensor | None = None


def compare(low: torch.Tensor, shadow: torch.Tensor) -> Comparison:
    """Return how `low` (any floating dtype) stands to its float32 or float64 shadow of the same shape."""
    if low.numel() == 0:
        return Comparison(0.0, 0.0)
    if low.is_complex():
        low, shadow = torch.view_as_real(low.resolve_conj()), torch.view_as_real(shadow.resolve_conj())
    error, scale, least, most, flushed, zeroed = compared(low, shadow) or _measured(low, shadow)
    if not (math.isfinite(error) and math.isfinite(scale)):
        return _careful(low.to(shadow.dtype), shadow, low.dtype)
    flushed = flushed if low.dtype != shadow.dtype else 0
    return Comparison(_ratio(error, scale), max(most, -least), int(flushed), int(zeroed))


def _measured(low: torch.Tensor, shadow: torch.Tensor) -> list[float]:
    """Return the squared error, the squared shadow, the shadow's extremes, and how many are flushed and zeroed.

    The first four and the count of zeros come in one transfer. Each is one pass without memory of its own, but for the
    difference, which is widened and subtracted in place. It is what `compared` gives by one pass over both.
    """
    value = low.to(shadow.dtype)
    zeros = low.numel() - torch.count_nonzero(value)
    difference = value - shadow if value is low else value.sub_(shadow)
    squares = [_square(difference), _square(shadow)]
    any_zero, *found = torch.stack([zeros.to(shadow.dtype), *squares, *torch.aminmax(shadow)]).tolist()
    return [*found, *(_lost(low, shadow, low.dtype) if any_zero else (0, 0))]


def _square(values: torch.Tensor) -> torch.Tensor:
    if not values.is_contiguous():
        return values.square().sum()
    flat = values.view(-1)
    return torch.dot(flat, flat)


def _careful(value: torch.Tensor, shadow: torch.Tensor, dtype: torch.dtype) -> Comparison:
    """Compare where something is not finite, or too large to be squared in float32."""
    bad, meant = ~torch.isfinite(value), torch.isfinite(shadow)
    new = bad & meant
    kept = meant & ~bad
    a, b = widened(torch.where(kept, value, 0)), widened(torch.where(kept, shadow, 0))
    error = _ratio(float((a - b).square().sum()), float(b.square().sum()))
    absmax = float(torch.where(meant, shadow, 0).abs().amax())
    flushed, zeroed = _lost(a, b, dtype)
    flushed = flushed if dtype != shadow.dtype else 0
    return Comparison(error, absmax, flushed, zeroed, int(bad.sum()), new if bool(new.any()) else None)


def _lost(value: torch.Tensor, shadow: torch.Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return how many zeros there are whose shadow is subnormal in `dtype`, and how many whose shadow is not zero."""
    zeroed = (shadow != 0) & (value == 0)
    tiny = shadow.abs() < torch.finfo(dtype).smallest_normal
    return int(torch.count_nonzero(tiny & zeroed)), int(torch.count_nonzero(zeroed))


def _ratio(error: float, scale: float) -> float:
    return math.sqrt(error / scale) if scale > 0 else 0.0 if error == 0 else math.inf


def first_row(mask: torch.Tensor) -> tuple[int, int]:
    """Return the index along the first dimension of the first element set, and its length; (0, 1) in 0-d."""
    if mask.ndim == 0:
        return 0, 1
    return int(mask.reshape(mask.shape[0], -1).any(-1).to(torch.uint8).argmax()), mask.shape[0]


def any_new(low: torch.Tensor, shadow: torch.Tensor) -> bool:
    """Return whether an element is bad whose shadow is finite."""
    return bool((~torch.isfinite(low) & torch.isfinite(shadow)).any())


def any_zeroed(low: torch.Tensor, shadow: torch.Tensor) -> bool:
    """Return whether an element is zero whose shadow is not."""
    return bool(((low == 0) & (shadow != 0) & torch.isfinite(shadow)).any())


def any_wrong(low: torch.Tensor, shadow: torch.Tensor, tainted: torch.Tensor | None = None) -> bool:
    """Return whether a finite element is far from its shadow; judged one by one, since a few vanish in any norm.

    Where it is known which elements are `tainted`, only they are judged, each against itself.
    """
    kept = torch.isfinite(low) & torch.isfinite(shadow)
    if tainted is not None:
        kept &= tainted
    a, b = torch.where(kept, low.to(shadow.dtype), 0), torch.where(kept, shadow, 0)
    room = _OFF_RMS * widened(b).square().mean().sqrt() if tainted is None else torch.finfo(low.dtype).smallest_normal
    return bool(((a - b).abs() > _OFF * b.abs() + room).any())
