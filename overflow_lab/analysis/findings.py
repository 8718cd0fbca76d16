"""The faults of one precision, each as a finding with its numbers; the first is the one that the verdict names."""

from __future__ import annotations

import dataclasses

from overflow_lab.analysis import origins
from overflow_lab.analysis.effects import is_imprecise
from overflow_lab.analysis.index import REFERENCE, Index, role
from overflow_lab.analysis.numbers import against, module_name, number, percent
from overflow_lab.analysis.operations import nan_anyway, operation_findings
from overflow_lab.analysis.results import Effect, Finding, Origin
from overflow_lab.recording import CastRow, ErrorRow, FailureRow, RangeRow
from overflow_lab.tolerances import tolerance

# A cast that turns this share of a tensor's energy into zeros is a finding by itself.
_ENERGY = 0.01
_MATMULS = ("Linear", "Conv", "Bilinear", "Embedding")
_CAST = "aten._to_copy"


def findings(found: Index, precision: str, effect: Effect, severity: str) -> list[Finding]:
    """Return the findings of a precision, the earliest cause first: from inside the modules where that was recorded."""
    if precision in found.operations:
        made = operation_findings(found, precision, effect, severity)
        if not made and precision == REFERENCE and (anyway := nan_anyway(found)):
            return [anyway]
        made = made or _failures(found, precision)
        if not made and not _drawn(found, precision) and is_imprecise(effect, found.format_of(precision)):
            made = [_flushed(found, precision, severity) or _imprecise(found, precision, effect, severity)]
        return made + _lost_casts(found, precision)
    made = [*_casts(found, precision, severity), *_nonfinite(found, precision, severity)]
    if not made:
        made = _failures(found, precision)
    if not made and is_imprecise(effect, found.format_of(precision)):
        made = [_flushed(found, precision, severity) or _imprecise(found, precision, effect, severity)]
    return made + _lost_casts(found, precision)


def _drawn(found: Index, precision: str) -> bool:
    """Return whether the model drew other random numbers than in float32: the shadow is the only judge then."""
    return any(event.event == "drawn" for event in found.events.get(precision, ()))


def _cast_rows(found: Index, precision: str) -> list[CastRow]:
    return [row for row in found.recording.of(CastRow) if row.precision == precision]


def _casts(found: Index, precision: str, severity: str) -> list[Finding]:
    """Return the casts that made infinities: weights, then buffers, then inputs."""
    return [
        Finding(
            precision,
            "overflow",
            f"cast-{row.role}",
            Origin(row.module, _CAST),
            severity,
            f"the cast to {row.to_dtype} turns {row.to_infinity:,} of {row.elements:,} elements of {row.role} "
            f"`{row.name}` into infinities: {number(row.absmax)} does not fit, "
            f"the limit is {number(found.format_of(row.to_dtype).max)}.",
            row.absmax,
            found.format_of(row.to_dtype).max,
            {"tensor": row.name, "to_infinity": row.to_infinity, "elements": row.elements},
        )
        for row in _cast_rows(found, precision)
        if row.to_infinity
    ]


def _lost_casts(found: Index, precision: str) -> list[Finding]:
    """Return the casts that flushed a part of a tensor that counts; a note unless the output shows it."""
    return [
        Finding(
            precision,
            "underflow",
            f"cast-{row.role}",
            Origin(row.module, _CAST),
            "warning",
            f"the cast to {row.to_dtype} flushes {row.to_zero:,} of {row.elements:,} elements of {row.role} "
            f"`{row.name}` to zero, {percent(row.energy_lost)} of its energy.",
            evidence={"tensor": row.name, "to_zero": row.to_zero, "energy_lost": row.energy_lost},
        )
        for row in _cast_rows(found, precision)
        if row.energy_lost > _ENERGY
    ]


def _nonfinite(found: Index, precision: str, severity: str) -> list[Finding]:
    rows = origins.fresh_rows(found, origins.bad_rows(found, precision))
    return [_bad_value(found, precision, row, severity if i == 0 else "warning") for i, row in enumerate(rows)]


def _bad_value(found: Index, precision: str, row: RangeRow, severity: str) -> Finding:
    """Return the finding of a site where bad values were made."""
    moment = row.first_bad
    assert moment is not None
    origin = origins.blame(found, origins.Event(moment.clock, row.module, row.port))
    reference = found.reference(row.module, row.port)
    value = None if reference is None else reference.range.absmax
    limit = found.format_of(row.dtype if row.dtype in ("float16", "bfloat16", "float32") else precision).max
    kind = "overflow" if row.range.posinf or row.range.neginf or (value or 0.0) > limit else "nan"
    return Finding(
        precision,
        kind,
        _mechanism(found, origin, row),
        origin,
        severity,
        _sentence(found, origin, row, value, limit),
        value,
        limit,
        {"port": row.port, "seen_at": row.module, "nonfinite": row.range.nonfinite, **dataclasses.asdict(moment)},
    )


def _sentence(found: Index, origin: Origin, row: RangeRow, value: float | None, limit: float) -> str:
    where = module_name(origin.module)
    seen = "" if row.module == origin.module else f", seen first in what it hands to {module_name(row.module)}"
    name = found.class_name(origin.module)
    head = f"{where}{f' ({name})' if name else ''} makes {_what(row)}{seen}"
    if value is not None and value > limit:
        misfit = f"which does not fit; the limit of {row.dtype} is {number(limit)}"
        return f"{head}: {against(row.precision)} has {number(value)} there, {misfit}."
    if value is not None:
        inside = "so it arose inside, between the values that module borders show"
        return f"{head}: {against(row.precision)} has at most {number(value)} there, {inside}."
    return f"{head}."


def _what(row: RangeRow) -> str:
    r = row.range
    parts = [text for count, text in ((r.posinf + r.neginf, "infinities"), (r.nan, "NaN")) if count]
    return " and ".join(parts) + f" ({r.nonfinite:,} of {r.count:,} values)"


def _mechanism(found: Index, origin: Origin, row: RangeRow) -> str:
    if not origin.module and role(row.port) == "input":
        return "cast-input"
    name = found.class_name(origin.module)
    if row.module == origin.module and any(part in name for part in _MATMULS):
        return "matmul-overflow"
    return "module-internal" if row.module == origin.module else "between-modules"


def _failures(found: Index, precision: str) -> list[Finding]:
    """Return the exceptions that float32 does not raise, the first of each kind."""
    rows = [row for row in found.recording.of(FailureRow) if row.precision == precision]
    return [
        Finding(
            precision,
            "unsupported",
            "kernel-or-dtype" if row.unsupported else "raises",
            Origin(row.module),
            "error",
            f"{module_name(row.module)} raises in {row.run}: {row.error}",
            evidence={"run": row.run, "batch": row.batch},
        )
        for row in {row.error: row for row in reversed(rows)}.values()
    ]


def _flushed(found: Index, precision: str, severity: str) -> Finding | None:
    """Return the first site that became zero, where one came before the error."""
    row = origins.first_flushed(found, precision)
    error = origins.first_error(found, precision, tolerance(found.format_of(precision)))
    if row is None or (error is not None and error.order < row.order):
        return None
    reference = found.reference(row.module, row.port)
    origin = origins.blame(found, origins.Event(row.order, row.module, row.port))
    value = reference.range.absmax if reference else None
    limit = found.format_of(precision).smallest_subnormal
    zeros = percent(row.range.zero / row.range.count)
    message = (
        f"{module_name(origin.module)} gives zeros where {against(precision)} has values up to {number(value)}: "
        f"{zeros} of `{row.port}` is zero; the smallest magnitude of {row.dtype} is {number(limit)}."
    )
    return Finding(
        precision, "underflow", "flushed-to-zero", origin, severity, message, value, limit, {"port": row.port}
    )


def _imprecise(found: Index, precision: str, effect: Effect, severity: str) -> Finding:
    """Return the finding of an output that is off although all is finite."""
    limit = tolerance(found.format_of(precision))
    row = origins.first_error(found, precision, limit)
    if row is None:
        row = origins.largest_error(found, precision)
    origin = None if row is None else origins.blame(found, origins.Event(row.order, row.module, row.port))
    return Finding(
        precision,
        "precision",
        "rounding",
        origin,
        severity,
        _off(effect, row, origin),
        row.relative_error if row else None,
        limit,
    )


def _off(effect: Effect, row: ErrorRow | None, origin: Origin | None) -> str:
    parts = []
    if effect.relative_error is not None:
        parts.append(f"the output is off by {percent(effect.relative_error)}")
    if effect.changed_decisions:
        parts.append(f"{percent(effect.changed_decisions)} of its decisions change")
    if effect.changed_answers:
        parts.append(f"{effect.changed_answers} of {effect.answers} answers change")
    where = (
        ""
        if row is None or origin is None
        else f"; the error first passes the tolerance at {module_name(origin.module)}"
    )
    return (", ".join(parts) or "the output differs") + where + "."
