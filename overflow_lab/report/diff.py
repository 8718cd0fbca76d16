"""A comparison as plain rows: what changed in each verdict, the sites that changed most, what else differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from overflow_lab.analysis.comparison import (
    BETTER,
    ERROR_BITS,
    HEADROOM_BITS,
    HEADROOM_NEAR,
    WORSE,
    Comparison,
    Difference,
    SitePair,
    VerdictPair,
)
from overflow_lab.analysis.index import bits
from overflow_lab.analysis.results import Effect, Origin, Verdict
from overflow_lab.report import text

# Rows of the page's table of sites; --json and `to_frame` have them all.
SITE_CAP = 200
NAME_CAP = 40
_SHAPES = {WORSE: "▼", BETTER: "▲", "same": "·"}
_TONES = {WORSE: "error", BETTER: "none"}
RULE = (
    "A site is worse or better by the first of these that tells: NaN or inf came, went, or doubled in share; its error "
    f"changed by a factor of {2**ERROR_BITS:g} or more above the rounding of the format; its headroom changed by "
    f"{HEADROOM_BITS:g} bits or more and is below {HEADROOM_NEAR:g} bits on one side. A verdict is by its severity."
)


@dataclass(frozen=True)
class Fact:
    """One thing on both sides; `changed` says whether they differ."""

    label: str
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Whether the two sides differ."""
        return self.before != self.after


@dataclass(frozen=True)
class VerdictLine:
    """What became of one precision's verdict; `tone` is the severity whose colour the judgement has."""

    precision: str
    shape: str
    judged: str
    tone: str
    headline: str
    facts: tuple[Fact, ...]
    sites: str


@dataclass(frozen=True)
class SiteLine:
    """One site that changed: its name, what it was called before where that differs, and the numbers on both sides."""

    precision: str
    shape: str
    judged: str
    tone: str
    module: str
    renamed_from: str
    port: str
    class_name: str
    why: str
    headroom: Fact
    bits: Fact
    nonfinite: Fact


def title(comparison: Comparison) -> str:
    """Return both sides on one line."""
    return f"{text.visible(comparison.before.label, 120)} → {text.visible(comparison.after.label, 120)}"


def models(comparison: Comparison) -> str:
    """Return the model, or both where they differ, and when they were scanned."""
    names = [text.model_name(side.model) for side in (comparison.before, comparison.after)]
    times = [text.visible(side.created, 40)[:16].replace("T", " ") for side in (comparison.before, comparison.after)]
    return ", ".join(first if first == second else f"{first} → {second}" for first, second in (names, times))


def summary(comparison: Comparison) -> str:
    """Return the outcome in one sentence."""
    verdicts = [pair.judged for pair in comparison.verdicts]
    counts = comparison.counts()
    if not comparison.worse and not comparison.better:
        return f"Nothing changed at {text.plural(counts['same'], 'site')}."
    parts = []
    for judged in (WORSE, BETTER):
        said = [text.plural(verdicts.count(judged), "verdict")] if judged in verdicts else []
        said += [text.plural(counts[judged], "site")] if counts[judged] else []
        parts += [f"{' and '.join(said)} {judged}"] if said else []
    return f"{', '.join(parts)}; {text.plural(counts['same'], 'site')} the same."


def verdicts(comparison: Comparison) -> list[VerdictLine]:
    """Return a line for each precision compared, in the order scanned."""
    return [_verdict(comparison, pair) for pair in comparison.verdicts]


def _verdict(comparison: Comparison, pair: VerdictPair) -> VerdictLine:
    words = ["not judged" if v is None else text.headline(v.verdict, v.severity) for v in (pair.before, pair.after)]
    counts = comparison.counts(pair.precision)
    return VerdictLine(
        precision=text.visible(pair.precision.replace(" to ", " → "), 80),
        shape=_SHAPES.get(pair.judged, "?"),
        judged=pair.judged if pair.judged != "none" else "not judged",
        tone=_TONES.get(pair.judged, ""),
        headline=words[0] if words[0] == words[1] else f"{words[0]} → {words[1]}",
        facts=tuple(_facts(pair)),
        sites=", ".join(f"{n:,} {name}" for name, n in counts.items() if n) or "none recorded on both sides",
    )


def _facts(pair: VerdictPair) -> Iterable[Fact]:
    for label, said in (("where", _where), ("why", _why)):
        before, after = said(pair.before), said(pair.after)
        if before != text.MISSING or after != text.MISSING:
            yield Fact(label, before, after)
    for label, of in _EFFECTS:
        before, after = (text.MISSING if v is None else of(v.effect) for v in (pair.before, pair.after))
        if before != text.MISSING or after != text.MISSING:
            yield Fact(label, before, after)


def _where(verdict: Verdict | None) -> str:
    return text.MISSING if verdict is None or verdict.origin is None else _place(verdict.origin)


def _place(origin: Origin) -> str:
    return text.module_name(origin.module, 160) + (f" ({text.visible(origin.op, 80)})" if origin.op else "")


def _why(verdict: Verdict | None) -> str:
    return text.MISSING if verdict is None or verdict.verdict == "ok" else text.sentence(verdict.reason)


def _answers(effect: Effect) -> str:
    if not effect.answers:
        return text.MISSING
    parts = [(effect.changed_answers, "changed"), (effect.failed_answers, "failed")]
    return (
        ", ".join(f"{n:,} {word}" for n, word in parts if n) + f" of {effect.answers:,}"
        if any(n for n, _ in parts)
        else f"0 changed of {effect.answers:,}"
    )


_EFFECTS: tuple[tuple[str, Callable[[Effect], str]], ...] = (
    ("NaN, inf in output", lambda effect: text.share(effect.nonfinite)),
    ("output error", lambda effect: text.share(effect.relative_error)),
    ("decisions changed", lambda effect: text.share(effect.changed_decisions)),
    ("KL, nats", lambda effect: text.number(effect.kl)),
    ("answers", _answers),
)


def sites(comparison: Comparison, *, cap: int = SITE_CAP) -> list[SiteLine]:
    """Return at most `cap` of the sites that changed, those that changed most first, the worse before the better."""
    worse = [site for site in comparison.changed if site.judged == WORSE]
    better = [site for site in comparison.changed if site.judged == BETTER]
    return [_site(site) for site in [*worse, *better][:cap]]


def _site(site: SitePair) -> SiteLine:
    return SiteLine(
        precision=text.visible(site.precision.replace(" to ", " → "), 80),
        shape=_SHAPES[site.judged],
        judged=site.judged,
        tone=_TONES[site.judged],
        module=text.module_name(site.module),
        renamed_from=text.module_name(site.module_before or "") if site.renamed else "",
        port="" if site.port == "output" else text.visible(site.port, 60),
        class_name=text.visible(site.class_name, 60),
        why=_measure(site),
        headroom=Fact("headroom, bits", *(text.bits(s.headroom if s else None) for s in (site.before, site.after))),
        bits=Fact("bits kept", *(text.bits(bits(s.error if s else None)) for s in (site.before, site.after))),
        nonfinite=Fact("NaN, inf", *(text.count(s.nonfinite if s else None) for s in (site.before, site.after))),
    )


def _measure(site: SitePair) -> str:
    """Return what decided, and by how much: "error, 5.3 bits more"."""
    size = abs(site.change.bits)
    more = site.change.bits > 0
    if site.change.measure == "nonfinite":
        return (
            ("NaN or inf came" if more else "NaN or inf went")
            if math.isinf(size)
            else f"{2**size:.1f} times {'more' if more else 'less'} NaN or inf"
        )
    factor = "much" if math.isinf(size) else f"{text.bits(size)} bits"
    if site.change.measure == "error":
        return f"error {factor} {'up' if more else 'down'}"
    return f"headroom {factor} {'less' if more else 'more'}"


def only(comparison: Comparison, side: str) -> list[str]:
    """Return the modules that are "before" or "after" only: of a module with all that it holds, the outermost."""
    names = {site.module for site in comparison.sites if site.judged == f"only {side}"}
    kept = [name for name in dict.fromkeys(s.module for s in comparison.sites) if name in names]
    outer = [name for name in kept if not any(above in names for above in _above(name))]
    return [text.module_name(name, 160) for name in outer]


def _above(name: str) -> Iterable[str]:
    while name:
        name = name.rpartition(".")[0]
        if name:
            yield name


def renames(comparison: Comparison) -> list[tuple[str, str]]:
    """Return how paths changed, each change once: what is equal at the end is left out, numbers that agree are "*"."""
    made: dict[tuple[str, str], None] = {}
    for site in comparison.sites:
        if site.renamed:
            ours, theirs = (site.module_before or "").split("."), site.module.split(".")
            while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
                ours, theirs = ours[:-1], theirs[:-1]
            if [part for part in ours if part.isdigit()] == [part for part in theirs if part.isdigit()]:
                ours, theirs = (["*" if part.isdigit() else part for part in parts] for parts in (ours, theirs))
            made[text.module_name(".".join(ours), 160), text.module_name(".".join(theirs), 160)] = None
    return list(made)


def facts(found: Sequence[Difference]) -> list[Fact]:
    """Return differences for reading, without absolute paths."""
    return [Fact(text.visible(one.name, 120), _value(one.before), _value(one.after)) for one in found]


def _value(value: object) -> str:
    if value is None or value == "":
        return text.MISSING
    if isinstance(value, float):
        return text.number(value)
    return ("yes" if value else "no") if isinstance(value, bool) else text.without_paths(value, 200)


def notes(comparison: Comparison) -> list[str]:
    """Return what limits the comparison, a sentence each."""
    return [text.without_paths(note, 300) for note in comparison.notes]
