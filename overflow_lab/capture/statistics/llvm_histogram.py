"""The histogram of a block's exponents, as LLVM IR.

For each exponent, from the block's largest downwards, all exponent bytes are compared with it, 64 at a time. In
ordinary activations eight exponents hold all but some ten elements of a block. When few are left, they are picked out;
when after `MOST_COMPARED` exponents many are left, they are counted one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llvmlite import ir

from overflow_lab.capture.statistics import layout
from overflow_lab.capture.statistics.llvm_emit import (
    BYTES,
    GROUP,
    I1,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    Value,
    add_to,
    at,
    broadcast,
    for_range,
    reduce_lanes,
    tree,
)

MOST_COMPARED = 20
FEW = 64

# Scratch memory: a byte for each element of a block, then the sub-histograms, 256 bins of 32 bits each.
EXPONENT_BYTES = 64 * GROUP
SUB_HISTOGRAMS = 8
SCRATCH_BYTES = EXPONENT_BYTES + SUB_HISTOGRAMS * 256 * 4


@dataclass(frozen=True)
class Histogram:
    """Emits the loops over the exponent bytes of `groups` groups of 64, at the start of `scratch`."""

    b: ir.IRBuilder
    groups: Value
    row: Value
    scratch: Value

    def add(self, top: Value, nonzero: Value, zero: Value) -> None:
        """Add `nonzero` elements whose largest biased exponent is `top` to the row's histogram."""
        b = self.b
        entry, head, done = b.block, b.append_basic_block("compare"), b.append_basic_block("compared")
        go_on = b.icmp_unsigned(">=", top, I32(4))
        b.cbranch(go_on, head, done)
        b.position_at_end(head)
        exponent, left = b.phi(I32), b.phi(I64)
        exponent.add_incoming(top, entry)
        left.add_incoming(nonzero, entry)
        counted = self._compare(exponent)
        next_exponent, next_left = b.sub(exponent, I32(4)), b.sub(left, counted)
        again = b.and_(
            b.icmp_unsigned(">", next_left, I64(FEW)),
            b.and_(
                b.icmp_unsigned(">=", next_exponent, I32(4)),
                b.icmp_unsigned("<", b.sub(top, next_exponent), I32(MOST_COMPARED)),
            ),
        )
        latch = b.block
        b.cbranch(again, head, done)
        exponent.add_incoming(next_exponent, latch)
        left.add_incoming(next_left, latch)
        b.position_at_end(done)
        last, rest = b.phi(I32), b.phi(I64)
        for phi, before, after in ((last, top, next_exponent), (rest, nonzero, next_left)):
            phi.add_incoming(before, entry)
            phi.add_incoming(after, latch)
        few = b.icmp_unsigned("<=", rest, I64(FEW))
        with b.if_then(b.icmp_unsigned("!=", rest, I64(0))), b.if_else(few) as (then, otherwise):
            with then:
                self._pick_out(last, rest)
            with otherwise:
                self._scatter(last, zero)

    def _compare(self, exponent: Value) -> Value:
        """Count the bytes equal to `exponent` and to the three below it into the row; return how many they are."""
        b = self.b
        exponents = [b.sub(exponent, I32(k)) for k in range(4)]
        counts = self.count_bytes([b.trunc(e, I8) for e in exponents])
        for e, n in zip(exponents, counts, strict=True):
            add_to(b, self.row, b.add(b.zext(e, I64), I64(layout.EXPONENTS)), n)
        return tree(b.add, counts)

    def count_bytes(self, wanted: Sequence[Value]) -> list[Value]:
        """Return how many exponent bytes equal each of `wanted`."""
        b = self.b
        splats, ones = [broadcast(b, w, GROUP) for w in wanted], BYTES([I8(1)] * GROUP)

        def body(i: Value, *counters: Value) -> list[Value]:
            found = self._load(i)
            # At most 64 iterations: a byte does not overflow.
            return [
                b.select(b.icmp_unsigned("==", found, s), b.add(n, ones), n)
                for n, s in zip(counters, splats, strict=True)
            ]

        counters = for_range(b, self.groups, body, [BYTES(None)] * len(wanted))
        wide = ir.VectorType(I16, GROUP)
        return [b.zext(reduce_lanes(b, "add", b.zext(counter, wide)), I64) for counter in counters]

    def _pick_out(self, top: Value, rest: Value) -> None:
        """Count the few bytes from `top` down to 1; of the `rest` elements, those not among them are subnormal."""
        b = self.b
        one, limit = broadcast(b, I8(1), GROUP), broadcast(b, b.trunc(top, I8), GROUP)

        def body(i: Value, subnormal: Value) -> list[Value]:
            # byte - 1 < top, unsigned, is 1 <= byte <= top.
            wanted = b.icmp_unsigned("<", b.sub(self._load(i), one), limit)
            mask = b.bitcast(wanted, I64)
            before, head, inside, done = b.block, *(b.append_basic_block() for _ in range(3))
            b.branch(head)
            b.position_at_end(head)
            left = b.phi(I64)
            left.add_incoming(mask, before)
            b.cbranch(b.icmp_unsigned("!=", left, I64(0)), inside, done)
            b.position_at_end(inside)
            lane = b.cttz(left, I1(1))
            place = at(b, self.scratch, b.add(b.mul(i, I64(GROUP)), lane), 8)
            exponent = b.zext(b.load(place, typ=I8), I64)
            add_to(b, self.row, b.add(exponent, I64(layout.EXPONENTS)), I64(1))
            left.add_incoming(b.and_(left, b.sub(left, I64(1))), inside)
            b.branch(head)
            b.position_at_end(done)
            return [b.sub(subnormal, b.ctpop(mask))]

        (subnormal,) = for_range(b, self.groups, body, [rest])
        add_to(b, self.row, layout.EXPONENTS, subnormal)

    def _scatter(self, top: Value, zero: Value) -> None:
        """Count the bytes from `top` down one by one, in several histograms, so that neighbours need not wait."""
        b = self.b
        counts = at(b, self.scratch, I64(EXPONENT_BYTES), 8)
        blank = INTS(None)
        for_range(
            b,
            I64(SUB_HISTOGRAMS * 256 // LANES),
            lambda i: b.store(blank, at(b, counts, b.mul(i, I64(LANES)), 32), align=64),
        )
        # What is above `top` has been counted: it goes to one bin beside the others, which nobody reads.
        beyond = b.add(b.zext(top, I64), I64(1))

        def body(i: Value) -> None:
            eight = b.load(at(b, self.scratch, b.mul(i, I64(8)), 8), typ=I64, align=8)
            for k in range(SUB_HISTOGRAMS):
                found = b.and_(b.lshr(eight, I64(8 * k)), I64(0xFF))
                found = b.select(b.icmp_unsigned("<", found, beyond), found, beyond)
                place = at(b, counts, b.add(found, I64(256 * k)), 32)
                b.store(b.add(b.load(place, typ=I32), I32(1)), place)

        for_range(b, b.mul(self.groups, I64(GROUP // 8)), body)

        def gather(i: Value) -> None:
            parts = [b.load(at(b, counts, b.add(i, I64(256 * k)), 32), typ=I32) for k in range(SUB_HISTOGRAMS)]
            add_to(b, self.row, b.add(i, I64(layout.EXPONENTS)), b.zext(tree(b.add, parts), I64))

        for_range(b, beyond, gather)
        add_to(b, self.row, layout.EXPONENTS, b.neg(zero))

    def _load(self, group: Value) -> Value:
        return self.b.load(at(self.b, self.scratch, self.b.mul(group, I64(GROUP)), 8), typ=BYTES, align=GROUP)
