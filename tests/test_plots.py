"""The pictures: what they show of a frame, that they are deterministic, and that they leave matplotlib as it was."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from overflow_lab.analysis.frame import layers
from overflow_lab.report import plots, svg
from tests.sample_recording import BAD_VALUE, CULPRIT, HOSTILE, sample_recording, t5_modules, wide_modules


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return layers(sample_recording())


def _heights(figure: Figure, colour: str) -> set[float]:
    """Return the heights of the lines of one colour in the first axes."""
    found = [line for line in figure.axes[0].lines if line.get_color() == plots.PALETTE[colour]]
    return {round(float(y), 6) for line in found for y in np.asarray(line.get_ydata(), dtype=float) if math.isfinite(y)}


def _texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_the_limit_of_float16_and_what_lies_beyond_it_are_red(frame: pd.DataFrame) -> None:
    heights = _heights(plots.range_ladder(frame), "bad")
    assert {round(math.log2(65504.0), 6), round(math.log2(BAD_VALUE), 6)} == heights - {0.0}


def test_every_leaf_has_its_tick_at_its_absmax(frame: pd.DataFrame) -> None:
    figure = plots.range_ladder(frame)
    drawn = _heights(figure, "ink") | _heights(figure, "bad")
    leaves = frame[frame["leaf"].astype(bool)]
    assert {round(math.log2(value), 6) for value in leaves["absmax"]} <= drawn


def test_limits_and_the_largest_layer_are_named(frame: pd.DataFrame) -> None:
    texts = _texts(plots.range_ladder(frame))
    assert {"float16 65,504", "float8_e4m3fn 448", "float8_e5m2 57,344", "↑ bfloat16 2¹²⁸"} <= set(texts)
    assert f"547,171  {CULPRIT}" in texts
    assert "1 with NaN or inf" in texts
    assert "no NaN or inf" in texts


def test_the_error_line_ends_where_the_frame_says(frame: pd.DataFrame) -> None:
    figure = plots.error_growth(frame)
    leaves = frame[frame["leaf"].astype(bool)]
    line = next(line for line in figure.axes[0].lines if line.get_color() == plots.PALETTE["line1"])
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), leaves["bits_float16"].astype(float))
    assert "bfloat16 has 8 bits" in _texts(figure)


def test_a_small_frame_is_drawn_whole_and_a_large_one_by_its_worst_layers(frame: pd.DataFrame) -> None:
    assert len(plots.sample_layers(frame)) == int(frame["leaf"].sum())
    large = layers(sample_recording(modules=wide_modules(1003)))
    chosen = plots.sample_layers(large, limit=40)
    assert len(chosen) == 40
    assert int(chosen["stands_for"].sum()) == 1003
    assert chosen["order"].is_monotonic_increasing
    assert chosen["absmax"].max() == large["absmax"].max()


def test_a_layer_with_nan_stands_for_its_neighbours() -> None:
    large = layers(sample_recording(modules=wide_modules(1000)))
    large.loc[517, "nonfinite_float16"] = 3
    assert 517 in set(plots.sample_layers(large, limit=10)["order"])


def test_sampling_twice_changes_nothing(frame: pd.DataFrame) -> None:
    once = plots.sample_layers(frame, limit=20)
    pd.testing.assert_frame_equal(plots.sample_layers(once, limit=20), once)


@pytest.mark.parametrize("draw", [plots.range_ladder, plots.error_growth])
def test_frames_without_rows_or_finite_values_can_be_drawn(frame: pd.DataFrame, draw: object) -> None:
    assert callable(draw)
    blank = frame.head(3).copy()
    names = ["absmax", "smallest", "min", "max", "headroom_float16", "bits_float16", "bits_bfloat16"]
    blank[names] = math.nan
    for rows in (frame.head(0), blank, frame.head(1)):
        assert svg.inline(draw(rows), "x", label="x").startswith("<svg")


def test_names_with_dollars_or_control_characters_are_text_and_not_formulas() -> None:
    names = {CULPRIT: "$\\frac{$\x1b[0m\nx", "encoder.block.0": HOSTILE}
    modules = [(names.get(path, path), kind, leaf, absmax) for path, kind, leaf, absmax in t5_modules()]
    made = svg.inline(plots.range_ladder(layers(sample_recording(modules=modules))), "x", label=HOSTILE)
    assert "$\\frac{$\\x1b[0m\\x0ax" in made
    assert "<img" not in made


def test_equal_frames_give_equal_pictures(frame: pd.DataFrame) -> None:
    first, second = (svg.inline(plots.range_ladder(frame), "ranges", label="x") for _ in range(2))
    assert first == second


def test_threads_that_draw_at_once_draw_the_same(frame: pd.DataFrame) -> None:
    with ThreadPoolExecutor(3) as pool:
        made = list(pool.map(lambda _: svg.inline(plots.error_growth(frame), "growth", label="x"), range(6)))
    assert len(set(made)) == 1


def test_matplotlibs_settings_are_left_as_they_were(frame: pd.DataFrame) -> None:
    before = dict(mpl.rcParams)
    svg.inline(plots.range_ladder(frame), "ranges", label="x")
    assert dict(mpl.rcParams) == before


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys, overflow_lab.report.html; sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_svg_takes_its_colours_from_the_page_and_styles_nothing_else(frame: pd.DataFrame) -> None:
    made = svg.inline(plots.range_ladder(frame), "ranges", label="x") + svg.inline(
        plots.error_growth(frame), "growth", label="x"
    )
    assert not re.findall(r"#[0-9a-f]{6}\b", made)
    assert not re.search(r"<style|<metadata|<script|xlink|DejaVu|https?:", made)
    ids = re.findall(r' id="([^"]+)"', made)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', made)) == set(ids)


def test_each_column_has_a_place_to_hover(frame: pd.DataFrame) -> None:
    rows = plots.sample_layers(frame)
    titles = [f"layer {HOSTILE} {number}" for number in range(len(rows))]
    root = ET.fromstring(svg.inline(plots.range_ladder(rows), "ranges", label="x", titles=titles))
    hits = [rectangle for rectangle in root.iter("rect") if rectangle.find("title") is not None]
    assert [rectangle.findtext("title") for rectangle in hits] == titles
    edges = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in hits]
    assert all(abs(x + width - following) < 0.2 for (x, width), (following, _) in pairwise(edges))
