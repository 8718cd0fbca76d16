"""Writes a recording row by row, so that a run that is killed leaves all that it knew."""

from __future__ import annotations

import gzip
import io
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.recording import Footer, Header, Recording, Row, build
from overflow_lab.recording.codec import encode

# Half of a surrogate pair, as a broken tokenizer or file name may have it, becomes \\udXXX: JSON's own escape for it.
_LONE = "backslashreplace"


class Writer:
    """Appends rows to a file (gzipped where its name ends in .gz), or keeps them in memory where `path` is None.

    Use it as a context manager: leaving it writes the footer, with what ended the scan. Each row is flushed; a disk
    that is full raises OverflowLabError, and the rows stay in memory. Entering raises UsageError where no file can be.
    """

    def __init__(self, path: Path | None, header: Header) -> None:
        self.path = path
        self.header = header
        self.rows: list[Any] = []
        self._file: IO[str] | None = None
        self._failed = False

    def __enter__(self) -> Writer:
        if self.path is not None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _create(self.path)
            except OSError as error:
                raise UsageError(
                    f"the recording {self.path.name} cannot be written ({error.strerror}); choose another place."
                ) from error
        self._write(self.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not any(isinstance(row, Footer) for row in self.rows) and not self._failed:
            status = (
                "complete" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            )
            self.append(Footer(status, None if error is None else one_line(error)))
        self._close()

    def append(self, row: Row | Footer) -> None:
        """Add one row, in memory and in the file."""
        self.rows.append(row)
        self._write(row)

    def recording(self) -> Recording:
        """Return what was written so far as a recording."""
        return build(self.header, list(self.rows), path=None if self.path is None else str(self.path))

    def _write(self, row: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(encode(row) + "\n")
            self._file.flush()
        except OSError as error:
            self._failed = True
            self._close()
            name = self.path.name if self.path else "?"
            raise OverflowLabError(
                f"the recording {name} could not be written further ({error.strerror}); free some disk and scan again."
            ) from error

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError:
                self._failed = True


def _create(path: Path) -> IO[str]:
    """Open a new recording for writing, over an older one of that name."""
    if path.suffix == ".gz":
        return cast(IO[str], io.TextIOWrapper(gzip.GzipFile(path, "wb", mtime=0), encoding="utf-8", errors=_LONE))
    return path.open("w", encoding="utf-8", errors=_LONE)


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a recording that is whole, behind its footer. Raises OverflowLabError where it cannot be written."""
    text = "".join(encode(row) + "\n" for row in rows)
    data = text.encode("utf-8", errors=_LONE)
    try:
        with path.open("ab") as file:  # a gzip file may have several members
            file.write(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise OverflowLabError(
            f"the recording {path.name} could not be written further ({error.strerror}); free some disk and try again."
        ) from error
