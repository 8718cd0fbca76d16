"""Where reporters write: one way to write a file, and to say that it cannot be written."""

from __future__ import annotations

from pathlib import Path

from overflow_lab.errors import UsageError


def write_file(path: Path, content: str | bytes, what: str = "") -> Path:
    """Write a file of these contents to `path`, making its folder, and return it; `what` names it in an error.

    Text is UTF-8 with plain newlines, on every system. Raises UsageError where it cannot be written.
    """
    raw = content if isinstance(content, bytes) else content.encode("utf-8", "backslashreplace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    except OSError as error:
        named = f"{what} {path.name}".strip()
        raise UsageError(f"{named} cannot be written ({error.strerror}); choose another place.") from error
    return path
