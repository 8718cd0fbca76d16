"""The recording: a JSON Lines file, optionally gzipped, that a scan writes and that analysis and reports only read.

One header, rows appended as they become known, one footer. A file without a footer is of a run that did not finish,
and is readable up to its last whole row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

from overflow_lab.errors import RecordingFormatError, UsageError
from overflow_lab.recording.answer_rows import AnswerCountRow, AnswerRow
from overflow_lab.recording.codec import decode
from overflow_lab.recording.operation_rows import AttributionRow, EventRow, LookRow, NoiseRow, OperationRow
from overflow_lab.recording.progress_row import ProgressRow
from overflow_lab.recording.proof_rows import ProofRow
from overflow_lab.recording.rows import (
    BlindSpotRow,
    CastRow,
    ErrorRow,
    FailureRow,
    Footer,
    Header,
    ModuleRow,
    Moment,
    OutputRow,
    PrecisionRow,
    RangeRow,
    Row,
    RunRow,
    TensorRow,
)
from overflow_lab.recording.share_rows import BatchRow, ShareRow
from overflow_lab.recording.step_rows import STEP_BATCHES, StepRow

# 1: the first format.
FORMAT = 1

# Rows of these kinds with the same key are of one site, and add up.
_MERGED = (RangeRow, ErrorRow, OutputRow, RunRow, OperationRow, EventRow, AnswerCountRow)

# Of these a reader wants one for each site, whatever looks it was seen in.
_LOOKED_AT = (OperationRow, EventRow, OutputRow)

R = TypeVar("R")


@dataclass(frozen=True)
class Recording:
    """A recording in memory: header, rows in the order of the file (those of one key merged), footer if any."""

    header: Header
    rows: tuple[Row, ...] = ()
    footer: Footer | None = None
    path: str | None = field(default=None, compare=False)

    def of(self, row_type: type[R]) -> list[R]:
        """Return the rows of one type, in the order of the file; those of one site are one, in however many looks."""
        rows: list[R] = [row for row in self.rows if isinstance(row, row_type)]
        return cast(list[R], _by_site(rows)) if row_type in _LOOKED_AT else rows

    @property
    def complete(self) -> bool:
        """Whether the scan ran to its end."""
        return self.footer is not None and self.footer.status == "complete"

    @property
    def status(self) -> str:
        """The footer's status, or "unfinished" where a killed scan wrote none."""
        return self.footer.status if self.footer else "unfinished"

    def __repr__(self) -> str:
        model = self.header.subject.get("name", "?")
        return f"<Recording of {model}: {', '.join(self.header.precisions)}; {len(self.rows)} rows; {self.status}>"


def load(path: str | Path) -> Recording:
    """Read a recording.

    Raises UsageError when there is no such file, RecordingFormatError when it is not a recording or is newer than
    this package.
    """
    source = Path(path)
    header, decoded = _decoded(source)
    return build(header, decoded, path=str(source))


class Resumable(NamedTuple):
    """A recording up to its last progress row, that row, and whether the whole scan is complete already."""

    recording: Recording
    progress: ProgressRow
    complete: bool


def load_progress(path: str | Path) -> Resumable | None:
    """Read what a scan can go on from; None where the recording has no progress row. Raises what `load` does."""
    source = Path(path)
    header, decoded = _decoded(source)
    places = [place for place, row in enumerate(decoded) if isinstance(row, ProgressRow)]
    if not places:
        return None
    complete = any(isinstance(row, Footer) and row.status == "complete" for row in decoded)
    return Resumable(build(header, decoded[: places[-1]], path=str(source)), decoded[places[-1]], complete)


def _decoded(source: Path) -> tuple[Header, list[Any]]:
    """Return the header and all that follows it."""
    lines = _lines(source)
    header = next(lines, None)
    if not isinstance(header, dict) or header.get("kind") != "header" or not isinstance(header.get("format"), int):
        raise RecordingFormatError(
            f"{source.name} is not a recording: its first line is no header; give a file that scan wrote."
        )
    if header["format"] > FORMAT:
        raise RecordingFormatError(
            f"{source.name} has format {header['format']}, this overflow-lab reads up to {FORMAT}; "
            "upgrade, or record again."
        )
    try:
        return cast(Header, decode(header)), [row for line in lines if (row := decode(line)) is not None]
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RecordingFormatError(f"{source.name} has a row that cannot be read ({error}); record again.") from error


def build(header: Header, decoded: list[Any], *, path: str | None = None) -> Recording:
    """Return the recording of these rows: those of the same site are merged, a footer among them ends it."""
    footer = next((row for row in decoded if isinstance(row, Footer)), None)
    merged = Merged()
    for row in decoded:
        if not isinstance(row, (Footer, ProgressRow)):
            merged.add(row)
    return Recording(header, merged.rows, footer, path)


class Merged:
    """Rows in the order in which they came, those of one site merged into the first of them."""

    def __init__(self) -> None:
        self._rows: dict[Any, Any] = {}
        self._added = 0

    def add(self, row: Row) -> None:
        """Add a row to that of its site; a row of no site stands for itself."""
        key = (row.kind, *row.key) if isinstance(row, _MERGED) else self._added
        self._added += 1
        self._rows[key] = self._rows[key] + row if key in self._rows else row

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows."""
        return tuple(self._rows.values())


def _by_site(rows: list[Any]) -> list[Any]:
    """Return the rows of each site added up, at the place of the first."""
    sites: dict[Any, Any] = {}
    for row in rows:
        sites[row.site] = sites[row.site] + row if row.site in sites else row
    return list(sites.values())


def _lines(path: Path) -> Iterator[Any]:
    """Yield the parsed lines of a recording, up to the last whole one."""
    try:
        with _open(path) as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    return  # the line on which a killed run was writing
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return  # a gzip member that a killed run left open, or a file that was cut or damaged
    except FileNotFoundError as error:
        raise UsageError(f"there is no recording {path.name}; scan writes one.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordingFormatError(f"{path.name} cannot be read as a recording ({error}).") from error


def _open(path: Path) -> IO[str]:
    """Open a recording for reading, gzipped or plain by its first bytes."""
    with path.open("rb") as file:
        zipped = file.read(2) == b"\x1f\x8b"
    return cast(IO[str], gzip.open(path, "rt", encoding="utf-8") if zipped else path.open(encoding="utf-8"))


__all__ = [
    "FORMAT",
    "STEP_BATCHES",
    "AnswerCountRow",
    "AnswerRow",
    "AttributionRow",
    "BatchRow",
    "BlindSpotRow",
    "CastRow",
    "ErrorRow",
    "EventRow",
    "FailureRow",
    "Footer",
    "Header",
    "LookRow",
    "Merged",
    "ModuleRow",
    "Moment",
    "NoiseRow",
    "OperationRow",
    "OutputRow",
    "PrecisionRow",
    "ProgressRow",
    "ProofRow",
    "RangeRow",
    "Recording",
    "Resumable",
    "Row",
    "RunRow",
    "ShareRow",
    "StepRow",
    "TensorRow",
    "build",
    "load",
    "load_progress",
]
