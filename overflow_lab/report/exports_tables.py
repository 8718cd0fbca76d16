"""A recording's tables as files for other tools: CSV, Parquet, JSON, or a folder of events for TensorBoard.

In CSV a missing number is `NaN` and the root module's path is empty, so that pandas reads the very table again with
`pandas.read_csv(path, keep_default_na=False, na_values="NaN")`.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from overflow_lab import __version__
from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis, Finding
from overflow_lab.errors import UsageError
from overflow_lab.recording import Recording
from overflow_lab.recording.codec import dump, plain
from overflow_lab.report.exports import FILE_FORMATS, SCHEMA, TABLES, as_python

Table = Literal["layers", "sites", "operations", "findings"]
FileFormat = Literal["csv", "parquet", "json", "tensorboard"]
_SUFFIXES = {".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".json": "json"}
_TEXTS = frozenset(
    {"precision", "module", "class_name", "port", "role", "dtype", "op", "detail", "exponents"}
    | {"kind", "mechanism", "severity", "message", "evidence"}
)
_FINDINGS = ["precision", "kind", "mechanism", "severity", "module", "op", "value", "limit", "message", "evidence"]


def export(
    recording: Recording, path: str | Path, *, table: Table = "layers", format: FileFormat | None = None
) -> Path:
    """Write one table of a recording to `path`, over what is there, and return the path.

    `table` is "layers", "sites", "operations" (as the functions of those names give them) or "findings". `format` is
    "csv", "parquet", "json" or "tensorboard" (a folder of events, for all layers; `table` is not asked for); without
    it the ending of `path` decides. Dicts (`exponents`, `evidence`) are JSON text in CSV and Parquet.
    Raises UsageError for another table or format, where an extra is not installed, and where nothing can be written.
    """
    target = Path(path)
    chosen = file_format(target, format)
    if table not in TABLES:
        raise UsageError(f"there is no table {table!r}; choose among {', '.join(TABLES)}.")
    try:
        if chosen == "tensorboard":
            from overflow_lab.report.exports_tensorboard import write_events

            return write_events(recording, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if chosen == "parquet":
            _write_parquet(exported_frame(recording, table), target)
        else:
            target.write_text(to_text(recording, table=table, format=chosen), encoding="utf-8", newline="")
    except OSError as error:
        raise UsageError(f"{target.name} cannot be written ({error.strerror}); choose another place.") from error
    return target


def file_format(path: Path, given: str | None = None) -> str:
    """Return the format to write: the given one, or the one that the path's ending names. Raises UsageError."""
    found = given if given is not None else _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise UsageError(
            f"the ending of {path.name} names no format; end it in .csv, .parquet or .json, or say which: "
            f"{', '.join(FILE_FORMATS)} (--format)."
        )
    if found not in FILE_FORMATS:
        raise UsageError(f"there is no format {found!r}; choose among {', '.join(FILE_FORMATS)}.")
    return found


def exported_frame(recording: Recording, table: str) -> pd.DataFrame:
    """Return a table as CSV and Parquet hold it: text, truths and numbers; dicts are JSON text, missing is NaN."""
    made = _table(recording, table)
    for name in made.columns:
        if name in ("exponents", "evidence"):
            made[name] = [dump(as_python(item)) for item in made[name]]
        elif name in _TEXTS:
            made[name] = made[name].fillna("").astype("str")
        elif made[name].dtype == object:  # a column of None alone, or one that holds a None
            made[name] = pd.to_numeric(made[name]).astype("float64")
    return made


def to_text(recording: Recording, *, table: str, format: str) -> str:
    """Return a table as CSV, or as one JSON object whose `rows` are objects, non-finite numbers strings."""
    if format == "csv":
        return exported_frame(recording, table).to_csv(index=False, na_rep="NaN", lineterminator="\n")
    if format != "json":
        raise UsageError(f"{format} is no text; give a file or folder to write to.")
    rows = [{key: _cell(value) for key, value in row.items()} for row in _table(recording, table).to_dict("records")]
    model = str(recording.header.subject.get("name", ""))
    made = {"overflow_lab": __version__, "schema": SCHEMA, "model": model, "table": table, "rows": rows}
    return json.dumps(made, indent=1, allow_nan=False) + "\n"


def findings(diagnosis: Diagnosis) -> pd.DataFrame:
    """Return one row for each finding, the most severe first; `module` is empty for the root, `evidence` a dict."""
    return pd.DataFrame([_finding(finding) for finding in diagnosis.findings], columns=_FINDINGS)


def _finding(finding: Finding) -> dict[str, Any]:
    origin = finding.origin
    return {
        **{name: getattr(finding, name) for name in ("precision", "kind", "mechanism", "severity", "value", "limit")},
        "module": "" if origin is None else origin.module,
        "op": "" if origin is None else origin.op or "",
        "message": finding.message,
        "evidence": dict(finding.evidence),
    }


def _table(recording: Recording, table: str) -> pd.DataFrame:
    if table == "findings":
        from overflow_lab.analysis import analyze

        return findings(analyze(recording))
    return {"layers": frame.layers, "sites": frame.sites, "operations": frame.operations}[table](recording)


def _cell(value: Any) -> Any:
    """Return a value for JSON: null where it is missing, a string where it is not finite."""
    found = as_python(value)
    return None if isinstance(found, float) and math.isnan(found) else plain(found)


def _write_parquet(table: pd.DataFrame, target: Path) -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise UsageError("Parquet needs pyarrow: pip install 'overflow-lab[parquet]'; or export to .csv.")
    table.to_parquet(target, engine="pyarrow", index=False)
