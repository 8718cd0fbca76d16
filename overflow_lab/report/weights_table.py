"""The weights of a checkpoint on a terminal: what each cast loses together, and of the tensors that lose most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overflow_lab.recording import CastRow
from overflow_lab.report import text

_STYLES = {"none": "bold green", "warning": "bold yellow", "error": "bold red"}
_WORDS = {"none": "fits", "warning": "loses", "error": "does not fit"}
# Columns of the table of tensors: heading, and what is shown of a cast.
_COLUMNS = ("largest", "to inf", "to zero", "subnormal", "energy")
_NAME = 44


def render(
    title: str, summaries: Mapping[str, Mapping[str, Any]], lost: Mapping[str, Sequence[CastRow]], *, most: int
) -> Group:
    """Return a line for each precision, and below it, where that matters, at most `most` tensors that lose most.

    `title` says what was read; `summaries` and `lost` are those of `Weights`, by precision.
    """
    parts: list[RenderableType] = [Text(title, style="bold")]
    for name, summary in summaries.items():
        parts += [Text(), _line(name, summary)]
        if summary["severity"] != "none" and lost[name] and most > 0:
            parts.append(_table(lost[name], most))
    return Group(*parts)


def _line(name: str, summary: Mapping[str, Any]) -> Text:
    severity = str(summary["severity"])
    head = Text.assemble(
        (f"{text.severity_shape(severity)} ", _STYLES[severity]), (text.visible(name, 40), "bold"), "  "
    )
    head.append(_WORDS[severity], style=_STYLES[severity])
    named = (("to_infinity", "to infinity"), ("to_zero", "to zero"), ("to_subnormal", "to subnormal"))
    said = [f"{summary[key]:,} {words}" for key, words in named if summary[key]]
    said = (
        [f"{', '.join(said)}, in {text.plural(summary['tensors'], 'tensor')}"] if said else ["nothing is out of range"]
    )
    said.append(f"headroom {text.bits(summary['headroom'])} bits")
    if summary["rounding"] is not None:
        said.append(f"rounding {_rounding(summary['rounding'])}")
    return head.append(f"  {'; '.join(said)}", style="not bold")


def _table(rows: Sequence[CastRow], most: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows[:most]:
        counts = [f"{n:,}" if n else "" for n in (row.to_infinity, row.to_zero, row.to_subnormal)]
        cells = [text.number(row.absmax), *counts, text.share(row.energy_lost)]
        table.add_row(Text(text.visible(row.name, _NAME)), *(Text(cell) for cell in cells))
    if len(rows) > most:
        table.caption = f"{most:,} of {text.plural(len(rows), 'tensor')} that lose something; --most or --json has more"
        table.caption_justify, table.caption_style = "left", "dim"
    return table


def _rounding(value: float | None) -> str:
    return "exact" if value == 0 else text.share(value)
