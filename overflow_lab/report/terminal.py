"""The scan on a terminal: verdicts first, then the sites nearest to a limit. Renderables only: nothing is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import summary, tables, text
from overflow_lab.report.plots import low_precisions
from overflow_lab.report.proofs import advised, proofs

WORST = 10
_STYLES = {"none": "bold green", "warning": "bold yellow", "error": "bold red"}
_TONES = {"bad": "bold red", "near": "yellow", "": ""}
_MOST_PRECISIONS = 2  # the columns of more do not fit 80 characters


def render(recording: Recording, diagnosis: Diagnosis, *, brief: bool = False) -> Group:
    """Return what a person should read after a scan, for a console of any width from 60 columns.

    With `brief` it is the verdicts alone. Names are rich Text and never markup; colours are the console's to drop
    (`NO_COLOR`), shapes say the same.
    """
    parts: list[RenderableType] = [_title(recording)]
    if unfinished := summary.banner(recording):
        parts.append(Text(f"▲ {unfinished}", style="bold yellow"))
    for card in advised(summary.cards(diagnosis), proofs(recording, budget=0)):
        parts += [Text(), _verdict(card)]
    if brief:
        return Group(*parts)
    layers = frame.layers(recording)
    if not layers.empty:
        parts += [Text(), worst_table(layers)]
    answers = tables.answer_table(recording)
    if answers.tally:
        parts += [Text(), answer_summary(answers)]
    blind = tables.blind_spots(recording)
    if blind:
        parts += [Text(), _blind(blind)]
    return Group(*parts)


def _title(recording: Recording) -> Text:
    said = Text(summary.model(recording), style="bold")
    kind = summary.model_class(recording)
    return said.append(f"  {kind + ', ' if kind else ''}{summary.basis(recording)}", style="not bold dim")


def _verdict(card: summary.Card) -> Group:
    """Return one verdict: the headline, and below it where, why, what reaches the output, what next."""
    head = Text.assemble((f"{card.shape} ", _STYLES.get(card.severity, "")), (card.precision, "bold"), "  ")
    head.append(card.headline, style=_STYLES.get(card.severity, ""))
    lines = Table.grid(padding=(0, 2))
    lines.add_column(style="dim", no_wrap=True)
    lines.add_column(overflow="fold", ratio=1)
    for label, words in _facts(card):
        lines.add_row(label, words)
    return Group(head, Padding(lines, (0, 0, 0, 2)))


def _facts(card: summary.Card) -> Iterator[tuple[str, Text]]:
    if card.where:
        operation = f"  ({card.operation})" if card.operation else ""
        yield "where", Text.assemble((card.where, "bold"), operation)
    yield "why", _prose(card.reason)
    if len(card.chain) > 1:
        yield "chain", _chain(card.chain)
    if card.also:
        yield "also", _prose("; ".join(card.also))
    if card.effects:
        yield "output", Text("; ".join(card.effects))
    if card.advice:
        yield "next", _prose(card.advice)


def _chain(steps: Sequence[summary.Step]) -> Text:
    """Return the explanation from the output back to its origin, a line for each link."""
    lines = []
    for number, step in enumerate(steps):
        line = Text("← " if number else "", style="dim")
        place = " ".join(part for part in (step.where, step.operation) if part)
        line.append(f"{place} " if place else "", style="not dim").append(step.text.replace("`", ""), style="not dim")
        lines.append(line.append(f"  {step.source}" if step.source else "", style="dim"))
    return Text("\n").join(lines)


def _prose(sentence: str) -> Text:
    """Return a sentence without the backticks round its names: a terminal shows them as they are."""
    return Text(sentence.replace("`", ""))


def worst_table(layers: pd.DataFrame, *, most: int = WORST) -> Table:
    """Return the sites with non-finite values, then those with the least float16 headroom."""
    names = _shown(layers)
    worst = tables.badness(layers).head(most)
    title = f"{len(worst)} of {text.plural(len(layers), 'layer')}, the worst first"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("absmax", justify="right", no_wrap=True)
    table.add_column("fp16\nroom", justify="right", no_wrap=True)
    for name in names:
        table.add_column(f"{_short(name)}\nbits", justify="right", no_wrap=True)
        table.add_column(f"{_short(name)}\nNaN, inf", justify="right", no_wrap=True)
    for row in worst.to_dict("records"):
        bad = [tables.nonfinite_cell(row[f"nonfinite_{name}"]) for name in names]
        bits = [tables.Cell(text.bits(row[f"bits_{name}"])) for name in names]
        pairs = [cell for pair in zip(bits, bad, strict=True) for cell in pair]
        cells = [tables.Cell(text.number(row["absmax"])), tables.headroom_cell(row["headroom_float16"]), *pairs]
        table.add_row(Text(_site(row["module"], row["port"])), *_cells(cells))
    table.caption = "absmax and room (doublings left in float16) from float32; bits agree with float32"
    if len(names) < len(low_precisions(layers)):
        table.caption += "; the report has the other precisions"
    table.caption_justify, table.caption_style = "left", "dim"
    return table


def _shown(layers: pd.DataFrame) -> list[str]:
    """Return the precisions that have columns: those with the most non-finite values, in the order scanned."""
    names = low_precisions(layers)
    bad = {name: float(layers[f"nonfinite_{name}"].fillna(0).sum()) for name in names}
    chosen = sorted(names, key=lambda name: -bad[name])[:_MOST_PRECISIONS]
    return [name for name in names if name in chosen]


def _cells(cells: Sequence[tables.Cell]) -> list[Text]:
    return [Text(cell.text, style=_TONES[cell.tone]) for cell in cells]


def _site(module: object, port: object) -> str:
    """Return a module and, where it is not the only output, its port."""
    name = text.module_name(str(module), 160)
    return name if port == "output" else f"{name} {text.visible(port, 40)}"


def _short(name: str) -> str:
    """Return a precision's short name, for narrow columns."""
    head, _, rest = name.partition("-")
    return {"float16": "fp16", "bfloat16": "bf16"}.get(head, head) + (f"\n{rest}" if rest else "")


def answer_summary(answers: tables.AnswerTable) -> Table:
    """Return how many generated answers are the same, changed or failed, for each precision and search."""
    table = Table(
        title="answers, against float32",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for head, justify in (
        ("precision", "left"),
        ("search", "left"),
        ("same", "right"),
        ("changed", "right"),
        ("failed", "right"),
    ):
        table.add_column(head, justify="right" if justify == "right" else "left")
    for precision, strategy, same, changed, failed in answers.tally:
        tones = ("", "near" if changed else "", "bad" if failed else "")
        cells = [tables.Cell(f"{n:,}", tone) for n, tone in zip((same, changed, failed), tones, strict=True)]
        table.add_row(Text(text.visible(precision, 40)), Text(text.visible(strategy, 40)), *_cells(cells))
    return table


def _blind(lines: Sequence[tuple[str, str]], most: int = 4) -> Group:
    """Return what the scan could not see, briefly."""
    said = Text("\n").join(Text(f"{reason}: {text.shorten(modules, 160)}") for reason, modules in lines[:most])
    if len(lines) > most:
        said.append(f"\nand {len(lines) - most} more kinds; the report lists them", style="dim")
    return Group(Text("not seen", style="bold"), Padding(said, (0, 0, 0, 2)))
