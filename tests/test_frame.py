"""The tables `sites` and `layers`, against numpy and torch.finfo."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch

from overflow_lab.analysis.frame import FORECAST, layers, sites
from tests.recordings_by_hand import error, recording, seen

SITE = (
    "precision order module class_name leaf port role dtype calls count nan posinf neginf zero min max absmax smallest "
    "rms headroom subnormal flushed relative_error effective_bits bad_clock"
)
VALUES = [1000.0, -2000.0, 0.0, 3e-6, 1e-9, 4.0, 0.5, -0.25]
ROWS = [
    seen("float32", "a", "input[0]", 0, [1.0]),
    seen("float32", "a", "output", 1, VALUES),
    seen("float32", "", "output", 2, [9e4]),
    seen("float16", "a", "input[0]", 0, [1.0]),
    seen("float16", "a", "output", 1, [1000.0, math.nan, 0.0, 3e-6]),
    seen("float16", "", "output", 2, [math.inf]),
    error("a", "output", 1, 0.25),
]


def one(frame: pd.DataFrame, **where: object) -> pd.Series:
    for name, value in where.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_there_is_a_row_for_each_precision_and_port_in_order_of_execution() -> None:
    frame = sites(recording(*reversed(ROWS)))
    assert list(frame.columns) == SITE.split()
    found = list(zip(frame["precision"], frame["module"], frame["port"], strict=True))
    ports = [("a", "input[0]"), ("a", "output"), ("", "output")]
    assert sorted(found) == sorted((p, *port) for p in ("float32", "float16") for port in ports)
    for precision in ("float32", "float16"):
        assert [row[1:] for row in found if row[0] == precision] == ports


def test_a_site_has_the_numbers_of_its_values() -> None:
    row = one(sites(recording(*ROWS)), precision="float16", module="a", port="output")
    assert (row["count"], row["nan"], row["zero"], row["absmax"], row["bad_clock"]) == (4, 1, 1, 1000.0, 1)
    assert row["headroom"] == pytest.approx(math.log2(torch.finfo(torch.float16).max / 1000))
    assert (row["subnormal"], row["flushed"]) == (0.25, 0.0)
    assert (row["relative_error"], row["effective_bits"]) == (0.25, 2.0)
    assert (row["class_name"], row["leaf"], row["role"]) == ("Linear", False, "output")


def test_a_site_of_float32_is_measured_in_float32() -> None:
    row = one(sites(recording(*ROWS)), precision="float32", module="", port="output")
    assert row["headroom"] == pytest.approx(math.log2(torch.finfo(torch.float32).max / 9e4))
    assert pd.isna(row["bad_clock"])


def test_layers_put_the_forecast_beside_what_was_seen() -> None:
    frame = layers(recording(*ROWS))
    assert list(frame["module"]) == ["a", ""]
    row = frame.iloc[0]
    for name in FORECAST:
        limit = torch.finfo(getattr(torch, name)).max
        assert row[f"headroom_{name}"] == pytest.approx(math.log2(limit / 2000))
    assert row["flushed_float16"] == 1 / 8  # 1e-9
    assert row["flushed_float8_e4m3fn"] == 2 / 8
    assert row["flushed_bfloat16"] == 0.0
    assert (row["observed_float16"], row["nonfinite_float16"], row["error_float16"], row["bits_float16"]) == (
        1000,
        1,
        0.25,
        2,
    )
    assert frame.iloc[1]["headroom_float16"] == pytest.approx(math.log2(65504 / 9e4))
    assert frame.iloc[1]["nonfinite_float16"] == 1


def test_counts_add_up_to_the_elements_of_the_rows() -> None:
    found = recording(*ROWS)
    frame = sites(found)
    assert frame["count"].sum() == 1 + 8 + 1 + 1 + 4 + 1
    assert frame[["nan", "posinf", "neginf"]].to_numpy().sum() == 2


def test_tables_of_an_empty_recording_have_their_columns() -> None:
    assert list(sites(recording()).columns) == SITE.split()
    empty = layers(recording())
    assert len(empty) == 0
    assert list(empty.columns) == list(layers(recording(*ROWS)).columns)


def test_a_site_without_a_finite_value_has_no_headroom() -> None:
    row = sites(recording(seen("float16", "a", "output", 0, [math.nan]))).iloc[0]
    assert pd.isna(row["headroom"])
    assert pd.isna(row["absmax"])


def test_without_float32_the_first_precision_is_the_base() -> None:
    frame = layers(recording(seen("float16", "a", "output", 0, [2.0])))
    assert list(frame["absmax"]) == [2.0]
