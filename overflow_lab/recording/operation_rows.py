"""The rows of shadow runs: calls looked at, their operations, what went wrong, and what makes the output's error."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class LookRow:
    """One call that was looked at from inside, by a shadow run; the rows that it gave bear its `name` in their `look`.

    `run` is "forward", "greedy" or "beam"; `off` says that its output, or answer, was known to differ from float32's.
    """

    kind: ClassVar[str] = "look"
    precision: str
    run: str
    batch: int
    off: bool = False

    @property
    def name(self) -> str:
        """What the rows of this look bear; one for each call of a precision."""
        return f"{self.run} {self.batch}"


@dataclass(frozen=True)
class OperationRow:
    """One operation of a module in the shadow run of a precision.

    `ordinal` counts the operations of that name in the module's code; casts of weights, buffers and inputs have
    negative ones and name the tensor in `detail`. `absmax` is of the shadow; `error` is the largest relative error
    against the shadow, `error_in` that of the operands then, and `local_error` the largest relative error against the
    same operation done in the shadow's dtype on the program's own operands (None where that was not measured);
    `flushed` counts zeros that the shadow has below the smallest normal.
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
    local_error: float | None = None
    flushed: int = 0
    constant_flushed: bool = False
    detail: str = ""
    look: str | None = None

    @property
    def site(self) -> tuple[object, ...]:
        """Rows of the same site, of several looks, are one for whoever reads them."""
        return (self.precision, self.module, self.op, self.ordinal)

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with the same key are of the same site and look, and add up."""
        return (*self.site, self.look)

    def __add__(self, other: OperationRow) -> OperationRow:
        """Return the row of both, as if recorded at once."""
        worst = max(self, other, key=lambda row: row.error)
        return dataclasses.replace(
            self,
            calls=self.calls + other.calls,
            elements=self.elements + other.elements,
            nonfinite=self.nonfinite + other.nonfinite,
            absmax=max(self.absmax, other.absmax),
            error=worst.error,
            error_in=worst.error_in,
            local_error=max((e for e in (self.local_error, other.local_error) if e is not None), default=None),
            flushed=self.flushed + other.flushed,
            constant_flushed=self.constant_flushed or other.constant_flushed,
        )


@dataclass(frozen=True)
class EventRow:
    """Something that went wrong at an operation, the first time that it did; counts are over all its calls.

    `event` is "bad" (non-finite out of good operands, where the shadow is finite), "fresh" (non-finite out of finite
    operands, which float32's own program does not make there), "unsupported" (no kernel), "decision" (`changed`
    integers or truths that the shadow decides otherwise), "constant" (another constant than in float32's program) or
    "drawn" (other random numbers than float32's program draws there, so that their outputs cannot be compared).
    `margin` is, of the decisions that changed, the largest margin by which the shadow makes the other one, in units of
    the root mean square of its scores, or of the values compared. `value` is the largest shadow magnitude where it
    went bad. `call` counts the calls of the model itself, in `generate` its steps; -1 is before the first (an encoder).
    `row` of `rows` is the first element's place: with `beams` above 0 its input, or its beam among all inputs' beams
    where there is more than one a beam search; otherwise an index along the first dimension that is no input's.
    `negative` says whether all of it was -inf. `zero_operand` says that an operand was zero whose shadow is not,
    `cause` where that zero came from; `harmed` and `absorbed` are the first consumers that gave a wrong, or the right,
    finite value; each is (module, operation).
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
    changed: int = 0
    row: int = 0
    rows: int = 0
    beams: int = 0
    margin: float | None = None
    value: float | None = None
    negative: bool = False
    zero_operand: bool = False
    cause: tuple[str, ...] | None = None
    constant_cause: bool = False
    harmed: tuple[str, ...] | None = None
    absorbed: tuple[str, ...] | None = None
    reaches_output: bool = False
    source: str = ""
    detail: str = ""
    look: str | None = None

    @property
    def site(self) -> tuple[object, ...]:
        """Rows of the same event, in several looks, are one for whoever reads them."""
        return (self.precision, self.event, self.module, self.op, self.ordinal)

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with the same key are of the same event and look, and add up."""
        return (*self.site, self.look)

    @property
    def explains(self) -> bool:
        """Whether it is a fault by itself: a kernel that is missing, or a bad value that did harm."""
        return self.event == "unsupported" or (self.event == "bad" and bool(self.harmed or self.reaches_output))

    def __add__(self, other: EventRow) -> EventRow:
        """Return the row of both; the earlier one says when it was."""
        return dataclasses.replace(
            self,
            inf=self.inf + other.inf,
            nan=self.nan + other.nan,
            elements=self.elements + other.elements,
            changed=self.changed + other.changed,
            value=max((v for v in (self.value, other.value) if v is not None), default=None),
            margin=max((m for m in (self.margin, other.margin) if m is not None), default=None),
            harmed=self.harmed or other.harmed,
            absorbed=self.absorbed or other.absorbed,
            reaches_output=self.reaches_output or other.reaches_output,
        )


@dataclass(frozen=True)
class NoiseRow:
    """How far the output moves, relatively, when every weight is rounded to the precision's format at random.

    `spread_error` is the same relative to the output's spread around its mean, where its elements are compared.
    """

    kind: ClassVar[str] = "noise"
    precision: str
    relative_error: float
    spread_error: float = 0.0


@dataclass(frozen=True)
class AttributionRow:
    """Which operation's rounding makes most of the output's error, by replaying in float32 all that comes after it.

    `metric` is "relative", "centered" (relative to the output's spread around its mean) or "decisions" (the number of
    decisions in the program that change); `total` the error that the precision makes by it, `share` the part that
    this operation adds to what the ones before it make. `amplifier` is the first later addition in which nearly equal
    terms leave little else than that error, as (module, operation). `noise` is, of decisions, the number that change
    in float32 when every weight is rounded to the precision's format at random; None where that was not measured.
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
    amplifier: tuple[str, ...] | None = None
    detail: str = ""
    noise: int | None = None
    look: str | None = None
