"""The report as one HTML file: closed (it fetches nothing), bounded in size, readable without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from typing import Any

import jinja2
import pandas as pd
from markupsafe import Markup, escape

from overflow_lab import __version__
from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import plots, summary, svg, tables, text
from overflow_lab.report.operation_table import OperationTable, operation_table

FINDING_CAP = 60
# The range column of the table shows magnitudes from 2**-30 to 2**24; wider ones touch the ends.
_BAR = (-30.0, 24.0)
# Where a name may break. Entities such as &lt; hold none of these places.
_BREAKS = re.compile(r"(?<=[a-zA-Z0-9]\.)(?=\w)|(?<=[a-zA-Z0-9]_)(?=\w)|(?<=[a-z]{2})(?=[A-Z])")
_SECTIONS = (
    ("findings", "Findings"),
    ("ranges", "Ranges"),
    ("growth", "Error growth"),
    ("answers", "Answers"),
    ("layers", "Layers"),
    ("operations", "Operations"),
    ("casts", "Casts"),
    ("blind", "Blind spots"),
    ("environment", "How it was run"),
)


@dataclass(frozen=True)
class FigurePart:
    """A picture with what is written around it."""

    id: str
    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class Page:
    """All that the template shows, as plain values."""

    model: str
    model_class: str
    basis: str
    created: str
    banner: str
    cards: Sequence[summary.Card]
    findings: Sequence[summary.FindingLine]
    findings_total: int
    figures: Sequence[FigurePart]
    answers: tables.AnswerTable
    layers: tables.LayerTable
    operations: OperationTable
    casts: Sequence[tables.CastLine]
    casts_total: int
    blind_spots: Sequence[tuple[str, str]]
    notes: Sequence[str]
    executions: Sequence[summary.Execution]
    environment: str

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The sections that this page has, as (id, title)."""
        there = {
            "findings": self.findings,
            "answers": self.answers.lines,
            "operations": self.operations.lines,
            "casts": self.casts,
            "blind": self.blind_spots or self.notes,
            **{figure: any(f.id == figure for f in self.figures) for figure in ("ranges", "growth")},
        }
        return [(name, title) for name, title in _SECTIONS if there.get(name, True)]

    @property
    def layer_groups(self) -> list[tuple[str, int]]:
        """The upper heads of the table of layers, with how many columns each spans."""
        return [(name, len(list(columns))) for name, columns in groupby(self.layers.columns, key=lambda c: c.group)]


def render(recording: Recording, diagnosis: Diagnosis) -> str:
    """Return the report as one HTML page, below 1 MB whatever the size of the model."""
    script = _asset("script.js")
    template = _environment().from_string(_asset("report.html.j2"))
    return template.render(
        page=page(recording, diagnosis),
        policy=_policy(script),
        version=__version__,
        style=Markup(_asset("style.css")),
        script=Markup(script),
    )


def page(recording: Recording, diagnosis: Diagnosis) -> Page:
    """Return the values that the template shows."""
    layers = frame.layers(recording)
    casts, casts_total = tables.cast_table(recording)
    findings = summary.findings(diagnosis)
    return Page(
        model=summary.model(recording),
        model_class=summary.model_class(recording),
        basis=summary.basis(recording),
        created=summary.created(recording),
        banner=summary.banner(recording),
        cards=summary.cards(diagnosis),
        findings=findings[:FINDING_CAP],
        findings_total=len(findings),
        figures=_figures(layers),
        answers=tables.answer_table(recording),
        layers=tables.layer_table(layers),
        operations=operation_table(frame.operations(recording), recording),
        casts=casts,
        casts_total=casts_total,
        blind_spots=tables.blind_spots(recording),
        notes=summary.notes(recording),
        executions=summary.executions(recording),
        environment=summary.environment_text(recording, diagnosis),
    )


def _figures(layers: pd.DataFrame) -> list[FigurePart]:
    """Return the pictures; none where nothing was recorded."""
    if layers.empty:
        return []
    rows = plots.sample_layers(layers)
    made = [_ladder(rows)]
    if any(layers[f"bits_{name}"].notna().any() for name in plots.low_precisions(layers)):
        made.append(_growth(rows))
    return made


def _ladder(rows: pd.DataFrame) -> FigurePart:
    caption = (
        "Each column is a leaf module's output in float32, from its smallest to its largest magnitude, stronger where "
        "more of its values are. A red tick lies beyond float16. Crosses above mark layers that had NaN or inf in that "
        "precision. Hover over a column for its name."
    )
    titles = [_ladder_title(row) for row in rows.to_dict("records")]
    picture = svg.inline(plots.range_ladder(rows), "ranges", label=_ladder_label(rows), titles=titles)
    return FigurePart("ranges", "Range of every layer", Markup(picture), caption + _sampled(rows))


def _growth(rows: pd.DataFrame) -> FigurePart:
    caption = (
        "Bits in which each layer's output agrees with float32: minus log2 of the relative error. Dotted lines are the "
        "bits that the format has; a sudden step down is where the damage happens, a slope is rounding that adds up."
    )
    names = plots.low_precisions(rows)
    titles = [_growth_title(row, names) for row in rows.to_dict("records")]
    label = f"Bits that agree with float32 through the depth, for {', '.join(names)}; the table has the numbers."
    picture = svg.inline(plots.error_growth(rows), "growth", label=label, titles=titles)
    return FigurePart("growth", "Error growth through the depth", Markup(picture), caption + _sampled(rows))


def _sampled(rows: pd.DataFrame) -> str:
    """Return how many layers a column stands for, where that is more than one."""
    most, total = int(rows["stands_for"].max()), int(rows["stands_for"].sum())
    if most == 1:
        return ""
    return f" Showing {len(rows):,} of {total:,} layers: a column is the worst of up to {most} neighbours."


def _ladder_label(rows: pd.DataFrame) -> str:
    """Return the picture in one sentence, for those who do not see it."""
    worst = tables.badness(rows).iloc[0]
    name = text.module_name(str(worst["module"]), 120)
    return (
        f"Range of {len(rows):,} layers on a log2 scale. Worst: {name}, absmax {text.number(worst['absmax'])}, "
        f"headroom {text.bits(worst['headroom_float16'])} bits in float16. The table of layers has the numbers."
    )


def _ladder_title(row: Mapping[Hashable, Any]) -> str:
    name, headroom = text.module_name(str(row["module"]), 200), text.bits(row["headroom_float16"])
    return f"{name}\nabsmax {text.number(row['absmax'])}, headroom {headroom} bits in float16"


def _growth_title(row: Mapping[Hashable, Any], names: Sequence[str]) -> str:
    said = [f"{name} {text.bits(row[f'bits_{name}'])} bits" for name in names]
    return "\n".join([text.module_name(str(row["module"]), 200), ", ".join(said)])


def _environment() -> jinja2.Environment:
    made = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "sort_keys": True}
    made.filters |= {"breakable": breakable, "prose": prose, "bar": range_bar, "shorten": text.shorten}
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
    if span is None:
        return Markup("")
    low, high = _BAR
    x0, x1 = (min(100.0, max(0.0, 100 * (value - low) / (high - low))) for value in span)
    limit = 100 * (16 - low) / (high - low)
    bar = f'<rect x="{x0:.0f}" y="3" width="{max(1.0, x1 - x0):.0f}" height="6"/><path d="M{limit:.0f} 0v12"/>'
    head = '<svg class="bar" viewBox="0 0 100 12" preserveAspectRatio="none" aria-hidden="true">'
    return Markup(f"{head}{bar}</svg>")


def _policy(script: str) -> str:
    """Return the content security policy: nothing is loaded, only this page's own script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("overflow_lab.report") / "template" / name).read_text(encoding="utf-8")
