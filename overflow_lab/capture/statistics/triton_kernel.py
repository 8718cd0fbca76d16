"""The CUDA kernel in Triton: all statistics of a row in one pass over memory, and no word of it through the host.

A tensor is taken in tiles. A small one is one program's, which writes the row itself: one launch. Of a large one each
program writes a row of its own, and a second launch merges these column by column. So nothing has to be cleared before,
there are no atomics, and the order of the sums is fixed: the same tensor has the same row, to the last bit.

The places of `layout` are arguments with defaults: of global constants Triton asks at each launch whether they have
changed, which took longer than all the rest of a launch.

With TRITON_INTERPRET=1 (before this module is imported) the same code runs on the CPU, which is how it is tested
where there is no GPU.
"""

# No `from __future__ import annotations` here: Triton reads the annotations of its functions.

import torch
import triton
import triton.language as tl

from overflow_lab.capture.statistics import eager, layout

# Element types that the kernel reads; all others (float8, integers) are widened by torch first, as the eager one does.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

TILE = 4096
# Up to so many tiles are one program's: a launch costs more than what is lost by using a small part of the GPU.
ONE_PROGRAM = 4
# Four for each of the 128 or so multiprocessors of a large GPU; their rows are 1 MB, which stays in its cache.
MOST_PROGRAMS = 512
WARPS = 8
# A count is passed as a number of these where it is a multiple: the compiler then knows that loads may be wide.
UNIT = 16
# Words that a program of the second launch merges.
_COLUMNS = 16


def runs_on(device: torch.device) -> bool:
    """Return whether the kernel can run there: on CUDA, and in Triton's interpreter anywhere."""
    return device.type == "cuda" or not isinstance(_measure, triton.JITFunction)


def measure(tensor: torch.Tensor, rows: torch.Tensor, row: int) -> None:
    """Write the row of `tensor`, of any dtype and strides, into `rows`, int64 [n, layout.WORDS], at index `row`.

    Both are on one device, whose current stream does the work. The first call for a dtype compiles.
    """
    if tensor.dtype not in DTYPES or tensor.is_neg() or not (tensor.is_contiguous() or eager.is_dense(tensor)):
        tensor = _plain(tensor)
    count = tensor.numel()
    unit = UNIT if count % UNIT == 0 else 1
    tiles = -(-count // TILE)  # Triton's own division takes longer than a launch should
    # Triton launches on the current device, whichever the tensor is on.
    with torch.cuda.device_of(tensor):
        if tiles <= ONE_PROGRAM:
            _measure[(1,)](tensor, count // unit, rows, row, tiles, UNIT=unit, TILE=TILE, num_warps=WARPS)
            return
        programs = min(tiles, MOST_PROGRAMS)
        parts = torch.empty((programs, layout.WORDS), dtype=torch.int64, device=tensor.device)
        each = -(-tiles // programs)
        _measure[(programs,)](tensor, count // unit, parts, 0, each, UNIT=unit, TILE=TILE, num_warps=WARPS)
        _merge[(layout.WORDS // _COLUMNS,)](parts, programs, rows, row, COLUMNS=_COLUMNS, PARTS=64, num_warps=4)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements without gaps in a dtype that the kernel reads, complex ones as pairs."""
    with torch.inference_mode(False), torch.no_grad():
        flat = eager.flatten(tensor)
        return flat if flat.dtype in DTYPES else flat.to(eager.exact_dtype(flat))


@triton.jit(do_not_specialize=["units", "row", "tiles"])  # type: ignore[untyped-decorator]
def _measure(
    data: tl.tensor,
    units: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    tiles: tl.tensor,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    COUNTS: tl.constexpr = layout.COUNT,
    FLOATS: tl.constexpr = layout.MIN,
    EXPONENTS: tl.constexpr = layout.EXPONENTS,
    WORDS: tl.constexpr = layout.WORDS,
) -> None:
    """Write the row of this program's tiles, at `row` and as many below it as it has programs before it.

    Elements behind the end are taken as zeros that nobody counts.
    """
    program = tl.program_id(0).to(tl.int64)
    count = units.to(tl.int64) * UNIT
    BINS: tl.constexpr = WORDS - EXPONENTS
    wide: tl.constexpr = tl.float64 if data.dtype.element_ty == tl.float64 else tl.float32
    nan_zero, infinities = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    infinity = tl.full([], float("inf"), wide)
    least, most, smallest = infinity, -infinity, infinity
    total, squares = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    histogram = tl.zeros([BINS], tl.int64)
    for tile in range(tiles):
        places = (program * tiles + tile) * TILE + tl.arange(0, TILE)
        inside = places < count
        x = _widened(tl.load(data + places, mask=inside, other=0.0), wide)
        is_nan, is_inf, magnitude, bins = _taken_apart(x)
        is_zero = magnitude == 0
        kept = inside & ~(is_nan | is_inf)
        nonzero = kept & ~is_zero
        # Two counts in the halves of one word: of a tile, then of all tiles.
        nan_zero += _both(tl.sum(is_nan.to(tl.int32) + ((inside & is_zero).to(tl.int32) << 16), 0))
        infinities += _both(tl.sum(is_inf.to(tl.int32) << tl.where(x > 0, 0, 16), 0))
        least = tl.minimum(least, tl.min(tl.where(kept, x, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(kept, x, float("-inf")), 0))
        size = magnitude.to(wide, bitcast=True)
        smallest = tl.minimum(smallest, tl.min(tl.where(nonzero, size, float("inf")), 0))
        finite = tl.where(kept, x, 0.0).to(tl.float64)
        total += tl.sum(finite, 0)
        squares += tl.sum(finite * finite, 0)
        # What has no exponent goes to the last bin, which is not written.
        histogram += tl.histogram(tl.where(nonzero, bins, BINS - 1), BINS).to(tl.int64)
    out = rows + (row.to(tl.int64) + program) * WORDS
    # In the order of `layout`.
    tl.store(out + COUNTS, tl.minimum(tl.maximum(count - program * tiles * TILE, 0), tiles.to(tl.int64) * TILE))
    tl.store(out + COUNTS + 1, nan_zero & 0xFFFFFFFF)
    tl.store(out + COUNTS + 2, infinities & 0xFFFFFFFF)
    tl.store(out + COUNTS + 3, infinities >> 32)
    tl.store(out + COUNTS + 4, nan_zero >> 32)
    tl.store(out + FLOATS, least.to(tl.float64).to(tl.int64, bitcast=True))
    tl.store(out + FLOATS + 1, most.to(tl.float64).to(tl.int64, bitcast=True))
    tl.store(out + FLOATS + 2, smallest.to(tl.float64).to(tl.int64, bitcast=True))
    tl.store(out + FLOATS + 3, total.to(tl.int64, bitcast=True))
    tl.store(out + FLOATS + 4, squares.to(tl.int64, bitcast=True))
    places = tl.arange(0, BINS)
    tl.store(out + EXPONENTS + places, tl.where(places == BINS - 1, 0, histogram))


@triton.jit  # type: ignore[untyped-decorator]
def _widened(x: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Return elements as `wide`; a bfloat16 is the upper half of a float32, subnormals included."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(wide)


@triton.jit  # type: ignore[untyped-decorator]
def _both(counts: tl.tensor) -> tl.tensor:
    """Widen two counts of 16 bits each in an int32 to two of 32 bits each in an int64."""
    return (counts & 0xFFFF).to(tl.int64) + ((counts >> 16).to(tl.int64) << 32)


@triton.jit  # type: ignore[untyped-decorator]
def _taken_apart(x: tl.tensor) -> tl.tensor:
    """Return whether elements are NaN, whether infinite, the bits of their magnitudes, and their bins.

    From the bits alone: a comparison might take a subnormal for zero.
    """
    if x.dtype == tl.float64:
        magnitude = x.to(tl.int64, bitcast=True) & 0x7FFFFFFFFFFFFFFF
        infinite = 0x7FF0000000000000
        biased = (magnitude >> 52).to(tl.int32)
        bins = tl.minimum(tl.maximum(biased - (1023 - 127), 0), 254)
    else:
        magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        infinite = 0x7F800000
        bins = magnitude >> 23
    return magnitude > infinite, magnitude == infinite, magnitude, bins


@triton.jit(do_not_specialize=["programs", "row"])  # type: ignore[untyped-decorator]
def _merge(
    parts: tl.tensor,
    programs: tl.tensor,
    rows: tl.tensor,
    row: tl.tensor,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    FLOATS: tl.constexpr = layout.MIN,
    WORDS: tl.constexpr = layout.WORDS,
) -> None:
    """Merge `COLUMNS` words of the rows in `parts` into those of `row`: all are added, but for the three extremes."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lines = tl.arange(0, PARTS)
    out = rows + row.to(tl.int64) * WORDS + columns
    if tl.program_id(0) == 0:
        counts = tl.zeros([COLUMNS], tl.int64)
        sums = tl.zeros([COLUMNS], tl.float64)
        lows = tl.full([COLUMNS], float("inf"), tl.float64)
        highs = tl.full([COLUMNS], float("-inf"), tl.float64)
        for start in range(0, programs, PARTS):
            inside = (start + lines < programs)[:, None]
            words = tl.load(parts + (start + lines)[:, None] * WORDS + columns[None, :], mask=inside, other=0)
            counts += tl.sum(words, 0)
            values = words.to(tl.float64, bitcast=True)
            sums += tl.sum(values, 0)
            lows = tl.minimum(lows, tl.min(tl.where(inside, values, float("inf")), 0))
            highs = tl.maximum(highs, tl.max(tl.where(inside, values, float("-inf")), 0))
        floats = tl.where(columns == FLOATS + 1, highs, tl.where(columns >= FLOATS + 3, sums, lows))
        tl.store(out, tl.where(columns < FLOATS, counts, floats.to(tl.int64, bitcast=True)))
    else:
        counts = tl.zeros([COLUMNS], tl.int64)
        for start in range(0, programs, PARTS):
            inside = (start + lines < programs)[:, None]
            counts += tl.sum(
                tl.load(parts + (start + lines)[:, None] * WORDS + columns[None, :], mask=inside, other=0), 0
            )
        tl.store(out, counts)
