"""The kernel that compares a tensor with its shadow: numpy's numbers in float64, and those of what it replaces."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture.shadow import judge
from overflow_lab.capture.statistics import layout, llvm
from overflow_lab.capture.statistics.compare import compared

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
pytestmark = pytest.mark.skipif(llvm.comparing("float32") is None, reason="this host has no compiled kernel")
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expected(low: torch.Tensor, shadow: torch.Tensor) -> list[float]:
    """Return the same in float64, by numpy."""
    tiny = torch.finfo(low.dtype).smallest_normal
    a, b = (t.double().numpy().reshape(-1) for t in (low, shadow))
    zeroed = (a == 0) & (b != 0)
    sums = [float(((a - b) ** 2).sum()), float((b**2).sum())]
    least, most = (float(b.min()), float(b.max())) if len(b) else (np.inf, -np.inf)
    return [*sums, least, most, float((zeroed & (np.abs(b) < tiny)).sum()), float(zeroed.sum())]


def check(low: torch.Tensor, shadow: torch.Tensor) -> None:
    found = compared(low, shadow)
    assert found is not None
    wanted = expected(low, shadow)
    assert found[layout.LEAST :] == wanted[layout.LEAST :]
    assert found[: layout.LEAST] == pytest.approx(wanted[: layout.LEAST], rel=2e-5, abs=1e-37)


@every_dtype
@pytest.mark.parametrize("count", [0, 1, 2, 15, 16, 17, 63, 64, 65, 4095, 4096, 4097, 4160, 12_345])
def test_sizes_round_the_borders_of_blocks(dtype: torch.dtype, count: int) -> None:
    made = torch.Generator().manual_seed(count)
    shadow = torch.randn(count, generator=made) * 100.0
    shadow[::7] *= 1e-7
    check(shadow.to(dtype), shadow)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_all_finite_codes_are_read_as_torch_reads_them(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    low = codes[codes.float().isfinite() & (codes.float().abs() < 1e18)]
    shadow = (low.float() * 1.001).contiguous()
    for value, high in zip(low.split(97), shadow.split(97), strict=True):
        check(value, high)


@given(st.lists(st.floats(-(2.0**50), 2.0**50, width=32), min_size=1, max_size=200), st.sampled_from(DTYPES))
@settings(max_examples=150, deadline=None)
def test_it_is_numpys_answer_for_any_values(values: list[float], dtype: torch.dtype) -> None:
    shadow = torch.tensor(values, dtype=torch.float32)
    low = shadow.to(dtype)
    if bool(low.isfinite().all()):
        check(low, shadow)


@every_dtype
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 63, 64, 99])
def test_a_value_that_is_not_finite_shows_in_the_error(dtype: torch.dtype, bad: float, at: int) -> None:
    shadow = torch.ones(100)
    low = shadow.to(dtype)
    low[at] = bad
    found = compared(low, shadow)
    assert found is not None
    assert not np.isfinite(found[layout.ERROR])
    assert judge.compare(low, shadow).nonfinite == 1


@every_dtype
def test_with_and_without_it_a_comparison_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = torch.randn(333, 7) * torch.logspace(-9, 3, 7)
    low = shadow.to(dtype)
    fast = judge.compare(low, shadow)
    monkeypatch.setattr(judge, "compared", lambda *_: None)
    slow = judge.compare(low, shadow)
    assert fast.error == pytest.approx(slow.error, rel=1e-5)
    assert (fast.absmax, fast.flushed, fast.zeroed) == (slow.absmax, slow.flushed, slow.zeroed)


def test_an_order_in_memory_that_both_share_is_taken_and_another_is_not() -> None:
    shadow = torch.randn(8, 9)
    assert compared(shadow.half().t(), shadow.t()) is not None
    assert compared(shadow.half().t().contiguous(), shadow.t()) is None
    assert compared(shadow.half()[:, ::2], shadow[:, ::2]) is None
    assert compared(shadow.half(), shadow.double()) is None
    assert compared(shadow.int(), shadow) is None
