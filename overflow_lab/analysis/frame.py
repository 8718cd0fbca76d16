"""The recording as tables: `sites`, a row a port and precision; `layers`, a row an output; `operations`."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from overflow_lab.analysis.index import REFERENCE, Index, bits, index, role
from overflow_lab.analysis.streams import streams
from overflow_lab.formats import FORMATS, FloatFormat, headroom_bits
from overflow_lab.ranges import Range
from overflow_lab.recording import ErrorRow, OperationRow, RangeRow, Recording

# The formats that are forecast from the float32 run, whatever was run.
FORECAST = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_SITE_COLUMNS = [
    *("precision", "order", "module", "class_name", "leaf", "port", "role", "dtype", "calls"),
    *("count", "nan", "posinf", "neginf", "zero", "min", "max", "absmax", "smallest", "rms"),
    *("headroom", "subnormal", "flushed", "relative_error", "effective_bits", "bad_clock"),
]
_OPERATION_COLUMNS = [
    *("precision", "order", "module", "class_name", "op", "ordinal", "detail", "dtype", "calls", "elements"),
    *(
        "nonfinite",
        "tainted",
        "absmax",
        "headroom",
        "error",
        "error_in",
        "local_error",
        "effective_bits",
        "flushed",
        "constant_flushed",
    ),
]


def sites(recording: Recording) -> pd.DataFrame:
    """Return one row for each precision, module and port, in order of precision and execution.

    `headroom` is in bits, in the format of the values' own dtype; `subnormal` and `flushed` are shares of the elements;
    `relative_error` and `effective_bits` compare with float32; `bad_clock` is when a NaN or inf was first seen.
    """
    found = index(recording)
    rows = [_site(found, row) for rows in found.ranges.values() for row in sorted(rows.values(), key=lambda r: r.order)]
    return pd.DataFrame(rows, columns=_SITE_COLUMNS)


def _site(found: Index, row: RangeRow) -> dict[str, Any]:
    r = row.range
    fmt = FORMATS.get(row.dtype, FORMATS[REFERENCE])
    error = found.errors.get(row.precision, {}).get((row.module, row.port))
    relative = None if error is None else error.relative_error
    return {
        "precision": row.precision,
        "order": row.order,
        "module": row.module,
        "class_name": found.class_name(row.module),
        "leaf": _leaf(found, row.module),
        "port": row.port,
        "role": role(row.port),
        "dtype": row.dtype,
        "calls": row.calls,
        **_numbers(r),
        "headroom": _headroom(r, fmt),
        "subnormal": _share(r.subnormal(fmt), r),
        "flushed": _share(r.flushed(fmt), r),
        "relative_error": relative,
        "effective_bits": bits(relative),
        "bad_clock": None if row.first_bad is None else row.first_bad.clock,
    }


def _numbers(r: Range) -> dict[str, Any]:
    names = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "absmax", "smallest", "rms")
    return {name: getattr(r, name) for name in names}


def layers(recording: Recording) -> pd.DataFrame:
    """Return one row for each module's output in order of execution, float32 beside what each precision showed.

    For each format f of FORECAST: `headroom_f` (bits), `flushed_f` (share of elements), `energy_lost_f` (share of the
    sum of squares), all from the float32 run. `stream` names the residual stream whose values these are, "" for others.
    For each low precision p: `observed_p` (absmax), `nonfinite_p` (elements), `error_p` (relative error against
    float32), `bits_p` (effective bits).
    """
    found = index(recording)
    lows = [name for name in found.precisions if name != REFERENCE]
    base = found.ranges.get(REFERENCE) or next(iter(found.ranges.values()), {})
    outputs = sorted((row for row in base.values() if role(row.port) == "output"), key=lambda row: row.order)
    named = streams(found, base)
    rows = [
        {**_layer(found, row), "stream": named.get((row.module, row.port), ""), **_observed(found, row, lows)}
        for row in outputs
    ]
    return pd.DataFrame(rows, columns=list(rows[0]) if rows else _layer_columns(lows))


def operations(recording: Recording) -> pd.DataFrame:
    """Return one row for each operation of each module that the shadow run saw, by precision and execution.

    `ordinal` counts the operations of one name in one module's own code; casts of weights, buffers and inputs have
    negative ones, and name the tensor in `detail`. `absmax` is of the shadow (what float32 would have there), and
    `headroom` (bits) says whether it fits the operation's own `dtype`. `error` is the largest relative error of a
    result against its shadow, `error_in` that of its operands then, `local_error` what it adds itself: against the same
    operation done wide on its own operands (NaN where not measured); `effective_bits` are those that `error` leaves.
    `flushed` is the share of values that became zero below the smallest normal, `nonfinite` the count of NaN and inf,
    `tainted` whether these came after the first bad value that the precision made: those before are in float32, too
    (a mask of -inf, a log of 0). No rows where the recording was made at the level of modules.
    """
    found = index(recording)
    rows = [
        _operation(found, row)
        for name in found.operations
        for row in sorted(found.operations[name].values(), key=lambda row: row.order)
    ]
    return pd.DataFrame(rows, columns=_OPERATION_COLUMNS)


def _operation(found: Index, row: OperationRow) -> dict[str, Any]:
    kept = {name: getattr(row, name) for name in _OPERATION_COLUMNS if hasattr(row, name)}
    made = [e.clock for e in found.events.get(row.precision, ()) if e.event in ("bad", "fresh")]
    return kept | {
        "class_name": found.class_name(row.module),
        "tainted": row.nonfinite > 0 and bool(made) and row.order >= min(made),
        "headroom": headroom_bits(row.absmax, FORMATS.get(row.dtype, FORMATS[REFERENCE])),
        "effective_bits": bits(row.error),
        "local_error": math.nan if row.local_error is None else row.local_error,
        "flushed": row.flushed / row.elements if row.elements else 0.0,
    }


def _layer(found: Index, row: RangeRow) -> dict[str, Any]:
    r = row.range
    made: dict[str, Any] = {
        "order": row.order,
        "module": row.module,
        "class_name": found.class_name(row.module),
        "leaf": _leaf(found, row.module),
        "port": row.port,
        "count": r.count,
        "min": r.min,
        "max": r.max,
        "absmax": r.absmax,
        "smallest": r.smallest,
        "zero": r.zero,
        "exponents": dict(r.exponents),
    }
    for name in FORECAST:
        fmt = FORMATS[name]
        made |= {
            f"headroom_{name}": _headroom(r, fmt),
            f"flushed_{name}": _share(r.flushed(fmt), r),
            f"energy_lost_{name}": r.flushed_energy(fmt),
        }
    return made


def _observed(found: Index, row: RangeRow, lows: list[str]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name in lows:
        low = found.ranges.get(name, {}).get((row.module, row.port))
        error: ErrorRow | None = found.errors.get(name, {}).get((row.module, row.port))
        relative = None if error is None else error.relative_error
        made |= {
            f"observed_{name}": None if low is None else low.range.absmax,
            f"nonfinite_{name}": None if low is None else low.range.nonfinite,
            f"error_{name}": relative,
            f"bits_{name}": bits(relative),
        }
    return made


def _layer_columns(lows: list[str]) -> list[str]:
    """Return the columns of a table without rows."""
    site = ["order", "module", "class_name", "leaf", "port"]
    plain = [*site, "count", "min", "max", "absmax", "smallest", "zero", "exponents"]
    forecast = [f"{what}_{name}" for name in FORECAST for what in ("headroom", "flushed", "energy_lost")]
    seen = [f"{what}_{name}" for name in lows for what in ("observed", "nonfinite", "error", "bits")]
    return [*plain, *forecast, "stream", *seen]


def _headroom(r: Range, fmt: FloatFormat) -> float | None:
    """Return the headroom of the finite values; None where there were none."""
    return None if r.absmax is None else headroom_bits(r.absmax, fmt)


def _share(part: int, r: Range) -> float:
    return part / r.count if r.count else 0.0


def _leaf(found: Index, module: str) -> bool:
    row = found.modules.get(module)
    return row.leaf if row else True
