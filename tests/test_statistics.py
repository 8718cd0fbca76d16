"""The tape, by each kernel, against statistics that are written out in numpy."""

from __future__ import annotations

import importlib.util
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture.statistics import Tape, eager, llvm
from overflow_lab.ranges import Range

CPU = torch.device("cpu")
KERNELS = (
    "eager",
    *(("llvm",) if llvm.compiled("float32") else ()),
    *(("triton",) if importlib.util.find_spec("triton") else ()),
)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def numbers(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    """The elements as float64, complex ones as pairs."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    plain = plain.float() if plain.dtype.itemsize == 1 and plain.dtype.is_floating_point else plain
    return np.asarray(plain.detach().double().numpy()).reshape(-1)


def by_definition(values: npt.NDArray[np.float64]) -> Range:
    """Every statistic as its definition reads; the sums are exact."""
    finite = [x for x in values.tolist() if math.isfinite(x)]
    sizes = [abs(x) for x in finite if x != 0]
    exponents = Counter(min(max(math.frexp(size)[1] - 1, -127), 127) for size in sizes)
    squares = [x * x for x in finite]
    return Range(
        count=len(values),
        nan=int(np.isnan(values).sum()),
        posinf=int((values == np.inf).sum()),
        neginf=int((values == -np.inf).sum()),
        zero=len(finite) - len(sizes),
        min=min(finite, default=None),
        max=max(finite, default=None),
        smallest=min(sizes, default=None),
        sum=math.fsum(finite),
        sum_of_squares=math.fsum(squares) if max(squares, default=0.0) < 1e300 else math.inf,
        exponents=dict(sorted(exponents.items())),
    )


def assert_alike(actual: Range, expected: Range, *, magnitude: float) -> None:
    """All exact but the sums, whose error is small against the sum of magnitudes."""
    for name in ("count", "nan", "posinf", "neginf", "zero", "min", "max", "smallest", "exponents"):
        assert getattr(actual, name) == getattr(expected, name), name
    assert actual.sum == pytest.approx(expected.sum, rel=1e-12, abs=1e-12 * magnitude)
    assert actual.sum_of_squares == pytest.approx(expected.sum_of_squares, rel=1e-12)


def check(tensor: torch.Tensor, kernel: str) -> Range:
    """Measure, compare with the definition and with what the tensor was before."""
    values = numbers(tensor)
    tape = Tape(CPU, kernel=kernel)
    row = measured(tape, tensor)
    np.testing.assert_array_equal(numbers(tensor), values)
    finite = np.abs(values[np.isfinite(values)])
    assert_alike(row, by_definition(values), magnitude=math.fsum(finite.tolist()))
    return row


def measured(tape: Tape, tensor: torch.Tensor) -> Range:
    index = tape.measure(tensor)
    return tape.drain().row(index)


def from_bits(bits: npt.NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(bits.copy()).view(dtype)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator())


pytestmark = pytest.mark.parametrize("kernel", KERNELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_16_bit_codes_are_measured_as_defined(kernel: str, dtype: torch.dtype) -> None:
    check(from_bits(np.arange(2**16).astype(np.uint16).view(np.int16), dtype), kernel)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_each_finite_16_bit_code_alone_falls_into_its_bin(kernel: str, dtype: torch.dtype) -> None:
    codes = from_bits(np.arange(0, 2**16, 97).astype(np.uint16).view(np.int16), dtype)
    tape = Tape(CPU, kernel=kernel)
    row_ids = [tape.measure(code) for code in codes.unbind()]
    rows = tape.drain()
    for row_id, value in zip(row_ids, numbers(codes), strict=True):
        expected = by_definition(np.array([value]))
        assert_alike(rows.row(row_id), expected, magnitude=abs(expected.sum))


@pytest.mark.parametrize("name", FLOAT8)
def test_all_float8_codes_are_measured_as_defined(kernel: str, name: str) -> None:
    check(from_bits(np.arange(2**8, dtype=np.uint8), getattr(torch, name)), kernel)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.integers(0, 300))
def test_random_float32_bit_patterns_are_measured_as_defined(kernel: str, seed: int, size: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 2**32, size, dtype=np.uint32).view(np.int32)
    check(from_bits(bits, torch.float32), kernel)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(width=32) | st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45])))
def test_lists_of_odd_float32_values_are_measured_as_defined(kernel: str, values: list[float]) -> None:
    check(torch.tensor(values, dtype=torch.float32), kernel)


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(width=64, min_value=-1e140, max_value=1e140), max_size=70))
def test_float64_values_are_measured_in_float64(kernel: str, values: list[float]) -> None:
    check(torch.tensor([*values, math.nan, math.inf], dtype=torch.float64), kernel)


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 4096, 4097, 4096 * 3 + 100])
def test_sizes_around_the_kernels_steps_are_measured_as_defined(kernel: str, size: int) -> None:
    check(normal(size), kernel)


def test_several_chunks_of_the_eager_kernel_are_one_row(kernel: str) -> None:
    check(normal(eager.CHUNK + 1000), kernel)


@pytest.mark.parametrize("scale", [1.0, 1e-42, 1e37])
def test_relu_outputs_subnormals_and_huge_values_are_measured_as_defined(kernel: str, scale: float) -> None:
    check(normal(5000).relu() * scale, kernel)


def test_a_wide_spread_of_exponents_is_measured_as_defined(kernel: str) -> None:
    exponents = torch.rand(9000, generator=generator()) * 250 - 125
    row = check(exponents.exp2(), kernel)
    assert len(row.exponents) > 200


def test_one_outlier_among_ordinary_values_is_measured_as_defined(kernel: str) -> None:
    values = normal(8192)
    values[100], values[5000], values[5001] = 3e38, 1e-30, 1e-44
    check(values, kernel)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -3.4028234663852886e38])
@pytest.mark.parametrize("size", [1, 64, 5000])
def test_a_tensor_of_one_repeated_value_is_measured_as_defined(kernel: str, special: float, size: int) -> None:
    check(torch.full((size,), special), kernel)


def test_values_that_do_not_exist_are_none(kernel: str) -> None:
    row = check(torch.tensor([math.nan, -math.inf]), kernel)
    assert (row.min, row.max, row.smallest, row.exponents) == (None, None, None, {})
    zeros = check(torch.zeros(100), kernel)
    assert (zeros.min, zeros.max, zeros.smallest) == (0.0, 0.0, None)


def test_an_additive_mask_does_not_disturb_the_finite_values(kernel: str) -> None:
    scores = normal(4, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf)
    assert check(scores, kernel).neginf == 4 * 64 * 63 // 2


def test_the_square_of_the_largest_float32_does_not_overflow(kernel: str) -> None:
    largest = torch.finfo(torch.float32).max
    row = check(torch.full((5000,), -largest), kernel)
    assert row.sum == -5000 * largest
    assert row.sum_of_squares == pytest.approx(5000 * largest**2, rel=1e-12)


def test_half_precision_sums_are_not_made_in_half_precision(kernel: str) -> None:
    assert check(torch.ones(100_000, dtype=torch.bfloat16), kernel).sum == 100_000
    assert check(torch.full((100,), 65504.0, dtype=torch.float16), kernel).sum == 6_550_400


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
)
def test_empty_and_0d_tensors_are_measured(kernel: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert check(torch.ones(shape).to(dtype), kernel).count == math.prod(shape)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(0, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "strided": lambda x: x[:, ::2, 1::3],
    "offset": lambda x: x[3:],
    "expanded": lambda x: x[:, :1].expand(-1, 9, -1),
    "expanded scalar": lambda x: x[0, 0, 0].expand(7, 11),
    "flipped": lambda x: x.flip(0),
    "overlapping": lambda x: x.reshape(-1).unfold(0, 8, 2),
    "one row": lambda x: x[2:3].transpose(0, 1),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_any_strides_are_measured_element_by_element(kernel: str, layout: str, dtype: torch.dtype) -> None:
    check(LAYOUTS[layout](normal(7, 10, 40).to(dtype)), kernel)


@pytest.mark.parametrize("name", ["uint8", "int8", "int16", "int32", "int64"])
def test_integers_are_measured_as_numbers(kernel: str, name: str) -> None:
    info = torch.iinfo(getattr(torch, name))
    values = [0, 1, 2, 3, 100, info.min, info.max]
    check(torch.tensor(values, dtype=getattr(torch, name)), kernel)


def test_bool_is_counted_as_zeros_and_ones(kernel: str) -> None:
    row = check(torch.tensor([True, False, True, True]), kernel)
    assert (row.zero, row.sum, dict(row.exponents)) == (1, 3.0, {0: 3})


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_values_are_measured_as_pairs_of_numbers(kernel: str, dtype: torch.dtype) -> None:
    values = torch.complex(normal(50), -normal(50) * 3).to(dtype)
    check(values, kernel)
    check(values.conj(), kernel)


@pytest.mark.parametrize("size", [1, 50])
def test_a_lazily_negated_view_is_measured_with_its_sign(kernel: str, size: int) -> None:
    # One element is contiguous, fifty are not: the two ways into the compiled kernel.
    imaginary = torch.complex(normal(size), normal(size).abs() + 1).conj().imag
    assert imaginary.is_neg()
    row = check(imaginary, kernel)
    assert row.max is not None
    assert row.max < 0


def test_a_parameter_is_measured_without_touching_its_graph(kernel: str) -> None:
    parameter = torch.nn.Parameter(normal(100))
    check(parameter * 2, kernel)
    check(parameter, kernel)
    assert parameter.grad is None
    assert parameter._version == 0


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    with torch.device("meta"):
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)


def test_default_device_and_dtype_do_not_matter(kernel: str, odd_defaults: None) -> None:
    values = torch.arange(100, dtype=torch.float32, device="cpu")
    for tensor in (values, values.half(), values.to(torch.int64)):
        assert measured(Tape(CPU, kernel=kernel), tensor).sum == 4950.0


def test_measuring_works_under_autocast_and_inference_mode(kernel: str) -> None:
    tape = Tape(CPU, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        tape.measure(torch.tensor([1.0, 2.0]) * 257)
    with torch.inference_mode():
        inside = tape.measure(torch.tensor([1.0, 2.0]) * 257)
    after = tape.measure(torch.tensor([5.0], dtype=torch.float64))
    rows = tape.drain()
    assert [rows.row(index).sum for index in (0, inside, after)] == [771.0, 771.0, 5.0]


def test_random_numbers_after_measuring_are_those_without(kernel: str) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    measured(Tape(CPU, kernel=kernel), torch.ones(10, dtype=torch.float64))
    assert torch.equal(torch.rand(3), expected)
