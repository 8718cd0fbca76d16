"""Before and after: the headroom that a remedy gives, for the whole model and for the modules that had the least."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overflow_lab.recording import ProofRow
from overflow_lab.report import text
from overflow_lab.report.plots.canvas import FONT, PALETTE, WIDTH, Picture

# Bits beyond which nothing is drawn to scale: bfloat16 has 112 more than float16.
_MOST_BITS, _LEAST_BITS = 16.0, -16.0
_LEFT, _RIGHT = 4.1, 0.95  # inches of margin
_ROW = 0.245  # inches
_NAME = 56
Row = tuple[str, float, float]


def before_after(proofs: Sequence[ProofRow], *, most: int = 12) -> Figure:
    """Return the headroom before and after as dumbbells, in bits: below 0 does not fit.

    First a line for each remedy, the least headroom of any module; then the tightest modules under the first remedy
    that has them, at most `most`, those of the same numbers as one.
    """
    remedies = [(_title(row), *rooms) for row in proofs if (rooms := _rooms(row)) is not None]
    modules = tightest(proofs, most=most)
    groups = [part for part in (remedies, modules) if part]
    count = sum(len(part) for part in groups) + len(groups)
    height = 0.5 + _ROW * max(count, 1)
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    area = (_LEFT / WIDTH, 0.42 / height, (WIDTH - _LEFT - _RIGHT) / WIDTH, 1 - 0.5 / height)
    ax = fig.add_axes(area, frameon=False)
    _frame(ax, [row for part in groups for row in part], count)
    at = 0.0
    for part in groups:
        at = _part(ax, part, at, "least headroom of any module" if part is remedies else "the tightest modules")
    return fig


def tightest(proofs: Sequence[ProofRow], *, most: int) -> list[Row]:
    """Return the modules of the first proof that has them: one row for those with the same numbers, the innermost."""
    given = next((row.tightest for row in proofs if row.tightest), ())
    alike: dict[tuple[float, float], list[str]] = {}
    for module, before, after in given:
        if math.isfinite(before) and not math.isnan(after):
            alike.setdefault((before, after), []).append(module)
    found = [(_named(paths), before, after) for (before, after), paths in alike.items()]
    return sorted(found, key=lambda row: row[1])[:most]


def _named(paths: Sequence[str]) -> str:
    """Return the innermost of some modules, and how many others there are."""
    inner = max(paths, key=lambda path: path.count("."))
    more = f" +{len(paths) - 1}" if len(paths) > 1 else ""
    return text.shorten(text.module_name(inner), _NAME - len(more)) + more


def _title(row: ProofRow) -> str:
    return text.shorten(text.visible(row.title, 200).replace("`", ""), _NAME)


def _rooms(row: ProofRow) -> tuple[float, float] | None:
    figures: Mapping[str, float] = row.figures
    pair = [float(figures.get(f"headroom_{side}", math.nan)) for side in ("before", "after")]
    return None if any(math.isnan(value) for value in pair) else (pair[0], pair[1])


def _frame(ax: Axes, rows: Sequence[Row], count: int) -> None:
    values = [_on_scale(value) for _, *pair in rows for value in pair]
    low, high = min([*values, -1.0]) - 1.0, max([*values, 6.0]) + 1.0
    ax.set_xlim(low, high)
    ax.set_ylim(max(count, 1) - 0.4, -0.7)
    ax.axvspan(low, 0, color=PALETTE["bad"], alpha=0.06, linewidth=0, zorder=0)
    ax.axvline(0, color=PALETTE["bad"], linewidth=1.1, zorder=1)
    ticks = [tick for tick in range(-20, 21, 2) if low < tick < high]
    ax.set_xticks(ticks, [str(tick).replace("-", text.MINUS) for tick in ticks], fontsize=FONT, color=PALETTE["muted"])
    ax.set_yticks([])
    ax.tick_params(length=0, pad=5)
    ax.grid(axis="x", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    style: dict[str, Any] = {"fontsize": FONT, "color": PALETTE["muted"]}
    ax.set_xlabel("headroom in bits: how many doublings are left  →", loc="left", labelpad=5, **style)
    ax.annotate("does not fit", (0, -0.7), (-5, -3), textcoords="offset points", ha="right", va="top", **style)


def _part(ax: Axes, rows: Sequence[Row], at: float, heading: str) -> float:
    """Draw a heading and a dumbbell for each row below it; return where the next part begins."""
    ax.annotate(
        heading,
        (0, at),
        (-_LEFT * 72 + 12, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        annotation_clip=False,
        fontsize=FONT,
        color=PALETTE["muted"],
        fontstyle="italic",
        va="center",
    )
    for number, (name, before, after) in enumerate(rows, 1):
        _dumbbell(ax, at + number, before, after)
        _label(ax, (0, at + number), name, (-_LEFT * 72 + 12, 0), PALETTE["ink"])
        said = f"{text.bits(before)} → {text.bits(after)}"
        _label(ax, (1, at + number), said, (8, 0), PALETTE["ink" if after > 0 else "bad"])
    return at + len(rows) + 1


def _dumbbell(ax: Axes, y: float, before: float, after: float) -> None:
    start, end = _on_scale(before), _on_scale(after)
    ax.plot([start, end], [y, y], color=PALETTE["line1"], linewidth=2.0, alpha=0.45, solid_capstyle="butt", zorder=2)
    colour = PALETTE["bad" if before < 0 else "muted"]
    ax.plot([start], [y], "o", markersize=5, color=PALETTE["surface"], markeredgecolor=colour, zorder=3)
    marker = ">" if after > _MOST_BITS else "o"
    ax.plot([end], [y], marker, markersize=5.5, color=PALETTE["line1" if after >= 0 else "bad"], zorder=4)


def _label(ax: Axes, place: tuple[float, float], said: str, offset: tuple[float, float], colour: str) -> None:
    ax.annotate(
        said,
        place,
        offset,
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        annotation_clip=False,
        fontsize=FONT,
        color=colour,
        va="center",
        parse_math=False,
    )


def _on_scale(value: float) -> float:
    return min(max(value, _LEAST_BITS), _MOST_BITS)
