"""A comparison as the body of an issue or a comment in review: GitHub-flavoured Markdown, the long parts folded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from overflow_lab.analysis.comparison import Comparison
from overflow_lab.report import diff, text
from overflow_lab.report.markdown import LIMIT, code, folded, prose, table

# Rows of each folded table: fewer where names are so long that more would not fit.
_CAPS = (60, 25, 8, 0)


def render(comparison: Comparison) -> str:
    """Return the Markdown, less than 60,000 characters, ending in a newline; it names no absolute path."""
    for cap in _CAPS:
        body = "\n".join(_lines(comparison, cap)).rstrip() + "\n"
        if len(body) < LIMIT:
            return body
    return body[: LIMIT - 100].rpartition("\n")[0] + "\n\n(cut: `--json` has the rest)\n"


def _lines(comparison: Comparison, cap: int) -> Iterator[str]:
    yield f"### {code(comparison.before.label)} → {code(comparison.after.label)}"
    yield ""
    yield prose(diff.models(comparison)) + ". " + prose(diff.summary(comparison))
    yield ""
    yield from (f"> {prose(note)}\n" for note in diff.notes(comparison))
    for line in diff.verdicts(comparison):
        yield from _verdict(line)
    lines = diff.sites(comparison, cap=cap)
    if lines:
        yield from folded(f"{len(lines)} of {text.plural(len(comparison.changed), 'site')} that changed", _sites(lines))
    for side in ("before", "after"):
        yield from _listed(f"Only {side}", [code(name) for name in diff.only(comparison, side)], cap)
    yield from _listed("Renamed", [f"{code(old)} → {code(new)}" for old, new in diff.renames(comparison)], cap)
    for title, found in (
        ("Inputs that differ", comparison.inputs),
        ("Weights that differ", comparison.weights),
        ("Also different", comparison.differences),
    ):
        said = [f"{code(fact.label)}: {code(fact.before)} → {code(fact.after)}" for fact in diff.facts(found)]
        yield from _listed(title, said, cap)
    yield prose(diff.RULE)


def _verdict(line: diff.VerdictLine) -> Iterator[str]:
    yield f"**{line.shape} {prose(line.precision)}: {prose(line.headline)}, {line.judged}**"
    yield ""
    yield from table(
        ("", "before", "after"),
        [
            *((prose(fact.label), *_sides(fact)) for fact in line.facts),
            ("sites", "", line.sites),
        ],
    )
    yield ""


def _sides(fact: diff.Fact) -> tuple[str, str]:
    """Return both sides; numbers are ours, and need no escape."""
    say = code if fact.label == "where" else prose if fact.label == "why" else str
    before, after = (text.MISSING if side == text.MISSING else say(side) for side in (fact.before, fact.after))
    return before, after if fact.changed else "as before"


def _sites(lines: Sequence[diff.SiteLine]) -> list[str]:
    rows = [
        (
            f"{line.shape} {line.judged}",
            prose(line.precision),
            code(f"{line.module} {line.port}".strip())
            + (f" (was {code(line.renamed_from)})" if line.renamed_from else ""),
            line.why,
            *(f"{f.before} → {f.after}" if f.changed else f.after for f in (line.headroom, line.bits, line.nonfinite)),
        )
        for line in lines
    ]
    return table(("", "precision", "module", "why", "headroom, bits", "bits kept", "NaN, inf"), rows)


def _listed(title: str, lines: Sequence[str], cap: int) -> Iterator[str]:
    if lines:
        more = [f"- and {len(lines) - cap:,} more"] if len(lines) > cap else []
        yield from folded(f"{title}: {len(lines):,}", [*(f"- {line}" for line in lines[:cap]), *more])
