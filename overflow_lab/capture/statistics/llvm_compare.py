"""The CPU kernel that compares a tensor with its float32 shadow, as LLVM IR: one pass over both, nothing allocated.

Sums are over blocks of 4,096 elements in float32 and across them in float64. A value that is not finite, in either,
makes a sum that is not; who calls it looks again then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from overflow_lab.capture.statistics import layout
from overflow_lab.capture.statistics.llvm_emit import (
    F32,
    F64,
    I32,
    I64,
    LANES,
    POINTER,
    Value,
    at,
    for_range,
    reduce_lanes,
    sum_floats,
    word_at,
)
from overflow_lab.formats import FORMATS

_BLOCK = 4096
# Vectors that are worked on side by side, so that their sums do not wait for each other.
_ABREAST = 4


def comparison_ir(dtype: str) -> str:
    """Return a module with compare(low, shadow, count, out): void, for `low` in a dtype and `shadow` in float32.

    `out` is float64 [layout.COMPARED]: the sum of squared differences, that of squared shadows, the shadow's least and
    greatest value, how many elements are zero though their shadow is not but below the dtype's smallest normal number,
    and how many are zero though their shadow is not.
    """
    module = ir.Module(name=f"overflow_lab_compare_{dtype}")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER, POINTER, I64, POINTER]), "compare")
    low, shadow, count, out = function.args
    b = ir.IRBuilder(function.append_basic_block())
    for word, value in zip(range(layout.COMPARED), (0.0, 0.0, float("inf"), float("-inf"), 0.0, 0.0), strict=True):
        b.store(F64(value), word_at(b, out, word))
    wide = _Loop(b, dtype, LANES, _ABREAST, low, shadow, out)
    single = _Loop(b, dtype, 1, 1, low, shadow, out)
    each = _BLOCK // (LANES * _ABREAST)
    whole = b.udiv(count, I64(_BLOCK))
    for_range(b, whole, lambda i: wide.add(b.mul(i, I64(_BLOCK)), I64(each)))
    done = b.mul(whole, I64(_BLOCK))
    groups = b.udiv(b.sub(count, done), I64(LANES * _ABREAST))
    wide.add(done, groups)
    done = b.add(done, b.mul(groups, I64(LANES * _ABREAST)))
    single.add(done, b.sub(count, done))
    b.ret_void()
    return str(module)


@dataclass(frozen=True)
class _Loop:
    """A loop over elements, `lanes` * `abreast` at a time."""

    b: ir.IRBuilder
    dtype: str
    lanes: int
    abreast: int
    low: Value
    shadow: Value
    out: Value

    def add(self, first: Value, steps: Value) -> None:
        """Add the elements from `first` on to the result."""
        b = self.b
        floats, ints = self._type(F32), self._type(I32)
        start = []
        for _ in range(self.abreast):
            start += [self._all(F32, 0.0), self._all(F32, 0.0), self._all(F32, float("inf"))]
            start += [self._all(F32, float("-inf")), self._all(I32, 0), self._all(I32, 0)]

        def body(i: Value, *carried: Value) -> list[Value]:
            made: list[Value] = []
            for k in range(self.abreast):
                place = b.add(first, b.mul(b.add(b.mul(i, I64(self.abreast)), I64(k)), I64(self.lanes)))
                made += self._element(place, carried[6 * k : 6 * k + 6], ints)
            return made

        ends = for_range(b, steps, body, start)
        assert ends[0].type == floats
        for k in range(self.abreast):
            self._store(ends[6 * k : 6 * k + 6])

    def _element(self, place: Value, carried: Any, ints: Value) -> list[Value]:
        b = self.b
        error, scale, least, most, flushed, zeroed = carried
        value, shadow = self._load(self.low, place), self._float(self.shadow, place)
        apart = b.fsub(value, shadow)
        zero = self._all(F32, 0.0)
        lost = b.and_(b.fcmp_ordered("==", value, zero), b.fcmp_ordered("!=", shadow, zero))
        tiny = self._all(F32, FORMATS[self.dtype].smallest_normal)
        small = b.and_(b.fcmp_ordered("<", shadow, tiny), b.fcmp_ordered(">", shadow, b.fneg(tiny)))
        return [
            b.fadd(error, b.fmul(apart, apart), flags=("contract",)),
            b.fadd(scale, b.fmul(shadow, shadow), flags=("contract",)),
            b.select(b.fcmp_ordered("<", shadow, least), shadow, least),
            b.select(b.fcmp_ordered(">", shadow, most), shadow, most),
            b.add(flushed, b.zext(b.and_(lost, small), ints)),
            b.add(zeroed, b.zext(lost, ints)),
        ]

    def _store(self, ends: Any) -> None:
        b = self.b
        error, scale, least, most, flushed, zeroed = ends
        for word, value in ((layout.ERROR, error), (layout.SCALE, scale)):
            total = value if self.lanes == 1 else sum_floats(b, value)
            self._added(word, b.fpext(total, F64))
        for word, way, name, value in ((layout.LEAST, "<", "fmin", least), (layout.MOST, ">", "fmax", most)):
            found = b.fpext(value if self.lanes == 1 else reduce_lanes(b, name, value), F64)
            place = word_at(b, self.out, word)
            old = b.load(place, typ=F64)
            b.store(b.select(b.fcmp_ordered(way, found, old), found, old), place)
        for word, value in ((layout.FLUSHED, flushed), (layout.ZEROED, zeroed)):
            n = value if self.lanes == 1 else reduce_lanes(b, "add", value)
            self._added(word, b.uitofp(n, F64))

    def _added(self, word: int, value: Value) -> None:
        place = word_at(self.b, self.out, word)
        self.b.store(self.b.fadd(self.b.load(place, typ=F64), value), place)

    def _load(self, base: Value, place: Value) -> Value:
        """Return elements of the compared tensor as float32."""
        b = self.b
        if self.dtype == "float32":
            return self._float(base, place)
        raw = b.load(at(b, base, place, 16), typ=self._type(ir.IntType(16)), align=2)
        if self.dtype == "float16":
            return b.fpext(b.bitcast(raw, self._type(ir.HalfType())), self._type(F32))
        return b.bitcast(b.shl(b.zext(raw, self._type(I32)), self._all(I32, 16)), self._type(F32))

    def _float(self, base: Value, place: Value) -> Value:
        return self.b.load(at(self.b, base, place, 32), typ=self._type(F32), align=4)

    def _type(self, element: Value) -> Value:
        return element if self.lanes == 1 else ir.VectorType(element, self.lanes)

    def _all(self, element: Value, value: float) -> Value:
        return element(value) if self.lanes == 1 else self._type(element)([element(value)] * self.lanes)
