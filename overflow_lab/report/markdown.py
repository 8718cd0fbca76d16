"""The diagnosis as the body of an issue: GitHub-flavoured Markdown that fits, with the long parts folded.

Trackers turn bare names into mentions, links and emphasis, and strip most HTML: names stand in code spans, prose is
escaped, and `<details>` is the only HTML, which GitHub and GitLab keep.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Sequence

from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import summary, tables, text
from overflow_lab.report.plots import low_precisions
from overflow_lab.report.proofs import Mended, ProofLine, advised, proofs

# GitHub takes 65,536 characters; some room is left for what the author writes round it.
LIMIT = 60_000
# Rows of the folded tables: fewer where names are so long that more would not fit.
_CAPS = (40, 15, 5, 0)
_NAME = 160
# Characters of code to paste for each of these rows.
_SNIPPETS = 300
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>~])")
# What trackers make of these outside of code: a mention, a link to an issue. A zero-width space keeps them apart.
_LINKED = re.compile(r"([@#!&$%])(?=\w)")
# What begins a heading, a list or a rule at the start of a line.
_OPENING = re.compile(r"^([#+=-]|\d+(?=[.)]))")
_TICKS = re.compile(r"`+")
_PIPE = re.compile(r"(\\*)\|")
# The lines of `transformers env`, in its order: what maintainers ask for first.
_ASKED = (
    ("`overflow-lab` version", "overflow-lab"),
    ("`transformers` version", "transformers"),
    ("Platform", "system"),
    ("Processor", "processor"),
    ("Python version", "python"),
    ("Tokenizers version", "tokenizers"),
    ("Safetensors version", "safetensors"),
    ("Accelerate version", "accelerate"),
    ("Numpy version", "numpy"),
    ("PyTorch version", "torch"),
    ("Device", "device"),
)


def render(recording: Recording, diagnosis: Diagnosis) -> str:
    """Return the issue body, less than 60,000 characters, ending in a newline; it names no absolute path."""
    for cap in _CAPS:
        body = "\n".join(_lines(recording, diagnosis, cap)).rstrip() + "\n"
        if len(body) < LIMIT:
            return body
    return body[: LIMIT - 100].rpartition("\n")[0] + "\n\n(cut: the report has the rest)\n"


def code(name: object, limit: int = _NAME) -> str:
    """Return a name as a code span, whatever the name is."""
    shown = text.visible(name, limit)
    if not shown.strip():
        return ""
    fence = "`" * (max((len(run) for run in _TICKS.findall(shown)), default=0) + 1)
    pad = " " if shown[0] == "`" or shown[-1] == "`" else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def prose(sentence: str) -> str:
    """Return a sentence with its special characters escaped; what stands in single backticks stays code."""
    parts = re.split(r"`([^`]*)`", text.visible(sentence, 2000))
    made = "".join(code(part) if i % 2 else _plain(part) for i, part in enumerate(parts))
    return _OPENING.sub(lambda found: f"{found[1]}\u200b", made)


def _plain(part: str) -> str:
    return _LINKED.sub("\\1\u200b", _SPECIAL.sub(r"\\\1", part))


def _lines(recording: Recording, diagnosis: Diagnosis, cap: int) -> Iterator[str]:
    mended = proofs(recording, budget=_SNIPPETS * cap)
    cards = advised(summary.cards(diagnosis), mended)
    kind = summary.model_class(recording)
    yield f"### {code(summary.model(recording))}{' (' + code(kind) + ')' if kind else ''} in low precision"
    yield ""
    if unfinished := summary.banner(recording):
        yield from (f"> {prose(unfinished)}", "")
    yield from table(("precision", "verdict", "module", "operation"), [_row(card) for card in cards])
    yield from ("", f"Seen on {_plain(summary.basis(recording))}.", "")
    for card in cards:
        if card.severity != "none":
            yield from _card(card)
    for group in mended:
        yield from _mended(group)
    yield from _folded_findings(diagnosis, cap)
    yield from _folded_layers(recording, cap)
    yield from _folded_answers(recording)
    yield from _folded_blind_spots(recording, cap)
    yield from folded("Environment", list(_environment(recording)))


def _row(card: summary.Card) -> list[str]:
    return [code(card.precision), f"{card.shape} {card.headline}", code(card.where), code(card.operation)]


def _card(card: summary.Card) -> Iterator[str]:
    """Yield one verdict: why, how it came to the output, what mends it."""
    yield from (f"#### {_plain(card.precision)} {card.headline}", "", prose(card.reason), "")
    if card.chain:
        yield from ("From the output back to the origin:", "")
    for number, step in enumerate(card.chain, 1):
        place = " ".join(part for part in (code(step.where), code(step.operation)) if part)
        line = f"{number}. {place + ' ' if place else ''}{prose(step.text)}"
        yield f"{line} ({code(step.source)})" if step.source else line
    yield ""
    if card.effects:
        yield from (f"What reaches the output: {_plain('; '.join(card.effects))}.", "")
    if card.advice:
        yield from (f"**What mends it:** {prose(card.advice)}", "")


def _mended(group: Mended) -> Iterator[str]:
    """Yield what was tried for one precision, before and after, and the text to paste of the best."""
    yield from (f"#### What mends {_plain(group.precision)}", "")
    best = group.best
    after = f", after: {best.after.headline}" if best and best.after else ""
    yield from (f"Before: {_plain(group.before.headline)}{_plain(after)}; {_plain(group.statement)}.", "")
    if best:
        names = [what for what, _ in best.figures if what != "search"]
        rows = [[prose(line.title), _side(line), *_figures(line, names)] for line in group.offered]
        yield from table(("remedy", "second scan", *names), rows)
        yield from ("", f"The first is {_plain(best.basis)}.", "")
        for snippet in best.snippets[:1]:
            if snippet.text:
                yield from folded(f"{best.title}: {snippet.title}", fenced(snippet.text))
    if group.unproven:
        lines = [f"- {prose(line.title)}: {prose(line.reason)}" for line in group.unproven]
        yield from folded(f"{len(lines)} tried and not proven", lines)


def _side(line: ProofLine) -> str:
    if line.after is None:
        return text.MISSING
    held = ", held back too" if line.held else ""
    return f"{line.after.shape} {_plain(line.after.headline)}{held}"


def _figures(line: ProofLine, names: Sequence[str]) -> list[str]:
    found = dict(line.figures)
    return [_plain(found.get(name, text.MISSING)) for name in names]


def fenced(code_text: str, language: str = "python") -> list[str]:
    """Return the lines of a block of code behind a fence that is longer than any in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _TICKS.findall(code_text)), default=0))
    return [f"{fence}{language}", *code_text.split("\n"), fence]


def _folded_findings(diagnosis: Diagnosis, cap: int) -> Iterator[str]:
    found = summary.findings(diagnosis)
    rows = [
        [code(f.precision), _plain(f.title), code(f.where), code(f.operation), prose(f.message)] for f in found[:cap]
    ]
    if len(found) > 1 and rows:
        title = f"{_of(len(rows), len(found))} findings"
        yield from folded(title, table(("precision", "mechanism", "module", "operation", "what"), rows))


def _folded_layers(recording: Recording, cap: int) -> Iterator[str]:
    layers = frame.layers(recording)
    worst = tables.badness(layers).head(cap)
    if worst.empty:
        return
    names = low_precisions(layers)
    head = ["module", "absmax in float32", "headroom in float16, bits"]
    for name in names:
        head += [f"{name}: bits kept", f"{name}: NaN, inf"]
    rows = []
    for row in worst.to_dict("records"):
        port = "" if row["port"] == "output" else f" {code(row['port'])}"
        module = code(text.module_name(str(row["module"])))
        cells = [module + port, text.number(row["absmax"]), tables.headroom_cell(row["headroom_float16"]).text]
        for name in names:
            cells += [text.bits(row[f"bits_{name}"]), tables.nonfinite_cell(row[f"nonfinite_{name}"]).text]
        rows.append(cells)
    yield from folded(f"{_of(len(rows), len(layers))} layers, the worst first", table(head, rows))


def _folded_answers(recording: Recording) -> Iterator[str]:
    tally = tables.answer_table(recording).tally
    rows = [[code(p), _plain(text.visible(s, 40)), f"{a:,}", f"{b:,}", f"{c:,}"] for p, s, a, b, c in tally]
    if rows:
        yield from folded("Generated answers", table(("precision", "search", "same", "changed", "failed"), rows))


def _folded_blind_spots(recording: Recording, cap: int) -> Iterator[str]:
    found = tables.blind_spots(recording, shown=4)
    shown = found[: max(cap, 3)]
    lines = [f"- {prose(reason)}: {_plain(text.shorten(modules, 300))}" for reason, modules in shown]
    if lines:
        yield from folded(f"What the scan could not see ({_of(len(shown), len(found))})", lines)


def _of(shown: int, total: int) -> str:
    return f"{shown:,} of {total:,}" if shown < total else f"{total:,}"


def folded(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield lines behind a heading that opens them; the empty line after it lets Markdown begin again."""
    yield from (f"<details><summary>{_in_html(title)}</summary>", "", *lines, "", "</details>", "")


def _in_html(said: str) -> str:
    """Return a sentence for a line of HTML, where backslashes escape nothing and backticks are no code."""
    kept = _LINKED.sub("\\1\u200b", text.visible(said, _NAME).replace("`", ""))
    return html.escape(kept, quote=False)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose cells are Markdown already; a pipe in them divides none."""
    made = [_line(head), _line(["---"] * len(head))]
    return made + [_line(row) for row in rows]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_PIPE.sub(_escaped_pipe, cell) for cell in cells) + " |"


def _escaped_pipe(found: re.Match[str]) -> str:
    """Return a pipe that divides no cells. Renderers differ about backslashes before it: they are kept away."""
    return f"{found[1]}\u200b\\|" if found[1] else "\\|"


def _environment(recording: Recording) -> Iterator[str]:
    """Yield the environment as `transformers env` lays it out, then how each precision was run."""
    facts = recording.header.environment
    for label, key in _ASKED:
        if facts.get(key) not in (None, ""):
            yield f"- {label}: {_plain(text.without_paths(facts[key], 120))}"
    for key in facts:
        if key not in {known for _, known in _ASKED}:
            yield f"- {prose(text.visible(key, 60))}: {_plain(text.without_paths(facts[key], 120))}"
    for run in summary.executions(recording):
        kept = f"; in float32: {_plain(run.kept)}" if run.kept and run.precision != "float32" else ""
        yield f"- {code(run.precision)}: {_plain(run.cast)}{kept} ({_plain('; '.join(run.runs))})"
    options = ((key, value) for key, value in recording.header.options.items() if value not in (None, ""))
    said = ", ".join(f"{text.visible(key, 60)}={text.without_paths(value, 60)}" for key, value in options)
    if said:
        yield f"- Options: {_plain(said)}"
