"""Emulated products: what float32 gives, rounded once; what the CPU's own kernels give, but for the order of sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import overflow_lab
from overflow_lab.capture import emulated
from overflow_lab.capture.emulated import Emulated, is_emulated, is_product
from overflow_lab.capture.precisions import parse_precision, prepare
from overflow_lab.errors import UsageError
from overflow_lab.recording import PrecisionRow
from overflow_lab.subjects.module import from_module

ROWS = 64
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PRODUCTS: dict[str, Product] = {
    "mm": lambda a, b: a @ b,
    "linear": lambda a, b: functional.linear(a, b.T, b[0]),
    "bmm": lambda a, b: torch.bmm(a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "baddbmm": lambda a, b: torch.baddbmm(b[0], a.expand(3, -1, -1), b.expand(3, -1, -1)),
    "conv1d": lambda a, b: functional.conv1d(a.T[None], b.T[..., None], b[0]),
    "conv2d": lambda a, b: functional.conv2d(a.T[None, :, None], b.T[..., None, None]),
}


def operands(scale: float = 1.0, *, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    a, b = torch.randn(ROWS, 48, generator=made), torch.randn(48, 32, generator=made)
    return (a * scale).half(), (b * scale).half()


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_float64_rounded_to_float16_but_for_ties(name: str) -> None:
    a, b = operands()
    with torch.no_grad(), Emulated():
        made = PRODUCTS[name](a, b)
    wanted = PRODUCTS[name](a.double(), b.double()).half()
    assert made.dtype == torch.float16
    codes = (made.contiguous().view(torch.int16) - wanted.contiguous().view(torch.int16)).abs()
    assert int(codes.max()) <= 1
    assert float(codes.float().mean()) < 0.005  # where float32's own rounding meets the middle between two numbers


@pytest.mark.parametrize("name", PRODUCTS)
def test_it_is_the_cpus_own_product_but_for_the_order_of_sums(name: str) -> None:
    a, b = operands()
    with torch.no_grad():
        native = PRODUCTS[name](a, b)
        with Emulated():
            made = PRODUCTS[name](a, b)
    assert (made == native).float().mean() > 0.98
    torch.testing.assert_close(made, native, rtol=2**-10, atol=2**-9)


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_does_not_fit_becomes_infinite_as_in_float16(name: str) -> None:
    a, b = operands(200.0)
    with torch.no_grad():
        wide = PRODUCTS[name](a.float(), b.float())
        with Emulated():
            made = PRODUCTS[name](a, b)
    clear = (wide.abs() - 65520.0).abs() > 1.0
    assert bool(made.isinf().any())
    assert torch.equal(made.isinf()[clear], (wide.abs() > 65520.0)[clear])


def test_attention_is_emulated_too() -> None:
    query, key, value = (torch.randn(1, 2, ROWS, 16).half() for _ in range(3))
    with torch.no_grad(), Emulated():
        made = functional.scaled_dot_product_attention(query, key, value)
    wanted = functional.scaled_dot_product_attention(query.float(), key.float(), value.float()).half()
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    a, b = (t.to(dtype) for t in operands())
    with torch.no_grad():
        plain = a @ b
        with Emulated():
            assert torch.equal(a @ b, plain)
    assert not is_product(torch.ops.aten.mm.default, (a, b))


def test_a_few_rows_stay_native() -> None:
    a, b = operands()
    assert is_product(torch.ops.aten.mm.default, (a, b))
    assert not is_product(torch.ops.aten.mm.default, (a[:8], b))


@pytest.mark.parametrize(
    ("kernels", "dtype", "device", "has", "expected"),
    [
        ("auto", "float16", "cpu", False, True),
        ("auto", "float16", "cpu", True, False),
        ("emulated", "float16", "cpu", True, True),
        ("native", "float16", "cpu", False, False),
        ("emulated", "bfloat16", "cpu", False, False),
        ("emulated", "float16", "cuda", False, False),
    ],
)
def test_it_is_for_float16_on_a_cpu_that_cannot(
    monkeypatch: pytest.MonkeyPatch, kernels: str, dtype: str, device: str, *, has: bool, expected: bool
) -> None:
    monkeypatch.setattr(emulated, "_has_float16", lambda: has)
    assert is_emulated(kernels, dtype, device) is expected


class Loud(nn.Module):
    """A product that leaves float16, inside a module's own code."""

    def forward(self, x: torch.Tensor) -> Any:
        scores = x @ x.transpose(-1, -2)
        return scores.softmax(-1) @ x


@pytest.mark.parametrize("kernels", ["native", "emulated"])
def test_a_scan_finds_the_same_by_either_kernels_and_says_which_ran(kernels: str) -> None:
    inputs = {"x": torch.linspace(-90.0, 90.0, ROWS * 48).reshape(1, ROWS, 48)}
    scan = overflow_lab.scan(Loud(), inputs, precisions=("float16",), kernels=kernels)
    verdict = scan.verdicts["float16"]
    assert verdict.origin is not None
    assert verdict.verdict in ("overflow", "nan")
    assert verdict.origin.op == "aten.bmm"
    (row,) = [row for row in scan.recording.of(PrecisionRow) if row.precision == "float16"]
    assert ("rounded once" in row.detail) is (kernels == "emulated")


def test_native_kernels_leave_the_program_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 8)).eval()
    x = operands()[0]
    subject = from_module(model, {"input": x.float()})
    prepared = prepare(dataclasses.replace(subject, kernels="native"), parse_precision("float16"))
    assert not prepared.emulated
    with torch.no_grad(), emulated.products(prepared):
        made = prepared.model(x)
        assert torch.equal(made, prepared.model(x))


def test_kernels_that_do_not_exist_are_refused() -> None:
    with pytest.raises(UsageError, match="kernels is 'fast'"):
        overflow_lab.scan(nn.Linear(2, 2), {"input": torch.ones(1, 2)}, kernels="fast")
