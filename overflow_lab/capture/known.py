"""What is said, done or counted once in a whole scan, however many batches it has or interruptions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from overflow_lab.capture.answers import AnswerLimit
from overflow_lab.recording import AnswerCountRow, AnswerRow, BlindSpotRow, Resumable
from overflow_lab.recording.writer import Writer

MOST_BLIND_SPOTS = 500
# In front of what is noted as done, apart from blind spots that were told.
_DONE = "done: "


@dataclass
class Known:
    """Writes blind spots once and answers up to a limit; `failed` are the runs, (precision, run), that have raised."""

    writer: Writer
    failed: set[tuple[str, str]] = field(default_factory=set)
    _limit: AnswerLimit = field(default_factory=AnswerLimit)
    _seen: set[str] = field(default_factory=set)

    def blind(self, module: str, reason: str, precision: str | None = None) -> None:
        """Write a blind spot, unless it is known, or so many are that the rest is left out."""
        key = f"{precision}:{module}:{reason}"
        if key in self._seen or len(self._seen) > MOST_BLIND_SPOTS:
            return
        self._seen.add(key)
        if len(self._seen) > MOST_BLIND_SPOTS:
            module, reason, precision = "", f"further blind spots, beyond {MOST_BLIND_SPOTS}, are left out", None
        self.writer.append(BlindSpotRow(module, reason, precision))

    def first(self, what: str, precision: str) -> bool:
        """Return whether something is to be done for a precision, since it has not been."""
        key = f"{_DONE}{what} {precision}"
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def answers(self, rows: Sequence[AnswerRow]) -> None:
        """Write the answers of one batch, within the limit."""
        for row in self._limit.limited(rows):
            self.writer.append(row)

    def memory(self) -> dict[str, Any]:
        """Return what `recall` needs beside the rows of the recording."""
        return {"done": sorted(k for k in self._seen if k.startswith(_DONE)), "failed": sorted(self.failed)}

    def recall(self, resumed: Resumable) -> None:
        """Take up what was known when the scan that is resumed wrote its last progress row."""
        rows, state = resumed.recording.rows, resumed.progress.state
        self._seen = {f"{r.precision}:{r.module}:{r.reason}" for r in rows if isinstance(r, BlindSpotRow)}
        self._seen |= set(state.get("done", ()))
        self.failed = {(precision, run) for precision, run in state.get("failed", ())}
        self._limit.resume(row for row in rows if isinstance(row, AnswerRow | AnswerCountRow))
