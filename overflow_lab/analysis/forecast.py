"""The forecast: what would not fit a format, or would be flushed to zero in it, told from float32's run alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from overflow_lab.analysis.frame import FORECAST, layers
from overflow_lab.recording import Recording

# A layer loses values where this share of its sum of squares becomes zero.
_LOST = 0.01


@dataclass(frozen=True)
class Forecast:
    """What float32's run tells of one format.

    `beyond` of `layers` outputs have a value that does not fit: the first of them in order of execution is that of
    `module`, with the magnitude `value`. `headroom` is the least of all layers, in bits; `flushed` counts the layers
    of which a hundredth of the energy becomes zero.
    """

    format: str
    layers: int
    beyond: int
    headroom: float
    flushed: int
    module: str = ""
    value: float | None = None


def forecast(recording: Recording) -> list[Forecast]:
    """Return the forecast of each format; empty where float32 has not run."""
    table = layers(recording)
    if table.empty:
        return []
    made = []
    for name in FORECAST:
        room = table[f"headroom_{name}"].astype(float)
        beyond = table[room < 0].sort_values("order")
        first = beyond.iloc[0] if len(beyond) else None
        made.append(
            Forecast(
                format=name,
                layers=len(table),
                beyond=len(beyond),
                headroom=float(room.min()) if len(room) else math.inf,
                flushed=int((table[f"energy_lost_{name}"].astype(float) > _LOST).sum()),
                module="" if first is None else str(first["module"]),
                value=None if first is None else float(first["absmax"]),
            )
        )
    return made
