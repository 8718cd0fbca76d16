"""Headroom before and after a remedy: a row for each of the modules that were nearest to the limit."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from overflow_lab.report import text
from overflow_lab.report.plots.canvas import FONT, PALETTE, WIDTH, Picture

# Beyond this a module runs in a wide format, and how wide is no matter.
_MOST = 20.0
_ROW, _TOP, _BOTTOM, _NAMES = 0.21, 0.3, 0.5, 4.2  # inches


def headroom_gain(tightest: Sequence[tuple[str, float, float]]) -> Figure:
    """Return a picture of (module, bits of headroom before, bits after): what lies left of 0 does not fit."""
    rows = [(name, min(before, _MOST), min(after, _MOST), after > _MOST) for name, before, after in tightest]
    height = _TOP + _BOTTOM + _ROW * max(len(rows), 1)
    fig = Picture(figsize=(WIDTH, height), frameon=False)
    left, width = _NAMES / WIDTH, (WIDTH - _NAMES - 0.6) / WIDTH
    ax = fig.add_axes((left, _BOTTOM / height, width, (height - _TOP - _BOTTOM) / height), frameon=False)
    low = min([0.0, *(before for _, before, _, _ in rows), *(after for _, _, after, _ in rows)])
    high = max([1.0, *(before for _, before, _, _ in rows), *(after for _, _, after, _ in rows)])
    ax.set_xlim(low - 0.6, high + 1.2)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.axvspan(low - 0.6, 0.0, color=PALETTE["band"], zorder=0, linewidth=0)
    ax.axvline(0.0, color=PALETTE["bad"], linewidth=1.0, zorder=1)
    ax.grid(axis="x", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    for at, (_, before, after, wide) in enumerate(rows):
        ax.plot([before, after], [at, at], color=PALETTE["muted"], linewidth=1.0, zorder=2)
        ax.plot(before, at, "o", color=PALETTE["bad"], markersize=4.5, zorder=3)
        ax.plot(after, at, ">" if wide else "o", color=PALETTE["line3"], markersize=5.0, zorder=4)
    names = [text.shorten(text.module_name(name), 52) for name, *_ in rows]
    ax.set_yticks(range(len(rows)), names, fontsize=FONT, color=PALETTE["ink"])
    ax.tick_params(length=0, pad=6, labelsize=FONT, labelcolor=PALETTE["muted"])
    ax.set_xlabel("bits of headroom; left of 0 a value does not fit", fontsize=FONT, color=PALETTE["muted"])
    return fig
