"""The CPU kernel as LLVM IR: all statistics of a row in one pass over memory.

Elements are taken in blocks of 4,096, which stay in the first-level cache while three loops go over them:

1. extremes, and the biased exponent of each element as one byte;
2. sums in float64 (and, only where a block has a subnormal, infinity or NaN, one more loop that counts exceptions);
3. the histogram of the bytes, as `llvm_histogram` says.

Vectors are written 16 floats wide; LLVM splits them into what the host has. A tail shorter than 64 elements is padded
with NaN, which every statistic but the number of NaN passes over, and that number is corrected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from overflow_lab.capture.statistics import layout, llvm_histogram
from overflow_lab.capture.statistics.llvm_emit import (
    BYTES,
    DOUBLES,
    F32,
    F64,
    FLOATS,
    GROUP,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    POINTER,
    Value,
    add_to,
    at,
    for_range,
    fused_square,
    pick,
    pick_float,
    reduce_lanes,
    splat,
    splat_float,
    sum_lanes,
    tree,
    word_at,
)

BLOCK = llvm_histogram.EXPONENT_BYTES

# What the caller lends to the kernel: what the histogram needs, then the padded tail.
_TAIL_AT = llvm_histogram.SCRATCH_BYTES
SCRATCH_BYTES = _TAIL_AT + GROUP * 4

_MAGNITUDE, _INFINITE, _SUBNORMAL = 0x7FFFFFFF, 0x7F800000, 0x00800000

Widen = Callable[[ir.IRBuilder, Value], Value]


@dataclass(frozen=True)
class Source:
    """An element type that the kernel reads: bits of an element, its NaN, how 16 of them become float32 bits."""

    name: str
    bits: int
    nan: int
    widen: Widen


def _widen_bfloat16(b: ir.IRBuilder, raw: Value) -> Value:
    return b.shl(b.zext(raw, INTS), splat(16))


def _widen_float16(b: ir.IRBuilder, raw: Value) -> Value:
    halves = b.bitcast(raw, ir.VectorType(ir.HalfType(), LANES))
    return b.bitcast(b.fpext(halves, FLOATS), INTS)


SOURCES = {
    source.name: source
    for source in (
        Source("float32", 32, 0x7FC00000, lambda _b, raw: raw),
        Source("bfloat16", 16, 0x7FC0, _widen_bfloat16),
        Source("float16", 16, 0x7E00, _widen_float16),
    )
}


def kernel_ir(source: Source) -> str:
    """Return a module with the function measure(data, count, row, scratch): void, for elements like `source`."""
    module = ir.Module(name=f"overflow_lab_{source.name}")
    block = _block_function(module, source)
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER, POINTER]), "measure")
    data, count, row, scratch = function.args
    b = ir.IRBuilder(function.append_basic_block())
    _clear(b, row, count)
    whole = b.udiv(count, I64(BLOCK))

    def each_block(index: Value) -> None:
        b.call(block, [at(b, data, b.mul(index, I64(BLOCK)), source.bits), I64(BLOCK // GROUP), row, scratch])

    for_range(b, whole, each_block)
    left = b.urem(count, I64(BLOCK))
    groups, tail = b.udiv(left, I64(GROUP)), b.urem(left, I64(GROUP))
    with b.if_then(b.icmp_unsigned("!=", groups, I64(0))):
        b.call(block, [at(b, data, b.mul(whole, I64(BLOCK)), source.bits), groups, row, scratch])
    with b.if_then(b.icmp_unsigned("!=", tail, I64(0))):
        padded = _pad(b, source, at(b, data, b.sub(count, tail), source.bits), tail, scratch)
        b.call(block, [padded, I64(1), row, scratch])
        add_to(b, row, layout.NAN, b.sub(tail, I64(GROUP)))
    b.ret_void()
    return str(module)


def _clear(b: ir.IRBuilder, row: Value, count: Value) -> None:
    """Make `row` that of a tensor without elements, but for its count."""
    zeros = ir.VectorType(I64, 8)(None)
    for_range(b, I64(layout.WORDS // 8), lambda i: b.store(zeros, at(b, row, b.mul(i, I64(8)), 64), align=8))
    b.store(count, word_at(b, row, layout.COUNT))
    for word, value in ((layout.MIN, "inf"), (layout.MAX, "-inf"), (layout.SMALLEST, "inf")):
        b.store(F64(float(value)), word_at(b, row, word))


def _pad(b: ir.IRBuilder, source: Source, data: Value, count: Value, scratch: Value) -> Value:
    """Copy the last `count` elements to scratch, and NaN behind them; return where."""
    element, padded = ir.IntType(source.bits), at(b, scratch, I64(_TAIL_AT), 8)
    for_range(b, I64(GROUP), lambda i: b.store(element(source.nan), at(b, padded, i, source.bits)))

    def copy(i: Value) -> None:
        b.store(b.load(at(b, data, i, source.bits), typ=element), at(b, padded, i, source.bits))

    for_range(b, count, copy)
    return padded


def _block_function(module: ir.Module, source: Source) -> Value:
    """Define block(data, groups, row, scratch), which adds at most `BLOCK` elements to a row."""
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, I64, POINTER, POINTER]), "block")
    function.linkage = "internal"
    data, groups, row, scratch = function.args
    b = ir.IRBuilder(function.append_basic_block())
    block = _Block(b, source, data, groups, row, scratch)
    low, high, least, most = block.extremes()
    elements = b.mul(groups, I64(GROUP))
    # Both are of magnitude - 1, so infinity and NaN are above the one limit and subnormals below the other.
    careful = b.or_(b.icmp_signed(">=", high, I32(_INFINITE - 1)), b.icmp_unsigned("<", low, I32(_SUBNORMAL - 1)))
    with b.if_else(careful) as (then, otherwise):
        with then:
            masked_high, masked_least, masked_most, masked_zero, bad = block.exceptions()
            block.sums(masked=True)
            after_then = b.block
        with otherwise:
            plain_high, plain_zero = b.add(high, I32(1)), block.zeros()
            block.sums(masked=False)
            after_otherwise = b.block

    def merged(typ: Value, then_value: Value, otherwise_value: Value) -> Value:
        phi = b.phi(typ)
        phi.add_incoming(then_value, after_then)
        phi.add_incoming(otherwise_value, after_otherwise)
        return phi

    absmax = merged(I32, masked_high, plain_high)
    least, most = merged(F32, masked_least, least), merged(F32, masked_most, most)
    zero, bad = merged(I64, masked_zero, plain_zero), merged(I64, bad, I64(0))
    block.store_extremes(low, least, most)
    nonzero = b.sub(elements, b.add(zero, bad))
    with b.if_then(b.icmp_unsigned("!=", nonzero, I64(0))):
        block.histogram.add(b.lshr(absmax, I32(23)), nonzero, zero)
    b.ret_void()
    return function


@dataclass(frozen=True)
class _Block:
    """The loops over one block; each method emits one of them."""

    b: ir.IRBuilder
    source: Source
    data: Value
    groups: Value
    row: Value
    scratch: Value

    @property
    def histogram(self) -> llvm_histogram.Histogram:
        """The histogram of this block."""
        return llvm_histogram.Histogram(self.b, self.groups, self.row, self.scratch)

    def extremes(self) -> tuple[Value, Value, Value, Value]:
        """Store the exponent bytes; return unsigned min, signed max of magnitude - 1 (neither sees zeros), min, max."""
        b = self.b

        def body(i: Value, low: Value, high: Value, least: Value, most: Value) -> list[Value]:
            bits = self._load(i)
            shifted = [b.sub(b.and_(v, splat(_MAGNITUDE)), splat(1)) for v in bits]
            floats = [b.bitcast(v, FLOATS) for v in bits]
            b.store(b.bitcast(_exponents(b, bits), BYTES), at(b, self.scratch, b.mul(i, I64(GROUP)), 8), align=GROUP)
            return [
                tree(lambda x, y: pick(b, "<", x, y), [*shifted, low]),
                tree(lambda x, y: b.select(b.icmp_signed(">", x, y), x, y), [*shifted, high]),
                tree(lambda x, y: pick_float(b, "<", x, y), [*floats, least]),
                tree(lambda x, y: pick_float(b, ">", x, y), [*floats, most]),
            ]

        start = [splat(0xFFFFFFFF), splat(0xFFFFFFFF), splat_float("inf"), splat_float("-inf")]
        ends = for_range(b, self.groups, body, start)
        low, high, least, most = (
            reduce_lanes(b, *pair) for pair in zip(("umin", "smax", "fmin", "fmax"), ends, strict=True)
        )
        return low, high, least, most

    def zeros(self) -> Value:
        """Count zeros into the row, in a block without subnormals; return how many they are."""
        (n,) = self.histogram.count_bytes([I8(0)])
        add_to(self.b, self.row, layout.ZERO, n)
        return n

    def exceptions(self) -> tuple[Value, Value, Value, Value, Value]:
        """Count exceptions into the row; return absmax (bits), min, max of the finite, zeros, and non-finite."""
        b = self.b

        def body(i: Value, *carried: Value) -> list[Value]:
            state = list(carried)
            for v in self._load(i):
                magnitude, x = b.and_(v, splat(_MAGNITUDE)), b.bitcast(v, FLOATS)
                finite = b.icmp_unsigned("<", magnitude, splat(_INFINITE))
                tests = (
                    b.icmp_unsigned(">", magnitude, splat(_INFINITE)),
                    b.icmp_unsigned("==", v, splat(_INFINITE)),
                    b.icmp_unsigned("==", v, splat(_INFINITE | 0x80000000)),
                    b.icmp_unsigned("==", magnitude, splat(0)),
                )
                state = [
                    pick(b, ">", b.select(finite, magnitude, splat(0)), state[0]),
                    pick_float(b, "<", b.select(finite, x, splat_float("inf")), state[1]),
                    pick_float(b, ">", b.select(finite, x, splat_float("-inf")), state[2]),
                    *(b.sub(n, b.sext(test, INTS)) for n, test in zip(state[3:], tests, strict=True)),
                ]
            return state

        start = [splat(0), splat_float("inf"), splat_float("-inf"), *[splat(0)] * 4]
        absmax, least, most, *counters = for_range(b, self.groups, body, start)
        counts = [b.zext(reduce_lanes(b, "add", counter), I64) for counter in counters]
        for word, n in zip((layout.NAN, layout.POSINF, layout.NEGINF, layout.ZERO), counts, strict=True):
            add_to(b, self.row, word, n)
        bad = b.add(counts[0], b.add(counts[1], counts[2]))
        ends = reduce_lanes(b, "umax", absmax), reduce_lanes(b, "fmin", least), reduce_lanes(b, "fmax", most)
        return (*ends, counts[3], bad)

    def sums(self, *, masked: bool) -> None:
        """Add sum and sum of squares to the row, in float64; with `masked` non-finite elements count as zero."""
        b = self.b

        def body(i: Value, *carried: Value) -> list[Value]:
            state = list(carried)
            for lane, v in enumerate(self._load(i)):
                x = b.bitcast(v, FLOATS)
                if masked:
                    finite = b.icmp_unsigned("<", b.and_(v, splat(_MAGNITUDE)), splat(_INFINITE))
                    x = b.select(finite, x, splat_float("0"))
                wide, half = b.fpext(x, DOUBLES), lane % 2
                state[half] = b.fadd(state[half], wide)
                state[2 + half] = fused_square(b, wide, state[2 + half])
            return state

        zero = DOUBLES([F64(0.0)] * LANES)
        totals = for_range(b, self.groups, body, [zero] * 4)
        for word, pair in ((layout.SUM, totals[:2]), (layout.SUM_OF_SQUARES, totals[2:])):
            place = word_at(b, self.row, word)
            old = b.load(place, typ=F64)
            b.store(sum_lanes(b, old, b.fadd(*pair)), place)

    def store_extremes(self, low: Value, least: Value, most: Value) -> None:
        """Widen min, max and smallest of the row."""
        b = self.b
        some = b.icmp_unsigned("<", low, I32(_INFINITE - 1))
        smallest = b.select(some, b.bitcast(b.add(low, I32(1)), F32), F32(float("inf")))
        for word, way, value in ((layout.MIN, "<", least), (layout.MAX, ">", most), (layout.SMALLEST, "<", smallest)):
            place, wide = word_at(b, self.row, word), b.fpext(value, F64)
            b.store(pick_float(b, way, wide, b.load(place, typ=F64)), place)

    def _load(self, group: Value) -> list[Value]:
        """Return 64 elements as four vectors of float32 bits."""
        b, raw = self.b, ir.VectorType(ir.IntType(self.source.bits), LANES)
        start = b.mul(group, I64(GROUP))
        places = [at(b, self.data, b.add(start, I64(k * LANES)), self.source.bits) for k in range(4)]
        align = self.source.bits // 8
        return [self.source.widen(b, b.load(place, typ=raw, align=align)) for place in places]


def _exponents(b: ir.IRBuilder, bits: Sequence[Value]) -> Value:
    """Pack the exponents of four vectors into the bytes of one, in an order that nobody needs to know."""
    moved = [
        b.lshr(bits[0], splat(23)),
        b.lshr(bits[1], splat(15)),
        b.lshr(bits[2], splat(7)),
        b.shl(bits[3], splat(1)),
    ]
    return tree(b.or_, [b.and_(v, splat(0xFF << (8 * k))) for k, v in enumerate(moved)])
