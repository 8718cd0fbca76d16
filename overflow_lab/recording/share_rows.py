"""The rows of a share: of a scan that several processes divide, each of which takes every so-many-th batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class BatchRow:
    """A batch that one precision has run, and whose rows are all written.

    `batch` counts all batches of the scan from 0, and `first` is the place of its first input among all inputs, of
    which it holds `inputs`; `ticks` is how far the clock of the precision went in it. By these a merge dates what was
    seen as one process would have, and knows what is missing.
    """

    kind: ClassVar[str] = "batch"
    precision: str
    batch: int
    first: int
    inputs: int
    ticks: int


@dataclass(frozen=True)
class ShareRow:
    """All that there was to divide, as a process knows at its end: the same for each, or the inputs were not the same.

    `digest` is a hash of the tensors of all batches, in their order.
    """

    kind: ClassVar[str] = "share"
    batches: int
    inputs: int
    digest: str
