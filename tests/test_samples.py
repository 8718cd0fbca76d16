"""Samples of float32 values and the differences from them, against numpy in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture.samples import SAMPLE, Differences, Samples, differences, sample

SPECIAL = [0.0, 1.0, -2.5, 3e4, 7e4, -1e-7, math.inf, -math.inf, math.nan]
LOW = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e5m2]


def by_definition(low: torch.Tensor, reference: torch.Tensor) -> list[float]:
    a, b = low.double().numpy(), reference.double().numpy()
    meant = np.isfinite(b)
    kept = meant & np.isfinite(a)
    error = a[kept] - b[kept]
    return [float(error @ error), float(b[kept] @ b[kept]), float((meant & ~kept).sum()), float(meant.sum())]


@given(st.lists(st.sampled_from(SPECIAL), max_size=20), st.sampled_from(LOW))
def test_differences_are_those_of_numpy(values: list[float], dtype: torch.dtype) -> None:
    reference = torch.tensor(values)
    low = reference.to(dtype)
    assert differences(low, reference).tolist() == pytest.approx(by_definition(low, reference), rel=1e-12)


def test_a_value_that_is_not_finite_in_float32_either_is_no_difference() -> None:
    mask = torch.tensor([-math.inf, 0.0, -math.inf])
    assert differences(mask.half(), mask).tolist() == [0.0, 0.0, 0.0, 1.0]


def test_large_float16_values_do_not_overflow_the_sum() -> None:
    reference = torch.full((1000,), 6e4)
    squares, scale, nonfinite, compared = differences(reference.half(), reference).tolist()
    assert (nonfinite, compared, squares) == (0, 1000, 0.0)
    assert scale == 3.6e12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=3).filter(lambda shape: math.prod(shape) < 30_000))
def test_a_sample_has_few_elements_of_every_channel(shape: list[int]) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    taken = sample(tensor)
    assert set(taken.tolist()) <= set(tensor.reshape(-1).tolist())
    assert min(tensor.numel(), SAMPLE // 3) <= len(taken) <= 2 * SAMPLE
    if tensor.numel() >= 8 * shape[-1]:
        assert {int(x) % shape[-1] for x in taken.tolist()} == set(range(shape[-1]))


@pytest.mark.parametrize("last", [64, 768, 1024, 4096])
def test_large_power_of_two_shapes_are_sampled_across_all_channels(last: int) -> None:
    tensor = torch.arange(last).repeat(64, 1)
    assert len(set(sample(tensor).tolist())) > 0.9 * min(last, 64 * last // (64 * last // SAMPLE + 2))


def test_scalars_empty_and_permuted_tensors_are_sampled() -> None:
    assert sample(torch.tensor(2.0)).tolist() == [2.0]
    assert sample(torch.zeros(0, 3)).tolist() == []
    assert sorted(sample(torch.arange(6).reshape(2, 3).T).tolist()) == [0, 1, 2, 3, 4, 5]


def test_a_sample_is_no_view_of_a_value_that_the_model_overwrites() -> None:
    samples, value = Samples(), torch.ones(3)
    samples.keep(("a", "output", 0), value, 0)
    value.zero_()
    assert samples.kept["a", "output", 0][0].tolist() == [1.0, 1.0, 1.0]


def test_the_same_tensor_at_two_ports_is_held_once() -> None:
    samples, value = Samples(), torch.ones(100)
    samples.keep(("a", "output", 0), value, 0)
    samples.keep(("b", "input[0]", 0), value, 0)
    samples.keep(("b", "output", 0), torch.ones(10), 1)
    assert samples.nbytes == 440


def test_rows_add_up_over_calls_and_batches() -> None:
    found = Differences("float16")
    for batch in range(3):
        samples = Samples()
        value = torch.tensor([1.0, 2.0, 70000.0]) + batch
        samples.keep(("a", "output", 0), value, batch)
        found.compare(samples, ("a", "output", 0), value.half(), number=batch, order=batch)
        found.settle()
    (row,) = found.rows()
    assert (row.order, row.compared, row.nonfinite) == (0, 9, 3)
    assert row.error_squares == 0.0
    assert row.reference_squares == pytest.approx(1 + 4 + 4 + 9 + 9 + 16)
    assert found.rows() == []


@pytest.mark.parametrize("shape", [(2,), (1, 3)])
def test_another_shape_or_call_is_named_and_not_compared(shape: tuple[int, ...]) -> None:
    samples, found = Samples(), Differences("float16")
    samples.keep(("a", "output", 0), torch.ones(3), 0)
    found.compare(samples, ("a", "output", 0), torch.ones(shape), number=1, order=0)
    found.compare(samples, ("b", "output", 1), torch.ones(3), number=2, order=1)
    found.settle()
    assert found.rows() == []
    assert found.mismatched == {"a", "b"}
