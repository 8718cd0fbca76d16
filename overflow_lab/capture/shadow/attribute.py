"""Which operation's rounding makes most of the output's error: found by replaying, not by correlation.

Let the shadows follow the program up to an operation, and go on in float32 from there: what then differs at the
output is what the operations up to there caused. That error grows along the program from nothing to the whole; where
it passes a third of the whole is the operation to blame, found by bisection: the first of what may be several. (Casts
of weights, buffers and inputs come before all operations, and are told apart one by one.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from overflow_lab.capture.noise import rounded_weights
from overflow_lab.capture.outputs import compared, spread_error, whole_error
from overflow_lab.capture.precisions import Prepared
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.operations import ADDING
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.run import CAST, ShadowRun, input_seeds, log_program, run, seeds
from overflow_lab.capture.shadow.sites import SiteKey
from overflow_lab.formats import FORMATS

Metric = Callable[[ShadowRun, ShadowRun], float]

_PART = 1 / 3
_MOST_RUNS, _MOST_SECONDS = 64, 120.0
# A sum amplifies when its relative error is this many times that of its terms, and this large.
_AMPLIFIED, _OFF = 8.0, 0.05


def relative(got: ShadowRun, wanted: ShadowRun) -> float:
    """Return the largest relative error of any output tensor; inf where one is not finite."""
    pairs = _pairs(got, wanted)
    return max((whole_error(a, b) for a, b in pairs), default=0.0)


def centered(got: ShadowRun, wanted: ShadowRun) -> float:
    """Return the largest error of any output relative to its spread around its mean: what sets its elements apart."""
    judged = compared(wanted.shadows)
    pairs = [(got.shadows[name], wanted.shadows[name]) for name in judged if name in got.shadows]
    return max((spread_error(a, b) for a, b in pairs), default=0.0)


def decisions(got: ShadowRun, wanted: ShadowRun) -> float:
    """Return how many of the decisions inside the program differ."""
    pairs = zip(got.mode.decisions.kept, wanted.mode.decisions.kept, strict=False)
    return float(sum(int((a != b).sum()) for a, b in pairs if a.shape == b.shape))


def _pairs(got: ShadowRun, wanted: ShadowRun) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(got.shadows[name], wanted.shadows[name]) for name in wanted.shadows if name in got.shadows]


def changed_decisions(base: Prepared, call: Call, log: ProgramLog, format_name: str) -> int | None:
    """Return how many of the decisions in `log`, float32's own, one random rounding of the weights changes.

    They are compared one by one, as far as both programs take the same way. None where the model cannot be called with
    other weights. Costs one float32 forward and a copy of the weights.
    """
    weights = rounded_weights(base.model, FORMATS[format_name])
    try:
        moved = log_program(base, call, weights)
    except MemoryError:
        raise
    except Exception:
        return None
    changed = 0
    for before, after in zip(log.decisions.kept, moved.decisions.kept, strict=False):
        if before.shape != after.shape:
            break
        changed += int((before != after).sum())
    return changed


@dataclass
class Blame:
    """The operation to blame, the whole error, the share it adds, and how many runs it took to find."""

    key: SiteKey
    total: float
    share: float
    runs: int
    amplifier: SiteKey | None = None
    detail: str = ""


@dataclass
class Attribution:
    """Attributes one precision's output error on one call, by the metric."""

    prepared: Prepared
    original: nn.Module
    call: Call
    baseline: ProgramLog
    full: ShadowRun
    metric: Metric
    runs: int = 0
    gave_up: bool = False
    _errors: dict[int, float] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def find(self) -> Blame | None:
        """Return the operation at which the error passes a third of the whole.

        None where there is no error, or where the search would take too long.
        """
        last = self.full.mode.clock
        total = self._error(last)
        if not total > 0:
            return None
        wanted = _PART * total if math.isfinite(total) else math.inf
        if self._error(0) >= wanted:
            return self._cast(total, wanted)
        low, high = 0, last
        while high - low > 1:
            if self._spent():
                return None
            middle = (low + high) // 2
            low, high = (low, middle) if self._error(middle) >= wanted else (middle, high)
        share = _share(self._error(high), self._error(low), total)
        return Blame(self.full.mode.at(high), total, share, self.runs, amplifier(self.full, high))

    def _spent(self) -> bool:
        """Return whether the search has taken what it may: then no operation is named, rather than a guess."""
        self.gave_up = self.runs >= _MOST_RUNS or time.monotonic() - self._began > _MOST_SECONDS
        return self.gave_up

    def _error(self, clock: int) -> float:
        """Return the output's error where the shadows follow the program up to `clock` and are exact from there."""
        found = self._errors.get(clock)
        if found is None:
            found = self._errors[clock] = self._replayed(clock)
        return found

    def _cast(self, total: float, wanted: float) -> Blame | None:
        """Return the cast that makes most of the error: by halving the set of tensors that are taken as cast."""
        low = self.call.cast(self.prepared)
        planted = [*seeds(self.prepared.model, self.original), *input_seeds(low.named(), self.call.named())]
        names = [seed[1] for seed in planted if seed[3].dtype != seed[4].dtype]
        while len(names) > 1:
            if self._spent():
                return None
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            names = max(halves, key=self._with_cast)
        if not names:
            return None
        number, seed = next((i, s) for i, s in enumerate(planted) if s[1] == names[0])
        share = self._with_cast(names) / total if math.isfinite(total) else 1.0
        return Blame((seed[2], CAST, -1 - number), total, share, self.runs, detail=seed[1])

    def _with_cast(self, names: Sequence[str]) -> float:
        """Return the output's error where only these tensors are taken as cast."""
        return self._replayed(-1, frozenset(names))

    def _replayed(self, clock: int, synced: frozenset[str] = frozenset()) -> float:
        """Run the program with shadows that follow it up to `clock`, and these tensors' casts; return the error."""
        self.runs += 1
        mode = ShadowMode(baseline=self.baseline, sync_until=clock, least=self.full.mode.shadows.least)
        made = run(mode, self.prepared, self.original, self.call, synced=synced)
        error = self.metric(made, self.full)
        mode.shadows.close()
        return error


def amplifier(full: ShadowRun, clock: int) -> SiteKey | None:
    """Return the first addition after `clock` whose result is off though its terms are not: they cancel."""
    for site in sorted(full.mode.notes.sites.values(), key=lambda site: site.order):
        cancels = site.error > _AMPLIFIED * site.error_in and site.error > _OFF
        if site.order >= clock and site.op in ADDING and cancels and site.error_in > 0:
            return site.key
    return None


def _share(after: float, before: float, total: float) -> float:
    """Return the part of the whole error that one operation adds."""
    if not math.isfinite(after) or not math.isfinite(total):
        return 1.0
    return max(0.0, (after - before) / total)
