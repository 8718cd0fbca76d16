"""Findings and verdicts on small models of our own, one for each mechanism, and on healthy ones beside them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis import Verdict
from tests.modules import Calling, Step, chain

X = torch.linspace(0.5, 2.0, 8).reshape(2, 4)


def verdicts(
    model: nn.Module, *inputs: Any, precisions: Any = ("float16", "bfloat16"), **named: Any
) -> dict[str, Verdict]:
    given = named if named else tuple(inputs)
    return dict(overflow_lab.scan(model.eval(), given, precisions=precisions, level="module").verdicts)


def origin(verdict: Verdict) -> str | None:
    return verdict.origin.module if verdict.origin else None


def linear(value: float, size: int = 4) -> nn.Linear:
    made = nn.Linear(size, size, bias=False)
    nn.init.constant_(made.weight, value)
    return made


# --- what breaks -----------------------------------------------------------------------------------------------------


def test_a_matrix_product_that_does_not_fit() -> None:
    model = nn.Sequential(Step(lambda x: x * 100), linear(200.0), Step(lambda x: x / 1e4))
    found = verdicts(model, X)
    assert (found["float16"].verdict, found["float16"].severity) == ("overflow", "error")
    assert (origin(found["float16"]), found["float16"].mechanism) == ("1", "matmul-overflow")
    expected = (X * 100).sum(1).max().item() * 200
    assert found["float16"].value == pytest.approx(expected)
    assert found["float16"].limit == torch.finfo(torch.float16).max
    assert found["bfloat16"].verdict == "ok"
    assert "bfloat16" in found["float16"].advice


def test_a_square_inside_a_module_of_ones_own() -> None:
    model = nn.Sequential(
        Step(lambda x: x * 300), Step(lambda x: x / x.pow(2).mean(-1, keepdim=True).sqrt()), linear(1.0)
    )
    found = verdicts(model, X)
    assert found["float16"].verdict != "ok"
    assert found["bfloat16"].verdict == "ok"


def test_a_sum_between_two_modules_is_the_callers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = Step(lambda x: x * 3e4), Step(lambda x: x / 1e5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(x)
            seen: torch.Tensor = self.norm(y + y)
            return seen

    found = verdicts(nn.Sequential(linear(0.2), Block()), X)["float16"]
    assert (found.verdict, origin(found), found.mechanism) == ("overflow", "1", "between-modules")


def test_zero_divided_by_zero() -> None:
    model = chain(lambda x: x * 1e-9, lambda x: x / x.sum(-1, keepdim=True))
    found = verdicts(model, X)["float16"]
    assert (found.verdict, origin(found)) == ("nan", "1")
    assert found.severity == "error"


def test_a_buffer_that_becomes_infinite_in_the_cast_although_all_values_are_finite() -> None:
    model = Calling(lambda m, x: m.lin(x) / m.var.sqrt())
    model.register_buffer("var", torch.tensor([1e5, 1e6, 1e5, 4.0e4]))
    found = verdicts(model, X)["float16"]
    assert (found.verdict, found.severity, found.mechanism) == ("overflow", "error", "cast-buffer")
    assert found.value == 1e6
    assert "`var`" in found.reason


def test_a_weight_in_a_submodule_that_becomes_infinite_in_the_cast() -> None:
    model = Calling(lambda m, x: m.lin(x).tanh())
    nn.init.constant_(model.lin.weight, 1e6)
    found = verdicts(model, X)["float16"]
    assert (found.verdict, origin(found), found.mechanism) == ("overflow", "lin", "cast-parameter")
    assert found.severity == "warning"  # tanh gives the right output all the same


@pytest.mark.parametrize("named", [True, False])
def test_an_input_that_does_not_fit(named: bool) -> None:
    model = Calling(lambda m, x: m.lin(x) / 1e6)
    found = (verdicts(model, x=X * 1e6) if named else verdicts(model, X * 1e6))["float16"]
    assert (found.verdict, origin(found), found.mechanism) == ("overflow", "", "cast-input")


def test_values_that_are_flushed_to_zero() -> None:
    model = chain(lambda x: x * 1e-5, lambda x: x * 1e-5, lambda x: x * 1e10)
    found = verdicts(model, X)["float16"]
    assert (found.verdict, origin(found), found.mechanism, found.severity) == (
        "underflow",
        "1",
        "flushed-to-zero",
        "error",
    )
    assert verdicts(model, X)["bfloat16"].verdict == "ok"


def test_positions_beyond_the_integers_of_bfloat16() -> None:
    positions = torch.arange(1000.0, 1016.0).reshape(4, 4)
    found = verdicts(chain(lambda x: torch.sin(x * 1.0)), positions)
    assert (found["bfloat16"].verdict, found["bfloat16"].mechanism) == ("precision", "rounding")
    assert found["float16"].verdict == "ok"


def test_a_kernel_that_is_missing_is_unsupported() -> None:
    found = verdicts(chain(torch.tanh, lambda x: torch.linalg.inv(x.T @ x + torch.eye(4, dtype=x.dtype))), X)
    for verdict in found.values():
        assert (verdict.verdict, origin(verdict), verdict.mechanism) == ("unsupported", "1", "kernel-or-dtype")
        assert verdict.severity == "error"


MISSING: dict[str, Callable[[torch.Tensor], Any]] = {
    "qr": torch.linalg.qr,
    "fft": torch.fft.fft,
    "quantile": lambda x: torch.quantile(x, 0.5),
    "pinv": torch.linalg.pinv,
    "cdist": lambda x: torch.cdist(x, x),
}


@pytest.mark.parametrize("name", MISSING)
def test_what_torch_says_of_missing_kernels_is_understood(name: str) -> None:
    found = verdicts(chain(MISSING[name]), X)["float16"]
    assert (found.verdict, found.mechanism) == ("unsupported", "kernel-or-dtype"), found.reason


@pytest.mark.parametrize("wrong", [lambda x: x.reshape(3), lambda x: x @ x, lambda x: x[5]])
def test_a_shape_or_an_index_that_is_wrong_in_one_precision_is_no_missing_kernel(wrong: Any) -> None:
    model = chain(lambda x: wrong(x) if x.dtype is torch.float16 else x)
    found = verdicts(model, X)["float16"]
    assert (found.verdict, found.mechanism) == ("unsupported", "raises")


def test_dtypes_that_clash_are_unsupported() -> None:
    found = verdicts(Calling(lambda m, x: m.lin(x.float())), X)["float16"]
    assert (found.verdict, origin(found)) == ("unsupported", "lin")


def test_autocast_is_judged_by_what_runs_in_the_low_format() -> None:
    model = nn.Sequential(Step(lambda x: x * 1e5), linear(1.0), Step(lambda x: x / 1e5))
    found = verdicts(model, X, precisions=("float16-autocast", "bfloat16-autocast"))
    assert (found["float16-autocast"].verdict, origin(found["float16-autocast"])) == ("overflow", "1")
    assert found["bfloat16-autocast"].verdict == "ok"


# --- what is well ----------------------------------------------------------------------------------------------------


def causal(x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((x.shape[0], x.shape[0]), -math.inf, dtype=x.dtype).triu(1)
    return (x @ x.T + mask).softmax(-1) @ x


HEALTHY: dict[str, nn.Module] = {
    "linear": nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
    "a mask of -inf inside": chain(causal),
    "a mask of -inf at a module's border": chain(
        lambda x: x + torch.tensor([0.0, -math.inf, 0.0, 0.0], dtype=x.dtype), lambda x: x.softmax(-1)
    ),
    "log of zero, absorbed": chain(lambda x: (x - x).log(), torch.exp, lambda x: x + 1),
    "a norm that upcasts": chain(lambda x: x * 300, lambda x: (x.float() / x.float().pow(2).sum().sqrt()).to(x.dtype)),
    "near the limit": chain(lambda x: x * 32000, lambda x: x / 32000),
    "zeros": chain(lambda x: x * 0, torch.relu),
    "integers": chain(lambda x: (x * 4).round().long()),
    "a large constant in fp32": chain(lambda x: (x.float() * 1e6 / 1e6).to(x.dtype)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_model_is_ok_in_every_precision(name: str) -> None:
    torch.manual_seed(0)
    for precision, verdict in verdicts(
        HEALTHY[name], torch.tensor([[0.5, 1.0, 1.5, 2.0], [1.0, 0.25, 2.0, 0.75]])
    ).items():
        assert (precision, verdict.verdict, verdict.severity) == (precision, "ok", "none"), verdict.reason
        assert verdict.origin is None


def test_bool_and_empty_inputs_are_no_fault() -> None:
    model = Calling(lambda m, x, mask, past: m.lin(x).masked_fill(mask, 0) + past.sum())
    found = verdicts(model, x=X, mask=torch.tensor([[True, False] * 2] * 2), past=torch.zeros(0, 4))
    assert {verdict.verdict for verdict in found.values()} == {"ok"}


def test_one_bad_batch_among_many_is_found() -> None:
    model = nn.Sequential(linear(100.0), Step(lambda x: x / 100))
    scan = overflow_lab.scan(model, [(X,), (X * 300,), (X,)], level="module")
    found = scan.verdicts["float16"]
    assert (found.verdict, origin(found)) == ("overflow", "0")
    assert scan.diagnosis.findings[0].evidence["batch"] == 1
