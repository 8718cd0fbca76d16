"""What mends it, written for reading: the proofs of a recording by precision, those that are proven first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overflow_lab.analysis.results import Effect
from overflow_lab.recording import ProofRow, Recording
from overflow_lab.report import text
from overflow_lab.report.summary import Card, effects, first_sentence

KINDS: Mapping[str, str] = {
    "rescale": "rescaled weights",
    "island": "float32 island",
    "clamp": "clamp",
    "precision": "another precision",
    "penalty": "fine-tuned",
}
# Characters of texts to paste that a reporter may take: what does not fit any more is named, and left out.
BUDGET = 150_000
_LONGEST = 30_000
# A measured time within this share of the plain one is called the same: machines are noisy.
_SAME_TIME, _SAME_BYTES = 0.1, 0.005
_TELLING = ("least headroom", "in float32", "time of a forward", "memory of weights")
# Of a wide format nothing comes near the end: more bits than this say nothing.
_MOST_BITS = 24.0


@dataclass(frozen=True)
class Side:
    """A verdict of one scan, written for reading; `inputs` is how many it rests on."""

    severity: str
    shape: str
    headline: str
    reason: str
    effects: tuple[str, ...]
    inputs: int = 0


@dataclass(frozen=True)
class Snippet:
    """A text to paste, and what it is for; empty where there was no room for it."""

    title: str
    text: str

    @property
    def lines(self) -> int:
        """How many lines it has."""
        return self.text.count("\n") + 1


@dataclass(frozen=True)
class ProofLine:
    """One remedy and its proof. `after` and `held` are None where there was no such scan.

    `basis` says on how many inputs, `figures` are (what, value) pairs in the same order for each remedy.
    """

    title: str
    kind: str
    runs_in: str
    proven: bool
    after: Side | None
    held: Side | None
    basis: str
    reason: str
    figures: tuple[tuple[str, str], ...]
    members: tuple[str, ...]
    notes: tuple[str, ...]
    snippets: tuple[Snippet, ...]

    @property
    def in_short(self) -> str:
        """The figures that tell remedies apart, on one line; costs that are none are left out."""
        said = [f"{what} {value}" for what, value in self.figures if what in _TELLING and value != "the same"]
        return "; ".join(said)

    @property
    def only_held(self) -> tuple[str, ...]:
        """What the inputs that were held back showed otherwise than the others."""
        return tuple(
            said
            for said in (self.held.effects if self.held else ())
            if not self.after or said not in self.after.effects
        )


@dataclass(frozen=True)
class Mended:
    """All that was tried for one precision: `offered` is proven, the best first; `unproven` is not."""

    precision: str
    before: Side
    offered: tuple[ProofLine, ...]
    unproven: tuple[ProofLine, ...]

    @property
    def best(self) -> ProofLine | None:
        """The first remedy that is proven."""
        return next(iter(self.offered), None)

    @property
    def statement(self) -> str:
        """What came of it, in a few words."""
        tried = len(self.offered) + len(self.unproven)
        if tried == 1:
            return f"the one remedy that was tried is {'' if self.offered else 'not '}proven"
        if not self.offered:
            return f"none of the {tried} remedies that were tried is proven"
        return f"{len(self.offered)} of {tried} remedies {'is' if len(self.offered) == 1 else 'are'} proven"


def proofs(recording: Recording, *, budget: int = BUDGET) -> list[Mended]:
    """Return what was tried for each precision, in the order of the file; empty where nothing was.

    `budget` is how many characters all texts to paste may take together.
    """
    made, room = [], budget
    for precision, rows in by_precision(recording).items():
        lines = []
        for row in rows:
            lines.append(_line(row, room))
            room -= sum(len(snippet.text) for snippet in lines[-1].snippets)
        offered, unproven = (tuple(line for line in lines if line.proven is proven) for proven in (True, False))
        made.append(Mended(text.visible(precision, 60), _side(rows[0].before, rows[0].inputs), offered, unproven))
    return made


def by_precision(recording: Recording) -> dict[str, list[ProofRow]]:
    """Return the rows of each precision that is to be mended, those that are proven first."""
    found: dict[str, list[ProofRow]] = {}
    for row in recording.of(ProofRow):
        found.setdefault(row.precision, []).append(row)
    return {name: sorted(rows, key=lambda row: not row.proven) for name, rows in found.items()}


def advised(cards: Sequence[Card], mended: Sequence[Mended]) -> list[Card]:
    """Return the cards with the best remedy as their advice, where one is proven: better than a guess."""
    best = {group.precision: group.best for group in mended if group.best}
    return [
        card if (line := best.get(card.precision)) is None else dataclasses.replace(card, advice=advice(line))
        for card in cards
    ]


def advice(line: ProofLine) -> str:
    """Return a proven remedy and its basis as a sentence."""
    return f"{line.title}: {line.basis}."


def figure(row: ProofRow, name: str) -> float | None:
    """Return a figure of a proof, None where it is not known."""
    value = row.figures.get(name)
    return None if value is None else float(value)


def headroom(row: ProofRow) -> tuple[float, float] | None:
    """Return the least headroom before and after, in bits, where both are known."""
    before, after = figure(row, "headroom_before"), figure(row, "headroom_after")
    return None if before is None or after is None else (before, after)


def bits(value: float) -> str:
    """Return bits of headroom; of a wide format they say only that there is plenty."""
    return text.bits(value) if value <= _MOST_BITS else f"over {_MOST_BITS:.0f}"


def _line(row: ProofRow, room: int) -> ProofLine:
    return ProofLine(
        title=text.sentence(row.title),
        kind=KINDS.get(row.remedy, text.visible(row.remedy, 40)),
        runs_in=text.visible(row.runs_in, 60),
        proven=row.proven,
        after=_side(row.after, row.inputs) if row.after else None,
        held=_side(row.held_back, row.held_inputs) if row.held_back else None,
        basis=_basis(row),
        reason=text.sentence(row.reason),
        figures=tuple(_figures(row)),
        members=tuple(text.visible(member, 300) for member in row.members),
        notes=tuple(text.without_paths(note, 600) for note in row.notes),
        snippets=tuple(_snippets(row, room)),
    )


def _side(verdict: Mapping[str, Any], inputs: int) -> Side:
    """Return a verdict of the JSON contract for reading."""
    severity = str(verdict.get("severity", ""))
    return Side(
        severity if severity in ("none", "warning", "error") else "error",
        text.severity_shape(severity),
        text.headline(str(verdict.get("verdict", "")), severity),
        first_sentence(text.sentence(verdict.get("reason", ""))),
        tuple(effects(_effect(verdict.get("output") or {}))),
        inputs,
    )


def _effect(output: Mapping[str, Any]) -> Effect:
    """Return the effect of a verdict as JSON has it: infinities are strings, keys of a newer one are passed over."""
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    known = {field.name for field in dataclasses.fields(Effect)}
    values: dict[str, Any] = {name: special.get(str(value), value) for name, value in output.items() if name in known}
    numbers: dict[str, Any] = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return Effect(**numbers)


def _basis(row: ProofRow) -> str:
    if not row.proven:
        return "not proven"
    seen = text.plural(row.inputs, "input")
    if row.held_back is None:
        return f"proven on {seen}, none of them held back"
    return f"proven on {seen}, and on {row.held_inputs:,} that the search did not see"


def _figures(row: ProofRow) -> Iterator[tuple[str, str]]:
    """Yield what is known of a remedy, in one order, so that remedies can be compared."""
    if (rooms := headroom(row)) is not None:
        yield "least headroom", f"{bits(rooms[0])} → {bits(rooms[1])} bits"
    if (error := figure(row, "function_error")) is not None:
        yield "in float32", _function(row, error)
    if (share := figure(row, "same_tokens")) is not None:
        yield "same tokens", text.share(share)
    if (after := figure(row, "loss_after")) is not None:
        yield "task loss", _loss(row, after)
    for name, said, same in (
        ("seconds", "time of a forward", _SAME_TIME),
        ("bytes", "memory of weights", _SAME_BYTES),
    ):
        if (ratio := figure(row, name)) is not None:
            yield said, "the same" if abs(ratio - 1) <= same else f"× {ratio:.3g}"
    if (runs := figure(row, "runs")) is not None:
        yield "search", text.plural(int(runs), "run")


def _function(row: ProofRow, error: float) -> str:
    """Return how far the mended model's float32 outputs are from the original's."""
    if error == 0 and not figure(row, "function_ulp"):
        return "the same bits"
    said = [f"off by {text.number(error)}"]
    if (ulp := figure(row, "function_ulp")) is not None and ulp < 1000:
        said.append(f"{text.number(ulp)} ulp")
    if kl := figure(row, "function_kl"):
        said.append(f"KL {text.number(kl)}")
    return ", ".join(said)


def _loss(row: ProofRow, after: float) -> str:
    """Return the task loss in the precision before and after, and float32's."""
    low, wide = figure(row, "loss_low"), figure(row, "loss_before")
    said = f"{'NaN' if low != low else text.number(low)} → " if low is not None else ""
    return f"{said}{text.number(after)}" + ("" if wide is None else f" ({text.number(wide)} in float32)")


def _snippets(row: ProofRow, room: int) -> Iterator[Snippet]:
    for title, given in row.snippets.items():
        shown = text.block(given)
        fits = len(shown) <= min(room, _LONGEST)
        room -= len(shown) if fits else 0
        yield Snippet(text.visible(title, 120), shown if fits else "")
