"""The tables of a report as plain rows: layers, answers, casts of weights, blind spots. Markup is added elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overflow_lab.analysis.casts import worst_first
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AnswerCountRow, AnswerRow, BlindSpotRow, CastRow, Recording
from overflow_lab.report import packed, text
from overflow_lab.report.plots import low_precisions, nonfinite_of
from overflow_lab.report.site_keys import layer_key

LAYER_CAP = 150
# The range column of the table shows magnitudes from 2**-30 to 2**24; wider ones touch the ends.
BAR = (-30.0, 24.0)
ANSWER_CAP = 40
CAST_CAP = 60
# Below this many bits a layer counts as near the limit: inputs that were not run easily double a value twice.
NEAR = 2.0


@dataclass(frozen=True)
class Column:
    """A numeric column: `group` is written above, `label` names it, `title` explains it."""

    group: str
    label: str
    title: str


@dataclass(frozen=True)
class Cell:
    """A value as text; `tone` is "bad", "near" or empty and never the only sign: the text says it as well."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class LayerLine:
    """One layer: where it is, its magnitudes as log2 of smallest and absmax (None if it has none), and its cells."""

    key: str
    number: int
    module: str
    class_name: str
    port: str
    leaf: bool
    span: tuple[float, float] | None
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class LayerTable:
    """The layers shown, in order of execution, of `total`; a cap keeps the worst.

    Where it is capped, `rest` holds the others packed for the page's script, the worst first, and `held` their number.
    """

    columns: tuple[Column, ...]
    lines: tuple[LayerLine, ...]
    total: int
    rest: str = ""
    held: int = 0

    @property
    def caption(self) -> str:
        """How much of the whole is shown."""
        shown = len(self.lines)
        if shown == self.total:
            return f"all {text.plural(self.total, 'layer')}, in order of execution"
        return (
            f"showing {shown:,} of {self.total:,} layers, those nearest to a limit{held(shown, self.held, self.total)}"
        )


def held(shown: int, packed_rows: int, total: int) -> str:
    """Return where the rows are that a table does not show."""
    if shown + packed_rows >= total:
        return "; with JavaScript, all can be searched and sorted"
    many = f"; with JavaScript, {shown + packed_rows:,} can be searched" if packed_rows else ""
    return f"{many}; the recording holds them all"


def badness(layers: pd.DataFrame) -> pd.DataFrame:
    """Return the layers from worst to best: any NaN or inf first, then the least float16 headroom, then order."""
    keys = pd.DataFrame(
        {"bad": nonfinite_of(layers) <= 0, "headroom": layers["headroom_float16"], "order": layers["order"]}
    )
    return layers.loc[keys.sort_values(["bad", "headroom", "order"], kind="stable", na_position="last").index]


def layer_table(layers: pd.DataFrame, *, cap: int = LAYER_CAP) -> LayerTable:
    """Return the table of layers, at most `cap` of them, from the frame of `analysis.frame.layers`."""
    names = low_precisions(layers)
    ordered = layers.sort_values("order", kind="stable").reset_index(drop=True)
    worst = badness(ordered)
    made = [
        _layer(int(str(index)) + 1, row, names)
        for index, row in zip(worst.index, worst.to_dict("records"), strict=True)
    ]
    lines = sorted(made[:cap], key=lambda line: line.number)
    rest, count = packed.packed([_packed(line) for line in made[cap:]])
    return LayerTable(tuple(_columns(names)), tuple(lines), len(layers), rest, count)


def _packed(line: LayerLine) -> list[Any]:
    """Return a layer as the page's script takes it: key, name, port, whether a leaf, bar, texts, tones."""
    port = "" if line.port == "output" else line.port
    texts = [str(line.number), line.class_name, *(cell.text for cell in line.cells)]
    return [line.key, line.module, port, int(line.leaf), bar(line.span), texts, tones(line.cells)]


def tones(cells: Sequence[Cell]) -> str:
    """Return the tones of cells, a character each: b, n or a space."""
    return "".join(cell.tone[:1] or " " for cell in cells)


def bar(span: tuple[float, float] | None) -> list[int] | None:
    """Return start and width, in percent of the scale of all rows, of the bar from smallest to absmax."""
    if span is None:
        return None
    x0, x1 = (min(100.0, max(0.0, 100 * (value - BAR[0]) / (BAR[1] - BAR[0]))) for value in span)
    return [round(x0), max(1, round(x1 - x0))]


def _columns(names: Sequence[str]) -> list[Column]:
    columns = [
        Column("float32", "absmax", "largest magnitude in the float32 run"),
        Column("headroom, bits", "float16", "doublings left before float16 overflows, from the float32 run"),
        Column("headroom, bits", "bfloat16", "doublings left before bfloat16 overflows, from the float32 run"),
        Column("float16", "→ 0", "share of values that float16 rounds to zero, from the float32 run"),
    ]
    for name in names:
        columns += [
            Column(f"seen in {name}", "absmax", f"largest finite magnitude in the {name} run"),
            Column(f"seen in {name}", "bits", "bits that agree with float32: -log2 of the relative error"),
            Column(f"seen in {name}", "NaN, inf", "number of non-finite values"),
        ]
    return columns


def _layer(number: int, row: dict[Any, Any], names: Sequence[str]) -> LayerLine:
    cells = [
        Cell(text.number(row["absmax"])),
        headroom_cell(row["headroom_float16"]),
        headroom_cell(row["headroom_bfloat16"]),
        Cell(text.share(row["flushed_float16"])),
    ]
    for name in names:
        bad = row[f"nonfinite_{name}"]
        cells += [Cell(text.number(row[f"observed_{name}"])), Cell(text.bits(row[f"bits_{name}"])), nonfinite_cell(bad)]
    return LayerLine(
        key=layer_key(str(row["module"]), str(row["port"])),
        number=number,
        module=text.module_name(str(row["module"])),
        class_name=text.visible(row["class_name"], 60),
        port=text.visible(row["port"], 60),
        leaf=bool(row["leaf"]),
        span=_span(row["smallest"], row["absmax"]),
        cells=tuple(cells),
    )


def headroom_cell(bits: float | None) -> Cell:
    """Return headroom with its tone: negative does not fit, below 2 bits is near."""
    tone = "" if bits is None or text.missing(bits) else "bad" if bits < 0 else "near" if bits < NEAR else ""
    return Cell(text.bits(bits), tone)


def nonfinite_cell(count: float | None) -> Cell:
    """Return a count of non-finite values; a dash where there is no such run."""
    return Cell(text.count(count), "" if count is None or text.missing(count) or count == 0 else "bad")


def _span(smallest: float | None, absmax: float | None) -> tuple[float, float] | None:
    if smallest is None or absmax is None or not (smallest > 0 and absmax > 0 and math.isfinite(absmax)):
        return None
    return math.log2(smallest), math.log2(absmax)


@dataclass(frozen=True)
class AnswerCell:
    """How one precision answered: `status`, in words, and its text split where it parts from float32's, if stored."""

    status: str
    words: str
    same_text: str | None = None
    other_text: str | None = None


@dataclass(frozen=True)
class AnswerLine:
    """One input's answers by one search: prompt and float32's text if stored, a cell a precision (None: not run)."""

    strategy: str
    number: int
    prompt: str | None
    reference: str | None
    tokens: int
    cells: tuple[AnswerCell | None, ...]


@dataclass(frozen=True)
class AnswerTable:
    """Generated answers; `tally` counts by precision and strategy; with a cap, answers that differ come first."""

    precisions: tuple[str, ...]
    tally: tuple[tuple[str, str, int, int, int], ...]
    lines: tuple[AnswerLine, ...]
    total: int

    @property
    def texts(self) -> bool:
        """Whether the recording holds texts."""
        return any(line.reference is not None or line.prompt is not None for line in self.lines)


def answer_table(recording: Recording, *, cap: int = ANSWER_CAP) -> AnswerTable:
    """Return the answers of all low precisions beside float32's."""
    rows = [row for row in recording.of(AnswerRow) if row.precision != "float32"]
    precisions = tuple(dict.fromkeys(row.precision for row in rows))
    inputs: dict[tuple[str, int, int], dict[str, AnswerRow]] = {}
    for row in rows:
        inputs.setdefault((row.strategy, row.batch, row.sample), {})[row.precision] = row
    numbers = {place: n for n, place in enumerate(sorted({key[1:] for key in inputs}), start=1)}
    lines = [_answers(numbers[key[1:]], group, precisions) for key, group in inputs.items()]
    lines.sort(key=lambda line: line.number)  # stable: the searches of one input stay in their order
    differing = sorted(lines, key=lambda line: all(c is None or c.status == "same" for c in line.cells))
    kept = sorted(differing[:cap], key=lambda line: line.number)
    return AnswerTable(precisions, tuple(_tally(rows, recording.of(AnswerCountRow))), tuple(kept), len(lines))


def _tally(rows: Sequence[AnswerRow], counted_rows: Sequence[AnswerCountRow]) -> list[tuple[str, str, int, int, int]]:
    """Return (precision, strategy, same, changed, failed), of the answers that have rows and of those counted alone."""
    counted: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        place = {"same": 0, "changed": 1}.get(row.status, 2)
        counted.setdefault((row.precision, row.strategy), [0, 0, 0])[place] += 1
    for more in counted_rows:
        before = counted.setdefault((more.precision, more.strategy), [0, 0, 0])
        counted[more.precision, more.strategy] = [
            before[0] + more.same,
            before[1] + more.changed,
            before[2] + more.failed,
        ]
    return [(precision, strategy, *counts) for (precision, strategy), counts in counted.items()]  # type: ignore[misc]


def _answers(number: int, group: dict[str, AnswerRow], precisions: Sequence[str]) -> AnswerLine:
    first = next(iter(group.values()))
    reference = next((row.reference_text for row in group.values() if row.reference_text is not None), None)
    prompt = next((row.prompt for row in group.values() if row.prompt is not None), None)
    return AnswerLine(
        strategy=text.visible(first.strategy, 40),
        number=number,
        prompt=None if prompt is None else text.visible(prompt, 600),
        reference=None if reference is None else text.visible(reference, 600),
        tokens=first.reference_tokens,
        cells=tuple(_answer(row) if (row := group.get(name)) else None for name in precisions),
    )


def _answer(row: AnswerRow) -> AnswerCell:
    if row.status == "failed":
        return AnswerCell("failed", f"failed: {text.without_paths(row.error or 'no message', 300)}")
    known = row.first_difference is not None
    words = "same" if row.status == "same" else f"changed from token {row.first_difference}" if known else "changed"
    if row.text is None:
        return AnswerCell(row.status, words)
    shown, reference = text.visible(row.text, 600), text.visible(row.reference_text or "", 600)
    alike = 0 if row.status != "same" else len(shown)
    while alike < min(len(shown), len(reference)) and shown[alike] == reference[alike]:
        alike += 1
    return AnswerCell(row.status, words, shown[:alike], shown[alike:])


@dataclass(frozen=True)
class CastLine:
    """What a cast did to one tensor."""

    precision: str
    name: str
    role: str
    cast: str
    cells: tuple[Cell, ...]


def cast_table(recording: Recording, *, cap: int = CAST_CAP) -> tuple[list[CastLine], int]:
    """Return at most `cap` casts that lost something, the worst first, and how many there are."""
    rows = worst_first(recording.of(CastRow))
    return [_cast(row) for row in rows[:cap]], len(rows)


def _cast(row: CastRow) -> CastLine:
    fmt = FORMATS.get(row.to_dtype)
    cells = (
        Cell(text.number(row.absmax), "bad" if fmt and row.absmax > fmt.max else ""),
        Cell(text.count(row.elements)),
        Cell(text.count(row.to_infinity), "bad" if row.to_infinity else ""),
        Cell(text.count(row.to_zero), "near" if row.to_zero else ""),
        Cell(text.count(row.to_subnormal)),
        Cell(text.share(row.energy_lost)),
    )
    cast = f"{text.visible(row.from_dtype, 20)} → {text.visible(row.to_dtype, 20)}"
    return CastLine(text.visible(row.precision, 60), text.visible(row.name), text.visible(row.role, 20), cast, cells)


def blind_spots(recording: Recording, *, shown: int = 12) -> list[tuple[str, str]]:
    """Return (reason, modules) with the modules of one reason and precision on one line, at most `shown` by name."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in recording.of(BlindSpotRow):
        groups.setdefault((row.reason, row.precision or ""), []).append(text.module_name(row.module, 120))
    lines = []
    for (reason, precision), modules in groups.items():
        more = f" and {len(modules) - shown:,} more" if len(modules) > shown else ""
        said = text.without_paths(reason, 300) + (f" ({text.visible(precision, 60)})" if precision else "")
        lines.append((said, ", ".join(modules[:shown]) + more))
    return lines
