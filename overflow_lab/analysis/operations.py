"""The findings of a shadow run: which operation made the fault, by which mechanism, with what consequence."""

from __future__ import annotations

from collections.abc import Iterable

from overflow_lab.analysis import mechanisms
from overflow_lab.analysis.effects import is_imprecise
from overflow_lab.analysis.index import REFERENCE, Index
from overflow_lab.analysis.numbers import against, clearness, contribution, module_name, number, percent, place, step
from overflow_lab.analysis.origins import bad_rows
from overflow_lab.analysis.results import Effect, Finding, Origin
from overflow_lab.formats import FORMATS, integer_limit
from overflow_lab.recording import AttributionRow, EventRow, NoiseRow
from overflow_lab.tolerances import TOLERATED_NOISE

# Loss of what sets an output's elements apart is blamed only where one operation makes nearly all of it.
_ALONE = 0.9
# An operation whose results are zero, where they should not be, in this share of its elements has flushed its values.
_FLUSHED = 0.25


def operation_findings(found: Index, precision: str, effect: Effect, severity: str) -> list[Finding]:
    """Return the findings of the shadow run, the earliest cause first; none where all is well."""
    events = found.events.get(precision, [])
    made = [_finding(found, precision, event, severity) for event in _faults(found, precision, events, effect)]
    if made:
        return made
    if blamed := _attributed(found, precision, effect, severity):
        return [blamed]
    if is_imprecise(effect, found.format_of(precision)):
        constant = next((event for event in events if event.event == "constant"), None)
        return [] if constant is None else [_constant(found, precision, constant, severity)]
    return []


def _faults(found: Index, precision: str, events: list[EventRow], effect: Effect) -> list[EventRow]:
    """Return the events that are faults, in order: bad values that did harm, kernels that are missing."""
    harmful = [e for e in events if e.event == "unsupported" or (e.event == "bad" and (e.harmed or e.reaches_output))]
    if harmful:
        return sorted(harmful, key=lambda e: (e.batch, e.clock, e.event != "unsupported"))
    shown = bad_rows(found, precision)
    if not (effect.nonfinite or shown):
        return []
    absorbed = [e for e in events if e.event == "bad"]
    if handed := [e for e in absorbed if _fits(e) and any(_within(e.module, row.module) for row in shown)]:
        return handed[:1]
    # The shadow saw nothing: it followed a choice of the program's that float32 would not have made.
    known = {(e.module, e.op, e.ordinal) for e in absorbed}
    return [e for e in events if e.event == "fresh" and (e.module, e.op, e.ordinal) not in known][:1]


def nan_anyway(found: Index) -> Finding | None:
    """Return the operation that makes the NaN of float32's output which its shadow in float64 makes too; None if none.

    The first that makes NaN of other values: later ones may only say so again.
    """
    event = next((e for e in found.events.get(REFERENCE, ()) if e.event == "fresh" and e.nan), None)
    if event is None or not any(row.range.nan for row in found.outputs(REFERENCE)):
        return None
    mechanism = mechanisms.MECHANISMS[mechanisms.NAN_ANYWAY]
    made = f"{module_name(event.module)}, {event.op}, makes {_badness(event)}"
    message = f"{made}, and so it would in float64: {mechanism.what}."
    evidence = {**_evidence(event), "ways_out": mechanism.ways_out}
    origin = Origin(event.module, event.op)
    return Finding(REFERENCE, "nan", mechanism.name, origin, "error", message, evidence=evidence)


def _fits(event: EventRow) -> bool:
    """Return whether float32's value would fit the format: then inf is no rounding of it, whoever absorbs it.

    A module that hands out inf for a value beyond the limit hands out that value's right rounding, and where all who
    take it saturate (a soft-cap, a sigmoid) nothing is wrong. One that hands out inf for 7.6 is wrong by itself.
    """
    return event.value is not None and event.dtype in FORMATS and event.value <= FORMATS[event.dtype].max


def _within(module: str, other: str) -> bool:
    return not other or module == other or module.startswith(other + ".")


def _finding(found: Index, precision: str, event: EventRow, severity: str) -> Finding:
    if event.event == "unsupported":
        return _unsupported(precision, event)
    cause = _zero_cause(found, precision, event)
    if cause is not None:
        return _from_zero(found, precision, event, cause, severity)
    event = _nan_of_mask(found, precision, event)
    if event.zero_operand and event.harmed and not event.reaches_output:
        blame = _attribution(found, precision)
        if blame is not None and blame.metric == "decisions":
            return _rounding(found, precision, blame, severity)
    return _bad(found, precision, event, severity)


def _nan_of_mask(found: Index, precision: str, event: EventRow) -> EventRow:
    """Return the operation that made NaN of a mask constant that the cast made -inf: as a mask, -inf is right."""
    mask = event.op == mechanisms.CAST and event.detail and event.negative and (event.value or 0.0) >= mechanisms.MASK
    if not mask:
        return event
    later = (e for e in found.events[precision] if e.event == "fresh" and e.nan and e.clock > event.clock)
    return next(later, event)


def _zero_cause(found: Index, precision: str, event: EventRow) -> Origin | None:
    """Return where the zero came from that made a value bad; the event itself where a constant was flushed."""
    if event.event != "bad" or not event.zero_operand:
        return None
    if event.cause is not None:
        return Origin(event.module, event.op) if event.constant_cause else Origin(*event.cause[:2])
    blame = _attribution(found, precision)
    return (
        Origin(blame.module, blame.op) if blame is not None and blame.op == mechanisms.CAST and blame.detail else None
    )


def _from_zero(found: Index, precision: str, event: EventRow, cause: Origin, severity: str) -> Finding:
    """Return the finding of a value that went bad since an operand is zero that should not be."""
    flushed = event.cause is not None
    kind = "underflow" if flushed else _kind(event)
    name = "eps-flushed" if event.constant_cause else "flushed-to-zero" if flushed else "cast-buffer"
    tiny = FORMATS[event.dtype].smallest_subnormal if event.dtype in FORMATS else None
    message = (
        f"{module_name(event.module)}, {event.op}: an operand is zero that {against(event.precision)} "
        f"holds apart from zero, and the result is {_badness(event)}; "
        f"the zero comes from {module_name(cause.module)}, {cause.op}."
    )
    return Finding(precision, kind, name, cause, severity, message, event.value, tiny, _evidence(event))


def _bad(found: Index, precision: str, event: EventRow, severity: str) -> Finding:
    limit = FORMATS[event.dtype].max if event.dtype in FORMATS else None
    mechanism = mechanisms.of_bad(found, event)
    what = mechanisms.MECHANISMS[mechanism].what
    beyond = limit is not None and event.value is not None and event.value > limit
    number_said = (
        f": {against(precision)} has {number(event.value)} there, which does not fit; "
        f"the limit of {event.dtype} is {number(limit)}"
        if beyond
        else ""
    )
    tensor = f" of `{event.detail}`" if event.detail else ""
    made = f"{module_name(event.module)}, {event.op}{tensor}, makes {_badness(event)}{number_said}"
    message = f"{made}. {what[0].upper()}{what[1:]}."
    evidence = {**_evidence(event), "ways_out": mechanisms.MECHANISMS[mechanism].ways_out}
    return Finding(
        precision,
        _kind(event),
        mechanism,
        Origin(event.module, event.op),
        severity,
        message,
        event.value,
        limit,
        evidence,
    )


def _kind(event: EventRow) -> str:
    return "overflow" if event.inf else "nan"


def _badness(event: EventRow) -> str:
    parts = [text for count, text in ((event.inf, "infinities"), (event.nan, "NaN")) if count]
    return " and ".join(parts) + f" ({event.inf + event.nan:,} of {event.elements:,} values)"


def _unsupported(precision: str, event: EventRow) -> Finding:
    mechanism = mechanisms.of_unsupported(event.detail)
    message = f"{module_name(event.module)}, {event.op}, raises: {event.detail}"
    return Finding(
        precision, "unsupported", mechanism, Origin(event.module, event.op), "error", message, evidence=_evidence(event)
    )


def _attribution(found: Index, precision: str) -> AttributionRow | None:
    return next((row for row in found.recording.of(AttributionRow) if row.precision == precision), None)


def _attributed(found: Index, precision: str, effect: Effect, severity: str) -> Finding | None:
    """Return the finding of the operation whose rounding makes the error, where the error counts."""
    row = _attribution(found, precision)
    if row is None or (row.metric == "centered" and (row.share < _ALONE or _any_rounding_does(found, row))):
        return None
    known = row.metric == "decisions" or effect.relative_error is not None
    if row.metric != "centered" and known and not is_imprecise(effect, found.format_of(precision)):
        return None  # an output that nobody judges is off (hidden states beside logits): noise
    return _rounding(found, precision, row, severity)


def _any_rounding_does(found: Index, row: AttributionRow) -> bool:
    """Return whether a random rounding of the weights loses as much of what sets an output's elements apart."""
    floors = [noise.spread_error for noise in found.recording.of(NoiseRow) if noise.precision == row.precision]
    return any(row.total <= TOLERATED_NOISE * floor for floor in floors)


def _rounding(found: Index, precision: str, row: AttributionRow, severity: str) -> Finding:
    sites = found.operations.get(precision, {})
    site = sites.get((row.module, row.op, row.ordinal))
    if site is not None and site.elements and site.flushed / site.elements > _FLUSHED:
        return _flush(precision, row, site.flushed / site.elements, severity)
    fmt = found.format_of(precision)
    origin, mechanism = _blamed(row)
    if mechanism is None:
        mechanism = mechanisms.of_rounding(
            found,
            row.op,
            row.detail,
            exact_to=integer_limit(fmt),
            largest=site.absmax if site else 0.0,
            decides=row.metric == "decisions",
        )
    made = contribution(row.share, found.calls(precision, row.module, row.op), "it")
    message = f"{_off(found, row)} {module_name(origin.module)}, {origin.op}, {_tensor(row)}{made}: "
    message += mechanisms.MECHANISMS[mechanism].what + "."
    evidence = {"metric": row.metric, "share": row.share, "ways_out": mechanisms.MECHANISMS[mechanism].ways_out}
    if row.metric == "decisions" and (event := found.clearest(precision)) is not None:
        told = _evidence(event)
        evidence |= {"decision": f"{module_name(event.module)}, {event.op}"}
        evidence |= {name: told[name] for name in ("step", "place", "margin") if name in told}
    return Finding(precision, "precision", mechanism, origin, severity, message, row.total, None, evidence)


def _blamed(row: AttributionRow) -> tuple[Origin, str | None]:
    """Return the operation to name: an addition that cancels rather than the ordinary rounding that it lays bare."""
    adds = row.op.rstrip("_") in ("aten.add", "aten.sub", "aten.rsub") or row.op == mechanisms.CAST
    if row.amplifier is not None and not adds:
        return Origin(*row.amplifier[:2]), "cancellation"
    return Origin(row.module, row.op), None


def _tensor(row: AttributionRow) -> str:
    return f"of `{row.detail}` " if row.detail else ""


def _off(found: Index, row: AttributionRow) -> str:
    if row.metric == "decisions":
        event = found.clearest(row.precision)
        return f"{row.total:,.0f} decisions inside the model change{clearness(event) if event else ''}."
    what = "of its own spread" if row.metric == "centered" else ""
    return f"The output is off by {percent(row.total)}{' ' + what if what else ''}."


def _flush(precision: str, row: AttributionRow, share: float, severity: str) -> Finding:
    where = f"{module_name(row.module)}, {row.op}, {_tensor(row)}"
    message = f"{where}gives zero for {percent(share)} of its values, which are too small."
    return Finding(precision, "underflow", "flushed-to-zero", Origin(row.module, row.op), severity, message, row.total)


def _constant(found: Index, precision: str, event: EventRow, severity: str) -> Finding:
    given = f"is given another constant than in {against(precision)}: {event.detail}"
    message = f"{module_name(event.module)}, {event.op}, {given}."
    origin = Origin(event.module, event.op)
    return Finding(
        precision, "precision", "dtype-dependent-constant", origin, severity, message, evidence=_evidence(event)
    )


def _evidence(event: EventRow) -> dict[str, object]:
    """Return what a reader may want to check."""
    facts: Iterable[tuple[str, object]] = (
        ("source", event.source),
        ("run", event.run),
        ("batch", event.batch),
        ("step", step(event)),
        ("place", place(event)),
        ("margin", event.margin),
        ("harmed", None if event.harmed is None else ", ".join(event.harmed)),
        ("absorbed", None if event.absorbed is None else ", ".join(event.absorbed)),
        ("reaches_output", event.reaches_output),
    )
    return {name: value for name, value in facts if value not in (None, "")}
