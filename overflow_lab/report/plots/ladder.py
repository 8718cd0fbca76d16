"""The range ladder: the magnitudes of every layer in order of execution, against the limits of the formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator

from overflow_lab.formats import FORMATS
from overflow_lab.report import text
from overflow_lab.report.plots.canvas import (
    FONT,
    MAX_COLUMNS,
    PALETTE,
    WIDTH,
    Picture,
    Values,
    axes_in_inches,
    column_points,
    frame,
    groups,
    line_colour,
    log2,
    low_precisions,
    mark_column,
    right_labels,
    sample_layers,
    segments,
)

LIMITS = ("float16", "float8_e4m3fn", "float8_e5m2", "bfloat16")
_FLOOR = -30  # magnitudes below 2**-30 are not drawn: every format here but bfloat16 has long flushed them
_ROOM = 1.9  # bits of height for the name of one origin
# Share of a layer's elements in one power of two, and how dark that is drawn.
_SHADES = ((0.0, 0.10), (0.001, 0.24), (0.01, 0.42), (0.05, 0.64), (0.15, 0.90))


def range_ladder(
    layers: pd.DataFrame,
    *,
    leaf_only: bool = True,
    limit: int = MAX_COLUMNS,
    origins: Mapping[str, str] = MappingProxyType({}),
) -> Figure:
    """Return the range of every layer in float32 on a log2 scale, in order of execution, with the formats' limits.

    `layers` is the frame of `analysis.frame.layers`. A column spans a layer's magnitudes from smallest to absmax,
    stronger where more of its values are. What the blocks of a residual stream hand on has another colour, and a line
    along its largest values. Crosses above mark layers with NaN or inf in a low precision; `origins`, a module by
    precision, are marked and named.
    """
    rows = sample_layers(layers, leaf_only=leaf_only, limit=limit)
    names = low_precisions(rows)
    strips = 0.17 * len(names)
    height = 4.6 + strips
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    ax = axes_in_inches(fig, bottom=0.62, height=height - 0.62 - 0.12 - strips)
    low, high = _span(rows)
    high += _ROOM * len(set(origins.values()))
    frame(ax, len(rows), low, high, "magnitude")
    ax.yaxis.set_major_locator(FixedLocator(list(range(4 * math.ceil(low / 4), math.ceil(high), 4))))
    ax.set_yticks(ax.get_yticks(), [text.power(int(y)) for y in ax.get_yticks()], fontsize=FONT, color=PALETTE["muted"])
    groups(ax, [str(m) for m in rows["module"]])
    _limits(ax, low, high)
    _columns(ax, rows, low)
    _streams(ax, rows)
    _label_largest(ax, rows, _marked(ax, rows, origins))
    _strips(fig, ax, rows, names)
    return fig


def _span(rows: pd.DataFrame) -> tuple[float, float]:
    """Return the limits of the magnitude axis: all that was seen, and float16's largest value at the least."""
    tops, bottoms = log2(rows["absmax"]), log2(rows["smallest"])
    high = max(18.0, float(np.nanmax(tops)) + 2.5) if np.isfinite(tops).any() else 18.0
    low = float(np.nanmin(bottoms)) - 1 if np.isfinite(bottoms).any() else -4.0
    return min(max(low, _FLOOR), -4.0), high


def _limits(ax: Axes, low: float, high: float) -> None:
    """Draw the largest value of each format and the lower end of float16; name at the margin what is off the scale."""
    half = FORMATS["float16"]
    ax.axhspan(math.log2(half.max), high, color=PALETTE["bad"], alpha=0.06, linewidth=0, zorder=0)
    marks = [(math.log2(FORMATS[name].max), f"{name} {text.number(FORMATS[name].max)}") for name in LIMITS]
    marks += [(half.min_exponent, "float16 subnormal"), (math.log2(half.smallest_subnormal) - 1, "float16 → 0")]
    beyond = [name for name in LIMITS if math.log2(FORMATS[name].max) >= high]
    inside = [(float(y), label) for y, label in marks if low < y < high]
    for y, label in inside:
        main = label.startswith("float16 6")
        ax.axhline(
            y,
            color=PALETTE["bad" if main else "muted"],
            linewidth=1.1 if main else 0.7,
            linestyle="-" if main else (0, (4, 3)),
            zorder=3,
        )
    labels = [(y, label, PALETTE["bad" if label.startswith("float16 6") else "muted"]) for y, label in inside]
    labels += [(high, f"↑ {name} {text.power(128)}", PALETTE["muted"]) for name in beyond]
    right_labels(ax, labels)


def _columns(ax: Axes, rows: pd.DataFrame, low: float) -> None:
    """Draw each layer: a hairline from smallest to absmax, its density over it, a tick at absmax."""
    tops, bottoms = log2(rows["absmax"]), np.maximum(log2(rows["smallest"]), low)
    at = np.arange(len(rows), dtype=np.float64)
    wide = 0.8 * column_points(ax)
    hair = min(0.8, wide / 2)
    streams = _is_stream(rows)
    shades = _density(rows, low)
    for chosen, colour in ((~streams, "density"), (streams, "stream")):
        style: dict[str, Any] = {"color": PALETTE[colour], "linewidth": hair, "alpha": 0.6}
        segments(ax, at[chosen], at[chosen], bottoms[chosen], tops[chosen], **style)
        for (x, lo, hi), (_, opacity) in zip(shades, _SHADES, strict=True):
            mine = chosen[np.array(x, dtype=int)]
            parts = [np.array(part)[mine] for part in (x, x, lo, hi)]
            segments(ax, *parts, color=PALETTE[colour], linewidth=wide, alpha=opacity)
    beyond = tops > math.log2(FORMATS["float16"].max)
    for chosen, colour, width in ((~beyond, "ink", 1.3), (beyond, "bad", 2.6)):
        heights = np.where(chosen, tops, math.nan)
        segments(ax, at - 0.45, at + 0.45, heights, heights, color=PALETTE[colour], linewidth=width)


def _is_stream(rows: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which rows are values of a residual stream."""
    if "stream" not in rows:
        return np.zeros(len(rows), dtype=np.bool_)
    return (rows["stream"] != "").to_numpy(dtype=np.bool_)


def _streams(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw a line along the largest values of each residual stream."""
    if "stream" not in rows:
        return
    tops = log2(rows["absmax"])
    for name, members in rows.groupby("stream", sort=False).indices.items():
        if name and len(members) > 1:
            ax.plot(members, tops[members], color=PALETTE["stream"], linewidth=1.1, alpha=0.9, zorder=2.5)


def _density(rows: pd.DataFrame, low: float) -> list[tuple[list[float], list[float], list[float]]]:
    """Return for each shade the column, lower and upper end of its runs; neighbours of one shade are one run."""
    shades: list[tuple[list[float], list[float], list[float]]] = [([], [], []) for _ in _SHADES]
    histograms = zip(rows["exponents"], rows["count"], rows["absmax"], strict=True)
    for column, (exponents, size, absmax) in enumerate(histograms):
        cells = [(e, _shade(n / max(size, 1))) for e, n in sorted(exponents.items()) if e >= low and n > 0]
        for _, run in groupby(enumerate(cells), key=lambda item: (item[1][0] - item[0], item[1][1])):
            members = [cell for _, cell in run]
            x, lo, hi = shades[members[0][1]]
            x.append(column)
            lo.append(members[0][0])
            hi.append(min(members[-1][0] + 1, math.log2(absmax) if absmax > 0 else math.inf))
    return shades


def _shade(part: float) -> int:
    return max(number for number, (least, _) in enumerate(_SHADES) if part >= least)


def _marked(ax: Axes, rows: pd.DataFrame, origins: Mapping[str, str]) -> list[int]:
    """Draw a line down the column of each origin and say above all columns what it is; return these columns."""
    names: dict[str, list[str]] = {}
    for precision, module in origins.items():
        names.setdefault(module, []).append(precision)
    low, high = ax.get_ylim()
    columns: list[int] = []
    for number, (module, precisions) in enumerate(names.items()):
        here = (rows["module"] == module).to_numpy()
        inside = rows["module"].astype(str).str.startswith(f"{module}.").to_numpy() if module else here
        found = np.flatnonzero(here if here.any() else inside)
        if len(found):
            columns.append(int(found[0]))
            label = f"{', '.join(precisions)} breaks in {text.shorten(text.module_name(module), 60)}"
            mark_column(ax, columns[-1], label, at=(high - _ROOM * (number + 0.5) - low) / (high - low))
    return columns


def _label_largest(ax: Axes, rows: pd.DataFrame, marked: Sequence[int], most: int = 3) -> None:
    """Name the layer with the largest value and others within 6 bits of it, where there is room beside each other."""
    tops = log2(rows["absmax"])
    taken: list[float] = []
    total = max(len(rows), 1)
    least = max((top for top in tops if math.isfinite(top)), default=math.inf) - 6
    for column in np.argsort(-tops, kind="stable"):  # NaN sorts last, and no comparison with it holds
        if len(taken) == most or not tops[column] > least:
            break
        if any(abs(column - other) < 0.36 * total for other in taken):
            continue
        if any(abs(column - other) < 0.36 * total and tops[other] >= tops[column] for other in marked):
            continue
        taken.append(float(column))
        side = "left" if column < total / 3 else "right" if column > 2 * total / 3 else "center"
        name = text.shorten(text.module_name(str(rows["module"].iloc[column])), 44)
        label = f"{text.number(rows['absmax'].iloc[column])}  {name}"
        x = column + {"left": -0.45, "right": 0.45}.get(side, 0.0)
        where = (x, _clear(tops, x, len(label) * FONT * 0.55 / column_points(ax), side))
        beyond = tops[column] > math.log2(FORMATS["float16"].max)
        style: dict[str, Any] = {"fontsize": FONT, "color": PALETTE["bad" if beyond else "ink"], "ha": side}
        box = {"facecolor": PALETTE["surface"], "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        ax.annotate(label, where, (0, 6), textcoords="offset points", parse_math=False, bbox=box, zorder=5, **style)


def _clear(tops: Values, x: float, width: float, side: str) -> float:
    """Return the height above all columns that a label of `width` columns at `x` would cover."""
    start = x - {"left": 0.0, "center": width / 2, "right": width}[side]
    covered = tops[max(0, math.floor(start)) : math.ceil(start + width) + 1]
    return float(np.nanmax(covered))


def _strips(fig: Figure, below: Axes, rows: pd.DataFrame, names: Sequence[str]) -> None:
    """Draw above the ladder one line for each low precision, a cross where it has NaN or inf."""
    full = float(fig.get_figheight())
    top = below.get_position().y1
    for number, name in enumerate(names):
        bottom = top + (0.17 * (len(names) - 1 - number) + 0.02) / full
        ax = fig.add_axes((below.get_position().x0, bottom, below.get_position().width, 0.15 / full), frameon=False)
        ax.set_xlim(below.get_xlim())
        ax.set_ylim(-1, 1)
        ax.set_xticks([])
        ax.set_yticks(
            [0], [name.replace("-autocast", " ac.")], fontsize=FONT, color=line_colour(number), parse_math=False
        )
        ax.tick_params(length=0, pad=5)
        ax.axhline(0, color=PALETTE["grid"], linewidth=0.6)
        bad = np.flatnonzero(rows[f"nonfinite_{name}"].fillna(0).astype(float) > 0)
        ax.plot(bad, np.zeros(len(bad)), "x", color=PALETTE["bad"], markersize=5, markeredgewidth=1.4, clip_on=False)
        note = f"{len(bad):,} with NaN or inf" if len(bad) else "no NaN or inf"
        right_labels(ax, [(0.0, note, PALETTE["bad" if len(bad) else "muted"])])
