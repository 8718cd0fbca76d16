"""How much room the outputs of modules have in a precision, each against the limit of the dtype that it has there."""

from __future__ import annotations

from typing import Any

import pandas as pd

from overflow_lab.analysis.frame import sites
from overflow_lab.analysis.index import REFERENCE
from overflow_lab.formats import FORMATS, FloatFormat
from overflow_lab.formats import headroom_bits as headroom
from overflow_lab.recording import Recording


def outputs(recording: Recording, precision: str, *, expected: bool = False) -> pd.DataFrame:
    """Return the outputs of all modules in a precision, with `largest` magnitude and `room` in bits of its dtype.

    With `expected` the magnitude is the one that float32 has there: what would have to fit, also where it did not.
    """
    table = sites(recording)
    table = table[(table["role"] == "output") & table["precision"].isin([precision, REFERENCE])]
    wide = table[table["precision"] == REFERENCE].set_index(["module", "port"])
    reference = wide["min"].to_dict()
    found = table[(table["precision"] == precision) & table["absmax"].notna()].copy()
    pairs = [_room(row, reference.get((row["module"], row["port"]))) for row in found.to_dict("records")]
    if expected:
        largest = wide["absmax"].to_dict()
        pairs = [
            _expected(row, pair, largest.get((row["module"], row["port"])))
            for row, pair in zip(found.to_dict("records"), pairs, strict=True)
        ]
    found["largest"], found["room"] = [a for a, _ in pairs], [b for _, b in pairs]
    return found


def _room(row: Any, lowest: float | None) -> tuple[float, float]:
    """Return the largest magnitude of an output and its headroom, `lowest` being the least value in float32."""
    fmt: FloatFormat = FORMATS.get(row["dtype"], FORMATS[REFERENCE])
    largest = max(row["max"], 0.0) if _is_masked(row, fmt, lowest) else row["absmax"]
    return largest, headroom(largest, fmt)


def _expected(row: Any, seen: tuple[float, float], wide: float | None) -> tuple[float, float]:
    """Return the same by float32's magnitude, where that is no mask."""
    fmt: FloatFormat = FORMATS.get(row["dtype"], FORMATS[REFERENCE])
    if wide is None or wide != wide or wide >= 0.999 * FORMATS[REFERENCE].max:
        return seen
    return wide, headroom(wide, fmt)


def _is_masked(row: Any, fmt: FloatFormat, lowest: float | None) -> bool:
    """Return whether the lowest value is the format's own end in both runs: a mask, torch.finfo(x.dtype).min."""
    return bool(row["min"] == -fmt.max and lowest is not None and lowest <= -0.999 * FORMATS[REFERENCE].max)
