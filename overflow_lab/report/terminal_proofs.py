"""Remedies on a terminal: the best of each precision in full, the others on a line or two each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overflow_lab.recording import Recording
from overflow_lab.report import text
from overflow_lab.report.proofs import Mended, ProofLine, Side, Snippet, proofs

_STYLES = {"none": "bold green", "warning": "bold yellow", "error": "bold red"}
# What is shown of lists, and of a text to paste; the report has all of it.
_PARTS, _LINES = 3, 6
_NOTE = 240


def remedies(recording: Recording) -> Group:
    """Return what was tried against what breaks, from the recording; nothing where nothing was."""
    parts: list[RenderableType] = []
    for group in proofs(recording):
        parts += [Text(), _head(group), *_offered(group), *_unproven(group)]
    return Group(*parts)


def _head(group: Mended) -> Text:
    """Return the line that says what became of a precision."""
    best = group.best
    said = Text.assemble((group.precision, "bold"), "  ")
    said.append(group.before.headline, style=_style(group.before))
    if best is not None and best.after is not None:
        said.append(" → ").append(best.after.headline, style=_style(best.after))
    return said.append(f"  ({group.statement})", style="dim")


def _offered(group: Mended) -> Iterator[RenderableType]:
    for number, line in enumerate(group.offered):
        yield _marked(Text("✓", "bold green"), Text(_bare(line.title), style="" if number else "bold"))
        if not number:
            yield _indented(_grid([*_facts(line), *_pasted(line)]), 4)
        elif line.in_short:
            yield _indented(Text(line.in_short, style="dim"), 4)


def _unproven(group: Mended) -> Iterator[RenderableType]:
    for line in group.unproven:
        said = Text(f"{_bare(line.title)}: not proven. ").append(text.shorten(_bare(line.reason), _NOTE), style="dim")
        yield _marked(Text("✕", "bold red"), said)


def _facts(line: ProofLine) -> Iterator[tuple[str, str | Text]]:
    yield "proof", line.basis.removeprefix("proven ")
    if line.after is not None:
        yield "output", "; ".join(line.after.effects)
    if line.held is not None and line.only_held:
        yield "held back", "; ".join(line.only_held)
    if line.figures:
        yield "figures", "; ".join(f"{what} {value}" for what, value in line.figures)
    if line.members:
        more = f"; {len(line.members) - _PARTS} more in the report" if len(line.members) > _PARTS else ""
        yield "changes", "; ".join(line.members[:_PARTS]) + more
    for number, note in enumerate(line.notes):
        yield "" if number else "notes", text.shorten(_bare(note), _NOTE)


def _pasted(line: ProofLine) -> Iterator[tuple[str, str | Text]]:
    """Yield the first text to paste where it is short, and the names of the others."""
    shown: Snippet | None = next(iter(line.snippets), None)
    if shown is not None and shown.text and shown.lines <= _LINES:
        yield "paste", Text(shown.text)
    else:
        shown = None
    rest = [one.title for one in line.snippets if one is not shown]
    if rest:
        yield "to paste", f"in the report: {'; '.join(rest)}"


def _grid(rows: list[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for label, words in rows:
        table.add_row(label, words if isinstance(words, Text) else Text(words))
    return table


def _marked(mark: Text, said: Text) -> Padding:
    """Return a text behind a mark; where it wraps it stays behind it."""
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    table.add_row(mark, said)
    return _indented(table, 2)


def _indented(shown: RenderableType, columns: int) -> Padding:
    return Padding(shown, (0, 0, 0, columns))


def _style(side: Side) -> str:
    return _STYLES.get(side.severity, "")


def _bare(sentence: str) -> str:
    """Return a sentence without the backticks round its names: a terminal shows them as they are."""
    return sentence.replace("`", "")
