"""A clamp: values that do not fit are held at a limit, where that leaves the output right."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overflow_lab.progress import Progress
    from overflow_lab.remedies.clamp.search import Search, Trial
    from overflow_lab.remedies.remedy import Found, Remedy
    from overflow_lab.scan import Scan
    from overflow_lab.subjects import Subject


def propose(
    subject: Subject, found: Scan, precision: str, *, progress: Progress | None = None, runs: int = 60
) -> Found:
    """Return the clamp that makes the output of `precision` right, or nothing: most overflows a clamp does not mend.

    Tried at module borders, from the origin on along what carries the infinities, at a few limits, of which the one
    with the smallest error is taken. Right is: finite, within the format's own rounding of float32, no clear decision
    changed. At most `runs` runs.
    """
    from overflow_lab.progress import Silent
    from overflow_lab.remedies.clamp.search import Search
    from overflow_lab.remedies.remedy import Found

    verdict = found.verdicts.get(precision)
    if verdict is None or verdict.severity != "error" or verdict.verdict not in ("overflow", "nan"):
        return Found(reason="a clamp is for infinities that make the output wrong")
    search = Search(subject, found.recording, precision, progress or Silent(), runs)
    best = search.best()
    if best is None:
        return Found(
            reason=f"at none of the places and limits that were tried is the output right ({search.used} runs)"
        )
    return Found((_remedy(best, search),))


def _remedy(trial: Trial, search: Search) -> Remedy:
    from overflow_lab.remedies.clamp.search import clamped
    from overflow_lab.remedies.clamp.sites import snippet
    from overflow_lab.remedies.remedy import Remedy

    return Remedy(
        kind="clamp",
        title=_title(trial),
        precision=search.precision,
        mend=lambda subject: clamped(subject, trial.sites, trial.limit, dtype=search.format.name),
        members=tuple(str(site) for site in trial.sites),
        snippets={"forward hooks, once the model is loaded": snippet(trial.sites, trial.limit, search.format.name)},
        notes=_notes(trial, search),
        runs=search.used,
    )


def _title(trial: Trial) -> str:
    from overflow_lab.analysis.numbers import module_name, number

    first = trial.sites[0]
    what = "what" if len(trial.sites) == 1 else f"what {len(trial.sites)} modules give, from"
    side = "returns" if first.side == "output" else "takes"
    where = f"{module_name(first.module)} {side}"
    if len(trial.sites) == 1:
        return f"Clamp {what} {where} to ±{number(trial.limit)}"
    return f"Clamp values at {len(trial.sites)} places, from what {where} on, to ±{number(trial.limit)}"


def _notes(trial: Trial, search: Search) -> tuple[str, ...]:
    from overflow_lab.analysis.numbers import number, percent

    changed = sum(trial.changed[site] for site in trial.sites)
    largest = max((search.largest(site) or 0.0 for site in trial.sites), default=0.0)
    return (
        f"a clamp makes wrong values finite, it does not make them right: here it changes {changed:,} "
        f"{'value' if changed == 1 else 'values'}, up to {number(largest)} in float32, and the output is off by "
        f"{percent(trial.error)}, within the format's own rounding; on other inputs it may be more",
        "NaN is not changed by a clamp",
    )
