"""How numbers are said in sentences."""

from __future__ import annotations

import math

from overflow_lab.recording import EventRow

# A share this small, of an operation that runs more often than this, is that of one turn of a loop.
_LITTLE, _LOOPED = 0.1, 16


def number(value: float | None) -> str:
    """Return a number as a person writes it: 547,171 or 65,504 or 0.00031 or 3.2e+09."""
    if value is None:
        return "?"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    size = abs(value)
    if size and (size >= 1e9 or size < 1e-4):
        return f"{value:.3g}"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def percent(share: float | None) -> str:
    """Return a share from 0 to 1 in percent; "0%" is said only of exactly zero."""
    if share is None:
        return "?"
    if not math.isfinite(share):
        return number(share)
    value = 100 * share
    if value == 0:
        return "0%"
    if value < 0.01:
        return "<0.01%"
    return f"{value:,.0f}%" if value >= 10 else f"{value:.2g}%"


def against(precision: str) -> str:
    """Return what a precision is compared with: float32, and float64 where float32 itself is judged."""
    return "float64" if precision == "float32" else "float32"


def module_name(path: str) -> str:
    """Return a module's path for a sentence; the root has none."""
    return f"`{path}`" if path else "the model itself"


def contribution(share: float, calls: int, what: str) -> str:
    """Return what an operation makes of an error: by itself, or, where it runs in a loop, call by call.

    Later roundings may cancel, so that one alone can make more than the whole: that is said as the whole.
    """
    if share < _LITTLE and calls > _LOOPED:
        return f"makes {what} little by little, over {calls:,} calls"
    return f"makes {'all' if share >= 1 else percent(share)} of {what} alone"


def clearness(event: EventRow) -> str:
    """Return by what margin a decision that changed is made otherwise, as the end of a sentence; "" if unknown."""
    if event.margin is None:
        return ""
    return f", which {against(event.precision)} makes by at most {percent(event.margin)} of its scores' size"


def step(event: EventRow) -> int | None:
    """Return the step of a generation in which something happened; None in a plain forward, or before the first."""
    return None if event.run == "forward" or event.call < 0 else event.call


def place(event: EventRow) -> str:
    """Return where among the inputs something happened first: "input 2 of 4, beam 1"; "" where there is one input."""
    if not event.beams:
        return f"row {event.row} of {event.rows}" if event.rows > 1 else ""
    number, beam = divmod(event.row, event.beams)
    of = f"input {number} of {event.rows // event.beams}" if event.rows > event.beams else ""
    return ", ".join(part for part in (of, f"beam {beam}" if event.beams > 1 else "") if part)
