"""A scan in a notebook: its verdicts as a small table that needs no style of the page around it."""

from __future__ import annotations

from markupsafe import Markup

from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import summary as first_screen

_CELL = Markup('<td style="text-align:left;vertical-align:top">{}</td>')


def summary(recording: Recording, diagnosis: Diagnosis) -> str:
    """Return the verdicts as an HTML table, everything escaped."""
    heads = ("precision", "verdict", "where", "why", "next")
    head = Markup("").join(Markup('<th style="text-align:left">{}</th>').format(name) for name in heads)
    lines = [_line(card) for card in first_screen.cards(diagnosis)]
    title = Markup("<b>{}</b> {}").format(first_screen.model(recording), first_screen.basis(recording))
    banner = Markup("<br>{}").format(unfinished) if (unfinished := first_screen.banner(recording)) else Markup("")
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(head, Markup("").join(lines))
    return str(Markup("<div>{}{}{}</div>").format(title, banner, table))


def _line(card: first_screen.Card) -> Markup:
    where = f"{card.where} {card.operation}".strip()
    cells = (card.precision, f"{card.shape} {card.headline}", where, card.reason, card.advice)
    return Markup("<tr>{}</tr>").format(Markup("").join(_CELL.format(cell.replace("`", "")) for cell in cells))
