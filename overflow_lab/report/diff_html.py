"""A comparison as one HTML page: closed, without any script, in the style of the report."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from overflow_lab import __version__
from overflow_lab.analysis.comparison import Comparison
from overflow_lab.report import diff, diff_plots, svg
from overflow_lab.report.assets import asset
from overflow_lab.report.html import environment
from overflow_lab.report.writing import write_file

# No script at all: what a page of names from a model cannot run, it cannot run by mistake either.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
_LIST_CAP = 200


def render(comparison: Comparison) -> str:
    """Return the comparison as one HTML page, below 500 kB whatever the size of the models."""
    template = environment().from_string(asset("diff.html.j2"))
    sites = diff.sites(comparison)
    return template.render(
        title=diff.title(comparison),
        models=diff.models(comparison),
        summary=diff.summary(comparison),
        notes=diff.notes(comparison),
        verdicts=diff.verdicts(comparison),
        picture=_picture(comparison),
        sites=sites,
        several=len({line.precision for line in sites}) > 1,
        total=len(comparison.changed),
        rule=diff.RULE,
        lists=[(heading, lines[:_LIST_CAP], len(lines)) for heading, lines in _lists(comparison) if lines],
        tables=[(name, facts[:_LIST_CAP], len(facts)) for name, facts in _tables(comparison) if facts],
        policy=_POLICY,
        version=__version__,
        style=Markup(asset("style.css")),
    )


def write(comparison: Comparison, path: Path) -> Path:
    """Write the page to `path`, making its folder, and return it. Raises UsageError when it cannot be written."""
    return write_file(path, render(comparison), "the page")


def _picture(comparison: Comparison) -> Markup | None:
    """Return the dumbbell chart; None where no site changed."""
    sites = diff_plots.shown(comparison)
    if not sites:
        return None
    label = (
        f"Headroom and bits kept before and after of the {len(sites)} sites that changed most; "
        "the table below has the numbers."
    )
    return Markup(svg.inline(diff_plots.dumbbells(comparison), "dumbbells", label=label))


def _lists(comparison: Comparison) -> list[tuple[str, list[str]]]:
    renamed = [f"{old} → {new}" for old, new in diff.renames(comparison)]
    return [
        ("Only before", diff.only(comparison, "before")),
        ("Only after", diff.only(comparison, "after")),
        ("Renamed", renamed),
    ]


def _tables(comparison: Comparison) -> list[tuple[str, list[diff.Fact]]]:
    return [
        ("Inputs that differ", diff.facts(comparison.inputs)),
        ("Weights that differ", diff.facts(comparison.weights)),
        ("Versions, options and model", diff.facts(comparison.differences)),
    ]
