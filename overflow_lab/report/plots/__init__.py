"""The pictures of a scan as matplotlib Figures, drawn from frames of `analysis`: no pyplot, no global settings.

`range_ladder` shows the magnitudes of every layer against the limits of the formats; `error_staircase` what each
operation adds to the error and what it inherits, `error_growth` the same for layers; `generation_timeline` the steps of
`generate`; `before_after` the headroom that remedies give. Each returns a Figure, which a notebook shows and the
report turns into inline SVG.
"""

from __future__ import annotations

from overflow_lab.report.plots.canvas import PALETTE, Picture, low_precisions, nonfinite_of, sample_layers
from overflow_lab.report.plots.growth import error_growth
from overflow_lab.report.plots.ladder import range_ladder
from overflow_lab.report.plots.mended import before_after, tightest
from overflow_lab.report.plots.staircase import error_staircase, sample_operations
from overflow_lab.report.plots.timeline import generation_timeline

__all__ = [
    "PALETTE",
    "Picture",
    "before_after",
    "error_growth",
    "error_staircase",
    "generation_timeline",
    "low_precisions",
    "nonfinite_of",
    "range_ladder",
    "sample_layers",
    "sample_operations",
    "tightest",
]
