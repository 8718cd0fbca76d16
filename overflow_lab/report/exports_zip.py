"""One zip to attach to an issue: recording, report, the issue's text and a reproduction, and nothing private in it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from overflow_lab.analysis import analyze
from overflow_lab.recording import Recording, Row
from overflow_lab.recording.codec import encode
from overflow_lab.report import html, markdown, repro, text
from overflow_lab.report.writing import write_file

# What messages, not names, stand in: absolute paths in them are cut to their last part.
_MESSAGES = ("error", "detail", "reason", "source")
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can say: two zips of one recording are the same


def write_zip(recording: Recording, path: Path, *, built_in: Sequence[str] = ()) -> Path:
    """Write recording.jsonl.gz, report.html, issue.md and, where something breaks, repro.py into a zip; return `path`.

    Absolute paths in messages are cut to their last part; texts are in it where the scan was told to store them.
    `built_in` are the built-in texts, for the reproduction. Raises UsageError where it cannot be written.
    """
    shared = shareable(recording)
    diagnosis = analyze(shared)
    files: dict[str, bytes] = {
        "recording.jsonl.gz": _packed(shared),
        "report.html": html.render(shared, diagnosis).encode(),
        "issue.md": markdown.render(shared, diagnosis).encode(),
    }
    if diagnosis.worst != "none":
        files["repro.py"] = repro.script(shared, diagnosis, built_in=built_in).encode(errors="backslashreplace")
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, _TIME), content, zipfile.ZIP_DEFLATED)
    return write_file(path, packed.getvalue())


def shareable(recording: Recording) -> Recording:
    """Return the recording with the absolute paths in its messages cut to their last part."""
    header = recording.header
    kept = {name: _without_paths(getattr(header, name)) for name in ("subject", "environment", "options")}
    kept["subject"] = {**kept["subject"], "name": text.model_name(header.subject.get("name", ""))}
    footer = recording.footer
    if footer is not None and footer.error is not None:
        footer = dataclasses.replace(footer, error=_without_paths(footer.error))
    rows = tuple(_shareable_row(row) for row in recording.rows)
    return Recording(dataclasses.replace(header, **kept), rows, footer)


def _shareable_row(row: Row) -> Row:
    said = {name: value for name in _MESSAGES if isinstance(value := getattr(row, name, None), str)}
    changed = {name: cut for name, value in said.items() if (cut := _without_paths(value)) != value}
    return dataclasses.replace(row, **changed) if changed else row


def _without_paths(value: Any) -> Any:
    """Return nested facts with the absolute paths in their texts cut; texts without any stay as they are."""
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item) for item in value]
    if not isinstance(value, str):
        return value
    cut = text.without_paths(value, 10_000)
    return value if cut == text.visible(value, 10_000) else cut


def _packed(recording: Recording) -> bytes:
    """Return the recording as a gzipped file, the same each time."""
    rows = [recording.header, *recording.rows, *([recording.footer] if recording.footer else [])]
    packed = io.BytesIO()
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=0) as file:
        for row in rows:
            file.write((encode(row) + "\n").encode(errors="backslashreplace"))
    return packed.getvalue()
