"""Where a fault began, from what was seen at module borders.

A module takes inputs and returns outputs; both are watched. The first bad value in time tells who made it: seen first
in an output, that module's own code made it (whatever its submodules took and returned was good until then); seen
first in an input, the code of the module that called made it, between two calls. A scan of operations sees inside;
this is what module borders can tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from overflow_lab.analysis.index import Index, role
from overflow_lab.analysis.results import Origin
from overflow_lab.ranges import Range
from overflow_lab.recording import ErrorRow, RangeRow

# A site where float32 has non-finite values too (a mask of -inf) is at fault only when the share of them grows by
# this much.
_GROWTH = 1.5
# A site's values are taken as flushed when this much more of them is zero than in float32.
_FLUSHED = 0.5


@dataclass(frozen=True)
class Event:
    """Something seen at a port for the first time: at `clock`, at `module`'s `port`."""

    clock: int
    module: str
    port: str


def blame(found: Index, event: Event) -> Origin:
    """Return whose code made what the event shows."""
    if role(event.port) == "output" or not event.module:
        return Origin(event.module)
    return Origin(found.caller(event.module))


def bad_rows(found: Index, precision: str) -> list[RangeRow]:
    """Return the sites that hold non-finite values which float32 has not, by when they were first seen."""
    rows = [row for row in found.ranges.get(precision, {}).values() if row.first_bad and _worse(row, found)]
    return sorted(rows, key=lambda row: row.first_bad.clock if row.first_bad else 0)


def _worse(row: RangeRow, found: Index) -> bool:
    reference = found.reference(row.module, row.port)
    if reference is None:
        return True
    low, meant = row.range, reference.range
    return _grows(low.nan, meant.nan, low, meant) or _grows(low.nonfinite, meant.nonfinite, low, meant)


def _grows(bad: int, meant: int, low: Range, reference: Range) -> bool:
    """Return whether there are more bad values than in float32, in number and as a share.

    Both, since answers that part make `generate` run for another number of steps: the share of a mask in few steps is
    larger.
    """
    return bad > meant and bad * reference.count > _GROWTH * meant * low.count


def fresh_rows(found: Index, rows: Iterable[RangeRow]) -> list[RangeRow]:
    """Return the rows that made bad values: the first of all, then outputs of leaves whose inputs were all good."""
    ordered = list(rows)
    tainted = {row.module for row in ordered if role(row.port) == "input"}
    fresh: list[RangeRow] = []
    for row in ordered:
        made = role(row.port) == "output" and row.module not in tainted and _is_leaf(found, row.module)
        if (made or not fresh) and all(row.module != other.module for other in fresh):
            fresh.append(row)
    return fresh


def first_error(found: Index, precision: str, tolerance: float) -> ErrorRow | None:
    """Return the first site in time whose relative error is above the tolerance."""
    rows = sorted(found.errors.get(precision, {}).values(), key=lambda row: row.order)
    return next((row for row in rows if (row.relative_error or 0.0) > tolerance), None)


def largest_error(found: Index, precision: str) -> ErrorRow | None:
    """Return the output site with the largest relative error."""
    rows = [row for row in found.errors.get(precision, {}).values() if role(row.port) == "output"]
    return max(rows, key=lambda row: _finite(row.relative_error), default=None)


def first_flushed(found: Index, precision: str) -> RangeRow | None:
    """Return the first site in time where values that float32 has became zero."""
    rows = sorted(found.ranges.get(precision, {}).values(), key=lambda row: row.order)
    return next((row for row in rows if _zeroed(row, found.reference(row.module, row.port))), None)


def _zeroed(row: RangeRow, reference: RangeRow | None) -> bool:
    if reference is None or not row.range.count or not reference.range.count:
        return False
    gained = row.range.zero / row.range.count - reference.range.zero / reference.range.count
    return gained > _FLUSHED


def _is_leaf(found: Index, module: str) -> bool:
    row = found.modules.get(module)
    return row.leaf if row else True


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else -1.0 if value is None else math.inf
