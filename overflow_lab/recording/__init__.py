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
from typing import IO, Any, TypeVar, cast

from overflow_lab.errors import RecordingFormatError, UsageError
from overflow_lab.recording.codec import decode
from overflow_lab.recording.operation_rows import AttributionRow, EventRow, LookRow, NoiseRow, OperationRow
from overflow_lab.recording.proof_rows import ProofRow
from overflow_lab.recording.rows import (
    AnswerRow,
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
_MERGED = (RangeRow, ErrorRow, OutputRow, RunRow, OperationRow, EventRow)

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
        decoded = [row for line in lines if (row := decode(line)) is not None]
        return build(cast(Header, decode(header)), decoded, path=str(source))
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise RecordingFormatError(f"{source.name} has a row that cannot be read ({error}); record again.") from error


def build(header: Header, decoded: list[Any], *, path: str | None = None) -> Recording:
    """Return the recording of these rows: those of the same site are merged, a footer among them ends it."""
    footer = next((row for row in decoded if isinstance(row, Footer)), None)
    merged: dict[Any, Any] = {}
    for number, row in enumerate(row for row in decoded if not isinstance(row, Footer)):
        key = _key(row, number)
        merged[key] = merged[key] + row if key in merged else row
    return Recording(header, tuple(merged.values()), footer, path)


def _by_site(rows: list[Any]) -> list[Any]:
    """Return the rows of each site added up, at the place of the first."""
    sites: dict[Any, Any] = {}
    for row in rows:
        sites[row.site] = sites[row.site] + row if row.site in sites else row
    return list(sites.values())


def _key(row: Any, number: int) -> Any:
    """Return what makes two rows one: the site for mergeable rows, otherwise the row itself."""
    return (row.kind, *row.key) if isinstance(row, _MERGED) else number


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
    "ModuleRow",
    "Moment",
    "NoiseRow",
    "OperationRow",
    "OutputRow",
    "PrecisionRow",
    "ProofRow",
    "RangeRow",
    "Recording",
    "Row",
    "RunRow",
    "ShareRow",
    "StepRow",
    "TensorRow",
    "build",
    "load",
]
