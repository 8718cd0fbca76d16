"""Rows to JSON and back. Non-finite numbers are the strings "nan", "inf" and "-inf", which every parser reads."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from overflow_lab.ranges import Range
from overflow_lab.recording.progress_row import ProgressRow
from overflow_lab.recording.rows import ROW_TYPES, Footer, Header, Moment

_TUPLES = frozenset(
    {"aliases", "kept", "shape", "precisions", "cause", "harmed", "absorbed", "amplifier", "peaks", "bad", "errors"}
    | {"members", "notes"}
)
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FLOATS = frozenset(
    {
        "tightest",
        "error_squares",
        "reference_squares",
        "kl_sum",
        "sum",
        "sum_of_squares",
        "absmax",
        "energy_lost",
        "relative_error",
    }
    | {"rounding", "value", "error", "error_in", "local_error", "spread_error", "margin", "total", "share"}
)


def plain(value: Any) -> Any:
    """Return `value` JSON-ready: dataclasses as dicts, non-finite floats as strings, None fields left out."""
    if isinstance(value, Range):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {name: plain(item) for name, item in fields.items() if item is not None}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def dump(value: Any) -> str:
    """Return one line of strict JSON."""
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def encode(row: Any) -> str:
    """Return the line of a header, row or footer."""
    kind = {Header: "header", Footer: "footer"}.get(type(row)) or row.kind
    return dump({"kind": kind, **plain(row)})


def decode(line: Mapping[str, Any]) -> Any:
    """Return the row of a parsed line; None for a kind that this version does not know."""
    known: dict[str, type[Any]] = {"header": Header, "footer": Footer, "progress": ProgressRow, **ROW_TYPES}
    cls = known.get(str(line.get("kind")))
    if cls is None:
        return None
    names = {f.name for f in dataclasses.fields(cls)}
    return cls(**{name: _value(name, item) for name, item in line.items() if name in names})


def _value(name: str, item: Any) -> Any:
    """Return a field's value from JSON, by the field's name."""
    if name == "range":
        return Range.from_json({key: _number(key, number) for key, number in item.items()})
    if name == "first_bad":
        return Moment(**item)
    if name == "margins":
        return {int(exponent): count for exponent, count in item.items()}
    if name == "tightest":
        return tuple((str(module), _number(name, before), _number(name, after)) for module, before, after in item)
    if name == "figures":
        return {figure: _SPECIAL.get(number, number) for figure, number in item.items()}
    if name in _TUPLES:
        return tuple(item)
    return _number(name, item)


def _number(name: str, item: Any) -> Any:
    """Return a float where a non-finite one was written as a string."""
    return _SPECIAL.get(item, item) if name in _FLOATS and isinstance(item, str) else item
