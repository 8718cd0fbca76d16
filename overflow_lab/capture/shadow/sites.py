"""What the shadow run writes down: a site for each operation, and the events that happened at sites."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

# An operation that a module's code runs more often than this in one call, in a loop, shares its last site.
MOST_ORDINALS = 16

SiteKey = tuple[str, str, int]


@dataclass
class Site:
    """One operation of one module, over all its calls.

    `error` is the largest relative error of a result against its shadow and `error_in` that of the operands then;
    `absmax` the largest finite magnitude of the shadow; `flushed` counts zeros whose shadow is below the format's
    smallest normal.
    """

    module: str
    op: str
    ordinal: int
    order: int
    dtype: str
    calls: int = 0
    elements: int = 0
    nonfinite: int = 0
    absmax: float = 0.0
    error: float = 0.0
    error_in: float = 0.0
    local_error: float | None = None
    flushed: int = 0
    constant_flushed: bool = False
    detail: str = ""

    @property
    def flushed_share(self) -> float:
        """The share of the site's elements that were flushed."""
        return self.flushed / self.elements if self.elements else 0.0

    @property
    def key(self) -> SiteKey:
        """What identifies the site."""
        return (self.module, self.op, self.ordinal)


@dataclass
class Event:
    """Something that went wrong at a site; see recording.EventRow for the meaning of the fields.

    `carried` says that another operation was given the bad value.
    """

    event: str
    module: str
    op: str
    ordinal: int
    clock: int
    call: int
    dtype: str = ""
    inf: int = 0
    nan: int = 0
    elements: int = 0
    changed: int = 0
    row: int = 0
    rows: int = 0
    margin: float | None = None
    value: float | None = None
    negative: bool = True
    zero_operand: bool = False
    cause: SiteKey | None = None
    harmed: SiteKey | None = None
    absorbed: SiteKey | None = None
    reaches_output: bool = False
    carried: bool = False
    source: str = ""
    detail: str = ""
    scalars: tuple[float, ...] = ()

    @property
    def key(self) -> SiteKey:
        """The site where it happened."""
        return (self.module, self.op, self.ordinal)


class Ordinals:
    """Counts the operations of each running module call: the same line of code has the same ordinal each time."""

    def __init__(self) -> None:
        self._frames: list[Counter[str]] = [Counter()]

    def enter(self) -> None:
        """A module begins."""
        self._frames.append(Counter())

    def leave(self) -> None:
        """A module ends."""
        if len(self._frames) > 1:
            self._frames.pop()

    def next(self, op: str) -> int:
        """Return the ordinal of the next operation of that name."""
        count = self._frames[-1]
        count[op] += 1
        return min(count[op] - 1, MOST_ORDINALS)


def source_line() -> str:
    """Return "file.py:12 in forward" of the innermost frame of the model's code; "" where none of it is running.

    Such a frame is neither torch's nor ours, and lies inside the call that we make of the model. No folder is named.
    """
    frame = sys._getframe(1)
    while True:
        name = frame.f_code.co_filename.replace("\\", "/")
        if name.endswith("/overflow_lab/capture/shadow/call.py"):
            break  # what called us is not the model
        if not any(part in name for part in ("/torch/", "/overflow_lab/", "<frozen", "/contextlib.py")):
            return f"{name.rpartition('/')[2]}:{frame.f_lineno} in {frame.f_code.co_name}"
        back = frame.f_back
        if back is None:
            break
        frame = back
    return ""
