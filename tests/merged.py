"""What "the same recording" means: the same rows by key, up to order, times, and rounding in the last bits of sums."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from overflow_lab.recording import Recording, RunRow


def by_key(recording: Recording) -> dict[tuple[Any, ...], Any]:
    """Return the rows by kind and key; those without a key by what they say, and how often."""
    made: dict[tuple[Any, ...], Any] = {}
    seen: Counter[tuple[Any, ...]] = Counter()
    for row in recording.rows:
        untimed = dataclasses.replace(row, seconds=0.0) if isinstance(row, RunRow) else row
        key = (row.kind, *(row.key if hasattr(row, "key") else (repr(row),)))
        seen[key] += 1
        made[(*key, seen[key])] = untimed
    return made


def near(a: Any, b: Any) -> bool:
    """Return whether two values are the same, floats to within 1e-9 of themselves."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or math.isclose(a, b, rel_tol=1e-9) or (math.isnan(a) and math.isnan(b))
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(near(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(near, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(near(a[key], b[key]) for key in a)
    return bool(a == b)


def assert_same(one: Recording, other: Recording) -> None:
    """Fail unless the two hold the same rows, and end alike."""
    mine, theirs = by_key(one), by_key(other)
    assert mine.keys() - theirs.keys() == set()
    assert theirs.keys() - mine.keys() == set()
    apart = {key: (mine[key], theirs[key]) for key in mine if not near(mine[key], theirs[key])}
    assert apart == {}
    assert one.footer == other.footer
