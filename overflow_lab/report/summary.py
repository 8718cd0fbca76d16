"""What the first screen says, as plain values: verdict cards, what they rest on, notes, and the environment as text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overflow_lab.analysis.results import SEVERITIES, Diagnosis, Effect, Finding, Link, Origin, Verdict
from overflow_lab.recording import FailureRow, ModuleRow, PrecisionRow, Recording, RunRow
from overflow_lab.report import text
from overflow_lab.report.site_keys import layer_key, operation_key

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Further origins that a card names; the list of findings has them all.
ALSO = 3


@dataclass(frozen=True)
class Card:
    """One precision's verdict, written for reading. `shape` tells severities apart without colour.

    `reason` leaves out the place, which `where` and `operation` say; `also` names the further origins, in order.
    """

    precision: str
    headline: str
    verdict: str
    severity: str
    shape: str
    where: str
    operation: str
    mechanism: str
    reason: str
    advice: str
    effects: tuple[str, ...]
    chain: tuple[Step, ...] = ()
    also: tuple[str, ...] = ()
    key: str = ""

    @property
    def short_reason(self) -> str:
        """The first sentence of the reason, which has the number."""
        return first_sentence(self.reason)


@dataclass(frozen=True)
class Step:
    """One link of the explanation, written for reading: the place (empty for the output's effect), what, the line.

    `key` is that of the site, for a link to its row.
    """

    where: str
    operation: str
    text: str
    source: str
    key: str = ""


@dataclass(frozen=True)
class FindingLine:
    """One finding, written for reading; `evidence` are name and value pairs."""

    precision: str
    severity: str
    shape: str
    title: str
    where: str
    operation: str
    message: str
    evidence: tuple[tuple[str, str], ...]
    key: str = ""


@dataclass(frozen=True)
class Execution:
    """How one precision was executed: the way of its cast, what stayed in float32, and its runs."""

    precision: str
    cast: str
    kept: str
    runs: tuple[str, ...]


def cards(diagnosis: Diagnosis) -> list[Card]:
    """Return one card for each verdict, in the order scanned."""
    return [_card(verdict, diagnosis.findings) for verdict in diagnosis.verdicts.values()]


def _card(verdict: Verdict, made: Sequence[Finding]) -> Card:
    origin = verdict.origin
    return Card(
        precision=text.visible(verdict.precision, 60),
        headline=text.headline(verdict.verdict, verdict.severity),
        verdict=verdict.verdict,
        severity=verdict.severity,
        shape=text.severity_shape(verdict.severity),
        where="" if origin is None else text.module_name(origin.module),
        operation=text.visible(origin.op, 80) if origin and origin.op else "",
        mechanism=text.visible(verdict.mechanism, 80) if verdict.mechanism else "",
        reason=text.sentence(_without_place(verdict.reason, origin)),
        advice=text.sentence(verdict.advice),
        effects=tuple(effects(verdict.effect)),
        chain=steps(verdict.chain, verdict.precision),
        also=_also(verdict, made),
        key="" if origin is None else site_key(verdict.precision, origin.module, origin.op),
    )


def site_key(precision: str, module: str, op: str | None) -> str:
    """Return the key of an operation, or of a module's output where no operation is known."""
    return operation_key(precision, module, op, 0) if op else layer_key(module, "output")


def first_sentence(reason: str) -> str:
    """Return a text up to the first full stop that is followed by a capital letter."""
    return _SENTENCE_END.split(reason, maxsplit=1)[0]


def glance(diagnosis: Diagnosis) -> list[tuple[str, str, str]]:
    """Return which precisions break, are risky and work, as (severity, words, names), the worst first."""
    groups: dict[tuple[str, str], list[str]] = {}
    for verdict in diagnosis.verdicts.values():
        lead = text.headline(verdict.verdict, verdict.severity).partition(":")[0]
        groups.setdefault((verdict.severity, lead), []).append(text.visible(verdict.precision, 60))
    ordered = sorted(groups.items(), key=lambda item: -SEVERITIES.index(item[0][0]))
    return [(severity, f"{lead} in", _listed(names)) for (severity, lead), names in ordered]


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _without_place(reason: str, origin: Origin | None) -> str:
    """Return a reason without the module and operation that it opens with, since both are named above it."""
    if origin is None or not origin.module:
        return reason
    for place in (f"`{origin.module}`, {origin.op}, ", f"`{origin.module}`, {origin.op} ", f"`{origin.module}` "):
        if reason.startswith(place):
            rest = reason[len(place) :]
            return rest.partition(") ")[2] if rest.startswith("(") else rest
    return reason


def steps(links: Sequence[Link], precision: str = "") -> tuple[Step, ...]:
    """Return a chain for reading, the output's effect first; `precision` is the one whose sites it names."""
    return tuple(
        Step(
            where="" if link.module is None else text.module_name(link.module),
            operation=text.visible(link.op, 80) if link.op else "",
            text=text.without_paths(link.text),
            source=text.visible(link.source, 160),
            key="" if link.module is None else site_key(precision, link.module, link.op),
        )
        for link in links
    )


def _also(verdict: Verdict, made: Sequence[Finding]) -> tuple[str, ...]:
    """Return the further origins of a precision, in the order in which they happened: at most ALSO of them."""
    first = verdict.origin
    others = {
        (f.origin.module, f.origin.op or ""): f
        for f in reversed(made)
        if f.precision == verdict.precision and f.kind != "underflow" and f.origin and f.origin != first
    }
    places = list(reversed(others.items()))
    said = [_place(module, op, finding) for (module, op), finding in places[:ALSO]]
    return (*said, f"{len(places) - ALSO:,} more, under findings") if len(places) > ALSO else tuple(said)


def _place(module: str, op: str, finding: Finding) -> str:
    beyond = finding.value is not None and finding.limit is not None and finding.value > finding.limit
    name = f"`{text.module_name(module)}`" + (f" `{text.visible(op, 80)}`" if op else "")
    return f"{name} ({text.number(finding.value)})" if beyond else name


def effects(effect: Effect) -> list[str]:
    """Return what reaches the output, in a few short phrases; what was not compared is left out."""
    said: list[str] = []
    if effect.nonfinite is not None:
        said.append(
            "no NaN or inf in the output"
            if effect.nonfinite == 0
            else f"{text.share(effect.nonfinite)} of the output is NaN or inf"
        )
    if effect.relative_error is not None:
        floor = "" if effect.noise_floor is None else f" (noise floor {text.share(effect.noise_floor)})"
        said.append(f"relative error {text.share(effect.relative_error)}{floor}")
    if effect.changed_decisions is not None:
        said.append(
            "no decision changed"
            if effect.changed_decisions == 0
            else f"{text.share(effect.changed_decisions)} of decisions changed"
        )
    if effect.answers:
        said.append(_answers(effect))
    return said


def _answers(effect: Effect) -> str:
    """Return how many generated answers are the same, changed or missing."""
    total = text.plural(effect.answers, "answer")
    if not effect.changed_answers and not effect.failed_answers:
        return f"{total}: same as in float32"
    parts = [(effect.changed_answers, "changed"), (effect.failed_answers, "failed")]
    return f"{total}: " + ", ".join(f"{n:,} {word}" for n, word in parts if n)


def findings(diagnosis: Diagnosis) -> list[FindingLine]:
    """Return all findings, the most severe first, as the diagnosis orders them."""
    return [_finding(finding) for finding in diagnosis.findings]


def _finding(finding: Finding) -> FindingLine:
    origin = finding.origin
    evidence = [
        (name, text.number(value))
        for name, value in (("value", finding.value), ("limit", finding.limit))
        if value is not None
    ]
    evidence += [(text.visible(k, 60).replace("_", " "), _value(v)) for k, v in finding.evidence.items()]
    return FindingLine(
        precision=text.visible(finding.precision, 60),
        severity=finding.severity,
        shape=text.severity_shape(finding.severity),
        title=text.visible(finding.mechanism or finding.kind, 80),
        where="" if origin is None else text.module_name(origin.module),
        operation=text.visible(origin.op, 80) if origin and origin.op else "",
        message=text.sentence(_without_place(finding.message, origin)),
        evidence=tuple(evidence[:12]),
        key="" if origin is None else site_key(finding.precision, origin.module, origin.op),
    )


def model(recording: Recording) -> str:
    """Return the model's name, without the folders of an absolute path."""
    return text.model_name(recording.header.subject.get("name", "unnamed model"))


def model_class(recording: Recording) -> str:
    """Return the class of the model's root module, empty where it is not known."""
    return next((text.visible(row.class_name, 80) for row in recording.of(ModuleRow) if row.path == ""), "")


def basis(recording: Recording) -> str:
    """Return how many inputs and tokens the verdicts rest on, by run: "12 inputs, 384 tokens (forward, beam)"."""
    runs: dict[str, list[str]] = {}
    for row in {row.run: row for row in reversed(recording.of(RunRow))}.values():
        size = text.plural(row.inputs, "input") + (f", {text.plural(row.tokens, 'token')}" if row.tokens else "")
        runs.setdefault(size, []).insert(0, text.visible(row.run, 40))
    return "; ".join(f"{size} ({', '.join(names)})" for size, names in runs.items()) or "no run finished"


def created(recording: Recording) -> str:
    """Return when the scan began, to the minute."""
    stamp = text.visible(recording.header.created, 40)
    zone = " UTC" if stamp.endswith(("+00:00", "Z")) else ""
    return stamp[:16].replace("T", " ") + zone if len(stamp) >= 16 else stamp


def banner(recording: Recording) -> str:
    """Return what to say where the scan did not run to its end, empty otherwise."""
    if recording.complete:
        return ""
    why = recording.footer.error if recording.footer and recording.footer.error else ""
    reason = f" ({text.without_paths(why, 300)})" if why else ""
    ended = f"{text.visible(recording.status, 40)}{reason}"
    return f"The scan did not finish: {ended}. What follows rests on what was recorded until then."


def executions(recording: Recording) -> list[Execution]:
    """Return how each precision was executed, in the order of the file."""
    return [_execution(recording, row) for row in recording.of(PrecisionRow)]


def _execution(recording: Recording, row: PrecisionRow) -> Execution:
    words = {"none": "as it is", "loader": "cast by the loader", "to": ".to(dtype)", "autocast": "autocast"}
    shown = ", ".join(text.module_name(name, 80) for name in row.kept[:6])
    more = f" and {len(row.kept) - 6:,} more" if len(row.kept) > 6 else ""
    runs = [r for r in recording.of(RunRow) if r.precision == row.precision]
    cast = words.get(row.cast, text.visible(row.cast, 40))
    return Execution(
        precision=text.visible(row.precision, 60),
        cast=text.without_paths(row.detail, 300) or cast,
        kept=shown + more,
        runs=tuple(f"{text.visible(r.run, 40)}: {text.plural(r.inputs, 'input')} in {r.seconds:.1f} s" for r in runs),
    )


def notes(recording: Recording) -> list[str]:
    """Return notes about the subject, and the exceptions that ended runs."""
    given = recording.header.subject.get("notes") or ()
    lines = [text.without_paths(note, 600) for note in ([given] if isinstance(given, str) else list(given))]
    for row in recording.of(FailureRow):
        where = text.module_name(row.module)
        lines.append(
            f"{row.precision}, {row.run}, batch {row.batch + 1}: {text.without_paths(row.error, 400)} (in {where})"
        )
    return lines


def environment_text(recording: Recording, diagnosis: Diagnosis) -> str:
    """Return a block of text fit for a bug report: versions, model, what was run, verdicts. No absolute paths."""
    header = recording.header
    lines = [f"overflow-lab {header.overflow_lab}, recorded {header.created}, status {recording.status}"]
    named = f"{model(recording)} ({model_class(recording)})" if model_class(recording) else model(recording)
    lines += [f"model        {named}", f"inputs       {basis(recording)}"]
    lines += [f"precisions   {', '.join(header.precisions)}", "", "verdicts"]
    lines += [_verdict_line(verdict) for verdict in diagnosis.verdicts.values()] or ["  none"]
    for title, facts in (("environment", header.environment), ("options", header.options)):
        pairs = list(_flat(facts))
        width = min(28, max((len(k) for k, _ in pairs), default=0))
        lines += ["", title, *(f"  {k:<{width}}  {v}" for k, v in pairs)] if pairs else []
    return "\n".join(lines)


def _verdict_line(verdict: Verdict) -> str:
    where = f" at {text.module_name(verdict.origin.module, 200)}" if verdict.origin else ""
    op = f" ({text.visible(verdict.origin.op, 80)})" if verdict.origin and verdict.origin.op else ""
    judged = f"{verdict.verdict}, severity {verdict.severity}{where}{op}"
    return f"  {verdict.precision:<18} {judged}: {text.without_paths(verdict.reason)}"


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the pairs of nested facts with dotted names; empty values are left out."""
    for key, value in facts.items():
        name = f"{prefix}{text.visible(key, 60)}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{name}.")
        elif value is not None and value != "" and value != [] and value != ():
            yield name, _value(value)


def _value(value: Any) -> str:
    """Return a fact's value on one line."""
    if isinstance(value, float):
        return text.number(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return text.count(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(text.without_paths(item, 120) for item in value[:20])
    return text.without_paths(value, 300)
