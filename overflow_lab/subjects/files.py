"""Inputs from the user's file: txt, jsonl, csv or parquet; one column, or a template over several. Read as a stream."""

from __future__ import annotations

import csv
import json
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overflow_lab.errors import UsageError, one_line

SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
# What a column with the inputs is usually called, when the user names none.
USUAL = ("text", "prompt", "input", "question", "sentence", "content", "image", "audio", "file", "path")


@dataclass(frozen=True)
class Rows:
    """The texts in a file, one for each line or record, read anew each time it is walked; blank ones are left out.

    txt: a line is a text. jsonl, csv, parquet: `column` names the text, or `template` ("{question} {context}") joins
    columns; without either, the only column or one called text, prompt, input, ... is taken. Walking raises UsageError,
    in one line with line and column, for a file that is missing, empty, of another kind, or not as asked for.
    """

    path: str
    column: str | None = None
    template: str | None = None

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return Path(self.path).name

    def __iter__(self) -> Iterator[str]:
        return (text for _, _, text in self._walked())

    def beside(self, column: str) -> Iterator[str]:
        """Yield what stands in `column` beside each of the texts: labels, say."""
        for line, record, _ in self._walked():
            if column not in record:
                raise UsageError(f"{self.name}, line {line}: there is no column {column!r}; it has {_names(record)}")
            yield _plain(record[column])

    def _walked(self) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        self._check()
        found = False
        for line, record in _read(Path(self.path)):
            text = self._text(line, record)
            if text.strip():
                found = True
                yield line, record, text
        if not found:
            raise UsageError(f"{self.name} holds no input; give at least one line or record that is not blank")

    def _check(self) -> None:
        path = Path(self.path)
        if not path.is_file():
            raise UsageError(f"there is no file {self.path!r}; give a {', '.join(SUFFIXES)} file to --inputs")
        if path.suffix.lower() not in SUFFIXES:
            raise UsageError(f"{self.name} ends in {path.suffix or 'nothing'!r}; --inputs reads {', '.join(SUFFIXES)}")
        if self.column is not None and self.template is not None:
            raise UsageError("both --column and --template were given; choose one of them")

    def _text(self, line: int, record: Mapping[str, Any]) -> str:
        if self.template is not None:
            return self._filled(line, record, self.template)
        column = self.column or _usual(record)
        if column is None:
            raise UsageError(f"{self.name} has the columns {_names(record)}; say which by --column")
        if column not in record:
            raise UsageError(f"{self.name}, line {line}: there is no column {column!r}; it has {_names(record)}")
        return "" if record[column] is None else str(record[column])

    def _filled(self, line: int, record: Mapping[str, Any], template: str) -> str:
        try:
            fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
        except ValueError as error:
            raise UsageError(f"the template {template!r} is malformed ({error}); write {{column}}") from error
        if not fields:
            raise UsageError(f"the template {template!r} names no column; write {{column}} for a column")
        missing = next((field for field in fields if field not in record), None)
        if missing is not None:
            what = f"there is no column {missing!r} for the template"
            raise UsageError(f"{self.name}, line {line}: {what}; it has {_names(record)}")
        # By hand: str.format would follow "{text.__class__}" into the objects.
        parts = string.Formatter().parse(template)
        return "".join(literal + ("" if field is None else _plain(record[field])) for literal, field, _, _ in parts)


@dataclass(frozen=True)
class Media:
    """The pictures or sounds that a column of paths names, relative to the file's folder, opened as they are walked."""

    rows: Rows
    load: Callable[[Path], Any]

    def __iter__(self) -> Iterator[Any]:
        folder = Path(self.rows.path).parent
        for text in self.rows:
            path = folder / text.strip()
            if not path.is_file():
                raise UsageError(
                    f"{self.rows.name} names {text.strip()!r}, which is no file; give paths from its folder"
                )
            yield self.load(path)


def _plain(value: Any) -> str:
    return "" if value is None else str(value)


def _names(record: Mapping[str, Any]) -> str:
    shown = ", ".join(repr(name) for name in list(record)[:8])
    return f"{shown}, ..." if len(record) > 8 else shown or "none"


def _usual(record: Mapping[str, Any]) -> str | None:
    if len(record) == 1:
        return next(iter(record))
    return next((name for name in USUAL if name in record), None)


def _read(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    readers: dict[str, Callable[[Path], Iterable[tuple[int, Mapping[str, Any]]]]] = {
        ".txt": _read_txt,
        ".jsonl": _read_jsonl,
        ".csv": _read_csv,
        ".parquet": _read_parquet,
    }
    try:
        yield from readers[path.suffix.lower()](path)
    except UnicodeDecodeError as error:
        raise UsageError(f"{path.name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise UsageError(f"{path.name} cannot be read ({one_line(error, limit=120)}); check the file") from error


def _read_txt(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            yield line, {"text": text.rstrip("\n")}


def _read_jsonl(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for line, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except (ValueError, RecursionError) as error:
                reason = one_line(error, limit=120)
                raise UsageError(f"{path.name}, line {line}: no JSON ({reason}); write one object a line") from error
            if isinstance(record, str):
                record = {"text": record}
            if not isinstance(record, dict):
                kind = type(record).__name__
                raise UsageError(f"{path.name}, line {line}: a {kind}, not an object; write one object a line")
            yield line, record


def _read_csv(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        try:
            header = next(reader, None)
            for values in reader:
                if not values:
                    continue
                if header is None or len(values) != len(header):
                    count = len(header or ())
                    what = f"{len(values)} fields where the header has {count}"
                    raise UsageError(f"{path.name}, line {reader.line_num}: {what}; quote fields that hold commas")
                yield reader.line_num, dict(zip(header, values, strict=True))
        except csv.Error as error:
            raise UsageError(f"{path.name}, line {reader.line_num}: no CSV ({error}); check its quotes") from error


def _read_parquet(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(
            "parquet needs pyarrow, which is not installed; pip install 'overflow-lab[parquet]'"
        ) from error
    try:
        line = 0
        with parquet.ParquetFile(path) as file:
            for group in file.iter_batches(batch_size=1024):
                for record in group.to_pylist():
                    line += 1
                    yield line, record
    except ArrowException as error:
        raise UsageError(f"{path.name} is no parquet file ({one_line(error, limit=120)}); write it again") from error
