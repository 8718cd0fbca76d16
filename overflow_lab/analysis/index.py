"""The rows of a recording by what analysis asks for, looked up once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from overflow_lab.formats import FORMATS, FloatFormat
from overflow_lab.recording import (
    ErrorRow,
    EventRow,
    FailureRow,
    ModuleRow,
    OperationRow,
    PrecisionRow,
    RangeRow,
    Recording,
    RunRow,
    TensorRow,
)

REFERENCE = "float32"


@dataclass(frozen=True)
class Index:
    """A recording with its rows by precision and site."""

    recording: Recording
    modules: dict[str, ModuleRow]
    precisions: dict[str, PrecisionRow]
    ranges: dict[str, dict[tuple[str, str], RangeRow]]
    errors: dict[str, dict[tuple[str, str], ErrorRow]]
    ran: frozenset[str]
    operations: dict[str, dict[tuple[str, str, int], OperationRow]]
    events: dict[str, list[EventRow]]
    tensors: dict[str, TensorRow]

    def format_of(self, precision: str) -> FloatFormat:
        """Return the format that a precision rounds to."""
        row = self.precisions.get(precision)
        return FORMATS[row.dtype if row else precision.partition("-")[0]]

    def was_run(self, precision: str) -> bool:
        """Return whether a precision finished a batch, or failed in one: a scan may end before."""
        runs = any(row.batches for row in self.recording.of(RunRow) if row.precision == precision)
        return runs or any(row.precision == precision for row in self.recording.of(FailureRow))

    def reference(self, module: str, port: str) -> RangeRow | None:
        """Return float32's range at a site."""
        return self.ranges.get(REFERENCE, {}).get((module, port))

    def outputs(self, precision: str) -> list[RangeRow]:
        """Return the ranges of the model's own outputs."""
        rows = self.ranges.get(precision, {}).values()
        return [row for row in rows if not row.module and role(row.port) == "output"]

    def calls(self, precision: str, module: str, op: str) -> int:
        """Return how often the shadow run saw a module's code do an operation of that name."""
        sites = self.operations.get(precision, {}).items()
        return sum(row.calls for (path, name, _), row in sites if (path, name) == (module, op))

    def class_name(self, module: str) -> str:
        """Return a module's class, "" where the recording does not have it."""
        row = self.modules.get(module)
        return row.class_name if row else ""

    def clearest(self, precision: str) -> EventRow | None:
        """Return the decision that changed though the shadow prefers its own most; the first where no margin is known.

        None where no decision inside the model changed.
        """
        changed = [event for event in self.events.get(precision, ()) if event.event == "decision"]
        return max(changed, key=lambda event: -1.0 if event.margin is None else event.margin, default=None)

    def caller(self, module: str) -> str:
        """Return the nearest module above that was called itself (a ModuleList is not), otherwise the root."""
        while module:
            module = module.rpartition(".")[0]
            if module in self.ran:
                return module
        return ""


def index(recording: Recording) -> Index:
    """Return the lookups of a recording."""
    ranges: dict[str, dict[tuple[str, str], RangeRow]] = {}
    errors: dict[str, dict[tuple[str, str], ErrorRow]] = {}
    for row in recording.of(RangeRow):
        ranges.setdefault(row.precision, {})[row.module, row.port] = row
    for error in recording.of(ErrorRow):
        errors.setdefault(error.precision, {})[error.module, error.port] = error
    operations: dict[str, dict[tuple[str, str, int], OperationRow]] = {}
    for operation in recording.of(OperationRow):
        operations.setdefault(operation.precision, {})[operation.module, operation.op, operation.ordinal] = operation
    events: dict[str, list[EventRow]] = {}
    for event in sorted(recording.of(EventRow), key=lambda event: (event.batch, event.clock)):
        events.setdefault(event.precision, []).append(event)
    return Index(
        recording,
        {row.path: row for row in recording.of(ModuleRow)},
        {row.precision: row for row in recording.of(PrecisionRow)},
        ranges,
        errors,
        frozenset(module for rows in ranges.values() for module, _ in rows),
        operations,
        events,
        {row.name: row for row in recording.of(TensorRow)},
    )


def bits(relative_error: float | None) -> float | None:
    """Return the effective bits that a relative error leaves, -log2 of it; None where nothing was compared.

    An exact value has no error to measure and gives +inf.
    """
    if relative_error is None or math.isnan(relative_error):
        return None
    if relative_error == 0.0:
        return math.inf
    return -math.log2(relative_error) if math.isfinite(relative_error) else -math.inf


def role(port: str) -> str:
    """Return "input" or "output" of a port's name."""
    return "input" if port.startswith("input") else "output"
