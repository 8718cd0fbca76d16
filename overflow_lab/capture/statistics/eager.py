"""The reference: statistics by ordinary torch operations on the tensor's own device, which the host never waits for."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from overflow_lab.capture.devices import widest
from overflow_lab.capture.statistics import layout

# Elements that are worked on at once; the temporaries of one chunk are below 16 MB.
CHUNK = 2**18

# Exact in float32. All other types are taken as float64, where the device has it.
NARROW = frozenset(
    {torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16}
    | {getattr(torch, name) for name in dir(torch) if name.startswith("float8_")}
)


class _Partial(NamedTuple):
    """Statistics of a chunk: int64 [4 + 257] counts, [3] min, -max and smallest, [2] sum and sum of squares."""

    counts: torch.Tensor
    lows: torch.Tensor
    sums: torch.Tensor

    def __add__(self, other: object) -> _Partial:
        """Return the statistics of both chunks."""
        assert isinstance(other, _Partial)
        return _Partial(self.counts + other.counts, torch.minimum(self.lows, other.lows), self.sums + other.sums)


def exact_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype in which a real tensor is measured: float32 where that holds all its values, else the widest."""
    return torch.float32 if tensor.dtype in NARROW else widest(tensor.device)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill a stretch of memory without gap or overlap, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in one dimension, in any order, complex ones as pairs; copies only over gaps and overlaps."""
    plain = tensor.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())
    plain = plain.resolve_neg()
    if plain.is_contiguous():
        return plain.view(-1)
    if plain.numel() and is_dense(plain):
        return plain.as_strided((plain.numel(),), (1,))
    return plain.contiguous().view(-1)


def measure(tensor: torch.Tensor) -> torch.Tensor:
    """Return the row of `tensor` as `layout` says, int64 [layout.WORDS] on its device.

    float64, complex128 and integers above 16 bits are taken as float64, all others as float32. Sums are in float64;
    the sum of squares of float64 values beyond 1e154 is inf. On a device without float64 all is float32, and the bits
    of the five floats fill the lower half of their words.
    """
    # Neither a surrounding inference mode nor gradients may reach the tape.
    with torch.inference_mode(False), torch.no_grad():
        flat = flatten(tensor)
        double, wide = widest(flat.device), exact_dtype(flat)
        chunks = (_chunk(part.to(wide), double) for part in flat.split(CHUNK) if part.numel())
        total = functools.reduce(lambda x, y: x + y, chunks, _nothing(flat.device, double))
        return _pack(flat.numel(), total)


def _nothing(device: torch.device, double: torch.dtype) -> _Partial:
    return _Partial(
        torch.zeros(4 + layout.BINS + 1, dtype=torch.int64, device=device),
        torch.full((3,), torch.inf, dtype=double, device=device),
        torch.zeros(2, dtype=double, device=device),
    )


def _chunk(x: torch.Tensor, double: torch.dtype) -> _Partial:
    """Measure a chunk of float32 or float64."""
    finite, zero = x.isfinite(), x == 0
    bins = torch.where(zero, layout.BINS, _biased_exponents(x))
    # bincount and boolean indices would make the host wait for the device; histc may be refused as nondeterministic.
    histogram = torch.zeros(layout.BINS + 1, dtype=torch.int64, device=x.device)
    histogram.scatter_add_(0, bins, torch.ones((), dtype=torch.int64, device=x.device).expand_as(bins))
    special = [x.isnan().sum(), (x == torch.inf).sum(), (x == -torch.inf).sum(), zero.sum()]
    lows = [
        torch.where(finite, x, torch.inf).amin(),
        torch.where(finite, -x, torch.inf).amin(),
        torch.where(finite & ~zero, x.abs(), torch.inf).amin(),
    ]
    kept = torch.where(finite, x, 0).to(double)
    sums = [kept.sum(), (kept * kept).sum()]
    return _Partial(torch.cat([torch.stack(special), histogram]), torch.stack(lows).to(double), torch.stack(sums))


def _biased_exponents(x: torch.Tensor) -> torch.Tensor:
    """Return float32's biased exponents, int64; 0 and 254 also stand for what lies beyond, 255 for inf and NaN."""
    if x.dtype == torch.float32:
        return ((x.view(torch.int32) >> 23) & 0xFF).to(torch.int64)
    biased = (x.view(torch.int64) >> 52) & 0x7FF
    return torch.where(biased == 0x7FF, 255, (biased - (1023 - 127)).clamp(0, 254))


def _pack(count: int, total: _Partial) -> torch.Tensor:
    row = torch.zeros(layout.WORDS, dtype=torch.int64, device=total.counts.device)
    row[layout.COUNT] = count
    row[layout.NAN : layout.ZERO + 1] = total.counts[:4]
    floats = torch.stack([total.lows[0], -total.lows[1], total.lows[2], total.sums[0], total.sums[1]])
    row[layout.FLOATS] = floats.view(torch.int64 if floats.dtype == torch.float64 else torch.int32).to(torch.int64)
    row[layout.EXPONENTS : layout.WORDS - 1] = total.counts[4 : 4 + layout.BINS - 1]
    return row
