"""Remedies on a terminal: the best of each precision in full, the others on a line each."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from overflow_lab.recording import Recording
from overflow_lab.report.proofs import ProofLine, proof_lines

_PARTS = 3


def remedies(recording: Recording) -> Group:
    """Return what was tried against what breaks, from the recording; nothing where nothing was."""
    lines = proof_lines(recording)
    parts: list[RenderableType] = []
    for precision in dict.fromkeys(line.precision for line in lines):
        mine = [line for line in lines if line.precision == precision]
        parts += [Text(), *_precision(precision, mine)]
    return Group(*parts)


def _precision(precision: str, lines: list[ProofLine]) -> Iterator[RenderableType]:
    offered = [line for line in lines if line.proven]
    if offered:
        yield Text.assemble(("✓ ", "bold green"), (precision, "bold"), "  ", (_bare(offered[0].title), "bold green"))
        yield _full(offered[0])
    else:
        yield Text.assemble(("✕ ", "bold red"), (precision, "bold"), "  ", ("no remedy is proven", "bold red"))
    rest = [*offered[1:], *(line for line in lines if not line.proven)]
    if rest:
        yield Padding(_others(rest), (0, 0, 0, 2))


def _full(line: ProofLine) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for label, words in _facts(line):
        table.add_row(label, Text(_bare(words)))
    return Padding(table, (0, 0, 0, 2))


def _facts(line: ProofLine) -> Iterator[tuple[str, str]]:
    after = f" → {line.after.headline}" if line.after else ""
    yield "proof", f"{line.before.headline}{after}, on {line.basis}"
    yield from line.facts
    if line.members:
        more = f"; {len(line.members) - _PARTS} more in the report" if len(line.members) > _PARTS else ""
        yield "parts", "; ".join(line.members[:_PARTS]) + more
    for note in line.notes:
        yield "note", note
    if line.snippets:
        yield "code", f"in the report: {', '.join(label for label, _ in line.snippets)}"


def _others(lines: list[ProofLine]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for line in lines:
        said = Text(_bare(line.title))
        if not line.proven:
            said.append(f": {_bare(line.reason)}", style="dim")
        table.add_row("or" if line.proven else "not proven", said)
    return table


def _bare(sentence: str) -> str:
    return sentence.replace("`", "")
