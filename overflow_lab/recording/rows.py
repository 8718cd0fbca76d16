"""The rows of a recording: frozen values that capture writes and analysis reads. See docs/recording.md for the file."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from overflow_lab.ranges import Range
from overflow_lab.recording.answer_rows import AnswerCountRow, AnswerRow
from overflow_lab.recording.operation_rows import AttributionRow, EventRow, LookRow, NoiseRow, OperationRow
from overflow_lab.recording.proof_rows import ProofRow
from overflow_lab.recording.share_rows import BatchRow, ShareRow
from overflow_lab.recording.step_rows import StepRow


@dataclass(frozen=True)
class Moment:
    """When something happened first: `clock` counts the values seen in one precision's runs, in order of execution.

    `run` is "forward", "greedy" or "beam"; `batch` counts from 0; `call` counts the calls of the module in that batch
    from 0, which in `generate` with a cache is the step.
    """

    clock: int
    run: str
    batch: int
    call: int


@dataclass(frozen=True)
class ModuleRow:
    """One module of the model as found by `named_modules`; `aliases` are the further names of a shared module."""

    kind: ClassVar[str] = "module"
    path: str
    class_name: str
    index: int
    leaf: bool = True
    parameters: int = 0
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class TensorRow:
    """The range of a parameter, buffer or input before any cast; `role` is "parameter", "buffer" or "input"."""

    kind: ClassVar[str] = "tensor"
    name: str
    module: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    range: Range


@dataclass(frozen=True)
class CastRow:
    """What the cast to a precision did to a parameter, buffer or input that it changed for the worse.

    `to_infinity`, `to_zero` and `to_subnormal` count elements that were finite, nonzero and normal before; `absmax`
    is the largest finite magnitude before the cast, `energy_lost` the share of the sum of squares that became zero,
    `rounding` the relative error that rounding makes of what stays finite, where a sample of it was looked at.
    """

    kind: ClassVar[str] = "cast"
    precision: str
    name: str
    module: str
    role: str
    from_dtype: str
    to_dtype: str
    elements: int
    to_infinity: int = 0
    to_zero: int = 0
    to_subnormal: int = 0
    absmax: float = 0.0
    energy_lost: float = 0.0
    rounding: float | None = None


@dataclass(frozen=True)
class PrecisionRow:
    """How a precision was executed: the dtype asked for, the way of the cast, and the modules that it left in float32.

    `cast` is "none", "loader" (`from_pretrained(dtype=...)`), "to" (`.to(dtype)`) or "autocast".
    """

    kind: ClassVar[str] = "precision"
    precision: str
    dtype: str
    cast: str
    kept: tuple[str, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class RunRow:
    """The runs of one kind in one precision: how many batches, inputs and tokens it finished.

    `seconds` is wall-clock time, capture included, of a run that failed too; `ticks` how far the clock of the precision
    went in it.
    """

    kind: ClassVar[str] = "run"
    precision: str
    run: str
    batches: int
    inputs: int
    tokens: int
    seconds: float = 0.0
    ticks: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """Rows with the same key are of the same runs and add up."""
        return (self.precision, self.run)

    def __add__(self, other: RunRow) -> RunRow:
        """Return the row of both, as if recorded at once."""
        return dataclasses.replace(self, **_sums(self, other, "batches", "inputs", "tokens", "seconds", "ticks"))


@dataclass(frozen=True)
class RangeRow:
    """The range at a module's port in one precision: `port` is like "output", "output['logits']" or "input[0]".

    `order` is the clock at which the port was first seen; `calls` how often; `first_bad` the first moment with NaN or
    inf.
    """

    kind: ClassVar[str] = "range"
    precision: str
    module: str
    port: str
    order: int
    dtype: str
    calls: int
    range: Range
    first_bad: Moment | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Rows with the same key are of the same site and add up."""
        return (self.precision, self.module, self.port)

    def __add__(self, other: RangeRow) -> RangeRow:
        """Return the row of both, as if recorded at once."""
        moments = [m for m in (self.first_bad, other.first_bad) if m is not None]
        return dataclasses.replace(
            self,
            order=min(self.order, other.order),
            calls=self.calls + other.calls,
            range=self.range + other.range,
            first_bad=min(moments, key=lambda m: m.clock) if moments else None,
        )


@dataclass(frozen=True)
class ErrorRow:
    """The difference from the float32 run at a module's port, over the elements compared (a sample of large tensors).

    `error_squares` sums (low - reference)^2 and `reference_squares` sums reference^2 over elements finite in both;
    `nonfinite` counts elements that are finite in float32 only.
    """

    kind: ClassVar[str] = "error"
    precision: str
    module: str
    port: str
    order: int
    compared: int
    nonfinite: int = 0
    error_squares: float = 0.0
    reference_squares: float = 0.0

    @property
    def key(self) -> tuple[str, str, str]:
        """Rows with the same key are of the same site and add up."""
        return (self.precision, self.module, self.port)

    @property
    def relative_error(self) -> float | None:
        """Root of error_squares / reference_squares; None where nothing finite was compared."""
        return _relative(self.error_squares, self.reference_squares) if self.compared > self.nonfinite else None

    def __add__(self, other: ErrorRow) -> ErrorRow:
        """Return the row of both, as if recorded at once."""
        sums = _sums(self, other, "compared", "nonfinite", "error_squares", "reference_squares")
        return dataclasses.replace(self, order=min(self.order, other.order), **sums)


@dataclass(frozen=True)
class OutputRow:
    """One tensor of the model's own output in one precision against float32's, over all batches of the plain forward.

    `port` is like "output['logits']". `decisions` counts what float32 decides there (the argmax of each row of
    logits, each integer of an integer output), `changed` those that differ; `kl_sum` adds up the Kullback-Leibler
    divergences (nats) of the softmaxed rows over the `kl_rows` rows that are finite in both. `margins` maps
    floor(log2(m)) to the number of changed decisions where float32 prefers its own choice by m times the root mean
    square of its scores; an exact tie is -64. Of `ranked` rows, `evened` have another best element than in float32
    for one reason only: the low precision gives the two of them the very same value. float32's own rows are of a
    `look`: its output against its own shadow.
    """

    kind: ClassVar[str] = "output"
    precision: str
    port: str
    elements: int
    nonfinite: int = 0
    error_squares: float = 0.0
    reference_squares: float = 0.0
    decisions: int = 0
    changed: int = 0
    kl_sum: float = 0.0
    kl_rows: int = 0
    margins: Mapping[int, int] = field(default_factory=dict)
    ranked: int = 0
    evened: int = 0
    look: str | None = None

    @property
    def site(self) -> tuple[str, str]:
        """Rows of the same output are one for whoever reads them."""
        return (self.precision, self.port)

    @property
    def key(self) -> tuple[object, ...]:
        """Rows with the same key are of the same output and look, and add up."""
        return (*self.site, self.look)

    @property
    def relative_error(self) -> float | None:
        """Root of error_squares / reference_squares; None where nothing finite was compared."""
        return _relative(self.error_squares, self.reference_squares) if self.elements > self.nonfinite else None

    def __add__(self, other: OutputRow) -> OutputRow:
        """Return the row of both, as if recorded at once."""
        sums = _sums(self, other, *(f.name for f in dataclasses.fields(self)[2:] if f.name not in ("margins", "look")))
        return dataclasses.replace(self, margins=Counter(self.margins) + Counter(other.margins), **sums)


@dataclass(frozen=True)
class FailureRow:
    """An exception that ended a run: where (innermost module running), its type and its message on one line."""

    kind: ClassVar[str] = "failure"
    precision: str
    run: str
    batch: int
    module: str
    error: str
    unsupported: bool = False


@dataclass(frozen=True)
class BlindSpotRow:
    """What the scan could not see: a module never called, a value not understood, a comparison not possible."""

    kind: ClassVar[str] = "blind_spot"
    module: str
    reason: str
    precision: str | None = None
    look: str | None = None


Row = (
    ModuleRow
    | TensorRow
    | CastRow
    | PrecisionRow
    | RunRow
    | RangeRow
    | ErrorRow
    | OutputRow
    | AnswerRow
    | AnswerCountRow
    | FailureRow
    | LookRow
    | OperationRow
    | EventRow
    | AttributionRow
    | NoiseRow
    | StepRow
    | ProofRow
    | BatchRow
    | ShareRow
    | BlindSpotRow
)
ROW_TYPES: Mapping[str, type[Any]] = {cls.kind: cls for cls in get_args(Row)}


@dataclass(frozen=True)
class Header:
    """The first line of a recording: what was scanned, by what, where. `subject` holds facts about model and inputs."""

    format: int
    overflow_lab: str
    created: str
    subject: Mapping[str, Any]
    precisions: tuple[str, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Footer:
    """The last line of a recording: `status` is "complete", "interrupted" or "failed", `error` why it ended early."""

    status: str
    error: str | None = None


def _sums(a: Any, b: Any, *names: str) -> dict[str, Any]:
    """Return the sums of the fields of these names."""
    return {name: getattr(a, name) + getattr(b, name) for name in names}


def _relative(error_squares: float, reference_squares: float) -> float:
    """Return the relative error of two root mean squares; +inf where the reference is all zero and the error is not."""
    if reference_squares > 0.0:
        return math.sqrt(error_squares / reference_squares)
    return 0.0 if error_squares == 0.0 else math.inf
