"""The pictures: what they show of a frame, that they are deterministic, and that they leave matplotlib as it was."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from xml.etree import ElementTree as ET

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from overflow_lab.analysis.frame import layers, operations
from overflow_lab.analysis.steps import steps
from overflow_lab.report import plots, svg
from tests.rich_recording import rich_recording
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
    leaves = frame[frame["leaf"].astype(bool) | (frame["stream"] != "")]
    line = next(line for line in figure.axes[0].lines if line.get_color() == plots.PALETTE["line1"])
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), leaves["bits_float16"].astype(float))
    assert "bfloat16 has 8 bits" in _texts(figure)


def test_a_small_frame_is_drawn_whole_and_a_large_one_by_its_worst_layers(frame: pd.DataFrame) -> None:
    assert len(plots.sample_layers(frame)) == int((frame["leaf"].astype(bool) | (frame["stream"] != "")).sum())
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


def test_each_column_has_a_place_with_its_title_and_key(frame: pd.DataFrame) -> None:
    rows = plots.sample_layers(frame)
    titles = [f"layer {HOSTILE} {number}" for number in range(len(rows))]
    panel = svg.Panel(titles, [f"k{number}" for number in range(len(rows))])
    figure = plots.range_ladder(rows)
    root = ET.fromstring(svg.inline(figure, "x", label="x", panels=[panel]))
    (group,) = (element for element in root.iter("g") if element.attrib.get("class") == "hits")
    columns = json.loads(gzip.decompress(base64.b64decode(group.attrib["data-columns"])))
    assert columns == [[title, f"k{number}"] for number, title in enumerate(titles)]
    x, _, width, height = map(float, group.attrib["data-box"].split())
    box = figure.axes[0].get_position()
    assert (x, width) == pytest.approx((box.x0 * 11 * 72, box.width * 11 * 72), abs=0.06)
    assert height > 200


def test_a_picture_is_told_to_those_who_do_not_see_it(frame: pd.DataFrame) -> None:
    root = ET.fromstring(svg.inline(plots.range_ladder(frame), "x", title=HOSTILE, label="as words"))
    assert (root.attrib["role"], root.attrib["aria-labelledby"], root.attrib["aria-describedby"]) == (
        *("img", "x-title"),
        "x-desc",
    )
    assert [(child.tag, child.attrib["id"], child.text) for child in list(root)[:2]] == [
        ("title", "x-title", HOSTILE),
        ("desc", "x-desc", "as words"),
    ]


def _corners(path: str) -> list[tuple[float, float]]:
    """Return the points of a path of straight lines, absolute or relative: SVG 1.1, 8.3."""
    x = y = 0.0
    points = []
    for command, numbers in re.findall(r"([mlhvML])([^a-zA-Z]*)", path):
        values = [float(n) for n in re.findall(r"-?(?:\d+\.?\d*|\.\d+)", numbers)]
        if command in "ML":
            x, y = values
        else:
            dx, dy = values if command in "ml" else (values[0], 0.0) if command == "h" else (0.0, values[0])
            x, y = x + dx, y + dy
        points.append((x, y))
    return points


@given(st.lists(st.tuples(st.floats(-999, 999), st.floats(-999, 999)), min_size=1, max_size=30))
def test_a_shortened_path_has_the_same_corners_to_a_tenth(points: list[tuple[float, float]]) -> None:
    path = " ".join(f"{'M' if number % 7 == 0 else 'L'} {x:.6f} {y:.6f}" for number, (x, y) in enumerate(points))
    short = svg.short_path(path)
    assert len(short) <= len(path)
    np.testing.assert_allclose(_corners(short), points, atol=0.0501)


def test_a_path_with_curves_stays_as_it_is() -> None:
    assert svg.short_path("M 0 0 C 1 2 3 4 5 6 z") == "M 0 0 C 1 2 3 4 5 6 z"


def test_a_stream_has_a_colour_and_a_line_of_its_own(frame: pd.DataFrame) -> None:
    figure = plots.range_ladder(frame)
    lines = [line for line in figure.axes[0].lines if line.get_color() == plots.PALETTE["stream"]]
    heights = [np.asarray(line.get_ydata(), dtype=float).tolist() for line in lines]
    tops = [math.log2(value) for value in frame.loc[frame["stream"] == "encoder.block", "absmax"]]
    assert any(found == pytest.approx(tops) for found in heights)
    plain = plots.range_ladder(frame.drop(columns="stream"))
    assert not [line for line in plain.axes[0].lines if line.get_color() == plots.PALETTE["stream"]]


def test_origins_are_named_once_with_all_that_break_there(frame: pd.DataFrame) -> None:
    texts = _texts(plots.range_ladder(frame, origins={"float16": CULPRIT, "float16-to": CULPRIT, "x": "nowhere"}))
    assert f"float16, float16-to breaks in {CULPRIT}" in texts
    assert not any("nowhere" in text for text in texts)


# ---- the staircase ----


def _operations() -> pd.DataFrame:
    return operations(rich_recording())


def test_the_staircase_has_a_panel_for_each_precision_with_what_is_left_of_it() -> None:
    rows = _operations()
    figure = plots.error_staircase(rows, noise={"float16": 2.0**-9}, origins={"float16": (CULPRIT, "aten.mm")})
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["float16", "bfloat16"]
    for axes, (name, group) in zip(figure.axes, rows.groupby("precision", sort=False), strict=True):
        line = next(line for line in axes.lines if line.get_color() in (plots.PALETTE["line1"], plots.PALETTE["line2"]))
        np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), -np.log2(group["error"]))
        dots = next(line for line in axes.lines if line.get_color() == plots.PALETTE["own"])
        unit = {"float16": 11.0, "bfloat16": 8.0}[str(name)]
        assert set(np.asarray(dots.get_ydata(), dtype=float)) == {unit}
    texts = _texts(figure)
    assert "noise floor 9.0" in texts
    assert f"breaks in {CULPRIT}" in texts
    assert f"ends with {-math.log2(0.3):.1f} bits" in texts


def test_exact_results_are_passed_over_and_lost_ones_leave_a_gap() -> None:
    rows = _operations()
    rows = rows[rows["precision"] == "bfloat16"].head(4).copy()
    rows["error"], rows["error_in"] = [2.0**-8, 0.0, 2.0**-8, 2.0**-7], 2.0**-8
    rows["nonfinite"], rows["tainted"] = [0, 0, 1000, 0], [False, False, True, False]
    (axes,) = plots.error_staircase(rows).axes
    line = next(line for line in axes.lines if line.get_color() == plots.PALETTE["line1"])
    np.testing.assert_allclose(np.asarray(line.get_xdata(), dtype=float), [0, 2, 3])
    np.testing.assert_allclose(np.asarray(line.get_ydata(), dtype=float), [8, math.nan, 7])


def test_a_long_staircase_shows_the_worst_of_neighbours_and_no_casts() -> None:
    rows = _operations()
    rows.loc[rows.index[3], "ordinal"] = -1
    sampled = plots.sample_operations(rows, limit=20)
    assert {name: len(group) for name, group in sampled.items()} == {"float16": 20, "bfloat16": 20}
    assert sum(int(group["stands_for"].sum()) for group in sampled.values()) == len(rows) - 1
    assert CULPRIT in set(sampled["float16"]["module"])


def test_staircase_and_timeline_of_nothing_can_be_drawn() -> None:
    assert svg.inline(plots.error_staircase(_operations().head(0)), "x", label="x").startswith("<svg")
    assert svg.inline(plots.generation_timeline(steps(sample_recording())), "x", label="x").startswith("<svg")


# ---- the timeline ----


def test_the_timeline_marks_the_first_token_that_differs() -> None:
    figure = plots.generation_timeline(steps(rich_recording()))
    names = [axes.get_title(loc="left") for axes in figure.axes[::2]]
    assert names == ["float16, greedy", "float16, beam", "bfloat16, greedy", "bfloat16, beam"]
    texts = _texts(figure)
    assert texts.count("2 of 3 answers differ, from token 2 on") == 1
    beam = figure.axes[2]
    dots = [line for line in beam.lines if line.get_marker() == "o"]
    assert set(np.asarray(dots[0].get_xdata(), dtype=float)) == {2.0}


def test_a_timeline_of_many_inputs_says_how_many_it_shows() -> None:
    frame = steps(rich_recording())
    many = pd.concat([frame.assign(batch=number) for number in range(9)])
    figure = plots.generation_timeline(many)
    titles = {axes.get_title(loc="left") for axes in figure.axes[1::2]}
    assert "largest logit: 6 of 27 inputs, 4 beams each; grey is float32" in titles
    assert "largest logit: 24 of 27 inputs; grey is float32" in titles
