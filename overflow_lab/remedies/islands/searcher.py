"""The search for the smallest islands: widen until the model is mended, then leave out what is not needed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from overflow_lab.analysis.effects import is_wrong
from overflow_lab.analysis.results import Finding
from overflow_lab.errors import OverflowLabError
from overflow_lab.formats import FORMATS
from overflow_lab.remedies.islands.apply import mended
from overflow_lab.remedies.islands.candidates import kind, module_rungs, operation_rungs
from overflow_lab.remedies.islands.ddmin import ddmin
from overflow_lab.remedies.islands.discover import Discovery
from overflow_lab.remedies.islands.members import Member, Members, all_weights, children_of, kept_weights
from overflow_lab.remedies.islands.trials import BudgetSpent, Trials
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.subjects import Subject

# Scans that may find something new in what a trial accepted, before a set is given up.
_REPAIRS = 4
# Runs that are left for the scans that confirm a set, when it is made smaller.
_SPARED = 4
# Of more members, whole kinds of them are left out first.
_MANY = 12
# Of modules whose output stays in float32, only those near the origin are tried: the others are given it in float32.
_NEAR = 3
# Seconds that the scans which check a set's members one by one may take together; beyond, a forward stands for a scan.
_PATIENCE = 30.0


@dataclass(frozen=True)
class Found:
    """A set that mends, by a scan; `checked` says how it was found out that none of its members can be left out.

    "verdict": each by a scan; "forward": some by a plain forward only; "" where the runs did not suffice.
    """

    members: Members
    checked: str


@dataclass
class Search:
    """Looks for islands of modules and of operations in one precision, within the budget of `trials`.

    `blind` says that a plain forward does not show what breaks (only a generation does, say): then scans judge alone.
    """

    trials: Trials
    subject: Subject
    scan: Scan
    blind: bool = False
    _seconds: list[float] = field(default_factory=list)
    _tight: set[Member] = field(default_factory=set)
    _verdicts: dict[Members, tuple[Finding, ...] | None] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        """The model in float32."""
        return self.trials.base.model

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of the precision in the scan that the search begins with."""
        return tuple(f for f in self.scan.diagnosis.findings if f.precision == self.trials.name)

    def begin(self) -> None:
        """See whether a plain forward shows what breaks."""
        with contextlib.suppress(BudgetSpent):
            self.blind = self.trials.mends(frozenset())

    def modules(self) -> Found | None:
        """Return the smallest set of modules, None where no set short of the whole model mends."""
        return self._first(list(module_rungs(self.model, self.findings)), self._grown_modules)

    def open_modules(self) -> Found | None:
        """Return the smallest set of modules whose outputs stay in float32, None where none mends.

        So does what transformers calls `_keep_in_fp32_modules`: a residual stream that is added to is promoted.
        """
        rungs = list(itertools.islice(module_rungs(self.model, self.findings), _NEAR))
        return self._first([_opened(rung) for rung in rungs], self._grown_open)

    def operations(self) -> Found | None:
        """Return the smallest set of operations, None where none mends."""
        rungs = operation_rungs(self.model, self.scan.recording, self.trials.name, self.findings, self._followed())
        return self._first(rungs, self._grown_operations)

    # ---- widen ----

    def _first(self, rungs: Iterable[Members], grown: Callable[[Members], Iterable[Members]]) -> Found | None:
        """Return the first set that mends by a forward and then by a scan, made minimal.

        First none of the modules may give NaN or inf; then also sets after which these are absorbed on the way.
        """
        tried = list(rungs)
        for strict in (True,) if self.blind else (True, False):
            self.trials.strict = strict
            try:
                for members in tried:
                    found = self._narrowed(members, grown)
                    if found is not None:
                        return found
            except BudgetSpent:
                return None
        return None

    def _narrowed(self, members: Members, grown: Callable[[Members], Iterable[Members]]) -> Found | None:
        """Return what is needed of a set that mends, None where it does not or where that is the whole model."""
        if (self.blind and self._is_whole(members)) or not self._is_right(members):
            return None
        least = self._shrunk(members)
        return None if self._is_whole(least) else self._confirmed(least, grown)

    def _is_right(self, members: Members) -> bool:
        return self._faults(members) == () if self.blind else self.trials.mends(members)

    def _mends(self, members: Members) -> bool:
        """Return whether a set mends, as the search's oracle sees it; the whole model is no set."""
        return not self._is_whole(members) and self._is_right(members)

    def _is_whole(self, members: Members) -> bool:
        """Return whether a set of modules holds all the weights: to keep the whole model is no remedy."""
        total = all_weights(self.model)
        return total > 0 and kept_weights(self.model, members) == total

    def _followed(self, base: Members = frozenset()) -> Members:
        """Return the operations that a run which follows values that do not fit has met."""
        mode = Discovery(self.trials.precision.torch_dtype(), base)
        try:
            self.trials.watch(mode)
        except BudgetSpent:
            return base
        self._tight |= mode.found
        return frozenset(mode.found) | base

    # ---- narrow ----

    def _shrunk(self, members: Members) -> Members:
        """Return a 1-minimal part of a set, its modules replaced by parts of them where these suffice."""
        best = members
        try:
            with self.trials.sparing(_SPARED):
                best = self._without_kinds(members)
                tight = members <= self._tight
                best = ddmin(sorted(best, key=self._weight), self._mends, tight=tight)
                for member in () if self._is_whole(best) else sorted(best, key=lambda m: -self._weight(m)):
                    best = self._refined(best, member)
        except BudgetSpent:  # what was reached by then
            return self._smallest(best)
        return best

    def _without_kinds(self, members: Members) -> Members:
        """Return a large set without the kinds of members (all squares of all norms, say) that are not needed."""
        if len(members) <= (2 * _MANY if members <= self._tight else _MANY):
            return members
        groups: dict[object, set[Member]] = {}
        modules = dict(self.model.named_modules())
        for member in sorted(members):
            groups.setdefault((member.op, kind(member.module, modules[member.module])), set()).add(member)
        every = [frozenset(group) for group in groups.values()]
        kept = ddmin(every, lambda chosen: self._mends(frozenset().union(*chosen)), tight=members <= self._tight)
        return frozenset().union(*kept)

    def _smallest(self, members: Members) -> Members:
        """Return the smallest part of a set that a trial has accepted."""
        scanned = [tried for tried, faults in self._verdicts.items() if faults == ()]
        accepted = [t for t in [*scanned, *self.trials.accepted()] if t <= members and not self._is_whole(t)]
        return min(accepted, key=lambda m: (kept_weights(self.model, m), len(m)), default=members)

    def _refined(self, members: Members, member: Member) -> Members:
        """Return the set with a member replaced by those of its children that suffice, as deep as that goes."""
        if member.op or member.open or member not in members or not self._weight(member):
            return members
        rest = members - {member}
        below = frozenset(Member(path) for path in children_of(self.model, member.module))
        if not below or not self._mends(rest | below):
            return members
        part = ddmin(sorted(below, key=self._weight), lambda chosen: self._mends(rest | chosen))
        if kept_weights(self.model, rest | part) >= kept_weights(self.model, members) and len(part) > 1:
            return members
        best = rest | part
        for child in sorted(part, key=lambda m: -self._weight(m)):
            best = self._refined(best, child)
        return best

    def _weight(self, member: Member) -> int:
        return kept_weights(self.model, [member])

    # ---- confirm ----

    def _confirmed(self, members: Members, grown: Callable[[Members], Iterable[Members]]) -> Found | None:
        """Return the set once a scan says ok, with what the scans still find taken in; None where that does not end."""
        for _ in range(_REPAIRS):
            left = self._faults(members)
            if left is not None and not left:
                return self._minimal(members)
            wider = next((m for m in grown(members) if not self._is_whole(m)), None) if left else None
            if wider is None:
                return None
            members = wider
        return None

    def _grown_modules(self, members: Members) -> Iterator[Members]:
        for rung in module_rungs(self.model, self._faults(members) or ()):
            if not rung <= members and (self.blind or self._mends(members | rung)):
                yield members | rung

    def _grown_open(self, members: Members) -> Iterator[Members]:
        for rung in itertools.islice(module_rungs(self.model, self._faults(members) or ()), _NEAR):
            if not _opened(rung) <= members and (self.blind or self._mends(members | _opened(rung))):
                yield members | _opened(rung)

    def _grown_operations(self, members: Members) -> Iterator[Members]:
        left = self._faults(members) or ()
        followed = self._followed(members) - members
        for rung in operation_rungs(self.model, self.scan.recording, self.trials.name, left, followed):
            if not rung <= members and (self.blind or self._mends(members | rung)):
                yield members | rung

    def _minimal(self, members: Members) -> Found:
        """Leave out each member whose absence changes nothing; so none can be left out of what remains."""
        checked = "verdict"
        for member in sorted(members, key=lambda m: -self._weight(m)) if len(members) > 1 else ():
            less = members - {member}
            how = self._needed(less)
            if how is None:
                return self._minimal(less)
            checked = how if checked == "verdict" else min(checked, how)
        return Found(members, checked)

    def _needed(self, less: Members) -> str | None:
        """Return how a set that lacks a member was found to break ("" where no run was left for it), None if it mends.

        Where scans take long, an output that is wrong in a plain forward says as much as a scan would.
        """
        try:
            if self._slow(len(less)) and not self.blind and not self.trials.mends(less):
                return "forward"
            return None if self._faults(less) == () else "verdict"
        except BudgetSpent:
            return "forward" if self.trials.rejected(less) else ""

    def _slow(self, scans: int) -> bool:
        """Return whether so many scans, of those that took longest until now, would take too long."""
        return scans * max(self._seconds, default=0.0) > _PATIENCE

    def _faults(self, members: Members) -> tuple[Finding, ...] | None:
        """Return what a scan of the mended subject finds: () where the verdict is ok, None where it cannot run."""
        if members not in self._verdicts:
            self.trials.spend()
            self._verdicts[members] = self._scanned(members)
        return self._verdicts[members]

    def _scanned(self, members: Members) -> tuple[Finding, ...] | None:
        name = self.trials.name
        began = time.perf_counter()
        try:
            # What `.to()` does where the loader keeps modules in float32 is another precision, and its own search.
            subject = dataclasses.replace(mended(self.subject, members, name), loader_casts=False)
            made = scan_subject(subject, [name], level="operation")
        except OverflowLabError:
            return None
        finally:
            self._seconds.append(time.perf_counter() - began)
        verdict = made.verdicts.get(name)
        if verdict is None:
            return None
        if verdict.verdict == "ok" and not is_wrong(verdict.effect, FORMATS[self.trials.precision.dtype]):
            return ()
        return tuple(f for f in made.diagnosis.findings if f.precision == name) or None


def _opened(members: Members) -> Members:
    """Return the modules with their outputs in float32."""
    return frozenset(dataclasses.replace(member, open=True) for member in members)
