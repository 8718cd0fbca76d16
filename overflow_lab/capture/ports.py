"""The ports of modules as they are seen during the runs of one precision, and what was measured at each."""

from __future__ import annotations

from array import array
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
        self._ports: list[_Port] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._totals = Totals()
        # Three integers for each time that a tensor was seen: the port's number, the row, the call of the module.
        self._notes = array("q")
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
        number = self._numbers.get((module, port))
        if number is None:
            number = self._numbers[module, port] = len(self._ports)
            self._ports.append(_Port(module, port, str(tensor.dtype).removeprefix("torch."), self.clock))
        self._notes.extend((number, row, call))
        self.clock += 1
        return self._drained + row

    def _measured(self, tensor: torch.Tensor) -> int:
        if len(self.tape) >= MOST_ROWS:
            self.settle()
        # A value that the model keeps elsewhere (positions on the CPU) is brought to the tape.
        return self.tape.measure(tensor if tensor.device == self.tape.device else tensor.to(self.tape.device))

    def settle(self) -> None:
        """Merge what was seen since the last time into the ports' ranges."""
        notes, self._notes = np.frombuffer(self._notes, dtype=np.int64).reshape(-1, 3), array("q")
        rows = self.tape.drain()
        self._drained += len(rows)
        groups, ids, calls = notes.T
        self._totals.add(rows, ids, groups)
        for port, seen in zip(self._ports, np.bincount(groups).tolist(), strict=False):
            port.calls += seen
        began = self.clock - len(notes)
        for at in np.flatnonzero(rows.nonfinite[ids]).tolist():
            port = self._ports[groups[at]]
            if port.first_bad is None:
                port.first_bad = Moment(began + at, *self._now, int(calls[at]))

    def rows(self) -> list[RangeRow]:
        """Return the rows of all ports in order of execution, and start the ranges anew."""
        made = [
            RangeRow(self.precision, p.module, p.name, p.order, p.dtype, p.calls, found, p.first_bad)
            for p, found in zip(self._ports, map(self._totals.range, range(len(self._ports))), strict=True)
            if p.calls
        ]
        for port in self._ports:
            port.calls, port.first_bad = 0, None
        self._totals = Totals()
        return made
