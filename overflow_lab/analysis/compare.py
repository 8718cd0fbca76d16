"""Two recordings compared: sites matched, verdicts and sites judged. Reads recordings only and never imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from overflow_lab.analysis import differences
from overflow_lab.analysis.alignment import Place, align
from overflow_lab.analysis.comparison import Change, Comparison, Seen, Side, SitePair, VerdictPair, judge
from overflow_lab.analysis.index import REFERENCE, Index, index, role
from overflow_lab.analysis.results import Diagnosis, Origin
from overflow_lab.analysis.verdicts import analyze
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, SHORT_NAMES, headroom_bits
from overflow_lab.recording import RangeRow, Recording, load

Pair = tuple[str, str]
Sites = dict[tuple[str, str], RangeRow]


def compare(before: Any, after: Any = None, *, precisions: Iterable[str] | str | None = None) -> Comparison:
    """Return what changed from one recording to another, or between two precisions of one.

    `before` and `after` are each a Recording, a Scan or a recording file. `precisions` names what is compared; without
    it, every low precision that both have (float32 where there is no other, or both judge it). Without `after`,
    `precisions` names two, and the second is compared with the first. fp32, fp16 and bf16 are accepted.

    Modules are matched by their weights, names and order of execution, so that renamed and inserted ones are told
    apart; see `overflow_lab.analysis.alignment`. What is better or worse is decided by the constants of
    `overflow_lab.analysis.comparison`.

    Raises UsageError where there is nothing to compare, or no such precision.
    """
    old = _recording(before)
    new = old if after is None else _recording(after)
    names = [precisions] if isinstance(precisions, str) else None if precisions is None else list(precisions)
    pairs = _of_one(old, names) if after is None else _of_two(old, new, names)
    return _Comparer(old, new).compare(pairs, all_judged=names is None)


def _recording(given: Any) -> Recording:
    if isinstance(given, (str, Path)):
        return load(given)
    found = getattr(given, "recording", given)
    if not isinstance(found, Recording):
        raise UsageError(f"a {type(given).__name__} cannot be compared; give a Recording, a Scan or a recording file.")
    return found


def full_name(precision: str) -> str:
    """Return a precision's full name: fp16-autocast is float16-autocast."""
    head, dash, rest = precision.partition("-")
    return SHORT_NAMES.get(head, head) + dash + rest


def _of_one(recording: Recording, names: list[str] | None) -> list[Pair]:
    """Return the one pair of precisions to compare in one recording."""
    if names is None or len(names) != 2:
        raise UsageError(
            "one recording is given; give a second one, or two of its precisions "
            f"(it has {', '.join(recording.header.precisions)})."
        )
    first, second = (full_name(name) for name in names)
    for name in (first, second):
        _check(recording, name)
    return [(first, second)]


def _of_two(before: Recording, after: Recording, names: list[str] | None) -> list[Pair]:
    """Return the precisions to compare in two recordings, each with itself."""
    if names is not None:
        chosen = list(dict.fromkeys(full_name(name) for name in names))
        for name in chosen:
            _check(before, name)
            _check(after, name)
        return [(name, name) for name in chosen]
    both = [name for name in before.header.precisions if name in after.header.precisions]
    low = [name for name in both if name != REFERENCE]
    if not both:
        raise UsageError(
            f"no precision is in both recordings ({', '.join(before.header.precisions)}; "
            f"{', '.join(after.header.precisions)}); scan the same ones."
        )
    return [(name, name) for name in low or both]


def _check(recording: Recording, precision: str) -> None:
    if precision not in recording.header.precisions:
        known = ", ".join(recording.header.precisions)
        raise UsageError(f"{_label(recording, 'the recording')} has no precision {precision!r}; it has {known}.")


def _label(recording: Recording, otherwise: str) -> str:
    return Path(recording.path).name if recording.path else otherwise


@dataclass(frozen=True)
class _Match:
    """One site of either model, or of both, as (module, port)."""

    order: int
    class_name: str
    before: tuple[str, str] | None
    after: tuple[str, str] | None


class _Comparer:
    """Two recordings, matched once and compared in any precisions."""

    def __init__(self, before: Recording, after: Recording) -> None:
        self.recordings = (before, after)
        self.before, self.after = index(before), index(after)
        self.places = (_places(self.before), _places(self.after))
        self.pairs = align(*self.places)

    def compare(self, precisions: Sequence[Pair], *, all_judged: bool) -> Comparison:
        """Compare these precisions, with `all_judged` float32 too where both recordings judge it itself."""
        before, after = self.recordings
        diagnoses = [analyze(recording) for recording in self.recordings]
        matches = list(self._matches())
        own = (REFERENCE, REFERENCE)
        if all_judged and own not in precisions and all(REFERENCE in d.verdicts for d in diagnoses):
            precisions = [own, *precisions]
        sides = _sides(before, after, precisions[0])
        given = differences.inputs(self.before, self.after, self.pairs)
        return Comparison(
            *sides,
            verdicts=tuple(self._verdicts(diagnoses, pair) for pair in precisions),
            sites=tuple(site for pair in precisions for site in self._sites(matches, pair)),
            differences=differences.facts(before, after),
            inputs=given,
            weights=differences.weights(self.before, self.after, self.pairs),
            notes=tuple(self._notes(precisions, bool(given), len(matches))),
        )

    def _matches(self) -> Iterator[_Match]:
        """Yield every output of every module, in the order of execution before; those only after come after others."""
        ports = [_ports(found) for found in (self.before, self.after)]
        partners = {new: old for old, new in self.pairs.items()}
        positions = {place.path: number for number, place in enumerate(self.places[0])}
        at = -1
        for place in self.places[0]:
            other = self.pairs.get(place.path)
            there = [] if other is None else ports[1][other]
            for old, new in _paired(ports[0][place.path], there):
                name = place.path if other is None else other
                yield _Match(
                    2 * positions[place.path],
                    (self.after if other is not None else self.before).class_name(name),
                    None if old is None else (place.path, old),
                    None if new is None else (name, new),
                )
        for place in self.places[1]:
            if place.path in partners:
                at = positions[partners[place.path]]
            else:
                yield from (
                    _Match(2 * at + 1, place.class_name, None, (place.path, port)) for port in ports[1][place.path]
                )

    def _sites(self, matches: Sequence[_Match], precisions: Pair) -> Iterator[SitePair]:
        ours, theirs = self.before.ranges.get(precisions[0], {}), self.after.ranges.get(precisions[1], {})
        if not ours or not theirs:
            return  # one of the two did not come to it: that is said once, and not of every site
        for match in sorted(matches, key=lambda match: match.order):
            old = _seen(self.before, ours, match.before, precisions[0])
            new = _seen(self.after, theirs, match.after, precisions[1])
            if old is None and new is None:
                continue
            change = Change() if old is None or new is None else judge(old, new)
            places = (match.before, match.after)
            yield SitePair(named(precisions), match.order, match.class_name, *places, old, new, change)

    def _verdicts(self, diagnoses: Sequence[Diagnosis], precisions: Pair) -> VerdictPair:
        old, new = (d.verdicts.get(name) for d, name in zip(diagnoses, precisions, strict=True))
        origins = None if old is None else old.origin, None if new is None else new.origin
        return VerdictPair(named(precisions), old, new, self._moved(*origins))

    def _moved(self, before: Origin | None, after: Origin | None) -> bool | None:
        if before is None or after is None:
            return None
        return (self.pairs.get(before.module, before.module), before.op) != (after.module, after.op)

    def _notes(self, precisions: Sequence[Pair], other_inputs: bool, sites: int) -> Iterator[str]:
        """Yield what limits the comparison, a sentence each."""
        first, second = (recording.header.precisions for recording in self.recordings)
        if other_inputs:
            yield "The inputs differ: ranges and errors are of other data, and part of each change may come from them."
        one = self.recordings[0] is self.recordings[1]
        for found, which in zip((self.before, self.after), ("before",) if one else ("before", "after"), strict=False):
            if not found.recording.complete:
                yield f"The scan {which} did not finish ({found.recording.status}): sites that it lacks may be missing."
        for pair in precisions:
            lacking = [
                which
                for which, found, name in zip(("before", "after"), (self.before, self.after), pair, strict=True)
                if not found.ranges.get(name) and not found.was_run(name)
            ]
            if lacking:
                yield f"{named(pair)} was not reached {' and '.join(lacking)}: it cannot be compared."
        for own, other, which in ((first, second, "before"), (second, first, "after")):
            yield from (f"{name} is only in the recording {which}." for name in own if name not in other)
        if sites and not self.pairs:
            yield "No module of the two could be matched: they are recordings of different models."


def named(precisions: Pair) -> str:
    """Return what a pair of precisions is called: "float16", or "float16 to bfloat16"."""
    return precisions[0] if precisions[0] == precisions[1] else f"{precisions[0]} to {precisions[1]}"


def _sides(before: Recording, after: Recording, pair: Pair) -> tuple[Side, Side]:
    labels = (_label(before, "before"), _label(after, "after"))
    if labels[0] == labels[1] and before.path and after.path:  # runs/a/t5.jsonl.gz and runs/b/t5.jsonl.gz
        labels = cast(Pair, tuple("/".join(Path(path).parts[-2:]) for path in (before.path, after.path)))
    if labels[0] == labels[1]:
        labels = pair if pair[0] != pair[1] else ("before", "after")
    old, new = (
        Side(label, str(r.header.subject.get("name", "")), r.status, r.header.created, r.path)
        for r, label in ((before, labels[0]), (after, labels[1]))
    )
    return old, new


def _places(found: Index) -> list[Place]:
    """Return the modules that gave an output, in order of execution: float32's, or that of the first that ran them."""
    orders: dict[str, tuple[int, int]] = {}
    names = sorted(found.ranges, key=lambda name: name != REFERENCE)
    for number, name in enumerate(names):
        for (module, port), row in found.ranges[name].items():
            if role(port) == "output":
                orders[module] = min(orders.get(module, (number, row.order)), (number, row.order))
    weights = differences.weights_by_module(found)
    made = []
    for module in sorted(orders, key=lambda module: orders[module]):
        own = weights.get(module, ())
        made.append(Place(module, found.class_name(module), own, tuple(row[:2] for row in own)))
    return made


def _ports(found: Index) -> dict[str, list[str]]:
    """Return the output ports of each module, in the order first seen."""
    made: dict[str, dict[str, None]] = {}
    for rows in found.ranges.values():
        for module, port in rows:
            if role(port) == "output":
                made.setdefault(module, {})[port] = None
    return {module: list(ports) for module, ports in made.items()}


def _paired(ours: Sequence[str], theirs: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Yield the ports of one module in both: those of one name, then the others in order, then what is left."""
    both = [port for port in ours if port in theirs]
    left, right = ([port for port in ports if port not in both] for ports in (ours, theirs))
    yield from ((port, port) for port in both)
    for number in range(max(len(left), len(right))):
        yield left[number] if number < len(left) else None, right[number] if number < len(right) else None


def _seen(found: Index, rows: Sites, key: tuple[str, str] | None, precision: str) -> Seen | None:
    row = None if key is None else rows.get(key)
    if row is None or key is None:
        return None
    r, fmt = row.range, FORMATS.get(row.dtype, FORMATS[REFERENCE])
    error = found.errors.get(precision, {}).get(key)
    reference = found.reference(*key) if precision != REFERENCE else None
    return Seen(
        dtype=row.dtype,
        absmax=r.absmax,
        headroom=None if r.absmax is None else headroom_bits(r.absmax, fmt),
        nonfinite=r.nonfinite,
        count=r.count,
        made=max(0.0, _share(row) - (0.0 if reference is None else _share(reference))),
        error=None if error is None else error.relative_error,
        rounding=found.format_of(precision).eps / 2,
    )


def _share(row: RangeRow) -> float:
    return row.range.nonfinite / row.range.count if row.range.count else 0.0


__all__ = ["Comparison", "compare", "full_name", "named"]
