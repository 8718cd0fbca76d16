"""The compiled kernel: agreement with the eager one, and what happens where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture.statistics import Tape, llvm
from overflow_lab.errors import UsageError
from overflow_lab.ranges import Range
from tests.test_statistics import assert_alike, by_definition, measured, numbers

CPU = torch.device("cpu")

needs_llvm = pytest.mark.skipif(llvm.compiled("float32") is None, reason="no llvmlite for this host")


@pytest.fixture
def fresh_kernels() -> Iterator[None]:
    """Forget compiled kernels before and after."""
    llvm.compiled.cache_clear()
    yield
    llvm.compiled.cache_clear()


@needs_llvm
@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 9000),
    spread=st.sampled_from([0, 4, 8, 18, 30, 120]),
    specials=st.sampled_from([0.0, 0.001, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
def test_compiled_and_eager_kernel_give_the_same_row(
    seed: int, size: int, spread: int, specials: float, dtype: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size) * np.exp2(random.uniform(-spread, spread, size))
    odd = random.choice([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 65504.0], size)
    tensor = torch.from_numpy(np.where(random.random(size) < specials, odd, values)).to(dtype)
    fast, slow = (measured(Tape(CPU, kernel=kernel), tensor) for kernel in ("llvm", "eager"))
    assert_alike(fast, slow, magnitude=float(torch.nan_to_num(tensor.double(), 0, 0, 0).abs().sum()))


@needs_llvm
@pytest.mark.parametrize("top", range(1, 255, 7))
@pytest.mark.parametrize("below", [0, 3, 19, 60])
def test_every_way_of_counting_exponents_counts_all(top: int, below: int) -> None:
    # Thousands at the top and a few, or many, at each exponent below: compared, picked out, or counted one by one.
    for few in (1, 40):
        exponents = np.concatenate([np.full(1500, top), np.repeat(np.arange(max(top - below, 0), top), few)])
        mantissas = np.random.default_rng(top).integers(1, 2**23, len(exponents))
        bits = (exponents.astype(np.int64) << 23 | mantissas).astype(np.int32)
        tensor = torch.from_numpy(bits).view(torch.float32)
        row = measured(Tape(CPU, kernel="llvm"), tensor)
        assert dict(row.exponents) == dict(by_definition(numbers(tensor)).exponents)


@needs_llvm
def test_float16_is_measured_by_the_compiled_kernel_without_a_float32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(CPU, kernel="llvm")
    monkeypatch.setattr("overflow_lab.capture.statistics.eager.measure", None)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tape.measure(torch.ones(70, dtype=dtype))
    assert tape.drain().sum.tolist() == [70.0] * 3


@needs_llvm
def test_memory_around_the_tensor_is_not_read_into_it() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        surrounded = torch.full((300,), float("nan")).to(dtype)
        surrounded[100:201] = 1.0
        row = measured(Tape(CPU, kernel="llvm"), surrounded[100:201])
        assert row == Range(
            count=101, min=1.0, max=1.0, smallest=1.0, sum=101.0, sum_of_squares=101.0, exponents={0: 101}
        )


@needs_llvm
def test_subnormals_are_counted_although_the_thread_flushes_them() -> None:
    tensor = torch.tensor([1e-42, 0.0, 1.0])
    torch.set_flush_denormal(True)
    try:
        row = measured(Tape(CPU, kernel="llvm"), tensor)
    finally:
        torch.set_flush_denormal(False)
    assert (row.zero, dict(row.exponents)) == (1, {-127: 1, 0: 1})


@needs_llvm
def test_the_kernel_is_compiled_once() -> None:
    assert llvm.compiled("float32") is llvm.compiled("float32")


@needs_llvm
def test_auto_is_llvm_where_there_is_one() -> None:
    assert Tape(CPU).kernel_name == "llvm"
    assert Tape(CPU, kernel="eager").kernel_name == "eager"


def test_without_llvmlite_the_tape_is_eager_and_says_so(monkeypatch: pytest.MonkeyPatch, fresh_kernels: None) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    tape = Tape(CPU)
    assert tape.kernel_name == "eager"
    assert measured(tape, torch.ones(3)).sum == 3.0
    with pytest.raises(UsageError, match="use kernel 'auto' or 'eager'"):
        Tape(CPU, kernel="llvm")


@needs_llvm
def test_a_host_without_half_instructions_measures_float16_eagerly(
    monkeypatch: pytest.MonkeyPatch, fresh_kernels: None
) -> None:
    monkeypatch.setattr(llvm, "_HALF_FEATURES", ())
    tape = Tape(CPU)
    assert tape.kernel_name == "llvm"
    assert measured(tape, torch.ones(3, dtype=torch.float16)).sum == 3.0


def test_without_triton_a_cuda_tape_is_eager_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "overflow_lab.capture.statistics.triton_kernel", raising=False)
    monkeypatch.delattr("overflow_lab.capture.statistics.triton_kernel", raising=False)
    tape = Tape(torch.device("cuda"))
    assert tape.kernel_name == "eager"
    assert "triton" in tape.fallback
    with pytest.raises(UsageError, match="no triton kernel for device 'cuda' here"):
        Tape(torch.device("cuda"), kernel="triton")


def test_another_device_than_the_cpu_is_measured_eagerly() -> None:
    assert Tape(torch.device("meta")).kernel_name == "eager"
