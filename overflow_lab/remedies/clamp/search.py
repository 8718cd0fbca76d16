"""The search for a clamp: along the bad values from the origin on, until the output is right; then what is not needed
goes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from overflow_lab.analysis.index import REFERENCE, index
from overflow_lab.analysis.origins import bad_rows
from overflow_lab.capture.precisions import parse_precision
from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.formats import FloatFormat
from overflow_lab.recording import RangeRow, Recording
from overflow_lab.remedies.clamp.sites import Site, Tally, clamp_model
from overflow_lab.scan import scan_subject
from overflow_lab.tolerances import tolerance

if TYPE_CHECKING:
    from overflow_lab.analysis.results import Effect, Verdict
    from overflow_lab.progress import Progress
    from overflow_lab.subjects import Subject

# Limits that are tried, as shares of the format's largest value. The first leaves room for what a residual stream adds
# afterwards, as the clamps in transformers do (finfo.max - 1000); the last suits sums of two clamped values.
SHARES = (63 / 64, 1.0, 0.5)
# Errors that are this near to the least are taken as equal, and the earlier share is chosen.
NEARLY = 1.25
# A chain of more clamps than this is no remedy that somebody pastes, and each is a run.
MOST_ROUNDS, MOST_RUNS = 8, 16
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass(frozen=True)
class Trial:
    """A run with clamps: where, at what value, what reached the output, and how many values each site changed."""

    sites: tuple[Site, ...]
    limit: float
    verdict: Verdict
    recording: Recording
    changed: dict[Site, int]

    @property
    def error(self) -> float:
        """The relative error of the output."""
        return self.verdict.effect.relative_error or 0.0


@dataclass
class Search:
    """Looks for a clamp that makes the output of `precision` right, in at most `runs` runs."""

    subject: Subject
    recording: Recording
    precision: str
    progress: Progress
    runs: int
    used: int = 0
    format: FloatFormat = field(init=False)
    _reference: dict[tuple[str, str], float] = field(init=False)

    def __post_init__(self) -> None:
        found = index(self.recording)
        self.format = found.format_of(self.precision)
        rows = found.ranges.get(REFERENCE, {}).values()
        self._reference = {(row.module, row.port): row.range.absmax or 0.0 for row in rows}

    def best(self) -> Trial | None:
        """Return the clamp with the smallest error that makes the output right; None where none does."""
        first: Trial | None = None
        good: list[Trial] = []
        for share in SHARES:
            limit = representable(share * self.format.max, self.format.name)
            trial = self.again(first.sites, limit) if first else self.grown(limit)
            first = first or trial
            good += [trial] if trial is not None and self.is_right(trial.verdict) else []
        least = min((trial.error for trial in good), default=0.0)
        best = next((trial for trial in good if trial.error <= NEARLY * least), None)
        return None if best is None else self.without_idle(best)

    def again(self, sites: Sequence[Site], limit: float) -> Trial | None:
        """Try the same sites at another limit."""
        return self.run(sites, limit) if self.used < min(self.runs, MOST_RUNS) else None

    def grown(self, limit: float) -> Trial | None:
        """Clamp where a bad value shows first, run, and go on from there while more show.

        The output of what is returned is right, or finite and wrong; None where it stays NaN or inf.
        """
        sites: tuple[Site, ...] = ()
        recording = self.recording
        trial = None
        for _ in range(MOST_ROUNDS):
            more = self.next_sites(recording, limit)
            if not more or set(more) <= set(sites):
                break
            sites = tuple(dict.fromkeys((*sites, *more)))
            trial = self.again(sites, limit)
            if trial is None or self.is_right(trial.verdict):
                return trial
            recording = trial.recording
        return None if trial is None or trial.verdict.effect.nonfinite else trial

    def next_sites(self, recording: Recording, limit: float) -> tuple[Site, ...]:
        """Return where infinities show first, and the same place in the module's siblings that hold as large values.

        Empty where nothing is infinite at a module's border, or NaN comes first: a clamp does not reach either.
        """
        row = next(iter(bad_rows(index(recording), self.precision)), None)
        if row is None or not (row.range.posinf or row.range.neginf) or not Site(row.module, row.port).can_be_clamped:
            return ()
        return (Site(row.module, row.port), *self._siblings(row, limit))

    def _siblings(self, row: RangeRow, limit: float) -> list[Site]:
        alike = _NUMBER.sub("*", row.module)
        return [
            Site(module, port)
            for (module, port), absmax in self._reference.items()
            if port == row.port and module != row.module and absmax > limit and _NUMBER.sub("*", module) == alike
        ]

    def without_idle(self, trial: Trial) -> Trial:
        """Return the trial without the clamps that changed nothing, and without those it is right without."""
        sites = tuple(site for site in trial.sites if trial.changed[site])
        best = dataclasses.replace(trial, sites=sites)
        for site in sites if len(sites) > 1 else ():
            fewer = tuple(other for other in best.sites if other != site)
            tried = self.again(fewer, trial.limit) if fewer else None
            if tried is not None and self.is_right(tried.verdict):
                best = tried
        return best

    def run(self, sites: Sequence[Site], limit: float) -> Trial | None:
        """Scan with these clamps at module borders; None where the scan ends early."""
        self.used += 1
        self.progress.stage(f"trying a clamp at {len(sites)} places (run {self.used})")
        tally = Tally()
        subject = clamped(self.subject, sites, limit, dtype=self.format.name, tally=tally)
        try:
            made = scan_subject(_quick(subject), [self.precision], level="module")
        except UsageError:
            raise
        except OverflowLabError:
            return None
        counts = {site: tally.of(site) for site in sites}
        return Trial(tuple(sites), limit, made.verdicts[self.precision], made.recording, counts)

    def is_right(self, verdict: Verdict) -> bool:
        """Return whether the output is finite, within the format's own rounding, and no clear decision changed."""
        return verdict.severity != "error" and is_within(verdict.effect, self.format)

    def largest(self, site: Site) -> float | None:
        """Return the largest magnitude that float32 has at a site; None where it was not recorded."""
        return self._reference.get((site.module, site.port))


def _quick(subject: Subject) -> Subject:
    """Return the subject without what would make a run of the search longer: the proof runs all of it.

    That is the beam search, and `.to(dtype)` beside the loader's cast.
    """
    asked = subject.generation
    if asked is not None and "greedy" in asked.strategies:
        asked = dataclasses.replace(asked, strategies={"greedy": asked.strategies["greedy"]})
    return dataclasses.replace(subject, generation=asked, loader_casts=False)


def is_within(effect: Effect, fmt: FloatFormat) -> bool:
    """Return whether what reaches the output is what float32 gives, to within the format's rounding."""
    return (
        effect.compared
        and not effect.nonfinite
        and not effect.failed_answers
        and (effect.relative_error or 0.0) <= tolerance(fmt)
        and effect.overruled_decisions <= 0.0
        and effect.overruled_answers <= 0
    )


def representable(value: float, dtype: str) -> float:
    """Return the value of the format that is nearest to `value`: a limit that the clamp does not round."""
    return float(torch.tensor(value, dtype=getattr(torch, dtype)))


def clamped(
    subject: Subject, sites: Sequence[Site], limit: float, *, dtype: str, tally: Tally | None = None
) -> Subject:
    """Return the subject whose models are clamped once they are in a precision of the format `dtype`."""
    before = subject.adapt

    def adapt(model: torch.nn.Module, precision: str) -> torch.nn.Module:
        changed = model if before is None else before(model, precision)
        same = parse_precision(precision).dtype == dtype
        return clamp_model(changed, sites, limit, tally) if same else changed

    return dataclasses.replace(subject, adapt=adapt)
