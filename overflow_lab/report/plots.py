"""The pictures of a scan as matplotlib Figures, drawn from frames of `analysis.frame`: no pyplot, no global settings.

`range_ladder` shows the magnitudes of every layer against the limits of the formats, `error_growth` what is left of
float32's bits through the depth. Both return a Figure, which a notebook shows and the report turns into inline SVG.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
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

# Light theme. Each colour is used for one thing only: the report replaces it by the CSS variable --plot-<name>.
PALETTE: Mapping[str, str] = MappingProxyType(
    {
        "ink": "#1f2429",
        "muted": "#57606a",
        "grid": "#dde2e8",
        "band": "#f3f5f8",
        "surface": "#fefefe",
        "density": "#3f6fa6",
        "bad": "#b3261e",
        "line1": "#0b5cad",
        "line2": "#8a3b9e",
        "line3": "#0b6e66",
        "line4": "#8c5a0a",
    }
)
# One number for each layer, NaN where there is none.
Values = np.ndarray[tuple[int], np.dtype[np.float64]]
LIMITS = ("float16", "float8_e4m3fn", "float8_e5m2", "bfloat16")
MAX_COLUMNS = 400
WIDTH = 11.0  # inches, of every figure
LEFT, RIGHT = 0.95, 1.35  # inches of margin
FONT = 8.0
_FLOOR = -30  # magnitudes below 2**-30 are not drawn: every format here but bfloat16 has long flushed them
# Share of a layer's elements in one power of two, and how dark that is drawn.
_SHADES = ((0.0, 0.10), (0.001, 0.24), (0.01, 0.42), (0.05, 0.64), (0.15, 0.90))
_DASHES = ("-", "--", "-.", ":")


def sample_layers(layers: pd.DataFrame, *, leaf_only: bool = True, limit: int = MAX_COLUMNS) -> pd.DataFrame:
    """Return at most `limit` rows of a frame of layers, in order of execution.

    Leaf modules only, where there are any. Of more than `limit` rows, each run of neighbours is represented by its
    worst: most non-finite values in any precision, then largest absmax; column "stands_for" says how many they are.
    """
    rows = layers[layers["leaf"].astype(bool)] if leaf_only and layers["leaf"].any() else layers
    rows = rows.sort_values("order", kind="stable").reset_index(drop=True)
    if len(rows) <= limit:
        return rows.assign(stands_for=1) if "stands_for" not in rows else rows
    bins = np.arange(len(rows)) * limit // len(rows)
    badness = nonfinite_of(rows)
    worst = pd.DataFrame({"bin": bins, "bad": badness, "absmax": rows["absmax"].fillna(-1.0)})
    chosen = worst.sort_values(["bin", "bad", "absmax"]).groupby("bin").tail(1).index.sort_values()
    return rows.loc[chosen].assign(stands_for=np.bincount(bins)).reset_index(drop=True)


def low_precisions(layers: pd.DataFrame) -> list[str]:
    """Return the precisions that a frame of layers compares with float32, in order."""
    return [str(name).removeprefix("nonfinite_") for name in layers.columns if str(name).startswith("nonfinite_")]


def nonfinite_of(layers: pd.DataFrame) -> pd.Series[float]:
    """Return the number of non-finite values of each layer in the low precisions together."""
    columns = [f"nonfinite_{name}" for name in low_precisions(layers)]
    return layers[columns].fillna(0).astype(float).sum(axis=1)


class Picture(Figure):
    """A Figure that a notebook shows as it is, without pyplot or a magic command."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=90, facecolor=PALETTE["surface"])
        return buffer.getvalue()


def range_ladder(layers: pd.DataFrame, *, leaf_only: bool = True, limit: int = MAX_COLUMNS) -> Figure:
    """Return the range of every layer in float32 on a log2 scale, in order of execution, with the formats' limits.

    `layers` is the frame of `analysis.frame.layers`. A column spans a layer's magnitudes from smallest to absmax,
    stronger where more of its values are; crosses above mark layers with NaN or inf in a low precision.
    """
    rows = sample_layers(layers, leaf_only=leaf_only, limit=limit)
    names = low_precisions(rows)
    strips = 0.17 * len(names)
    height = 4.6 + strips
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    ax = _axes(fig, bottom=0.62, height=height - 0.62 - 0.12 - strips)
    low, high = _span(rows)
    _frame(ax, len(rows), low, high, "magnitude")
    ax.yaxis.set_major_locator(FixedLocator(list(range(4 * math.ceil(low / 4), math.ceil(high), 4))))
    ax.set_yticks(ax.get_yticks(), [text.power(int(y)) for y in ax.get_yticks()], fontsize=FONT, color=PALETTE["muted"])
    _groups(ax, [str(m) for m in rows["module"]])
    _limits(ax, low, high)
    _columns(ax, rows, low)
    _label_largest(ax, rows)
    _strips(fig, ax, rows, names)
    return fig


def error_growth(layers: pd.DataFrame, *, leaf_only: bool = True, limit: int = MAX_COLUMNS) -> Figure:
    """Return the bits in which each layer agrees with float32, -log2 of the relative error, through the depth.

    One line for each low precision of the frame; dotted lines mark the bits that its format has. A layer without a
    single finite value to compare is a cross at zero bits.
    """
    rows = sample_layers(layers, leaf_only=leaf_only, limit=limit)
    fig = Picture(figsize=(WIDTH, 3.3), frameon=False)
    ax = _axes(fig, bottom=0.62, height=3.3 - 0.74)
    lines = {name: _kept_bits(rows, name) for name in low_precisions(rows)}
    finite = [float(np.nanmax(y)) for y in lines.values() if np.isfinite(y).any()]
    high = max([12.0, *finite]) + 1.0
    _frame(ax, len(rows), -0.6, high, "bits that agree with float32")
    ticks = list(range(0, math.ceil(high), 4))
    ax.set_yticks(ticks, [str(tick) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    _groups(ax, [str(m) for m in rows["module"]])
    labels = [_error_line(ax, rows, name, y, number) for number, (name, y) in enumerate(lines.items())]
    known = {fmt.name: fmt for name in lines if (fmt := FORMATS.get(name.split("-")[0]))}
    labels += [(fmt.precision, f"{fmt.name} has {fmt.precision} bits", PALETTE["muted"]) for fmt in known.values()]
    _right_labels(ax, labels)
    return fig


def line_colour(number: int) -> str:
    """Return the colour of the precision with that number, the same in every picture."""
    return PALETTE[f"line{number % len(_DASHES) + 1}"]


def _axes(fig: Figure, *, bottom: float, height: float) -> Axes:
    """Return axes placed by inches, so that margins hold whatever the figure's height."""
    width, full = fig.get_size_inches()
    return fig.add_axes((LEFT / width, bottom / full, (width - LEFT - RIGHT) / width, height / full), frameon=False)


def _frame(ax: Axes, columns: int, low: float, high: float, label: str) -> None:
    ax.set_xlim(-0.5, max(columns, 1) - 0.5)
    ax.set_ylim(low, high)
    ax.set_xticks([])
    ax.tick_params(length=0, pad=5)
    ax.grid(axis="y", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_ylabel(label, fontsize=FONT, color=PALETTE["muted"], labelpad=8)


def _column_points(ax: Axes) -> float:
    """Return the width of one column in points."""
    low, high = ax.get_xlim()
    return (WIDTH - LEFT - RIGHT) * 72 / (high - low)


def _log2(values: Iterable[object]) -> Values:
    """Return log2 of positive finite values, NaN for the others."""
    wide = np.array([math.nan if text.missing(v) else v for v in values], dtype=np.float64)
    wide[~(np.isfinite(wide) & (wide > 0))] = math.nan
    return np.log2(wide)


def _span(rows: pd.DataFrame) -> tuple[float, float]:
    """Return the limits of the magnitude axis: all that was seen, and float16's largest value at the least."""
    tops, bottoms = _log2(rows["absmax"]), _log2(rows["smallest"])
    high = max(18.0, float(np.nanmax(tops)) + 2.5) if np.isfinite(tops).any() else 18.0
    low = float(np.nanmin(bottoms)) - 1 if np.isfinite(bottoms).any() else -4.0
    return min(max(low, _FLOOR), -4.0), high


def _groups(ax: Axes, modules: Sequence[str]) -> None:
    """Shade every other part of the model below the columns, and name the parts that have room for a name."""
    start = 0
    low = ax.get_ylim()[0]
    for number, (name, size) in enumerate(_parts(modules)):
        if number % 2:
            ax.axvspan(start - 0.5, start + size - 0.5, color=PALETTE["band"], linewidth=0, zorder=0)
        room = _column_points(ax) * size
        label = next((c for c in _spellings(name) if len(c) * FONT * 0.56 < room), "")
        middle = (start + (size - 1) / 2, low)
        style: dict[str, Any] = {
            "fontsize": FONT,
            "color": PALETTE["muted"],
            "ha": "center",
            "va": "top",
            "parse_math": False,
        }
        ax.annotate(label, middle, (0, -6), textcoords="offset points", annotation_clip=False, **style)
        start += size
    ax.annotate(
        "layers in order of execution  →",
        (0, 0),
        (0, -24),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=FONT,
        color=PALETTE["muted"],
        va="top",
    )


def _parts(modules: Sequence[str], most: int = 40) -> list[tuple[str, int]]:
    """Return runs of neighbours with a common start of their path, and their sizes: about 16, at most `most`."""
    depths: list[list[tuple[str, int]]] = []
    for depth in range(1, 8):
        starts = [".".join(module.split(".")[:depth]) for module in modules]
        depths.append([(name, len(list(group))) for name, group in groupby(starts)])
    fitting = [runs for runs in depths if len(runs) <= most]
    few = [runs for runs in fitting if 3 <= len(runs) <= 16]
    return max(few or fitting, key=len, default=[])


def _spellings(name: str) -> list[str]:
    """Return ever shorter ways to write a part's name."""
    shown = text.visible(name, 40)
    pieces = shown.split(".")
    return [shown, ".".join(pieces[-2:]), pieces[-1]]


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
    _right_labels(ax, labels)


def _right_labels(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Write labels in the right margin at their heights, moved apart where they would touch."""
    bottom, top = ax.get_ylim()
    points = ax.get_position().height * float(ax.figure.get_figheight()) * 72  # type: ignore[union-attr]
    step = (FONT + 2.5) * (top - bottom) / points
    free = math.inf
    for y, label, colour in sorted(labels, reverse=True):
        at = min(y, free - step, top - step / 2)
        free = at
        ax.annotate(
            label,
            (1.0, at),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            annotation_clip=False,
            fontsize=FONT,
            color=colour,
            va="center",
            parse_math=False,
        )


def _columns(ax: Axes, rows: pd.DataFrame, low: float) -> None:
    """Draw each layer: a hairline from smallest to absmax, its density over it, a tick at absmax."""
    tops, bottoms = _log2(rows["absmax"]), np.maximum(_log2(rows["smallest"]), low)
    at = np.arange(len(rows), dtype=np.float64)
    wide = 0.8 * _column_points(ax)
    _segments(ax, at, at, bottoms, tops, color=PALETTE["density"], linewidth=min(0.8, wide / 2), alpha=0.6)
    for (x, lo, hi), (_, opacity) in zip(_density(rows, low), _SHADES, strict=True):
        _segments(ax, x, x, lo, hi, color=PALETTE["density"], linewidth=wide, alpha=opacity)
    beyond = tops > math.log2(FORMATS["float16"].max)
    for chosen, colour, width in ((~beyond, "ink", 1.3), (beyond, "bad", 2.6)):
        heights = np.where(chosen, tops, math.nan)
        _segments(ax, at - 0.45, at + 0.45, heights, heights, color=PALETTE[colour], linewidth=width)


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


def _segments(ax: Axes, x0: object, x1: object, y0: object, y1: object, **style: object) -> None:
    """Draw many segments as one line with gaps: one SVG path instead of hundreds."""
    gap = np.full(len(np.atleast_1d(np.asarray(x0))), math.nan)
    x = np.stack([np.asarray(x0), np.asarray(x1), gap], axis=-1).ravel()
    y = np.stack([np.asarray(y0), np.asarray(y1), gap], axis=-1).ravel()
    if np.isfinite(y).any():
        ax.plot(x, y, solid_capstyle="butt", zorder=2, **style)  # type: ignore[arg-type]


def _label_largest(ax: Axes, rows: pd.DataFrame, most: int = 3) -> None:
    """Name the layer with the largest value and others within 6 bits of it, where there is room beside each other."""
    tops = _log2(rows["absmax"])
    taken: list[float] = []
    total = max(len(rows), 1)
    least = max((top for top in tops if math.isfinite(top)), default=math.inf) - 6
    for column in np.argsort(-tops, kind="stable"):  # NaN sorts last, and no comparison with it holds
        if len(taken) == most or not tops[column] > least:
            break
        if any(abs(column - other) < 0.36 * total for other in taken):
            continue
        taken.append(float(column))
        side = "left" if column < total / 3 else "right" if column > 2 * total / 3 else "center"
        colour = PALETTE["bad" if tops[column] > math.log2(FORMATS["float16"].max) else "ink"]
        name = text.shorten(text.module_name(str(rows["module"].iloc[column])), 44)
        label = f"{text.number(rows['absmax'].iloc[column])}  {name}"
        x = column + {"left": -0.45, "right": 0.45}.get(side, 0.0)
        where = (x, _clear(tops, x, len(label) * FONT * 0.55 / _column_points(ax), side))
        box: dict[str, Any] = {"facecolor": PALETTE["surface"], "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        style: dict[str, Any] = {
            "fontsize": FONT,
            "color": colour,
            "ha": side,
            "parse_math": False,
            "bbox": box,
            "zorder": 5,
        }
        ax.annotate(label, where, (0, 6), textcoords="offset points", **style)


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
        _right_labels(ax, [(0.0, note, PALETTE["bad" if len(bad) else "muted"])])


def _kept_bits(rows: pd.DataFrame, name: str) -> Values:
    """Return bits of agreement from 0 to 24, NaN where nothing was compared."""
    values = np.array([math.nan if text.missing(v) else v for v in rows[f"bits_{name}"]], dtype=np.float64)
    return np.clip(values, 0.0, 24.0)


def _error_line(ax: Axes, rows: pd.DataFrame, name: str, y: Values, number: int) -> tuple[float, str, str]:
    """Draw one precision's line, the bits of its format, its crosses; return height, text and colour of its label."""
    colour = line_colour(number)
    x = np.arange(len(rows), dtype=np.float64)
    ax.plot(x, y, color=colour, linewidth=1.6, linestyle=_DASHES[number % len(_DASHES)], zorder=3)
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
