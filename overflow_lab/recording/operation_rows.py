"""The rows of the shadow run: operations, what went wrong at them, and which of them makes the output's error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OperationRow:
    """One operation of a module in the shadow run of a precision.

    `ordinal` counts the operations of that name in the module's code; casts of weights, buffers and inputs have negative
    ones and name the tensor in `detail`. `absmax` is of the shadow; `error` is the largest relative error against the
    shadow and `error_in` that of the operands then; `flushed` counts zeros that the shadow has below the smallest normal.
    """

    kind: ClassVar[str] = "operation"
    precision: str
    module: str
    op: str
    ordinal: int
    order: int
    dtype: str
    calls: int
    elements: int
    nonfinite: int = 0
    absmax: float = 0.0
    error: float = 0.0
    error_in: float = 0.0
    flushed: int = 0
    constant_flushed: bool = False
    detail: str = ""


@dataclass(frozen=True)
class EventRow:
    """Something that went wrong at an operation, the first time that it did; counts are over all its calls.

    `event` is "bad" (non-finite out of good operands, where the shadow is finite), "fresh" (non-finite out of finite operands,
    which float32's own program does not make there), "unsupported" (no kernel), "flip" (a decision that the shadow takes
    otherwise, at the operation that made the tie), "tie" (the same in the output), "constant" (another constant than in
    float32's program). `value` is the largest shadow magnitude where it went bad. `zero_operand` says that an operand was
    zero whose shadow is not, `cause` where that zero came from; `harmed` and `absorbed` are the first consumers that gave a
    wrong, or the right, finite value; each is (module, operation).
    """

    kind: ClassVar[str] = "event"
    precision: str
    event: str
    module: str
    op: str
    ordinal: int
    clock: int
    run: str
    batch: int
    call: int
    dtype: str = ""
    inf: int = 0
    nan: int = 0
    elements: int = 0
    value: float | None = None
    zero_operand: bool = False
    cause: tuple[str, ...] | None = None
    constant_cause: bool = False
    harmed: tuple[str, ...] | None = None
    absorbed: tuple[str, ...] | None = None
    reaches_output: bool = False
    source: str = ""
    detail: str = ""


@dataclass(frozen=True)
class AttributionRow:
    """Which operation's rounding makes most of the output's error, by replaying in float32 all that comes after it.

    `metric` is "relative" or "centered" (relative to the output's spread around its mean); `total` the error that the
    precision makes by it, `share` the part that this operation adds to what the ones before it make.
    """

    kind: ClassVar[str] = "attribution"
    precision: str
    metric: str
    total: float
    module: str
    op: str
    ordinal: int
    share: float
    runs: int
    detail: str = ""
