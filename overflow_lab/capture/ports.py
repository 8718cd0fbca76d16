"""The ports of modules as they are seen during the runs of one precision, and what was measured at each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from overflow_lab.capture.statistics import Tape, Totals
from overflow_lab.recording import Moment, RangeRow

# Rows on the tape before they are merged, of 2 kB each.
MOST_ROWS = 8192


@dataclass
class _Port:
    module: str
    name: str
    dtype: str
    order: int
    number: int
    calls: int = 0
    first_bad: Moment | None = None


class Ports:
    """Collects, for one precision, which tensor stood at which port, and merges their statistics into one range a port.

    Rows of the tape are merged by `settle`: once a batch, with one transfer from the device, however many tensors were
    seen; long runs are settled in between, so that memory does not grow with the number of tokens.
    """

    def __init__(self, precision: str, tape: Tape) -> None:
        self.precision = precision
        self.tape = tape
        self.clock = 0
        self._ports: dict[tuple[str, str], _Port] = {}
        self._totals = Totals()
        self._notes: list[tuple[_Port, int, int, int]] = []
        self._now = ("forward", 0)
        self._drained = 0

    def begin(self, run: str, batch: int) -> None:
        """Say what runs from now on; moments are dated by it, so what was seen before is settled."""
        self.settle()
        self._now = (run, batch)

    def see(self, module: str, port: str, tensor: torch.Tensor, call: int, row: int | None = None) -> int:
        """Measure a tensor that stands at a port; return a number that the same unchanged tensor has until `settle`.

        `row` is the tensor's row on the tape, where it has one.
        """
        if row is None:
            row = self._measured(tensor)
        found = self._ports.get((module, port))
        if found is None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found = self._ports[module, port] = _Port(module, port, dtype, self.clock, len(self._ports))
        found.calls += 1
        self._notes.append((found, row, self.clock, call))
        self.clock += 1
        return self._drained + row

    def _measured(self, tensor: torch.Tensor) -> int:
        if len(self.tape) >= MOST_ROWS:
            self.settle()
        # A value that the model keeps elsewhere (positions on the CPU) is brought to the tape.
        return self.tape.measure(tensor if tensor.device == self.tape.device else tensor.to(self.tape.device))

    def settle(self) -> None:
        """Merge what was seen since the last time into the ports' ranges."""
        notes, self._notes = self._notes, []
        rows = self.tape.drain()
        self._drained += len(rows)
        if not notes:
            return
        groups = np.fromiter((port.number for port, *_ in notes), dtype=np.int64, count=len(notes))
        ids = np.fromiter((row for _, row, *_ in notes), dtype=np.int64, count=len(notes))
        self._totals.add(rows, ids, groups)
        bad = ((rows.nan + rows.posinf + rows.neginf) > 0)[ids]
        for at in np.flatnonzero(bad):
            port, _, clock, call = notes[at]
            if port.first_bad is None:
                port.first_bad = Moment(clock, *self._now, call)

    def rows(self) -> list[RangeRow]:
        """Return the rows of all ports in order of execution, and start the ranges anew."""
        made = [
            RangeRow(
                self.precision, p.module, p.name, p.order, p.dtype, p.calls, self._totals.range(p.number), p.first_bad
            )
            for p in self._ports.values()
            if p.calls
        ]
        for port in self._ports.values():
            port.calls, port.first_bad = 0, None
        self._totals = Totals()
        return made
