"""Weights, buffers and inputs: their ranges, and what a cast loses, element by element in numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.weights import SUBNORMAL_SHARE, Named, can_lose, cast_rows, named_tensors, tensor_rows
from overflow_lab.ranges import Range
from overflow_lab.recording import CastRow

VALUES = [0.0, 1.0, -1.5, 65504.0, 65519.0, 65520.0, -7e4, 3.4e38, 1e-4, 6e-8, 2e-8, -1e-30, 1e-42, np.inf, np.nan]
NUMPY = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def rows_of(tensor: torch.Tensor, precision: str, *, role: str = "parameter", name: str = "a.w") -> list[CastRow]:
    before: list[Named] = [(role, name, tensor)]
    after: list[Named] = [(role, name, tensor.to(getattr(torch, precision)))]
    return cast_rows(precision, tensor_rows(before, Tape(torch.device("cpu"))), before, after)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.sampled_from(VALUES), max_size=8), st.sampled_from(["float16", "bfloat16"]))
def test_what_a_cast_loses_is_what_numpy_loses(values: list[float], precision: str) -> None:
    wide = np.array(values, dtype=np.float32)
    with np.errstate(over="ignore"):
        low = wide.astype(NUMPY[precision]).astype(np.float64)
    tiny = float(torch.finfo(getattr(torch, precision)).smallest_normal)
    infinite = int((np.isinf(low) & np.isfinite(wide)).sum())
    zero = int(((low == 0) & (wide != 0)).sum())
    normal = np.abs(wide.astype(np.float64)) >= 2.0**-126
    subnormal = int(((np.abs(low) < tiny) & (low != 0) & normal).sum())
    found = rows_of(torch.from_numpy(wide), precision)
    counts = [(row.to_infinity, row.to_zero, row.to_subnormal) for row in found]
    counted = infinite or zero or subnormal > SUBNORMAL_SHARE * low.size
    assert counts == ([(infinite, zero, subnormal)] if counted else [])


def test_the_energy_that_is_lost_is_a_share_of_the_sum_of_squares() -> None:
    (row,) = rows_of(torch.tensor([3e-8, 4e-8, 1e-8]), "float16")
    assert row.to_zero == 1  # 1e-8; the others round to the smallest subnormal, 6e-8
    assert row.energy_lost == pytest.approx(1 / 26, rel=1e-5)
    assert row.module == "a"


def test_an_input_belongs_to_the_root_whatever_its_name() -> None:
    (row,) = rows_of(torch.tensor([1e5]), "float16", role="input", name="features.pixels")
    assert (row.module, row.name, row.to_infinity, row.absmax) == ("", "features.pixels", 1, 1e5)


@pytest.mark.parametrize(
    ("low", "high", "target", "expected"),
    [
        (1e-4, 65504.0, "float16", False),  # 1e-4 is above 2**-14
        (6e-5, 1.0, "float16", True),
        (1.0, 65505.0, "float16", True),
        (1e-30, 1e30, "bfloat16", False),
        (1.0, 1e300, "float64", False),
    ],
)
def test_a_cast_is_compared_only_where_its_range_can_lose(low: float, high: float, target: str, expected: bool) -> None:
    assert can_lose(Range(count=2, min=low, max=high, smallest=low), target) is expected


def test_each_floating_tensor_is_named_once_with_its_role() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].tied = model[0].weight
    model.register_buffer("gone", torch.empty(2, device="meta"))
    found = [(role, name) for role, name, _ in named_tensors(model)]
    assert found == [
        ("parameter", "0.weight"),
        ("parameter", "0.bias"),
        ("parameter", "1.weight"),
        ("parameter", "1.bias"),
        ("buffer", "1.running_mean"),
        ("buffer", "1.running_var"),
    ]


def test_lazy_parameters_are_passed_over() -> None:
    assert list(named_tensors(nn.LazyLinear(3))) == []


def test_tensors_are_matched_by_name_and_new_ones_are_passed_over() -> None:
    old: Named = ("buffer", "b", torch.tensor([1e5]))
    new: Named = ("buffer", "made.later", torch.tensor([1e6]))
    before = tensor_rows([old], Tape(torch.device("cpu")))
    low = [(role, name, tensor.half()) for role, name, tensor in (new, old)]
    assert [row.name for row in cast_rows("float16", before, [new, old], low)] == ["b"]


def test_what_was_not_cast_lost_nothing() -> None:
    named: list[Named] = [("parameter", "w", torch.tensor([1e5]))]
    assert cast_rows("float16", tensor_rows(named, Tape(torch.device("cpu"))), named, named) == []
