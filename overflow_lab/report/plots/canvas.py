"""What all pictures share: the palette, a figure placed by inches, the sample of layers, groups and labels."""

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
        "stream": "#a8480b",
        "own": "#7d6608",
        "bad": "#b3261e",
        "line1": "#0b5cad",
        "line2": "#8a3b9e",
        "line3": "#0b6e66",
        "line4": "#8c5a0a",
    }
)
# One number for each layer, NaN where there is none.
Values = np.ndarray[tuple[int], np.dtype[np.float64]]
MAX_COLUMNS = 400
WIDTH = 11.0  # inches, of every figure
LEFT, RIGHT = 0.95, 1.35  # inches of margin
FONT = 8.0
DASHES = ("-", "--", "-.", ":")


def sample_layers(layers: pd.DataFrame, *, leaf_only: bool = True, limit: int = MAX_COLUMNS) -> pd.DataFrame:
    """Return at most `limit` rows of a frame of layers, in order of execution.

    Leaf modules and what the blocks of a residual stream hand on, where there are leaves; `leaf_only=False` takes all.
    Of more than `limit` rows, each run of neighbours is represented by its worst: most non-finite values in any
    precision, then largest absmax; column "stands_for" says how many they are.
    """
    kept = layers["leaf"].astype(bool)
    if "stream" in layers:
        kept = kept | (layers["stream"] != "")
    rows = layers[kept] if leaf_only and layers["leaf"].any() else layers
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


def line_colour(number: int) -> str:
    """Return the colour of the precision with that number, the same in every picture."""
    return PALETTE[f"line{number % len(DASHES) + 1}"]


def axes_in_inches(fig: Figure, *, bottom: float, height: float) -> Axes:
    """Return axes placed by inches, so that margins hold whatever the figure's height."""
    width, full = fig.get_size_inches()
    return fig.add_axes((LEFT / width, bottom / full, (width - LEFT - RIGHT) / width, height / full), frameon=False)


def frame(ax: Axes, columns: int, low: float, high: float, label: str) -> None:
    """Set the limits of axes with so many columns, and their grid."""
    ax.set_xlim(-0.5, max(columns, 1) - 0.5)
    ax.set_ylim(low, high)
    ax.set_xticks([])
    ax.tick_params(length=0, pad=5)
    ax.grid(axis="y", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_ylabel(label, fontsize=FONT, color=PALETTE["muted"], labelpad=8)


def column_points(ax: Axes) -> float:
    """Return the width of one column in points."""
    low, high = ax.get_xlim()
    return (WIDTH - LEFT - RIGHT) * 72 / (high - low)


def log2(values: Iterable[object]) -> Values:
    """Return log2 of positive finite values, NaN for the others."""
    wide = np.array([math.nan if text.missing(v) else v for v in values], dtype=np.float64)
    wide[~(np.isfinite(wide) & (wide > 0))] = math.nan
    return np.log2(wide)


def groups(ax: Axes, modules: Sequence[str], *, arrow: bool = True) -> None:
    """Shade every other part of the model below the columns, and name the parts that have room for a name."""
    start = 0
    low = ax.get_ylim()[0]
    for number, (name, size) in enumerate(_parts(modules, column_points(ax))):
        if number % 2:
            ax.axvspan(start - 0.5, start + size - 0.5, color=PALETTE["band"], linewidth=0, zorder=0)
        label = next((c for c in _spellings(name) if _fits(c, column_points(ax) * size)), "")
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
    if not arrow:
        return
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


def _parts(modules: Sequence[str], points: float) -> list[tuple[str, int]]:
    """Return runs of neighbours with a common start of their path, and their sizes, at the depth that reads best.

    That is the one at which most runs have room for their whole name, columns of so many `points` wide; the
    shallowest of equals.
    """
    depths: list[list[tuple[str, int]]] = []
    for depth in range(1, 8):
        starts = [".".join(module.split(".")[:depth]) for module in modules]
        depths.append([(name, len(list(group))) for name, group in groupby(starts)])
    return max(depths, key=lambda runs: sum(_fits(text.visible(name, 40), size * points) for name, size in runs))


def _fits(label: str, points: float) -> bool:
    """Return whether a label has room in a run so many points wide."""
    return bool(label) and len(label) * FONT * 0.56 < points


def _spellings(name: str) -> list[str]:
    """Return ever shorter ways to write a part's name."""
    shown = text.visible(name, 40)
    pieces = shown.split(".")
    return [shown, ".".join(pieces[-2:]), pieces[-1]]


def right_labels(ax: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
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


def segments(ax: Axes, x0: object, x1: object, y0: object, y1: object, **style: object) -> None:
    """Draw many segments as one line with gaps: one SVG path instead of hundreds."""
    gap = np.full(len(np.atleast_1d(np.asarray(x0))), math.nan)
    x = np.stack([np.asarray(x0), np.asarray(x1), gap], axis=-1).ravel()
    y = np.stack([np.asarray(y0), np.asarray(y1), gap], axis=-1).ravel()
    if np.isfinite(y).any():
        ax.plot(x, y, solid_capstyle="butt", zorder=2, **style)  # type: ignore[arg-type]


def mark_column(ax: Axes, column: int, label: str, *, at: float = 0.5) -> None:
    """Draw a line down a column and say what is there, at a share of the height, on the side with more room."""
    low, high = ax.get_ylim()
    columns = ax.get_xlim()[1] + 0.5
    right = column > columns / 2
    ax.plot([column, column], [low, high], color=PALETTE["bad"], linewidth=1.0, zorder=2)
    ax.annotate(
        label,
        (column, low + at * (high - low)),
        (-4 if right else 4, 0),
        textcoords="offset points",
        fontsize=FONT,
        color=PALETTE["bad"],
        ha="right" if right else "left",
        va="center",
        parse_math=False,
        zorder=6,
        bbox={"facecolor": PALETTE["surface"], "edgecolor": "none", "alpha": 0.85, "pad": 1.0},
    )
