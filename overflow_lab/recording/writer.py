"""Writes a recording row by row, so that a run that is killed leaves all that it knew."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from overflow_lab.errors import OverflowLabError, UsageError, one_line
from overflow_lab.recording import Footer, Header, Merged, ProgressRow, Recording, Resumable, Row, build
from overflow_lab.recording.codec import encode

# Half of a surrogate pair, as a broken tokenizer or file name may have it, becomes \\udXXX: JSON's own escape for it.
_LONE = "backslashreplace"
# A file may grow by this many characters beyond twice what it has to say, then the rows of each site become one.
_SLACK = 1 << 20


class Writer:
    """Appends rows to a file (gzipped where its name ends in .gz), or keeps them in memory where `path` is None.

    Use it as a context manager: leaving it writes the footer, with what ended the scan. Each row is flushed; a disk
    that is full raises OverflowLabError, and the rows stay in memory. Entering raises UsageError where no file can be.

    Rows of one site are merged in memory as they come, and in the file at a `progress`, by writing it anew and putting
    it in the place of the old one at once: so neither grows with the number of inputs, and at every moment there is a
    file that can be read. With `resumed` (see `load_progress`) the file is left as it is until a first row is added to
    it; what stood behind that progress row is then gone.
    """

    def __init__(self, path: Path | None, header: Header, *, resumed: Resumable | None = None) -> None:
        self.path = path
        self.header = header if resumed is None else resumed.recording.header
        self.untouched = resumed is not None
        self._merged = Merged()
        for row in resumed.recording.rows if resumed else ():
            self._merged.add(row)
        self._progress = resumed.progress if resumed else None
        self._footer: Footer | None = None
        self._file: IO[str] | None = None
        self._failed = False
        self._written = self._least = 0

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows so far, those of one site merged."""
        return self._merged.rows

    def __enter__(self) -> Writer:
        if self.path is not None and not self.untouched:
            with self._usable():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = _open(self.path, "w")
            self._write(self.header)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._footer is None and not self._failed and not self.untouched:
            status = (
                "complete" if error is None else "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            )
            self.append(Footer(status, None if error is None else one_line(error)))
        self._close()

    def append(self, row: Row | Footer) -> None:
        """Add one row, in memory and in the file."""
        self._begin()
        if isinstance(row, Footer):
            self._footer = row
        else:
            self._merged.add(row)
        self._write(row)

    def progress(self, row: ProgressRow, *, last: bool = False) -> None:
        """Say that what was added so far is whole; the file is compacted where it has grown, and at the `last`."""
        self._begin()
        self._progress = row
        self._write(row)
        if self._file is not None and (last or self._written > 2 * self._least + _SLACK):
            self._compact()

    def recording(self) -> Recording:
        """Return what was written so far as a recording."""
        rows = [*self.rows, *([self._footer] if self._footer else [])]
        return build(self.header, rows, path=None if self.path is None else str(self.path))

    def _begin(self) -> None:
        """Make a resumed recording one that is being written, before its first new row."""
        if self.untouched:
            self.untouched = False
            if self.path is not None:
                with self._usable():
                    self._rewrite(self.path)

    def _compact(self) -> None:
        """Write the file anew with what it has to say; where that fails, the longer one stays and goes on."""
        assert self.path is not None
        self._close()
        try:
            self._rewrite(self.path)
        except OSError:
            _part(self.path).unlink(missing_ok=True)
            self._file = _open(self.path, "a")

    def _rewrite(self, path: Path) -> None:
        known = [self.header, *self.rows, *([self._progress] if self._progress else [])]
        self._written = 0
        with _open(_part(path), "w") as file:
            for row in known:
                self._written += file.write(encode(row) + "\n")
        os.replace(_part(path), path)
        self._least = self._written
        self._file = _open(path, "a")

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            name = self.path.name if self.path else "?"
            raise UsageError(
                f"the recording {name} cannot be written ({error.strerror}); choose another place."
            ) from error

    def _write(self, row: Any) -> None:
        if self._file is None:
            return
        try:
            self._written += self._file.write(encode(row) + "\n")
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


def _part(path: Path) -> Path:
    """Return where a file is written that is to take the place of `path`."""
    return path.with_name(path.name + ".part")


def _open(path: Path, mode: str) -> IO[str]:
    """Open a recording for writing over an older one ("w") or behind what is there ("a"), gzipped by `path`'s name."""
    if path.name.removesuffix(".part").endswith(".gz"):  # a gzip file may have several members
        zipped = gzip.GzipFile(path, f"{mode}b", mtime=0)
        return cast(IO[str], io.TextIOWrapper(zipped, encoding="utf-8", errors=_LONE))
    return path.open(mode, encoding="utf-8", errors=_LONE)


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
