"""The rows of a drained tape, as numpy arrays on the host, and how rows become ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from overflow_lab.capture.statistics import layout
from overflow_lab.capture.statistics.totals import Totals
from overflow_lab.ranges import Range

Integers = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


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

    @property
    def nonfinite(self) -> Integers:
        """Number of NaN and infinite elements of each tensor."""
        return self.nan + self.posinf + self.neginf

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
        totals = Totals()
        totals.add(self, row_ids, group_ids)
        groups = np.asarray(group_ids, dtype=np.int64).reshape(-1)
        return [totals.range(group) for group in range(int(groups.max()) + 1 if len(groups) else 0)]
