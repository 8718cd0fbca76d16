"""Error growth: the bits in which each layer agrees with float32, through the depth, at the level of modules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overflow_lab.formats import FORMATS
from overflow_lab.report import text
from overflow_lab.report.plots.canvas import (
    DASHES,
    FONT,
    MAX_COLUMNS,
    PALETTE,
    WIDTH,
    Picture,
    Values,
    axes_in_inches,
    frame,
    groups,
    line_colour,
    low_precisions,
    right_labels,
    sample_layers,
)


def error_growth(
    layers: pd.DataFrame,
    *,
    leaf_only: bool = True,
    limit: int = MAX_COLUMNS,
    noise: Mapping[str, float] = MappingProxyType({}),
) -> Figure:
    """Return the bits in which each layer agrees with float32, -log2 of the relative error, through the depth.

    One line for each low precision of the frame; dotted lines mark the bits that its format has, dashed ones the
    `noise` floor (the relative error of the output that rounding the weights alone makes, by precision). A layer
    without a single finite value to compare is a cross at zero bits.
    """
    rows = sample_layers(layers, leaf_only=leaf_only, limit=limit)
    fig = Picture(figsize=(WIDTH, 3.3), frameon=False)
    ax = axes_in_inches(fig, bottom=0.62, height=3.3 - 0.74)
    lines = {name: _kept_bits(rows, name) for name in low_precisions(rows)}
    finite = [float(np.nanmax(y)) for y in lines.values() if np.isfinite(y).any()]
    high = max([12.0, *finite]) + 1.0
    frame(ax, len(rows), -0.6, high, "bits that agree with float32")
    ticks = list(range(0, math.ceil(high), 4))
    ax.set_yticks(ticks, [str(tick) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    groups(ax, [str(m) for m in rows["module"]])
    labels = [_error_line(ax, rows, name, y, number) for number, (name, y) in enumerate(lines.items())]
    known = {fmt.name: fmt for name in lines if (fmt := FORMATS.get(name.split("-")[0]))}
    labels += [(fmt.precision, f"{fmt.name} has {fmt.precision} bits", PALETTE["muted"]) for fmt in known.values()]
    labels += [_floor(ax, name, noise[name], number) for number, name in enumerate(lines) if 0 < noise.get(name, 0) < 1]
    right_labels(ax, labels)
    return fig


def _floor(ax: Axes, name: str, error: float, number: int) -> tuple[float, str, str]:
    """Draw one precision's noise floor; return height, text and colour of its label."""
    at = min(-math.log2(error), 24.0)
    ax.axhline(at, color=line_colour(number), linewidth=0.9, linestyle=(0, (6, 3)), zorder=2)
    return at, f"{name} noise {text.bits(at)}", line_colour(number)


def _kept_bits(rows: pd.DataFrame, name: str) -> Values:
    """Return bits of agreement from 0 to 24, NaN where nothing was compared."""
    values = np.array([math.nan if text.missing(v) else v for v in rows[f"bits_{name}"]], dtype=np.float64)
    return np.clip(values, 0.0, 24.0)


def _error_line(ax: Axes, rows: pd.DataFrame, name: str, y: Values, number: int) -> tuple[float, str, str]:
    """Draw one precision's line, the bits of its format, its crosses; return height, text and colour of its label."""
    colour = line_colour(number)
    x = np.arange(len(rows), dtype=np.float64)
    ax.plot(x, y, color=colour, linewidth=1.6, linestyle=DASHES[number % len(DASHES)], zorder=3)
    fmt = FORMATS.get(name.split("-")[0])
    if fmt is not None:
        ax.axhline(fmt.precision, color=colour, linewidth=0.8, linestyle=(0, (1, 3)), zorder=1)
    lost = np.flatnonzero(np.isnan(y) & (rows[f"nonfinite_{name}"].fillna(0).astype(float).to_numpy() > 0))
    ax.plot(lost, np.zeros(len(lost)), "x", color=PALETTE["bad"], markersize=5, markeredgewidth=1.4, zorder=4)
    if len(lost) and lost[-1] == len(rows) - 1:
        return 0.0, f"{name} NaN", colour
    finite = y[np.isfinite(y)]
    end = float(finite[-1]) if len(finite) else 0.0
    return end, f"{name} {text.bits(end) if len(finite) else text.MISSING}", colour
