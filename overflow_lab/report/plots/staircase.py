"""The error staircase: what each operation inherits and what it adds itself, in bits, in order of execution."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
    frame,
    groups,
    line_colour,
    mark_column,
    right_labels,
    segments,
)

_PANEL, _BELOW = 1.55, 0.26  # inches of one precision's panel, and of the names under it
_LEGEND = 0.3
# A result within this many bits of its shadow is exact but for the shadow's own rounding.
_EXACT = 23.0


@dataclass(frozen=True)
class Marks:
    """What is marked in the panels: by precision the noise floor (a relative error) and the origin (module, op)."""

    noise: Mapping[str, float]
    origins: Mapping[str, tuple[str, str]]


def sample_operations(operations: pd.DataFrame, *, limit: int = MAX_COLUMNS) -> dict[str, pd.DataFrame]:
    """Return the operations of each precision in order of execution, casts of weights and inputs left out.

    Of more than `limit` in one precision, each run of neighbours is represented by its worst: NaN or inf that float32
    has not, then the most error of its own; the column "stands_for" says how many they are.
    """
    made: dict[str, pd.DataFrame] = {}
    through = operations[operations["ordinal"] >= 0]
    for name, group in through.groupby("precision", sort=False):
        rows = group.sort_values("order", kind="stable").reset_index(drop=True)
        bins = np.arange(len(rows)) * limit // max(len(rows), 1) if len(rows) > limit else np.arange(len(rows))
        worst = pd.DataFrame({"bin": bins, "bad": rows["tainted"].astype(bool), "own": _own(rows)})
        chosen = worst.sort_values(["bin", "bad", "own"], kind="stable").groupby("bin").tail(1).index.sort_values()
        made[str(name)] = rows.loc[chosen].assign(stands_for=np.bincount(bins)[: len(chosen)]).reset_index(drop=True)
    return made


def _own(rows: pd.DataFrame) -> pd.Series[float]:
    """Return the relative error that each operation adds; where it was not measured, what it has above its operands."""
    grown = (rows["error"] - rows["error_in"]).clip(lower=0.0)
    return rows["local_error"].astype(float).fillna(grown)


def error_staircase(
    operations: pd.DataFrame,
    *,
    noise: Mapping[str, float] | None = None,
    origins: Mapping[str, tuple[str, str]] | None = None,
    limit: int = MAX_COLUMNS,
) -> Figure:
    """Return, for each precision, the bits in which each operation's result agrees with its shadow, in order.

    `operations` is the frame of `analysis.frame.operations`; `noise` the relative error of the output that rounding
    the weights alone makes, by precision; `origins` the (module, op) to mark. The line is what is left after an
    operation, a fall under its step what it adds to what it inherits, a dot the error it would have of its own on exact
    operands. Results without a finite value that float32 does not have are crosses at zero bits.
    """
    rows = sample_operations(operations, limit=limit)
    marks = Marks(noise or {}, origins or {})
    height = _LEGEND + max(len(rows), 1) * (_PANEL + _BELOW) + 0.2
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    for number, (name, panel) in enumerate(rows.items()):
        bottom = height - _LEGEND - (number + 1) * (_PANEL + _BELOW) + _BELOW
        ax = axes_in_inches(fig, bottom=bottom, height=_PANEL - 0.16)
        _panel(ax, panel, name, number, marks)
        if number == len(rows) - 1:
            _arrow(ax)
    return fig


def _panel(ax: Axes, rows: pd.DataFrame, name: str, number: int, marks: Marks) -> None:
    fmt = FORMATS.get(name.split("-")[0], FORMATS["float16"])
    high = fmt.precision + 4.5
    frame(ax, len(rows), -1.2, high, "bits that agree")
    ticks = [tick for tick in range(0, math.ceil(high), 4) if tick < high]
    ax.set_yticks(ticks, [str(tick) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    groups(ax, [str(module) for module in rows["module"]], arrow=False)
    labels = [(float(fmt.precision), f"{fmt.name} has {fmt.precision} bits", PALETTE["muted"])]
    ax.axhline(fmt.precision, color=PALETTE["muted"], linewidth=0.7, linestyle=(0, (1, 3)), zorder=1)
    floor = marks.noise.get(name)
    if floor is not None and 0 < floor < 1:
        at = min(-math.log2(floor), high)
        ax.axhline(at, color=PALETTE["ink"], linewidth=0.9, linestyle=(0, (6, 3)), zorder=2)
        labels.append((at, f"noise floor {text.bits(at)}", PALETTE["ink"]))
    if name in marks.origins:
        _origin(ax, rows, marks.origins[name])
    labels.append(_staircase(ax, rows, line_colour(number), high))
    right_labels(ax, labels)
    ax.set_title(name, loc="left", fontsize=FONT + 1, color=line_colour(number), pad=3, parse_math=False)


def _staircase(ax: Axes, rows: pd.DataFrame, colour: str, high: float) -> tuple[float, str, str]:
    """Draw one precision's line, falls, dots and crosses; return height, text and colour of the label at its end."""
    total, inherited, own = (_bits(rows[column], high) for column in ("error", "error_in", "local_error"))
    gone = rows["nonfinite"].to_numpy(dtype=np.float64) >= rows["elements"].to_numpy(dtype=np.float64)
    bad = rows["tainted"].to_numpy(dtype=bool)
    total[gone] = math.nan
    x = np.arange(len(rows), dtype=np.float64)
    seen = np.isfinite(total)
    drawn = seen | gone  # a gap where nothing finite is left, and none where a result is exact
    ax.plot(x[drawn], total[drawn], color=colour, linewidth=1.3, drawstyle="steps-mid", zorder=3)
    fell = seen & (np.where(np.isfinite(inherited), inherited, high) - np.where(seen, total, high) > 0.5)
    top = np.where(np.isfinite(inherited), inherited, high)
    segments(ax, x[fell], x[fell], top[fell], total[fell], color=colour, linewidth=2.4, alpha=0.55)
    ax.plot(x, own, ".", color=PALETTE["own"], markersize=2.6, zorder=4)
    ax.plot(x[bad], np.zeros(int(bad.sum())), "x", color=PALETTE["bad"], markersize=4, markeredgewidth=1.1, zorder=5)
    if len(rows) and bad[-1] and (gone[-1] or not seen.any()):
        return 0.0, "ends in NaN or inf", PALETTE["bad"]
    last = float(total[seen][-1]) if seen.any() else high
    return last, f"ends with {text.bits(last)} bits" if seen.any() else "exact", colour


def _bits(errors: pd.Series[float], high: float) -> Values:
    """Return -log2 of relative errors from 0 to `high`; NaN for what is exact, or was not measured."""
    values = errors.to_numpy(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = -np.log2(values)
    found[~(found < max(_EXACT, high))] = math.nan
    return np.clip(found, 0.0, high)


def _origin(ax: Axes, rows: pd.DataFrame, origin: tuple[str, str]) -> None:
    """Mark the first operation of that module and name; where only the module is here, its first."""
    here = (rows["module"] == origin[0]).to_numpy()
    both = here & (rows["op"] == origin[1]).to_numpy()
    found = np.flatnonzero(both if both.any() else here)
    if len(found):
        mark_column(ax, int(found[0]), f"breaks in {text.shorten(text.module_name(origin[0]), 60)}", at=0.42)


def _arrow(ax: Axes) -> None:
    ax.annotate(
        "operations in order of execution  →",
        (0, 0),
        (0, -24),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=FONT,
        color=PALETTE["muted"],
        va="top",
    )
