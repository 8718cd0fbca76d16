"""Which looks from inside one process would have taken, of those that several took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from overflow_lab.recording import EventRow, LookRow


def kept_looks(rows: Sequence[Any]) -> Iterator[Any]:
    """Yield the looks, and the rows of each, that one process would have taken: see `capture.inside`.

    Of each precision those are the first forward and the first whose output is off; and the first answer that is not
    float32's, where no forward until then has explained it. Rows of no look (of older recordings) are all kept.
    """
    looks = [row for row in rows if isinstance(row, LookRow)]
    explained = {(row.precision, row.look) for row in rows if isinstance(row, EventRow) and row.explains}
    for precision in dict.fromkeys(look.precision for look in looks):
        own = sorted((look for look in looks if look.precision == precision), key=_when)
        for look in _taken(own, explained):
            yield look
            yield from (row for row in rows if _belongs(row, look))


def _when(look: LookRow) -> tuple[int, bool]:
    return look.batch, look.run != "forward"  # a stable sort: a greedy answer stands before that of a beam search


def _taken(looks: Sequence[LookRow], explained: set[tuple[str, str | None]]) -> list[LookRow]:
    forwards = [look for look in looks if look.run == "forward"]
    taken = forwards[:1]
    if taken and not taken[0].off:
        taken += [look for look in forwards if look.off][:1]
    answer = next((look for look in looks if look.run != "forward"), None)
    if answer is not None:
        before = (look for look in taken if look.batch <= answer.batch)
        if not any((look.precision, look.name) in explained for look in before):
            taken.append(answer)
    return sorted(taken, key=_when)


def _belongs(row: Any, look: LookRow) -> bool:
    return getattr(row, "look", None) == look.name and row.precision == look.precision
