"""The CUDA kernel, in Triton's interpreter: several programs, merging, and what happens where it cannot run.

That its rows are what statistics mean is tested by `test_statistics` and `test_tape`, with those of the other kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture.statistics import Tape, eager, layout
from overflow_lab.capture.statistics.rows import Rows
from tests.test_statistics import CPU, assert_alike, by_definition, check, measured, normal, numbers

triton = pytest.importorskip("triton")
from overflow_lab.capture.statistics import triton_kernel  # noqa: E402

TILE = triton_kernel.TILE
# The words of a row that mean something; those between them are never read.
READ = [*range(layout.COUNT, layout.ZERO + 1), *range(layout.MIN, layout.SUM_OF_SQUARES + 1)]
READ += range(layout.EXPONENTS, layout.WORDS)


def row_of(tensor: torch.Tensor, place: int = 1, places: int = 3) -> torch.Tensor:
    """The words of a row, with the rows around it checked to be untouched."""
    rows = torch.full((places, layout.WORDS), -7, dtype=torch.int64)
    triton_kernel.measure(tensor, rows, place)
    assert (rows[:place] == -7).all()
    assert (rows[place + 1 :] == -7).all()
    return rows[place]


@pytest.mark.parametrize("tiles", [1, triton_kernel.ONE_PROGRAM, triton_kernel.ONE_PROGRAM + 1, 9])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 16])
def test_sizes_around_the_borders_of_tiles_and_programs_are_measured_as_defined(tiles: int, beyond: int) -> None:
    check(normal(tiles * TILE + beyond), "triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_more_tiles_than_programs_are_shared_out_and_merged(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(triton_kernel, "MOST_PROGRAMS", 3)
    values = normal(11 * TILE + 5)
    values[::97], values[5::1001], values[3] = 0.0, float("nan"), float("-inf")
    check(values.to(dtype), "triton")


def test_rows_of_more_programs_than_one_step_of_the_merge_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "TILE", 64)
    monkeypatch.setattr(triton_kernel, "ONE_PROGRAM", 1)
    check(normal(64 * 150 + 7), "triton")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 3 * TILE),
    spread=st.sampled_from([0, 8, 30, 120]),
    specials=st.sampled_from([0.0, 0.01, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
)
def test_the_kernel_and_the_eager_one_give_the_same_row(
    seed: int, size: int, spread: int, specials: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    values = torch.randn(size, dtype=torch.float64) * torch.exp2((torch.rand(size) * 2 - 1) * spread)
    odd = torch.tensor([0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-45, 65504.0], dtype=torch.float64)
    values = torch.where(torch.rand(size) < specials, odd[torch.randint(len(odd), (size,))], values).to(dtype)
    fast, slow = (measured(Tape(CPU, kernel=kernel), values) for kernel in ("triton", "eager"))
    assert_alike(fast, slow, magnitude=float(torch.nan_to_num(values.double(), 0, 0, 0).abs().sum()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_words_of_all_16_bit_codes_are_those_of_the_eager_kernel(dtype: torch.dtype) -> None:
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    mine, theirs = (Rows.from_words(words[None].numpy()) for words in (row_of(codes), eager.measure(codes)))
    for name in ("count", "nan", "posinf", "neginf", "zero", "min", "max", "smallest"):
        assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
    assert (mine.exponents == theirs.exponents).all()
    # An exact sum: each code stands beside its negative, and the squares are of one sign.
    assert mine.sum.tolist() == [0.0]
    assert mine.sum_of_squares == pytest.approx(theirs.sum_of_squares, rel=1e-14)


def test_the_same_tensor_has_the_same_row_to_the_last_bit() -> None:
    values = normal(7 * TILE)
    assert torch.equal(row_of(values)[READ], row_of(values.clone())[READ])


def test_a_row_is_written_whole_whatever_was_there() -> None:
    for size in (0, 1, 6 * TILE):
        assert -7 not in row_of(torch.ones(size))[READ].tolist()


def test_a_dense_view_is_measured_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_plain", None)
    values = normal(6, 5, 7)
    for view in (values.permute(2, 0, 1), values[2:4], values.transpose(0, 2)):
        row = Rows.from_words(row_of(view)[None].numpy()).row(0)
        assert_alike(row, by_definition(numbers(view)), magnitude=1e3)


def test_a_bfloat16_tensor_is_not_widened_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(CPU, kernel="triton")
    monkeypatch.setattr(eager, "measure", None)
    for dtype in triton_kernel.DTYPES:
        tape.measure(torch.ones(70, dtype=dtype))
    assert tape.drain().sum.tolist() == [70.0] * 4


def test_a_kernel_that_does_not_compile_leaves_the_tape_to_torch_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(triton_kernel, "measure", fails)
    tape = Tape(torch.device("cuda"))
    tape.device = CPU
    assert (tape.kernel_name, tape.fallback) == ("triton", "")
    assert measured(tape, torch.ones(3)).sum == 3.0
    assert (tape.kernel_name, tape.fallback) == ("eager", "RuntimeError: Failed to find C compiler.")
    assert measured(tape, torch.ones(4)).sum == 4.0
    with pytest.raises(RuntimeError, match="C compiler"):
        Tape(CPU, kernel="triton").measure(torch.ones(3))


def test_a_full_device_is_an_error_and_no_reason_for_another_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(triton_kernel, "measure", full)
    tape = Tape(CPU, kernel="triton")
    with pytest.raises(torch.OutOfMemoryError):
        tape.measure(torch.ones(3))
    assert (tape.kernel_name, len(tape)) == ("triton", 0)


def test_the_kernel_of_a_cuda_tape_is_tritons() -> None:
    tape = Tape(torch.device("cuda"))
    assert (tape.kernel_name, tape.fallback) == ("triton", "")
    assert Tape(torch.device("mps")).kernel_name == Tape(torch.device("xpu")).kernel_name == "eager"
