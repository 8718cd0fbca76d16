"""Recordings written by hand, row by row, so that each rule of the analysis is asked alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from overflow_lab.ranges import Range
from overflow_lab.recording import (
    FORMAT,
    ErrorRow,
    Footer,
    Header,
    ModuleRow,
    Moment,
    PrecisionRow,
    RangeRow,
    Recording,
    RunRow,
    build,
)

HEADER = Header(FORMAT, "0.1.0", "2026-01-01T00:00:00+00:00", {"name": "m"}, ("float32", "float16"))


def range_of(values: Iterable[float]) -> Range:
    """Return the range of these values, as its definition reads."""
    x = np.array(list(values), dtype=np.float64)
    finite = x[np.isfinite(x)]
    sizes = np.abs(finite[finite != 0])
    exponents, counts = np.unique(np.floor(np.log2(sizes)).astype(int), return_counts=True)
    return Range(
        count=len(x),
        nan=int(np.isnan(x).sum()),
        posinf=int((x == np.inf).sum()),
        neginf=int((x == -np.inf).sum()),
        zero=int((x == 0).sum()),
        min=float(finite.min()) if len(finite) else None,
        max=float(finite.max()) if len(finite) else None,
        smallest=float(sizes.min()) if len(sizes) else None,
        sum=float(finite.sum()),
        sum_of_squares=float((finite**2).sum()),
        exponents=dict(zip(exponents.tolist(), counts.tolist(), strict=True)),
    )


def seen(precision: str, module: str, port: str, order: int, values: Iterable[float]) -> RangeRow:
    """Return the row of a port that was seen once; its first bad moment is when it was seen."""
    found = range_of(values)
    moment = Moment(order, "forward", 0, 0) if found.nonfinite else None
    return RangeRow(precision, module, port, order, precision, 1, found, moment)


def error(module: str, port: str, order: int, relative: float, *, precision: str = "float16") -> ErrorRow:
    """Return the row of a port whose relative error is this."""
    return ErrorRow(precision, module, port, order, 100, 0, relative**2 * 4.0, 4.0)


def recording(*rows: Any, low: str = "float16", classes: dict[str, str] | None = None, ran: bool = True) -> Recording:
    """Return a recording of float32 and one low precision that holds these rows."""
    classes = classes or {"": "Model", "a": "Linear", "a.b": "Linear", "c": "Block"}
    modules = [
        ModuleRow(path, name, index, leaf=not any(other.startswith(path + ".") for other in classes) and path != "")
        for index, (path, name) in enumerate(classes.items())
    ]
    precisions = [PrecisionRow("float32", "float32", "none"), PrecisionRow(low, low.partition("-")[0], "to")]
    runs = [RunRow(name, "forward", 1, 2, 0) for name in ("float32", low)] if ran else []
    return build(HEADER, [*modules, *precisions, *rows, *runs, Footer("complete")])
