"""Islands as remedies: the sets that the search found, with what they cost, in words, and the texts to paste."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from overflow_lab.analysis.numbers import percent
from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.progress import Progress, Silent
from overflow_lab.remedies.islands.apply import mended
from overflow_lab.remedies.islands.cost import Cost, cost_of, residual_stream
from overflow_lab.remedies.islands.members import Members, all_weights, kept_weights, modules_of, open_of
from overflow_lab.remedies.islands.searcher import Found, Search
from overflow_lab.remedies.islands.snippets import snippets
from overflow_lab.remedies.islands.trials import BudgetSpent, Trials
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan
from overflow_lab.subjects import Subject

# What the search for modules may take of all runs, and what it may with those whose outputs stay in float32; the rest
# is for operations.
_FOR_MODULES, _FOR_OPEN = 0.4, 0.6
# An island of modules with less than this share of the weights needs no operations in its place.
_TINY = 0.01
_SHOWN = 3


@dataclass(frozen=True)
class Islands:
    """What a search gave: remedies, the best first; `runs` that it took; `reason`, a sentence, where there are none."""

    remedies: tuple[Remedy, ...] = ()
    runs: int = 0
    reason: str = ""


def islands(subject: Subject, found: Scan, precision: str, *, progress: Progress | None, runs: int) -> Islands:
    """Search one precision of a scan for islands; see `overflow_lab.remedies.islands.search`."""
    verdict = found.verdicts.get(precision)
    if verdict is None or verdict.verdict == "ok" or precision == "float32":
        return Islands(reason=f"nothing breaks in {precision} that an island could mend.")
    progress = progress or Silent()
    progress.stage(f"searching the smallest fp32 islands for {precision}", runs)
    try:
        trials = Trials(subject, precision, found.recording, runs, progress=progress)
        return _searched(Search(trials, subject, found), runs)
    except (UsageError, MemoryError):
        raise
    except OverflowLabError as error:
        return Islands(reason=str(error))
    except (
        Exception
    ) as error:  # the user's batches or loader, or a model that resists the hooks: no reason to end a fix
        return Islands(reason=f"the search for islands ended early: {one_line(error)}.")


def _searched(search: Search, runs: int) -> Islands:
    trials = search.trials
    search.begin()
    trials.most = max(1, int(_FOR_MODULES * runs))
    modules = search.modules()
    none = modules is None and trials.runs < trials.most
    trials.most = max(1, int(_FOR_OPEN * runs))
    if modules is None or not _cost(search, modules.members).small:
        modules = search.open_modules() or modules
    spent = trials.runs >= trials.most
    trials.most = runs
    tiny = modules is not None and kept_weights(search.model, modules.members) <= _TINY * all_weights(search.model)
    operations = None if tiny else search.operations()
    found = [(one, _alone(search, one.members)) for one in (modules, operations) if one is not None]
    made = [_remedy(search, one, alone=alone, most=runs, none_of_modules=none) for one, alone in found]
    made.sort(key=lambda pair: (not pair[0].small, round(pair[0].share, 2)))
    reason = "" if made else _why_none(search, spent or trials.runs >= runs)
    return Islands(tuple(remedy for _, remedy in made), trials.runs, reason)


def _cost(search: Search, members: Members) -> Cost:
    return cost_of(search.model, members, autocast=search.trials.precision.cast == "autocast")


def _remedy(
    search: Search, found: Found, *, alone: bool | None, most: int, none_of_modules: bool
) -> tuple[Cost, Remedy]:
    trials, members = search.trials, found.members
    cost = _cost(search, members)
    notes = [_counted(found, trials.runs, most), *cost.sentences()]
    if not cost.small:
        notes.insert(0, _not_small(search, cost))
    elif residual := _residual(search):
        notes.append(f"What it keeps wide goes through many layers: {residual}.")
    if none_of_modules:
        notes.append("No set of modules short of the whole model was found that mends it with its outputs cast back.")
    if open_of(members):
        notes.append(
            "What these modules give stays in float32, and so does what it is added to, until it is cast back."
        )
    if any(member.op for member in members):
        notes.append("Operations are members by module and name, in all their calls; what they read is widened there.")
    remedy = Remedy(
        kind="island",
        title=title(members),
        precision=trials.name,
        mend=functools.partial(_mend, members=members, precision=trials.name),
        members=tuple(str(member) for member in sorted(members)),
        snippets=snippets(search.model, members, trials.precision, alone=alone),
        notes=tuple(notes),
        runs=trials.runs,
    )
    return cost, remedy


def _mend(subject: Subject, *, members: Members, precision: str) -> Subject:
    return mended(subject, members, precision)


def _alone(search: Search, members: Members) -> bool | None:
    """Return whether float32 weights alone, without casts at the border, are enough in a forward."""
    if not modules_of(members) or search.trials.precision.cast == "autocast":
        return None
    try:
        return search.trials.weights_alone(members)
    except BudgetSpent:
        return None


def title(members: Members) -> str:
    """Return the imperative sentence that names an island."""
    paths = modules_of(members)
    by_module: dict[str, list[str]] = {}
    for member in sorted(members):
        if member.op:
            by_module.setdefault(member.module, []).append(member.op)
    parts = []
    if paths:
        said = _several([f"`{path}`" for path in paths], "modules")
        parts.append(f"keep {said} in float32" + (_outputs(len(paths)) if open_of(members) else ""))
    if by_module:
        items = [f"{', '.join(ops)} of `{module}`" if module else ", ".join(ops) for module, ops in by_module.items()]
        count = sum(len(ops) for ops in by_module.values())
        alike = {op for ops in by_module.values() for op in ops}
        many = (
            f"{alike.pop()} of {len(items)} modules"
            if len(alike) == 1
            else f"{count} operations of {len(items)} modules"
        )
        named = _joined(items) if len(items) <= _SHOWN else many
        parts.append(f"do {named} in float32")
    said = " and ".join(parts)
    return said[:1].upper() + said[1:]


def _outputs(modules: int) -> str:
    return ", its output too" if modules == 1 else ", their outputs too"


def _several(items: list[str], what: str) -> str:
    return _joined(items) if len(items) <= _SHOWN else f"{len(items)} {what}"


def _joined(items: list[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def _counted(found: Found, runs: int, most: int) -> str:
    """Return how the set was found, and how sure it is that no member can be left out."""
    took = f"Found in {runs} of at most {most} runs, and confirmed by a scan"
    if len(found.members) == 1:
        return f"{took}; without its one member the model breaks as it did."
    how = {
        "verdict": "a scan of the rest breaks again without any one of the members",
        "forward": "without any one of the members it breaks again, which a plain forward showed where scans take long",
        "": "whether each of the members is needed was not checked to the end: the runs were used up",
    }[found.checked]
    return f"{took}; {how}."


def _residual(search: Search) -> str:
    return residual_stream(search.scan.recording, search.trials.precision.dtype)


def _not_small(search: Search, cost: Cost) -> str:
    """Return the plain statement that the smallest set of modules is not small, and why."""
    held = [f"holds {percent(cost.share)} of the weights"] if cost.kept else []
    held += (
        [f"has whole stacks of layers in it ({', '.join(f'`{path}`' for path in cost.stacks)})"] if cost.stacks else []
    )
    because = _residual(search)
    why = f", since {because}" if because else ""
    return f"No small set of modules mends this{why}: the smallest that was found {_joined(held)}."


def _why_none(search: Search, spent: bool) -> str:
    because = _residual(search)
    why = f", since {because}" if because else ""
    if spent:
        return f"no island was found in {search.trials.runs} runs, which is all that was allowed{why}."
    return f"no set of modules or operations mends {search.trials.name} short of the whole model{why}."
