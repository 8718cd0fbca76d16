"""The report as one HTML file: closed (it fetches nothing), bounded in size, readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import jinja2
from markupsafe import Markup, escape

from overflow_lab import __version__
from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.analysis.steps import steps
from overflow_lab.recording import Recording
from overflow_lab.report import figures, site_keys, summary, tables, text
from overflow_lab.report.assets import asset
from overflow_lab.report.operation_table import OperationTable, operation_table
from overflow_lab.report.proofs import Mended, advised, by_precision, proofs

FINDING_CAP = 60
SCRIPTS = ("unpack.js", "tables.js", "charts.js", "copy.js")
# Where a name may break. Entities such as &lt; hold none of these places.
_BREAKS = re.compile(r"(?<=[a-zA-Z0-9]\.)(?=\w)|(?<=[a-zA-Z0-9]_)(?=\w)|(?<=[a-z]{2})(?=[A-Z])")
_SECTIONS = (
    ("remedies", "What mends it"),
    ("why", "Why"),
    ("ranges", "Range ladder"),
    ("growth", "Error staircase"),
    ("generation", "Generation"),
    ("answers", "Answers"),
    ("findings", "Findings"),
    ("layers", "Layers"),
    ("operations", "Operations"),
    ("casts", "Casts"),
    ("blind", "Blind spots"),
    ("environment", "How it was run"),
)


@dataclass(frozen=True)
class Links:
    """The sites that have a row on the page, by key; `of(key)` is the link to one, "" where there is none."""

    keys: frozenset[str]

    def of(self, key: str) -> str:
        """Return the link to the row of a key, or to that of the operation's module."""
        if key in self.keys:
            return site_keys.anchor(key)
        module = key.split("/")[1] if key.count("/") > 1 else key.rpartition("/")[0]
        later = (f"{key}/{n}" for n in range(1, 9))
        ports = (f"{module}/{port}" for port in ("output", "output[0]"))
        return next((site_keys.anchor(k) for k in (*later, *ports) if k in self.keys), "")


@dataclass(frozen=True)
class Page:
    """All that the template shows, as plain values."""

    model: str
    model_class: str
    basis: str
    created: str
    banner: str
    glance: Sequence[tuple[str, str, str]]
    cards: Sequence[summary.Card]
    mended: Sequence[tuple[Mended, figures.Figure | None]]
    findings: Sequence[summary.FindingLine]
    findings_total: int
    figures: Sequence[figures.Figure]
    answers: tables.AnswerTable
    layers: tables.LayerTable
    operations: OperationTable
    casts: Sequence[tables.CastLine]
    casts_total: int
    blind_spots: Sequence[tuple[str, str]]
    notes: Sequence[str]
    executions: Sequence[summary.Execution]
    environment: str
    links: Links

    @property
    def explained(self) -> list[summary.Card]:
        """The cards of which there is more to say than the first screen does."""
        return [card for card in self.cards if len(card.chain) > 1 or card.also or card.reason != card.short_reason]

    @property
    def proven(self) -> set[str]:
        """The precisions for which a remedy is proven."""
        return {group.precision for group, _ in self.mended if group.offered}

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The sections that this page has, as (id, title)."""
        drawn = {figure.id: figure for figure in self.figures}
        there = {
            "why": self.explained,
            "remedies": self.mended,
            "findings": self.findings,
            "answers": self.answers.lines,
            "operations": self.operations.lines,
            "casts": self.casts,
            "blind": self.blind_spots or self.notes,
            **{name: name in drawn for name in ("ranges", "growth", "generation")},
        }
        return [
            (name, drawn[name].title if name in drawn else title) for name, title in _SECTIONS if there.get(name, True)
        ]

    @property
    def layer_groups(self) -> list[tuple[str, int]]:
        """The upper heads of the table of layers, with how many columns each spans."""
        return [(name, len(list(columns))) for name, columns in groupby(self.layers.columns, key=lambda c: c.group)]


def render(recording: Recording, diagnosis: Diagnosis) -> str:
    """Return the report as one HTML page, below 1 MB whatever the size of the model."""
    script = "\n".join(asset(name) for name in SCRIPTS)
    template = environment().from_string(asset("report.html.j2"))
    return template.render(
        page=page(recording, diagnosis),
        policy=_policy(script),
        version=__version__,
        style=Markup(asset("style.css")),
        script=Markup(script),
    )


def page(recording: Recording, diagnosis: Diagnosis) -> Page:
    """Return the values that the template shows."""
    frames = figures.Frames(frame.layers(recording), frame.operations(recording), steps(recording))
    casts, casts_total = tables.cast_table(recording)
    findings = summary.findings(diagnosis)
    mended = proofs(recording)
    drawn = [figures.before_after(rows, number) for number, rows in enumerate(by_precision(recording).values())]
    return Page(
        model=summary.model(recording),
        model_class=summary.model_class(recording),
        basis=summary.basis(recording),
        created=summary.created(recording),
        banner=summary.banner(recording),
        glance=summary.glance(diagnosis),
        cards=advised(summary.cards(diagnosis), mended),
        mended=list(zip(mended, drawn, strict=True)),
        findings=findings[:FINDING_CAP],
        findings_total=len(findings),
        figures=figures.figures(recording, diagnosis, frames),
        answers=tables.answer_table(recording),
        layers=tables.layer_table(frames.layers),
        operations=operation_table(frames.operations, recording),
        casts=casts,
        casts_total=casts_total,
        blind_spots=tables.blind_spots(recording),
        notes=summary.notes(recording),
        executions=summary.executions(recording),
        environment=summary.environment_text(recording, diagnosis),
        links=_links(frames),
    )


def _links(frames: figures.Frames) -> Links:
    layers = (frames.layers[name] for name in ("module", "port"))
    operations = (frames.operations[name] for name in ("precision", "module", "op", "ordinal"))
    keys = [site_keys.layer_key(str(module), str(port)) for module, port in zip(*layers, strict=True)]
    keys += [site_keys.operation_key(str(p), str(m), str(o), int(n)) for p, m, o, n in zip(*operations, strict=True)]
    return Links(frozenset(keys))


def environment() -> jinja2.Environment:
    """Return what fills in templates of pages: everything is escaped, and what is missing is an error."""
    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {"breakable": breakable, "prose": prose, "bar": range_bar, "shorten": text.shorten}
    made.filters["anchor"] = site_keys.anchor
    return made


def breakable(value: object) -> Markup:
    """Return escaped text that may break within names: after dots and underscores, before capitals."""
    return Markup(_BREAKS.sub("<wbr>", str(escape(value))))


def prose(value: object) -> Markup:
    """Return escaped text with `quoted` parts as code."""
    parts = str(value).split("`")
    if len(parts) % 2 == 0:  # an unmatched backtick stays as it is
        return escape(value)
    code = Markup("<code>{}</code>")
    return Markup("").join(code.format(breakable(part)) if i % 2 else escape(part) for i, part in enumerate(parts))


def range_bar(span: tuple[float, float] | None) -> Markup:
    """Return a small bar from smallest to absmax on the scale of all rows, with a stroke at float16's limit."""
    placed = tables.bar(span)
    return Markup("") if placed is None else Markup(f'<i class="bar" style="--x:{placed[0]};--w:{placed[1]}"></i>')


def _policy(script: str) -> str:
    """Return the content security policy: nothing is loaded, only this page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
