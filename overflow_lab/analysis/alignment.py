"""Which module of one model is which of another, when some were renamed, inserted or taken out between the two.

What is surest goes first: equal weights that nothing else has, then the names, then the end of a name, then the place
in the order of execution. Each pair that is found teaches how names changed (what was "model.layers" is now
"model.text.layers"), and the modules without weights around it follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

Parts = tuple[str, ...]

# The matcher looks at every pair of equal keys, again for each block that it finds; beyond so many it takes too long.
_MOST_PAIRS = 200_000
# Longer ends of names than this are of modules that differ in their first parts only, and shorter ones find them too.
_LONGEST_END = 8


@dataclass(frozen=True)
class Place:
    """A module as it is told from others: its path, class, and what is known of its own parameters.

    `weights` holds a tuple of (name, shape, smallest and largest value, ...) for each parameter, `shapes` names and
    shapes alone.
    """

    path: str
    class_name: str = ""
    weights: tuple[Hashable, ...] = ()
    shapes: tuple[Hashable, ...] = ()

    @property
    def parts(self) -> Parts:
        """The path's names, () for the root."""
        return _parts(self.path)

    @property
    def numbered(self) -> bool:
        """Whether the last name is a number: that is a place in a list, which an insertion moves, and no name."""
        return self.path.rpartition(".")[2].isdigit()

    def like(self, other: Place) -> bool:
        """Return whether two places of equal or corresponding names can be the same module.

        Classes are renamed from version to version, but what only a number names must have the same class and shapes.
        """
        return not self.numbered or (self.class_name == other.class_name and self.shapes == other.shapes)


@dataclass
class _Pairs:
    """The pairs found so far, and the places in order of execution that are still free."""

    before: Sequence[Place]
    after: Sequence[Place]
    found: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def add(self, before: Place, after: Place) -> None:
        if before.path not in self.found and after.path not in self.taken:
            self.found[before.path] = after.path
            self.taken.add(after.path)

    def free_before(self) -> list[Place]:
        return [place for place in self.before if place.path not in self.found]

    def free_after(self) -> list[Place]:
        return [place for place in self.after if place.path not in self.taken]


def align(before: Sequence[Place], after: Sequence[Place]) -> dict[str, str]:
    """Return which path of `before` is which path of `after`; the places are in order of execution, each path once.

    Places that are in one of the two only are left out. To exchange the two gives the inverse mapping.
    """
    if _canonical(before) > _canonical(after):  # the steps below prefer earlier places of the first: choose it by rule
        return {old: new for new, old in align(after, before).items()}
    pairs = _Pairs(before, after)
    _match_unique(pairs, lambda place: (place.class_name, place.weights) if place.weights else None)
    _match_renamed(pairs)
    _match_names(pairs)
    for length in range(_LONGEST_END, 0, -1):
        _match_unique(pairs, lambda place, n=length: _end(place, n))  # type: ignore[misc]
    _match_renamed(pairs)
    for key in (_numbered_name, _name, _numbered_class, _class):
        _match_in_order(pairs, key)
    _match_renamed(pairs)
    return pairs.found


def _canonical(places: Sequence[Place]) -> tuple[int, list[tuple[str, str, str]]]:
    return len(places), [(place.path, place.class_name, repr(place.weights)) for place in places]


def _match_unique(pairs: _Pairs, key: Callable[[Place], Hashable]) -> None:
    """Pair free places whose key is theirs alone in both models; None is no key."""
    ours, theirs = (_unique(places, key) for places in (pairs.free_before(), pairs.free_after()))
    for value, place in ours.items():
        if value in theirs:
            pairs.add(place, theirs[value])


def _unique(places: Sequence[Place], key: Callable[[Place], Hashable]) -> dict[Hashable, Place]:
    keys = [key(place) for place in places]
    counts = Counter(keys)
    return {k: place for k, place in zip(keys, places, strict=True) if k is not None and counts[k] == 1}


def _end(place: Place, length: int) -> Hashable:
    """Return the last `length` names of a path with its class; None where the path is shorter or ends in a number."""
    return (place.class_name, place.parts[-length:]) if length <= len(place.parts) and not place.numbered else None


def _match_names(pairs: _Pairs) -> None:
    _match_translated(pairs, lambda parts: parts)


def _match_renamed(pairs: _Pairs) -> None:
    """Pair free places whose names correspond when their beginnings change as those of the pairs did."""
    renames = _renames(pairs.found)

    def translate(parts: Parts) -> Parts | None:
        cut = next((n for n in range(len(parts), -1, -1) if parts[:n] in renames), None)
        return None if cut is None else (*renames[parts[:cut]], *parts[cut:])

    _match_translated(pairs, translate)


def _match_translated(pairs: _Pairs, translate: Callable[[Parts], Parts | None]) -> None:
    """Pair free places with those of the translated name; what only a number names must keep its order, too."""
    theirs = {place.parts: place for place in pairs.free_after()}
    positions = {place.path: number for number, place in enumerate(pairs.after)}
    bounds = _bounds(pairs, positions)
    for place in pairs.free_before():
        name = translate(place.parts)
        other = None if name is None else theirs.get(name)
        if other is None or not place.like(other):
            continue
        low, high = bounds[place.path]
        if not place.numbered or low < positions[other.path] < high:
            pairs.add(place, other)


def _bounds(pairs: _Pairs, positions: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return between which positions of the other model a place lies, by the pairs nearest to it on both sides."""
    lows, highs = list[int](), list[int]()
    for places, bounds, last in ((pairs.before, lows, -1), (pairs.before[::-1], highs, len(pairs.after))):
        for place in places:
            bounds.append(last)
            if place.path in pairs.found:
                last = positions[pairs.found[place.path]]
    return dict(zip((place.path for place in pairs.before), zip(lows, reversed(highs), strict=True), strict=True))


def _renames(found: Mapping[str, str]) -> dict[Parts, Parts]:
    """Return what each beginning of a path became, by the vote of the pairs."""
    votes: dict[Parts, Counter[Parts]] = {}
    for old, new in found.items():
        ours, theirs = _parts(old), _parts(new)
        while ours and theirs and ours[-1] == theirs[-1]:
            votes.setdefault(ours, Counter())[theirs] += 1
            ours, theirs = ours[:-1], theirs[:-1]
        votes.setdefault(ours, Counter())[theirs] += 1
    return {old: max(counts, key=lambda new: (counts[new], new)) for old, counts in votes.items()}


def _match_in_order(pairs: _Pairs, key: Callable[[Place], Hashable]) -> None:
    """Pair free places of equal keys in each gap between the pairs, in the order of execution."""
    for ours, theirs in list(_gaps(pairs)):
        for old, new in _in_order([key(place) for place in ours], [key(place) for place in theirs]):
            pairs.add(ours[old], theirs[new])


def _in_order(ours: Sequence[Hashable], theirs: Sequence[Hashable]) -> Iterator[tuple[int, int]]:
    """Yield indices of equal keys in order: those that both begin and end with, and the matcher's between them."""
    shorter = min(len(ours), len(theirs))
    head = next((n for n in range(shorter) if ours[n] != theirs[n]), shorter)
    tail = next((n for n in range(shorter - head) if ours[-1 - n] != theirs[-1 - n]), shorter - head)
    yield from ((n, n) for n in range(head))
    yield from ((len(ours) - 1 - n, len(theirs) - 1 - n) for n in range(tail))
    left, right = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    counts = Counter(right)
    if sum(counts[key] for key in left) > _MOST_PAIRS:
        return
    for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        yield from ((head + block.a + n, head + block.b + n) for n in range(block.size))


def _gaps(pairs: _Pairs) -> Iterator[tuple[list[Place], list[Place]]]:
    """Yield the runs of free places that follow, or else precede, the same pair in both models."""
    ours, theirs = _runs(pairs.before, set(pairs.found)), _runs(pairs.after, pairs.taken)
    following = {previous: run for previous, run, _ in theirs}
    preceding = {after: run for _, run, after in theirs}
    for previous, run, after in ours:
        there = following.get(None if previous is None else pairs.found[previous])
        there = there or preceding.get(None if after is None else pairs.found[after])
        if there:
            yield run, there


def _runs(places: Sequence[Place], paired: set[str]) -> list[tuple[str | None, list[Place], str | None]]:
    """Return the runs of free places, each with the path of the paired place before and after it."""
    runs: list[tuple[str | None, list[Place], str | None]] = []
    previous, run = None, list[Place]()
    for place in places:
        if place.path in paired:
            runs += [(previous, run, place.path)] if run else []
            previous, run = place.path, []
        else:
            run.append(place)
    return [*runs, (previous, run, None)] if run else runs


def _parts(path: str) -> Parts:
    return tuple(path.split(".")) if path else ()


def _numbers(place: Place) -> tuple[str, ...]:
    return tuple(part for part in place.parts if part.isdigit())


def _numbered_name(place: Place) -> Hashable:
    return (_numbers(place), *_name(place))


def _name(place: Place) -> tuple[str, str]:
    return place.class_name, "" if place.numbered else place.parts[-1] if place.parts else ""


def _numbered_class(place: Place) -> Hashable:
    return _numbers(place), place.class_name


def _class(place: Place) -> Hashable:
    return place.class_name
