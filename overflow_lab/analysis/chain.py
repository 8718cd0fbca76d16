"""Why a verdict is what it is, in three to six links: from what reaches the output back to the operation that began it.

The links are taken from what was recorded: what the output shows, the module whose output is
the first to hold NaN, the operation that made a wrong finite value of a bad one, the first module border at which a
bad value shows (all that a hook can see), the origin, and what the origin was given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from overflow_lab.analysis.index import Index, role
from overflow_lab.analysis.mechanisms import CAST, NAN_ANYWAY
from overflow_lab.analysis.numbers import against, clearness, contribution, number, percent, place, step
from overflow_lab.analysis.origins import bad_rows
from overflow_lab.analysis.results import Effect, Finding, Link, Origin
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AttributionRow, EventRow, FailureRow, OperationRow, RangeRow

_DECIDING = ("argmax", "argmin", "argsort", "sort", "topk", "multinomial", "gt", "lt", "ge", "le", "eq", "ne")


def chain(found: Index, finding: Finding, effect: Effect) -> tuple[Link, ...]:
    """Return the links of a finding, the output's effect first; those that were not seen are left out."""
    event = _event(found, finding)
    if finding.kind == "unsupported":
        return (Link("effect", _stopped(event)), _unsupported(finding, event))
    before = [Link("effect", _reached(found, effect, finding))]
    if event is not None and event.event == "constant":
        text = f"is given another constant than in {against(finding.precision)}: {event.detail}"
        return (*before, _plain(finding, text, event.source))
    if event is not None:
        return _short([*before, *_carriers(found, finding, event), *_harm(event), *_made(found, finding, event)])
    if finding.kind in ("overflow", "nan"):
        return _short([*before, *_at_borders(found, finding)])
    return _short([*before, *_rounded(found, finding)])


def _short(links: Iterable[Link]) -> tuple[Link, ...]:
    """Return the links with those of one place joined: the same module twice in a row is one step of thought."""
    made: list[Link] = []
    for link in links:
        last = made[-1] if made else None
        if last and last.module == link.module and last.module is not None and "origin" not in (last.role, link.role):
            joined = f"{link.text}; {last.text}"
            made[-1] = Link(link.role, joined, link.module, link.op or last.op, link.source or last.source)
        else:
            made.append(link)
    return tuple(made)


def _event(found: Index, finding: Finding) -> EventRow | None:
    """Return the event that a finding rests on, None where it rests on an attribution or on module borders."""
    origin = finding.origin
    if origin is None or (finding.mechanism == "flushed-to-zero" and "source" not in finding.evidence):
        return None
    events = found.events.get(finding.precision, [])
    kinds = ("unsupported",) if finding.kind == "unsupported" else ("bad", "fresh", "constant")
    own = [e for kind in kinds for e in events if e.event == kind and (e.module, e.op) == (origin.module, origin.op)]
    if finding.kind == "precision":
        return next((e for e in own if e.event == "constant"), None) if "share" not in finding.evidence else None
    caused = [
        e for e in events if e.event == "bad" and e.cause is not None and e.cause[:2] == (origin.module, origin.op)
    ]
    loose = [e for e in events if e.event == "bad" and e.zero_operand] if origin.op == CAST else []
    return next((e for e in [*own, *caused, *loose] if e.event != "constant"), None)


def _reached(found: Index, effect: Effect, finding: Finding) -> str:
    """Return the two weightiest things that reach the output."""
    failures = (row for row in found.recording.of(FailureRow) if row.precision == finding.precision)
    said = [f"the run of {row.run} ends in an exception ({row.error})" for row in failures][:1]
    if effect.failed_answers:
        said.append(f"{effect.failed_answers:,} of {effect.answers:,} answers fail")
    if effect.nonfinite:
        said.append(f"{'all' if effect.nonfinite == 1 else percent(effect.nonfinite)} of the output is NaN or inf")
    if effect.changed_answers:
        said.append(f"{effect.changed_answers:,} of {effect.answers:,} answers change")
    if effect.changed_decisions:
        said.append(f"{percent(effect.changed_decisions)} of the decisions change")
    if effect.relative_error and not effect.nonfinite:
        said.append(f"the output is off by {percent(effect.relative_error)}")
    if finding.mechanism == NAN_ANYWAY:
        said.insert(0, "the output holds NaN, in float64 too")
    return ", ".join(said[:2]) or f"the output is as in {against(finding.precision)}"


def _stopped(event: EventRow | None) -> str:
    if event is None:
        return "the run ends in an exception"
    return "the run ends in an exception; this scan did the operation in float32 and went on"


def _unsupported(finding: Finding, event: EventRow | None) -> Link:
    text = f"raises {event.detail}" if event else finding.message.partition(": ")[2]
    return _plain(finding, text, event.source if event else "")


def _carriers(found: Index, finding: Finding, event: EventRow) -> Iterator[Link]:
    """Yield where infinities become NaN, and the module border where a hook would see a bad value first.

    Of several origins only the first is told by these: what later ones made cannot be told from it at a border.
    """
    if any(
        e.event == "bad" and (e.batch, e.clock) < (event.batch, event.clock) for e in found.events[finding.precision]
    ):
        return
    # The root's output is what the first link tells.
    rows = [row for row in bad_rows(found, finding.precision) if role(row.port) == "output" and row.module]
    own = event.module
    turned = next((row for row in rows if row.range.nan and row.module != own), None) if not event.nan else None
    if turned is not None:
        yield Link("carrier", f"{_port(turned)} is the first with NaN", turned.module)
    first = next(iter(rows), None)
    if first is not None and first.module != own and (turned is None or first.module != turned.module):
        yield Link("carrier", f"{_port(first)} is the first at a module's border with {_bad(first)}", first.module)


def _harm(event: EventRow) -> Iterator[Link]:
    bad = _names(event.inf, event.nan)
    if event.harmed is None:
        if event.absorbed is not None and not event.reaches_output:
            module, op = event.absorbed[:2]
            yield Link("absorbed", f"makes of {bad} what {against(event.precision)} has there: absorbed", module, op)
        return
    module, op = event.harmed[:2]
    bare = op.removeprefix("aten.").rstrip("_")
    text = f"makes finite values of {bad}, which are wrong"
    if bare.startswith("clamp"):
        text = f"clamps {bad} to finite values, which are wrong"
    if bare in _DECIDING:
        text = f"decides otherwise because of {bad}"
    yield Link("harm", text, module, op)


def _made(found: Index, finding: Finding, event: EventRow) -> Iterator[Link]:
    """Yield the operation that made bad values, and before it the one that gave it a zero."""
    origin = finding.origin
    text = f"makes {_names(event.inf, event.nan)}"
    if origin is not None and (origin.module, origin.op) == (event.module, event.op):
        # A cast is no line of the model's: the tensor's name says more.
        source = "" if event.op == CAST and event.detail else event.source
        yield _plain(finding, text + _misfit(found, event) + _of_tensor(event.detail) + _when(event), source)
        return
    yield Link("harm", f"{text}, since an operand is zero that should not be", event.module, event.op, event.source)
    site = _site(found, finding.precision, origin)
    share = (
        f" in {percent(site.flushed / site.elements)} of its values" if site and site.elements and site.flushed else ""
    )
    yield _plain(finding, f"gives that zero: what {against(finding.precision)} has there is too small{share}")


def _when(event: EventRow) -> str:
    """Return the step of a generation and the input or beam at which it happened first; "" in a plain forward."""
    if event.run == "forward":
        return ""
    number_of_step = step(event)
    said = ["" if number_of_step is None else f"step {number_of_step}", place(event)]
    return "".join(f", {part}" for part in said if part)


def _misfit(found: Index, event: EventRow) -> str:
    limit = FORMATS.get(event.dtype, found.format_of(event.precision)).max
    if event.zero_operand and event.op != CAST:
        return f", since an operand is zero that {against(event.precision)} holds apart from zero"
    if event.value is None:
        return ""
    if event.value > limit:
        return f": {number(event.value)} does not fit, the limit is {number(limit)}"
    return f", where {against(event.precision)} has at most {number(event.value)}"


def _at_borders(found: Index, finding: Finding) -> Iterator[Link]:
    """Yield what module borders tell of a bad value: no operation was recorded."""
    bad = _names(finding.kind == "overflow", finding.kind == "nan")
    seen = finding.evidence.get("seen_at")
    if isinstance(seen, str) and finding.origin is not None and seen != finding.origin.module:
        yield Link("carrier", f"is the first to be handed {bad}", seen)
    text = f"makes {bad}"
    if finding.value is not None and finding.limit is not None and finding.value > finding.limit:
        text += f": {number(finding.value)} does not fit, the limit is {number(finding.limit)}"
    yield _plain(finding, text + _of_tensor(str(finding.evidence.get("tensor", ""))))


def _rounded(found: Index, finding: Finding) -> Iterator[Link]:
    """Yield an error's way: the sum that lays it bare, the operation that makes it, with its share."""
    row = next((r for r in found.recording.of(AttributionRow) if r.precision == finding.precision), None)
    if row is None or finding.origin is None or "share" not in finding.evidence:
        yield from _flushed(found, finding)
        return
    if row.metric == "decisions":
        yield from _decided(found.clearest(finding.precision))
    amplifier = None if row.amplifier is None else Origin(*row.amplifier[:2])
    blamed = finding.origin == amplifier
    if amplifier is not None:
        text = "is left with little else than rounding: its terms are nearly equal"
        yield _plain(finding, text) if blamed else Link("amplifier", text, amplifier.module, amplifier.op)
    what = {"decisions": "the changed decisions", "centered": "the error in what sets the outputs apart"}
    calls = found.calls(row.precision, row.module, row.op)
    text = contribution(row.share, calls, what.get(row.metric, "the error")) + _grown(found, row)
    if blamed:
        yield Link("cause", text + _of_tensor(row.detail), row.module, row.op)
    else:
        yield _plain(finding, text + _of_tensor(row.detail))


def _decided(event: EventRow | None) -> Iterator[Link]:
    """Yield the decision that changed most clearly: by what margin float32 makes it, and where it changed first."""
    if event is None:
        return
    text = f"makes {event.changed:,} of {event.elements:,} decisions otherwise{clearness(event)}"
    where = _when(event) if event.run != "forward" else f", {place(event)}" if place(event) else ""
    yield Link("harm", text + (f"; first at{where[1:]}" if where else ""), event.module, event.op, event.source)


def _grown(found: Index, row: AttributionRow) -> str:
    """Return by how much an operation's result is off, and its operands were."""
    site = found.operations.get(row.precision, {}).get((row.module, row.op, row.ordinal))
    if site is None or not site.error or site.error <= site.error_in:
        return ""
    own = "" if site.local_error is None else f", of which it makes {percent(site.local_error)} itself"
    return f": off by {percent(site.error)}{own}, its operands by {percent(site.error_in)}"


def _flushed(found: Index, finding: Finding) -> Iterator[Link]:
    site = _site(found, finding.precision, finding.origin)
    if finding.kind == "underflow" and site is not None and site.elements:
        yield _plain(
            finding, f"gives zero for {percent(site.flushed / site.elements)} of its values, which are too small"
        )
    elif finding.kind == "underflow":
        tensor = _of_tensor(str(finding.evidence.get("tensor", "")))
        yield _plain(finding, f"gives zeros where {against(finding.precision)} has none{tensor}")
    elif finding.origin is not None:
        off = "" if finding.value is None else f": {percent(finding.value)}"
        yield _plain(finding, f"is where the error first passes the tolerance{off}")


def _site(found: Index, precision: str, origin: Origin | None) -> OperationRow | None:
    """Return the operation of that name in that module that flushed most."""
    rows = [
        row
        for (module, op, _), row in found.operations.get(precision, {}).items()
        if origin is not None and (module, op) == (origin.module, origin.op)
    ]
    return max(rows, key=lambda row: row.flushed, default=None)


def _plain(finding: Finding, text: str, source: str = "") -> Link:
    """Return the origin's link."""
    origin = finding.origin or Origin("")
    return Link("origin", text, origin.module if finding.origin else None, origin.op, source)


def _of_tensor(name: str) -> str:
    return f" (`{name}`)" if name else ""


def _names(inf: object, nan: object) -> str:
    return " and ".join(text for there, text in ((inf, "infinities"), (nan, "NaN")) if there) or "bad values"


def _bad(row: RangeRow) -> str:
    return _names(row.range.posinf + row.range.neginf, row.range.nan)


def _port(row: RangeRow) -> str:
    return "its output" if row.port == "output" else f"its `{row.port}`"
