"""The generation timeline: step by step, how near the logits are to float32's, and how large."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overflow_lab.formats import FORMATS
from overflow_lab.report import text
from overflow_lab.report.plots.canvas import (
    FONT,
    LEFT,
    PALETTE,
    WIDTH,
    Picture,
    Values,
    line_colour,
    log2,
)

_PANEL, _ABOVE, _BELOW, _GAP, _RIGHT = 0.95, 0.3, 0.42, 0.75, 0.4  # inches
MOST_LINES = 24  # of one precision and search


def generation_timeline(steps: pd.DataFrame) -> Figure:
    """Return a row of two pictures for each precision and search of the frame `analysis.steps.steps`.

    On the left the bits in which each beam's logits agree with float32's, step by step, as long as both have the same
    tokens behind them; a red dot is the first token of an answer that differs, a cross a step with NaN or inf. On the
    right the largest logit of each beam; grey is float32.
    """
    low = steps[steps["precision"] != "float32"]
    groups = [(str(p), str(run), rows) for (p, run), rows in low.groupby(["precision", "run"], sort=False)]
    height = _ABOVE + max(len(groups), 1) * _PANEL + _BELOW
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    longest = max(int(steps["step"].max()), 1) if len(steps) else 1
    colours = {name: line_colour(n) for n, name in enumerate(dict.fromkeys(p for p, _, _ in groups))}
    for number, (name, run, rows) in enumerate(groups):
        base = steps[(steps["precision"] == "float32") & (steps["run"] == run)]
        left, right = (_axes(fig, number, side, longest) for side in (0, 1))
        _agreement(left, rows, name, colours[name])
        _sizes(right, rows, base, colours[name])
        left.set_title(f"{name}, {run}", loc="left", fontsize=FONT, color=colours[name], pad=2, parse_math=False)
        if number == len(groups) - 1:
            for ax in (left, right):
                _step_ticks(ax, longest)
    return fig


def _axes(fig: Figure, number: int, side: int, longest: int) -> Axes:
    """Return the axes of a row, `side` 0 or 1, placed by inches."""
    width, height = (float(size) for size in fig.get_size_inches())
    plot = (width - LEFT - _RIGHT - _GAP) / 2
    x = LEFT + side * (plot + _GAP)
    y = height - _ABOVE - (number + 1) * _PANEL + 0.24
    ax = fig.add_axes((x / width, y / height, plot / width, (_PANEL - 0.28) / height), frameon=False)
    ax.set_xlim(-0.4, longest + 0.4)
    ax.set_xticks([])
    ax.tick_params(length=0, pad=4)
    ax.grid(axis="y", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def _step_ticks(ax: Axes, longest: int) -> None:
    every = max(1, math.ceil(longest / 12))
    ticks = list(range(0, longest + 1, every))
    ax.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    ax.set_xlabel("step of generate: one call of the model, one token for each beam", fontsize=FONT)
    ax.xaxis.label.set_color(PALETTE["muted"])


def _agreement(ax: Axes, rows: pd.DataFrame, name: str, colour: str) -> None:
    fmt = FORMATS.get(name.split("-")[0], FORMATS["float16"])
    high = fmt.precision + 3.0
    ax.set_ylim(-1.5, high)
    ticks = [0, fmt.precision]
    ax.set_yticks(ticks, ["0 bits", f"{fmt.precision} bits"], fontsize=FONT, color=PALETTE["muted"])
    drawn = _chosen(rows)
    _lines(ax, drawn, np.clip(drawn["bits"].to_numpy(dtype=np.float64), 0.0, high), colour)
    bad = rows[rows["nonfinite"] > 0]["step"].unique()
    ax.plot(bad, np.zeros(len(bad)), "x", color=PALETTE["bad"], markersize=4, markeredgewidth=1.2, zorder=4)
    parted = rows[rows["parts_at"].notna()].drop_duplicates(["batch", "input"])["parts_at"].astype(int)
    ax.plot(parted, np.full(len(parted), -1.1), "o", color=PALETTE["bad"], markersize=4.5, zorder=5, clip_on=False)
    if len(parted):
        first, total = int(parted.min()), len(rows.drop_duplicates(["batch", "input"]))
        ax.plot([first, first], [-1.1, high], color=PALETTE["bad"], linewidth=0.8, zorder=2)
        note = f"{len(parted):,} of {text.plural(total, 'answer')} differ, from token {first} on"
        style: dict[str, Any] = {"fontsize": FONT, "color": PALETTE["bad"], "va": "center"}
        ax.annotate(note, (first, high / 2), (6, 0), textcoords="offset points", **style)


def _sizes(ax: Axes, rows: pd.DataFrame, base: pd.DataFrame, colour: str) -> None:
    tops = log2(pd.concat([rows["absmax"], base["absmax"]]))
    finite = tops[np.isfinite(tops)]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    margin = max(0.1 * (high - low), 0.1)
    ax.set_ylim(low - margin, high + margin)
    ticks = [low, high] if high - low > 0.1 else [low]
    ax.set_yticks(ticks, [text.number(2.0**tick) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    drawn = _chosen(rows)
    same = base.merge(drawn[["batch", "input"]].drop_duplicates(), on=["batch", "input"])
    for group, shade in ((same, PALETTE["muted"]), (drawn, colour)):
        _lines(ax, group, log2(group["absmax"]), shade)
    beams = int(rows["beam"].max()) + 1 if len(rows) else 1
    shown, total = (len(part.drop_duplicates(["batch", "input"])) for part in (drawn, rows))
    inputs = text.plural(total, "input") if shown == total else f"{shown:,} of {total:,} inputs"
    said = f"largest logit: {inputs}, {beams} beams each" if beams > 1 else f"largest logit: {inputs}"
    grey = "; grey is float32" if len(same) else ""
    ax.set_title(said + grey, loc="left", fontsize=FONT, color=PALETTE["muted"], pad=2, parse_math=False)


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the steps of the inputs that are drawn: the first whose answers differ, then the first others."""
    beams = int(rows["beam"].max()) + 1 if len(rows) else 1
    inputs = rows.drop_duplicates(["batch", "input"]).sort_values("parts_at", kind="stable", na_position="last")
    drawn = inputs[["batch", "input"]].head(max(1, MOST_LINES // beams))
    return rows.merge(drawn, on=["batch", "input"])


def _lines(ax: Axes, rows: pd.DataFrame, y: Values, colour: str) -> None:
    """Draw the steps of each input and beam as one line with gaps; a point where there is one step only."""
    if not np.isfinite(y).any():
        return
    steps = rows.assign(y=y).sort_values(["batch", "input", "beam", "step"], kind="stable")
    xs: list[float] = []
    ys: list[float] = []
    for _, line in steps.groupby(["batch", "input", "beam"], sort=False):
        xs += [*line["step"].astype(float), math.nan]
        ys += [*line["y"].astype(float), math.nan]
    marker = "." if steps["step"][np.isfinite(steps["y"])].nunique() == 1 else ""
    ax.plot(xs, ys, color=colour, linewidth=0.9, alpha=0.6, marker=marker, markersize=4, zorder=3)
