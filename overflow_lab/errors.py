"""The errors that overflow-lab raises on purpose. Each message is one line: the situation, the value, the way out."""

from __future__ import annotations


class OverflowLabError(Exception):
    """Base class of every error that overflow-lab raises on purpose."""


class UsageError(OverflowLabError):
    """What was asked for cannot be done as asked: a wrong option, file, model or input (exit code 2)."""


class RecordingFormatError(OverflowLabError):
    """A file is not a recording, or was written by a newer overflow-lab (exit code 2)."""


class ScanInterrupted(OverflowLabError):
    """A scan ended early; what it had recorded is saved in `recording` (exit code 3)."""

    def __init__(self, message: str, recording: str | None = None) -> None:
        super().__init__(message)
        self.recording = recording


def one_line(error: BaseException, *, limit: int = 300) -> str:
    """Return the type and message of `error` on one line of at most `limit` characters."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    line = f"{name}: {text}" if text else name
    return line if len(line) <= limit else line[: limit - 1] + "…"
