"""What remedies did, before and after, written for reading: from the rows that their second scans left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from overflow_lab.analysis.results import Effect
from overflow_lab.recording import ProofRow, Recording
from overflow_lab.report import text
from overflow_lab.report.summary import effects, first_sentence

KINDS: Mapping[str, str] = {
    "rescale": "rescaled weights",
    "island": "float32 island",
    "clamp": "clamp",
    "precision": "another precision",
    "penalty": "fine-tuned",
}
# Of a wide island nothing comes near float32's end: more bits than this say nothing.
_MOST_BITS = 24.0


@dataclass(frozen=True)
class ProofSide:
    """One side of a proof, written for reading."""

    severity: str
    headline: str
    reason: str
    effects: tuple[str, ...]


@dataclass(frozen=True)
class ProofLine:
    """One remedy, written for reading: `basis` says on how many inputs, `facts` are (label, words)."""

    precision: str
    kind: str
    title: str
    proven: bool
    reason: str
    basis: str
    before: ProofSide
    after: ProofSide | None
    held: ProofSide | None
    facts: Sequence[tuple[str, str]]
    members: Sequence[str]
    notes: Sequence[str]
    snippets: Sequence[tuple[str, str]]


def proof_lines(recording: Recording) -> list[ProofLine]:
    """Return all remedies of a recording: those that are proven first, otherwise in the order tried."""
    rows = recording.of(ProofRow)
    order = {name: number for number, name in enumerate(dict.fromkeys(row.precision for row in rows))}
    return [_line(row) for row in sorted(rows, key=lambda row: (order[row.precision], not row.proven))]


def best(recording: Recording) -> dict[str, ProofRow]:
    """Return the first proven remedy of each precision that has one."""
    found: dict[str, ProofRow] = {}
    for row in recording.of(ProofRow):
        if row.proven:
            found.setdefault(row.precision, row)
    return found


def _line(row: ProofRow) -> ProofLine:
    return ProofLine(
        precision=text.visible(row.precision, 60),
        kind=KINDS.get(row.remedy, text.visible(row.remedy, 40)),
        title=text.sentence(row.title),
        proven=row.proven,
        reason=text.sentence(row.reason) if row.reason else "",
        basis=_basis(row),
        before=_side(row.before),
        after=_side(row.after) if row.after else None,
        held=_side(row.held_back) if row.held_back else None,
        facts=tuple(_facts(row)),
        members=tuple(text.visible(member, 200) for member in row.members),
        notes=tuple(text.without_paths(note, 600) for note in row.notes),
        snippets=tuple((text.visible(label, 80), str(code)) for label, code in row.snippets.items()),
    )


def _basis(row: ProofRow) -> str:
    held = f"and {row.held_inputs:,} held back" if row.held_inputs else "none held back"
    return f"{text.plural(row.inputs, 'input')}, {held}"


def _side(verdict: Mapping[str, Any]) -> ProofSide:
    """Return one side from a verdict as in the JSON contract; keys that a newer version wrote are passed over."""
    known = {field.name for field in fields(Effect)}
    effect = Effect(**{key: value for key, value in dict(verdict.get("output") or {}).items() if key in known})
    severity = str(verdict.get("severity", "none"))
    return ProofSide(
        severity,
        text.headline(str(verdict.get("verdict", "")), severity),
        first_sentence(text.sentence(verdict.get("reason", ""))),
        tuple(effects(effect)),
    )


def _facts(row: ProofRow) -> Iterator[tuple[str, str]]:
    figures = row.figures
    if "headroom_before" in figures and "headroom_after" in figures:
        pair = f"{_bits(figures['headroom_before'])} → {_bits(figures['headroom_after'])}"
        yield "least headroom", f"{pair} bits"
    if "function_error" in figures:
        yield "in float32", _function(figures)
    if "same_tokens" in figures:
        answers = text.share(figures.get("same_answers"))
        yield "answers", f"{answers} as in float32, {text.share(figures['same_tokens'])} of the tokens"
    if "loss_after" in figures:
        names = (("loss_before", "float32"), ("loss_low", row.precision), ("loss_after", "mended"))
        said = [f"{figures[name]:.4g} {where}" for name, where in names if name in figures]
        yield "loss", ", ".join(said)
    if "seconds" in figures:
        yield "time", f"{figures['seconds']:.2f} of plain {row.precision}"
    if "bytes" in figures:
        yield "weights", f"{figures['bytes']:.2f} of plain {row.precision}"
    if "runs" in figures:
        yield "search", text.plural(int(figures["runs"]), "run")


def _function(figures: Mapping[str, float]) -> str:
    if figures["function_error"] == 0.0:
        return "the same bits as before"
    said = f"differs by {figures['function_error']:.1g}, at most {figures.get('function_ulp', 0):.2g} ulp"
    return said + (f", KL {figures['function_kl']:.1g} nats" if "function_kl" in figures else "")


def _bits(value: float) -> str:
    return text.bits(value) if value < _MOST_BITS else f"over {_MOST_BITS:.0f}"
