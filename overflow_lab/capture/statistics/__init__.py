"""Statistics of tensors: one pass over each, a row of numbers on its own device, one transfer for all of them.

    tape = Tape(torch.device("cpu"))
    row = tape.measure(tensor)          # in a hook: no result is waited for
    rows = tape.drain()                 # after the run: one transfer
    rows.row(row)                       # a Range
    rows.merge(row_ids, group_ids)      # one Range for each group of rows
    totals.add(rows, row_ids, group_ids)  # the same over many drains; totals.range(group)

`eager` is the reference and runs everywhere, `llvm` is the fast kernel for CPUs and `triton_kernel` that for CUDA; all
fill rows as `layout` says.
"""

from __future__ import annotations

from overflow_lab.capture.statistics.rows import Rows
from overflow_lab.capture.statistics.tape import Tape
from overflow_lab.capture.statistics.totals import Totals

__all__ = ["Rows", "Tape", "Totals"]
