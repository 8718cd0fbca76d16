"""The picture of a comparison: headroom and bits kept before and after, for the sites that changed most."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from overflow_lab.analysis.comparison import BETTER, WORSE, Comparison, SitePair
from overflow_lab.analysis.index import bits
from overflow_lab.report import text
from overflow_lab.report.plots import PALETTE, Picture

SHOWN = 28
WIDTH = 11.0  # inches
_ROW, _TOP, _BOTTOM = 0.24, 0.55, 0.5  # inches
_NAMES, _GAP, _RIGHT = 3.6, 0.45, 0.2  # inches
_FONT = 8.0
# Wider spans would squeeze what is near the limits: bfloat16 has more than a hundred bits of headroom.
_HEADROOM = (-8.0, 24.0)
_BITS = (-1.0, 24.0)
_COLOURS = {WORSE: "bad", BETTER: "line1"}


def dumbbells(comparison: Comparison, *, limit: int = SHOWN) -> Figure:
    """Return the sites that changed most, in order of execution, each as a line from before (ring) to after (dot).

    On the left headroom in bits, on the right the bits that agree with float32; a cross at the edge is NaN or inf.
    Values beyond the scale are drawn at its edge.
    """
    sites = shown(comparison, limit=limit)
    height = _TOP + _BOTTOM + _ROW * max(len(sites), 1)
    figure = Picture(figsize=(WIDTH, height), frameon=False)
    panel = (WIDTH - _NAMES - _GAP - _RIGHT) / 2
    lefts = (_NAMES, _NAMES + panel + _GAP)
    axes = [
        figure.add_axes((left / WIDTH, _BOTTOM / height, panel / WIDTH, _ROW * max(len(sites), 1) / height))
        for left in lefts
    ]
    _panel(axes[0], "headroom, bits", _headrooms(sites), sites)
    _panel(axes[1], "bits that agree with float32", _kept(sites), sites)
    _names(axes[0], sites)
    axes[0].axvline(0, color=PALETTE["bad"], linewidth=1.0, zorder=1)
    return figure


def shown(comparison: Comparison, *, limit: int = SHOWN) -> list[SitePair]:
    """Return the sites of the picture: those that changed most, in the order of precision and execution."""
    chosen = comparison.changed[:limit]
    order = {id(site): number for number, site in enumerate(comparison.sites)}
    return sorted(chosen, key=lambda site: order[id(site)])


def _headrooms(sites: Sequence[SitePair]) -> list[tuple[float | None, float | None]]:
    return [_clipped(*(seen.headroom if seen else None for seen in (s.before, s.after)), span=_HEADROOM) for s in sites]


def _kept(sites: Sequence[SitePair]) -> list[tuple[float | None, float | None]]:
    return [_clipped(*(bits(seen.error) if seen else None for seen in (s.before, s.after)), span=_BITS) for s in sites]


def _clipped(
    before: float | None, after: float | None, *, span: tuple[float, float]
) -> tuple[float | None, float | None]:
    low, high = span
    old, new = (None if v is None or math.isnan(v) else min(max(v, low), high) for v in (before, after))
    return old, new


def _panel(
    ax: Axes, label: str, values: Sequence[tuple[float | None, float | None]], sites: Sequence[SitePair]
) -> None:
    """Draw one measure: a ring before, a dot after, a line between them in the colour of the judgement."""
    known = [value for pair in values for value in pair if value is not None]
    low, high = min([0.0, *known]) - 1.2, max([4.0, *known]) + 1.2
    ax.set_xlim(low, high)
    ax.set_ylim(len(sites) - 0.4, -0.6)
    ax.set_frame_on(False)
    ax.set_yticks([])
    ax.tick_params(length=0, labelsize=_FONT, labelcolor=PALETTE["muted"])
    ax.grid(axis="x", color=PALETTE["grid"], linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_title(label, fontsize=_FONT + 1, color=PALETTE["ink"], loc="left")
    for row, ((before, after), site) in enumerate(zip(values, sites, strict=True)):
        colour = PALETTE[_COLOURS[site.judged]]
        if before is not None and after is not None:
            ax.plot([before, after], [row, row], color=colour, linewidth=2.0, zorder=2, solid_capstyle="round")
        if before is not None:
            ring = {"markerfacecolor": PALETTE["surface"], "markeredgecolor": colour}
            ax.plot([before], [row], "o", markersize=5.5, markeredgewidth=1.3, zorder=3, **ring)  # type: ignore[arg-type]
        if after is not None:
            ax.plot([after], [row], "o", markersize=5.5, color=colour, zorder=4)
        for seen, value in ((site.before, before), (site.after, after)):
            if (
                seen is not None and seen.made > 0
            ):  # where all of it is NaN there is no number: the cross is at the edge
                at = low + 0.5 if value is None else value
                ax.plot([at], [row], "x", markersize=8.5, markeredgewidth=1.6, color=PALETTE["ink"], zorder=5)


def _names(ax: Axes, sites: Sequence[SitePair]) -> None:
    """Write the names left of the first panel, with a sign for the judgement: colour alone tells nothing."""
    several = len({site.precision for site in sites}) > 1
    for row, site in enumerate(sites):
        sign = "▼" if site.judged == WORSE else "▲"
        tail = f"  {_short(site.precision)}" if several else ""
        room = int((_NAMES - 0.3) * 72 / (_FONT * 0.56)) - len(tail) - 2
        name = f"{text.shorten(text.module_name(site.module), room)}{tail} {sign}"
        ax.annotate(
            name,
            (0, row),
            (-8, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            fontsize=_FONT,
            color=PALETTE["ink"],
            ha="right",
            va="center",
            annotation_clip=False,
            parse_math=False,
        )


def _short(precision: str) -> str:
    return precision.replace("bfloat16", "bf16").replace("float16", "fp16").replace(" to ", "→")
