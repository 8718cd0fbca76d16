"""A comparison on a terminal: verdicts before and after, then the sites that changed most. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overflow_lab.analysis.comparison import Comparison
from overflow_lab.report import diff, text

SHOWN = 12
_STYLES = {"none": "bold green", "error": "bold red", "": "bold"}
_MOST_NAMES = 6


def render(comparison: Comparison, *, brief: bool = False) -> Group:
    """Return what a person should read after a comparison, for a console of any width from 60 columns.

    With `brief` it is the verdicts alone. Names are rich Text and never markup.
    """
    parts: list[RenderableType] = [Text(diff.title(comparison), style="bold"), Text(diff.models(comparison), "dim")]
    parts += [Text(f"▲ {note}", style="yellow") for note in diff.notes(comparison)]
    for line in diff.verdicts(comparison):
        parts += [Text(), _verdict(line)]
    parts += [Text(), Text(diff.summary(comparison))]
    if brief:
        return Group(*parts)
    sites = diff.sites(comparison)
    if sites:
        parts += [Text(), _sites(sites, len(comparison.changed))]
    return Group(*parts, *_lists(comparison))


def _verdict(line: diff.VerdictLine) -> Group:
    head = Text.assemble((f"{line.shape} ", _STYLES[line.tone]), (line.precision, "bold"), f"  {line.headline}  ")
    head.append(line.judged, style=_STYLES[line.tone])
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", overflow="fold", max_width=18)
    table.add_column(overflow="fold", ratio=1)
    for fact in line.facts:
        table.add_row(fact.label, Text(_said(fact).replace("`", "")))
    table.add_row("sites", Text(line.sites))
    return Group(head, Padding(table, (0, 0, 0, 2)))


def _said(fact: diff.Fact) -> str:
    """Return both sides of a fact; sentences stand one above the other."""
    if not fact.changed:
        return f"{fact.before} (as before)"
    return f"{fact.before}\n→ {fact.after}" if fact.label == "why" else f"{fact.before} → {fact.after}"


def _sites(lines: Sequence[diff.SiteLine], total: int) -> Table:
    shown = lines[:SHOWN]
    title = f"{len(shown)} of {text.plural(total, 'site')} that changed, the most first"
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("module", overflow="fold", ratio=1)
    for head in ("room, bits", "bits kept", "NaN, inf"):
        table.add_column(head, justify="right", no_wrap=True)
    several = len({line.precision for line in lines}) > 1
    for line in shown:
        name = Text(f"{line.module} {line.port}".strip())
        if line.renamed_from:
            name.append(f"\nwas {line.renamed_from}", style="dim")
        name.append(f"\n{line.precision + ', ' if several else ''}{line.why}", style="dim")
        numbers = [Text(_both(fact)) for fact in (line.headroom, line.bits, line.nonfinite)]
        table.add_row(Text(line.shape, style=_STYLES[line.tone]), name, *numbers)
    return table


def _both(fact: diff.Fact) -> str:
    return f"{fact.before} → {fact.after}" if fact.changed else fact.after


def _lists(comparison: Comparison) -> Iterator[RenderableType]:
    """Yield what is on one side only, what was renamed, and what else differs, briefly."""
    for side in ("before", "after"):
        if names := diff.only(comparison, side):
            yield from (Text(), _named(f"only {side}", names))
    if renamed := diff.renames(comparison):
        yield from (Text(), _named("renamed", [f"{old} → {new}" for old, new in renamed]))
    for title, found in (
        ("inputs", comparison.inputs),
        ("weights", comparison.weights),
        ("also different", comparison.differences),
    ):
        if lines := [f"{fact.label}: {fact.before} → {fact.after}" for fact in diff.facts(found)]:
            yield from (Text(), _named(title, lines))


def _named(title: str, lines: Sequence[str]) -> Group:
    more = [f"and {len(lines) - _MOST_NAMES:,} more"] if len(lines) > _MOST_NAMES else []
    said = Text("\n").join(Text(line) for line in [*lines[:_MOST_NAMES], *more])
    return Group(Text(title, style="bold"), Padding(said, (0, 0, 0, 2)))
