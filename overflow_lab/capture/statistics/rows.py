"""The rows of a drained tape, as numpy arrays on the host, and how rows become ranges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from overflow_lab.capture.statistics import layout
from overflow_lab.errors import UsageError
from overflow_lab.ranges import LOWEST_EXPONENT, Range

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# Histograms that are gathered at once while merging, so that memory stays near 32 MB.
_GATHERED = 2**14


@dataclass(frozen=True)
class Rows:
    """Statistics of n tensors: arrays of shape [n], and `exponents` of shape [n, 256].

    `min`, `max` and `smallest` are +inf, -inf and +inf where a tensor has no such value. Bin b of `exponents` counts
    magnitudes in [2**(b - 127), 2**(b - 126)); bin 0 those below 2**-126; bin 254 also what float32 cannot hold; bin
    255 stays 0. `sum` and `sum_of_squares` are of the finite values, in float64.
    """

    count: Integers
    nan: Integers
    posinf: Integers
    neginf: Integers
    zero: Integers
    min: Floats
    max: Floats
    smallest: Floats
    sum: Floats
    sum_of_squares: Floats
    exponents: Integers

    @classmethod
    def from_words(cls, words: Integers, *, wide: bool = True) -> Rows:
        """Take apart `words`, int64 [n, layout.WORDS]; without `wide` the floats are float32 bits, not float64."""
        bits = words[:, layout.FLOATS]
        floats = bits.view(np.float64) if wide else bits.astype(np.int32).view(np.float32).astype(np.float64)
        count, nan, posinf, neginf, zero = (words[:, word].copy() for word in range(layout.COUNT, layout.ZERO + 1))
        least, most, smallest, total, squares = (column.copy() for column in floats.T)
        bins = words[:, layout.EXPONENTS :]
        return cls(count, nan, posinf, neginf, zero, least, most, smallest, total, squares, bins)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.count)

    def row(self, index: int) -> Range:
        """Return row `index` as a range."""
        return self.merge(np.array([index]), np.array([0]))[0]

    def merge(self, row_ids: npt.ArrayLike, group_ids: npt.ArrayLike) -> list[Range]:
        """Return one range for each group, 0 to the largest of `group_ids`: that of all its rows together.

        `row_ids` and `group_ids` are integers of the same shape [k]: row `row_ids[i]` belongs to group `group_ids[i]`.
        A row may be in many groups, and in one group many times; a group without rows gets an empty range.

        Raises:
            UsageError: the two differ in length, or an id is out of range.
        """
        rows, groups = (np.asarray(ids, dtype=np.int64).reshape(-1) for ids in (row_ids, group_ids))
        if len(rows) != len(groups):
            raise UsageError(
                f"cannot merge: {len(rows)} row ids for {len(groups)} group ids; give one group for each row"
            )
        if not len(rows):
            return []
        if rows.min() < 0 or rows.max() >= len(self) or groups.min() < 0:
            raise UsageError(f"cannot merge: row ids must be from 0 to {len(self) - 1} and group ids not negative")
        order = np.argsort(groups, kind="stable")
        present, starts = np.unique(groups[order], return_index=True)
        merged: list[Range] = [Range()] * int(present[-1] + 1)
        for group, one in zip(present.tolist(), self._reduced(rows[order], starts), strict=True):
            merged[group] = one
        return merged

    def _reduced(self, rows: Integers, starts: Integers) -> list[Range]:
        """Return a range for each run of `rows` that begins at one of `starts`."""
        with np.errstate(over="ignore"):  # float64 values near its limit have no finite sum of squares
            columns: dict[str, list[Any]] = {
                name: reduce.reduceat(getattr(self, name)[rows], starts).tolist() for name, reduce in _REDUCTIONS
            }
        histograms = _histograms(self.exponents, rows, starts)
        values = zip(*columns.values(), histograms, strict=True)
        return [_range(dict(zip((*columns, "exponents"), one, strict=True))) for one in values]


_REDUCTIONS = (
    *((name, np.add) for name in ("count", "nan", "posinf", "neginf", "zero", "sum", "sum_of_squares")),
    ("min", np.minimum),
    ("max", np.maximum),
    ("smallest", np.minimum),
)


def _histograms(exponents: Integers, rows: Integers, starts: Integers) -> list[Integers]:
    """Add up the histograms of each run of rows, a bounded number of runs at a time."""
    ends = np.append(starts[1:], len(rows))
    if len(rows) <= _GATHERED:
        return list(np.add.reduceat(exponents[rows], starts, axis=0))
    return [_total(exponents, rows[start:end]) for start, end in zip(starts, ends, strict=True)]


def _total(exponents: Integers, rows: Integers) -> Integers:
    total = np.zeros(layout.BINS, dtype=np.int64)
    for start in range(0, len(rows), _GATHERED):
        total += exponents[rows[start : start + _GATHERED]].sum(axis=0)
    return total


def _range(values: dict[str, Any]) -> Range:
    """Make a range of one row's numbers: sentinels become None, empty bins go."""
    bins = values.pop("exponents")
    filled = np.flatnonzero(bins)
    for name, absent in (("min", np.inf), ("max", -np.inf), ("smallest", np.inf)):
        values[name] = None if values[name] == absent else values[name]
    exponents = dict(zip((filled + LOWEST_EXPONENT).tolist(), bins[filled].tolist(), strict=True))
    return Range(**values, exponents=exponents)
