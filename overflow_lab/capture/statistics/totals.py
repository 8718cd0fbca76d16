"""Rows of many drains, added up by group: what a port has seen over all its calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from overflow_lab.capture.statistics import layout
from overflow_lab.errors import UsageError
from overflow_lab.ranges import LOWEST_EXPONENT, Range

if TYPE_CHECKING:
    from overflow_lab.capture.statistics.rows import Rows

Integers = npt.NDArray[np.int64]

# Histograms that are gathered at once while adding up, so that memory stays near 32 MB.
_GATHERED = 2**14
# How a column of two rows becomes one, its type, and its value where nothing was seen.
_COLUMNS: tuple[tuple[str, Any, type, float], ...] = (
    *((name, np.add, np.int64, 0) for name in ("count", "nan", "posinf", "neginf", "zero")),
    *((name, np.add, np.float64, 0.0) for name in ("sum", "sum_of_squares")),
    ("min", np.minimum, np.float64, np.inf),
    ("max", np.maximum, np.float64, -np.inf),
    ("smallest", np.minimum, np.float64, np.inf),
)


class Totals:
    """One sum of rows for each group, by numbers from 0 on. Ranges are made only when they are asked for."""

    def __init__(self) -> None:
        self._columns: dict[str, npt.NDArray[Any]] = {name: np.empty(0, kind) for name, _, kind, _ in _COLUMNS}
        self._bins: Integers = np.empty((0, layout.BINS), dtype=np.int64)

    def __len__(self) -> int:
        """Return the number of groups for which there is room."""
        return len(self._bins)

    def add(self, rows: Rows, row_ids: npt.ArrayLike, group_ids: npt.ArrayLike) -> None:
        """Add row `row_ids[i]` to group `group_ids[i]`, for integers of the same shape [k].

        A row may be in many groups, and in one group many times.

        Raises:
            UsageError: the two differ in length, or an id is out of range.
        """
        ids, groups = _checked(rows, row_ids, group_ids)
        if not len(ids):
            return
        self._grow(int(groups.max()) + 1)
        order = np.argsort(groups, kind="stable")
        ids = ids[order]
        present, starts = np.unique(groups[order], return_index=True)
        with np.errstate(over="ignore"):  # float64 values near its limit have no finite sum of squares
            for name, reduce, _, _ in _COLUMNS:
                column, new = self._columns[name], reduce.reduceat(getattr(rows, name)[ids], starts)
                column[present] = reduce(column[present], new)
        self._add_histograms(rows.exponents, ids, present, starts)

    def range(self, group: int) -> Range:
        """Return what a group has seen; an empty range for one without rows."""
        if group >= len(self):
            return Range()
        values: dict[str, Any] = {name: self._columns[name][group].item() for name, *_ in _COLUMNS}
        for name, absent in (("min", np.inf), ("max", -np.inf), ("smallest", np.inf)):
            values[name] = None if values[name] == absent else values[name]
        bins = self._bins[group]
        filled = np.flatnonzero(bins)
        exponents = dict(zip((filled + LOWEST_EXPONENT).tolist(), bins[filled].tolist(), strict=True))
        return Range(**values, exponents=exponents)

    def _grow(self, groups: int) -> None:
        """Make room, twice as much as before, so that many small additions copy little."""
        if groups <= len(self):
            return
        more = max(groups, 2 * len(self), 64) - len(self)
        for name, _, kind, nothing in _COLUMNS:
            self._columns[name] = np.concatenate([self._columns[name], np.full(more, nothing, kind)])
        self._bins = np.concatenate([self._bins, np.zeros((more, layout.BINS), dtype=np.int64)])

    def _add_histograms(self, exponents: Integers, ids: Integers, present: Integers, starts: Integers) -> None:
        """Add the histograms of each run of rows; only bins that a row has, since most are empty."""
        used = np.flatnonzero(exponents.any(axis=0))
        if not len(used):
            return
        first, last = int(used[0]), int(used[-1]) + 1
        if len(ids) <= _GATHERED:
            self._bins[present, first:last] += np.add.reduceat(exponents[ids, first:last], starts, axis=0)
            return
        ends = np.append(starts[1:], len(ids))
        for group, start, end in zip(present, starts, ends, strict=True):
            for at in range(start, end, _GATHERED):
                part = ids[at : min(at + _GATHERED, end)]
                self._bins[group, first:last] += exponents[part, first:last].sum(axis=0)


def _checked(rows: Rows, row_ids: npt.ArrayLike, group_ids: npt.ArrayLike) -> tuple[Integers, Integers]:
    ids, groups = (np.asarray(given, dtype=np.int64).reshape(-1) for given in (row_ids, group_ids))
    if len(ids) != len(groups):
        raise UsageError(f"cannot merge: {len(ids)} row ids for {len(groups)} group ids; give one group for each row")
    if len(ids) and (ids.min() < 0 or ids.max() >= len(rows) or groups.min() < 0):
        raise UsageError(f"cannot merge: row ids must be from 0 to {len(rows) - 1} and group ids not negative")
    return ids, groups
