"""The verdicts for machines: the JSON contract, schema 1. Keys may be added, never renamed. Tables: exports_tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overflow_lab import __version__
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import ProofRow, Recording
from overflow_lab.recording.codec import plain

# 1: the first schema.
SCHEMA = 1
# What `export` writes, and how.
TABLES = ("layers", "sites", "operations", "findings")
FILE_FORMATS = ("csv", "parquet", "json", "tensorboard")


def to_json(
    recording: Recording, diagnosis: Diagnosis, *, recording_path: str | None = None, report_path: str | None = None
) -> dict[str, Any]:
    """Return the one object that `scan --json` prints; `json.dumps(..., allow_nan=False)` takes it as it is.

    Paths are given back as they were given; without `recording_path` it is where the recording was read from.
    Non-finite floats are the strings "nan", "inf" and "-inf". "remedies" holds what was tried, a dict for
    each, with the keys of `ProofRow`.
    """
    made = {
        "overflow_lab": __version__,
        "schema": SCHEMA,
        "model": str(recording.header.subject.get("name", "")),
        "status": recording.status,
        "recording": recording_path if recording_path is not None else recording.path,
        "report": report_path,
        "verdicts": {name: verdict.to_dict() for name, verdict in diagnosis.verdicts.items()},
        "findings": [finding.to_dict() for finding in diagnosis.findings],
        "remedies": [{**vars(row)} for row in recording.of(ProofRow)],
    }
    return dict(plain(as_python(made)))


def as_python(value: Any) -> Any:
    """Return `value` with numpy's scalars as Python's: evidence is taken from tables."""
    if isinstance(value, Mapping):
        return {str(key): as_python(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_python(item) for item in value]
    return value.item() if hasattr(value, "item") and not isinstance(value, (str, bytes)) else value
