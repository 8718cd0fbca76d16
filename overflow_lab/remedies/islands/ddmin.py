"""Delta debugging: from a set that passes to a part of it that passes and of which nothing can be left out.

Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on Software Engineering
28(2), 2002: the algorithm ddmin, with "the model is mended" in the place of "the test fails". Hierarchies are then
refined from the top down, as in Misherghi and Su, "HDD: hierarchical delta debugging", ICSE 2006.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

T = TypeVar("T")


def ddmin(items: Collection[T], passes: Callable[[frozenset[T]], bool], *, tight: bool = False) -> frozenset[T]:
    """Return a part of `items` that passes and is 1-minimal: without any one of its items it does not pass.

    `passes(frozenset(items))` must hold; the empty set is never tried. `passes` may raise to end the search. With
    `tight` most of the items are expected to be needed: they are left out one by one from the start. That no item can
    be left out is sure where a set that passes does so with more items too; each is tried once in the last round.
    """
    kept, parts = list(items), len(items) if tight else 2
    while len(kept) > 1:
        chunks = _split(kept, min(parts, len(kept)))
        one_by_one = len(chunks) == len(kept)
        if len(chunks) == 2:
            half = next((part for part in chunks if passes(frozenset(part))), None)
            if half is not None:
                kept = list(half)
                continue
        else:
            # Past two parts a single one hardly ever passes, and its trials are most of the cost where many are needed.
            for chunk in chunks:
                left = [item for item in kept if item not in chunk]
                if left and passes(frozenset(left)):
                    kept = left
        if one_by_one:
            break
        parts = min(2 * parts, len(kept))
    return frozenset(kept)


def _split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Return `items` in `parts` runs of nearly equal length."""
    cuts = [len(items) * i // parts for i in range(parts + 1)]
    return [items[a:b] for a, b in itertools.pairwise(cuts)]
