"""Small pieces of LLVM IR: loops, reductions, addresses, and the types of the statistics kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

LANES = 16
GROUP = 4 * LANES

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
INTS, FLOATS, DOUBLES = (ir.VectorType(t, LANES) for t in (I32, F32, F64))
BYTES = ir.VectorType(I8, GROUP)
POINTER = ir.PointerType()

Value = Any  # llvmlite has no types


def for_range(b: ir.IRBuilder, count: Value, body: Callable[..., Any], start: Sequence[Value] = ()) -> list[Value]:
    """Emit `for i in range(count): values = body(i, *values)`; return the values after it."""
    entry, head, inside, done = b.block, *(b.append_basic_block(name) for name in ("head", "inside", "done"))
    b.branch(head)
    b.position_at_end(head)
    index, *values = [b.phi(typ) for typ in (I64, *(value.type for value in start))]
    b.cbranch(b.icmp_unsigned("<", index, count), inside, done)
    b.position_at_end(inside)
    after = body(index, *values) if start else (body(index), [])[1]
    following = b.add(index, I64(1))
    for phi, before, later in zip((index, *values), (I64(0), *start), (following, *after), strict=True):
        phi.add_incoming(before, entry)
        phi.add_incoming(later, b.block)
    b.branch(head)
    b.position_at_end(done)
    return values


def tree(combine: Callable[[Value, Value], Value], values: Sequence[Value]) -> Value:
    """Combine neighbours, then the results: short chains of dependent instructions."""
    level = list(values)
    while len(level) > 1:
        pairs = [combine(x, y) for x, y in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


def pick(b: ir.IRBuilder, way: str, x: Value, y: Value) -> Value:
    """Return, lane by lane, x where it is unsigned `way` y, else y."""
    return b.select(b.icmp_unsigned(way, x, y), x, y)


def pick_float(b: ir.IRBuilder, way: str, x: Value, y: Value) -> Value:
    """Return x where it is ordered before y, else y; a NaN in x is passed over."""
    return b.select(b.fcmp_ordered(way, x, y), x, y)


def splat(value: int) -> Value:
    """Return 16 times an integer."""
    return INTS([I32(value)] * LANES)


def splat_float(value: str) -> Value:
    """Return 16 times a float."""
    return FLOATS([F32(float(value))] * LANES)


def broadcast(b: ir.IRBuilder, scalar: Value, lanes: int) -> Value:
    """Return `lanes` times a value that is known at run time only."""
    vector = ir.VectorType(scalar.type, lanes)
    first = b.insert_element(vector(ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(first, vector(ir.Undefined), ir.VectorType(I32, lanes)([I32(0)] * lanes))


def at(b: ir.IRBuilder, base: Value, index: Value, bits: int) -> Value:
    """Return the address of element `index` of `bits` bits."""
    return b.gep(base, [index], source_etype=ir.IntType(bits))


def word_at(b: ir.IRBuilder, row: Value, word: Any) -> Value:
    """Return the address of a word of the row."""
    return at(b, row, word if isinstance(word, ir.Value) else I64(word), 64)


def add_to(b: ir.IRBuilder, row: Value, word: Any, n: Value) -> None:
    """Add `n` to a word of the row."""
    place = word_at(b, row, word)
    b.store(b.add(b.load(place, typ=I64), n), place)


def reduce_lanes(b: ir.IRBuilder, name: str, vector: Value) -> Value:
    """Return the reduction `name` (add, umin, smax, fmin, ...) over the lanes of a vector."""
    function = _intrinsic(b, f"llvm.vector.reduce.{name}", vector.type.element, [vector.type])
    return b.call(function, [vector])


def sum_lanes(b: ir.IRBuilder, start: Value, vector: Value) -> Value:
    """Return `start` and the lanes of a float64 vector, added in any order."""
    function = _intrinsic(b, "llvm.vector.reduce.fadd", F64, [F64, DOUBLES], named_by=1)
    return b.call(function, [start, vector], fastmath=("reassoc",))


def sum_floats(b: ir.IRBuilder, vector: Value) -> Value:
    """Return the lanes of a float32 vector, added in any order."""
    function = _intrinsic(b, "llvm.vector.reduce.fadd", F32, [F32, FLOATS], named_by=1)
    return b.call(function, [F32(0.0), vector], fastmath=("reassoc",))


def fused_square(b: ir.IRBuilder, x: Value, total: Value) -> Value:
    """Return x * x + total, in one instruction where the host has it."""
    return b.call(_intrinsic(b, "llvm.fmuladd", DOUBLES, [DOUBLES] * 3), [x, x, total])


def _intrinsic(b: ir.IRBuilder, name: str, result: Value, arguments: Sequence[Value], *, named_by: int = 0) -> Value:
    vector = arguments[named_by]
    full = f"{name}.v{vector.count}{vector.element.intrinsic_name}"
    known = b.module.globals.get(full)
    return known or ir.Function(b.module, ir.FunctionType(result, list(arguments)), full)
