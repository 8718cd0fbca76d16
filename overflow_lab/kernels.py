"""Which kernels this torch lacks for a model: a view on a scan, whose shadow run does what is refused in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.recording import BlindSpotRow, EventRow, FailureRow, OperationRow, Recording
from overflow_lab.scan import scan


@dataclass(frozen=True)
class MissingKernel:
    """An operation that torch refuses: where, for which dtype, with what message, called from which line of code.

    `op` is None where an exception ended the run and it is not known which operation raised it.
    """

    module: str
    op: str | None
    dtype: str
    message: str
    source: str = ""


@dataclass(frozen=True)
class Kernels:
    """What was found in one precision: the operations that are missing, and how many ran in its dtype (casts apart)."""

    precision: str
    dtype: str
    missing: tuple[MissingKernel, ...]
    operations: int


def missing_kernels(
    model: Any, inputs: Any = None, *, precision: str = "bfloat16", **options: Any
) -> list[MissingKernel]:
    """Return the operations of a model that this torch cannot do in a precision on this device, in order.

    The model is run once in float32 and once in the precision; an operation that is refused is done in float32, and
    the run goes on to the next. Arguments are those of `scan` (`device="cuda"`, `texts=...`); nothing is generated. An
    empty list means that nothing is missing on these inputs. Raises UsageError for what cannot be run as asked,
    ScanInterrupted where the model fails in float32, OverflowLabError where the run could not be followed to its end.
    """
    return list(kernels(model, inputs, precision=precision, **options).missing)


def kernels(model: Any, inputs: Any = None, *, precision: str, **options: Any) -> Kernels:
    """Return what `missing_kernels` does, with the number of operations that ran."""
    from overflow_lab.capture.precisions import parse_precision

    wanted = parse_precision(precision)
    if wanted.cast == "none":
        raise UsageError("float32 is what the others are compared with; choose float16 or bfloat16.")
    found = scan(
        model,
        inputs,
        precisions=(wanted.name,),
        **{**options, "level": "operation", "generate": False, "kernels": "native"},
    )
    return of_recording(found.recording, wanted.name, wanted.dtype)


def of_recording(recording: Recording, precision: str, dtype: str) -> Kernels:
    """Return the missing kernels that a recording holds. Raises OverflowLabError where its shadow run ended early."""
    sites = [row for row in recording.of(OperationRow) if row.precision == precision]
    events = [row for row in recording.of(EventRow) if row.precision == precision and row.event == "unsupported"]
    failed = [row for row in recording.of(FailureRow) if row.precision == precision]
    missing = [MissingKernel(row.module, row.op, row.dtype or dtype, row.detail, row.source) for row in events]
    if not sites:
        why = [row.reason for row in recording.of(BlindSpotRow) if row.precision == precision]
        reasons = [*why, *(f"{row.error}, in {row.module or 'the model itself'}" for row in failed)]
        raise OverflowLabError(f"the run in {precision} could not be followed: {'; '.join(reasons) or 'nothing ran'}.")
    if failed and not missing:
        missing = [MissingKernel(row.module, None, dtype, row.error) for row in {r.error: r for r in failed}.values()]
    return Kernels(precision, dtype, tuple(missing), sum(row.dtype == dtype and row.ordinal >= 0 for row in sites))
