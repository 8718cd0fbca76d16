"""For test suites: `assert_fits(model, inputs, "float16")`, whose failure is the diagnosis."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from overflow_lab.analysis import rooms
from overflow_lab.capture.precisions import parse_precisions
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS
from overflow_lab.recording import BlindSpotRow, Recording
from overflow_lab.report import summary, text
from overflow_lab.scan import Scan, scan

_WIDTH = 100
_LABEL = 10


def assert_fits(
    model: Any,
    inputs: Any = None,
    precisions: str | Iterable[str] = "float16",
    *,
    headroom_bits: float = 0.0,
    level: str = "auto",
    **options: Any,
) -> Scan:
    """Scan a model and raise AssertionError unless each precision works, with `headroom_bits` to spare.

    A precision works where its verdict is `ok`. With `headroom_bits` every output of every module must also stay that
    many doublings below the largest finite value of the dtype that it has in that precision (1 leaves a factor of two);
    a mask filled with the lowest number of its own dtype does not count. The message names the module and operation
    that broke first, why and what to do; or the module with the least headroom and how many bits are missing. All else
    is as in `overflow_lab.scan`: `model` is a module with `inputs` (a list of them for several calls), or a hub id,
    folder or file.py:function. Returns the scan.

    Raises UsageError for what cannot be scanned as asked, ScanInterrupted where the model fails in float32 already.
    """
    __tracebackhide__ = True  # pytest then shows the test, and the message, alone
    if not (math.isfinite(headroom_bits) and headroom_bits >= 0):
        raise UsageError(f"headroom_bits is {headroom_bits}; give a number of bits, 0 or more.")
    wanted = parse_precisions([precisions] if isinstance(precisions, str) else precisions)
    names = [precision.name for precision in wanted]
    if not names:
        raise UsageError("no precision is named; give one, such as 'float16'.")
    found = scan(model, inputs, precisions=names, level=level, **options)
    faults = [fault for name in names if (fault := _fault(found, name, headroom_bits)) is not None]
    if faults:
        raise AssertionError(_message(found.recording, faults))
    return found


@dataclass(frozen=True)
class _Fault:
    """Why one precision does not fit: `title` on one line, and labelled facts."""

    title: str
    facts: tuple[tuple[str, str], ...]


def _fault(found: Scan, precision: str, bits: float) -> _Fault | None:
    """Return why a precision does not fit, None where it does."""
    verdict = found.verdicts.get(precision)
    if verdict is None:  # float32 without its shadow run
        spots = found.recording.of(BlindSpotRow)
        return _Fault(
            f"{precision} was not judged", tuple(("why", s.reason) for s in spots if s.precision == precision)
        )
    if verdict.verdict != "ok":
        return _broken(found, precision)
    if not verdict.effect.compared:
        why = "What the model returns could not be compared with float32; let it return tensors, dicts or tuples."
        return _Fault(f"{precision} shows nothing", (("why", why),))
    outputs = rooms.outputs(found.recording, precision)
    short = outputs[outputs["room"] < bits].sort_values("room")
    return None if short.empty else _tight(short, len(outputs), precision, bits)


def _broken(found: Scan, precision: str) -> _Fault:
    """Return the verdict of a precision: where, why, what reaches the output, what next."""
    card = next(card for card in summary.cards(found.diagnosis) if card.precision == precision)
    sources = [step.source for step in card.chain if step.where == card.where and step.source]
    inside = ", ".join(part for part in (card.operation, *sources[-1:]) if part)
    facts = {
        "where": (f"{card.where} ({inside})" if inside else card.where) if card.where else "",
        "why": _cut(card.reason, 3),
        "output": _cut("; ".join(card.effects), 2),
        "next": _cut(card.advice, 3),
    }
    return _Fault(f"{precision} {card.headline}", tuple((k, v.replace("`", "")) for k, v in facts.items() if v))


def _tight(short: pd.DataFrame, total: int, precision: str, bits: float) -> _Fault:
    """Return which outputs come too near to the limit, the nearest first."""
    rows = short.to_dict("records")
    least, others = rows[0], rows[1:4]
    limit = FORMATS[least["dtype"]].max
    room = f"{text.number(least['largest'])} of {text.number(limit)}, {text.bits(least['room'])} bits below the limit"
    facts = {
        "least": f"{_place(least)}: {room}; {_missing(bits - least['room'])} missing",
        "also": ", ".join(f"{_place(row)} ({text.bits(row['room'])} bits)" for row in others),
        "next": f"Scale its weights down and the next layer's up, keep it in float32, or ask for fewer bits "
        f"(headroom_bits={math.floor(max(least['room'], 0) * 10) / 10:g} holds on these inputs).",
    }
    if len(rows) > 4:
        facts["also"] += f" and {len(rows) - 4:,} more"
    some = f"{len(rows):,} of {text.plural(total, 'module output')} {'keeps' if len(rows) == 1 else 'keep'}"
    title = f"{precision} works, but {some} less than {bits:.3g} bit{'' if bits == 1 else 's'} of headroom"
    return _Fault(title, tuple((k, v) for k, v in facts.items() if v))


def _missing(bits: float) -> str:
    """Return the bits that are missing; a little is more than "0.0 bits"."""
    return f"{text.bits(bits)} bits are" if bits >= 0.05 else "less than 0.1 bits is"


def _place(row: Any) -> str:
    """Return the name of an output, with its port where it is not the only one."""
    name = text.module_name(str(row["module"]), 160)
    return name if row["port"] == "output" else f"{name} {text.visible(row['port'], 40)}"


def _message(recording: Recording, faults: list[_Fault]) -> str:
    """Return what pytest shows: the first fault in full, the others by their titles."""
    first, *others = faults
    facts = (*first.facts, *(("also", fault.title) for fault in others), ("inputs", summary.basis(recording)))
    return "\n".join([f"{summary.model(recording)} in {first.title}", *_wrapped(facts)])


def _cut(words: str, lines: int) -> str:
    """Return what fits on so many lines of the message; the report has the rest."""
    return textwrap.shorten(words, lines * (_WIDTH - _LABEL) - 10, placeholder=" …")


def _wrapped(facts: Iterable[tuple[str, str]]) -> Iterator[str]:
    for label, words in facts:
        yield from textwrap.wrap(
            words,
            _WIDTH,
            initial_indent=f"  {label:<{_LABEL - 2}}",
            subsequent_indent=" " * _LABEL,
            break_long_words=False,
            break_on_hyphens=False,
        )
