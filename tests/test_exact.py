"""float32 judged itself: its program beside shadows in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab import Scan
from overflow_lab.recording import BlindSpotRow, NoiseRow, OperationRow, OutputRow, RunRow


class Program(nn.Module):
    """A linear layer followed by what a test wants to see."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.after(self.linear(x))
        return made


def scan(after: Any, *, precisions: tuple[str, ...] = ("fp32",), **options: Any) -> Scan:
    torch.manual_seed(0)
    return overflow_lab.scan(Program(after).eval(), {"x": torch.randn(4, 8)}, precisions=precisions, **options)


def test_a_healthy_model_is_within_float32s_rounding_of_float64() -> None:
    found = scan(torch.tanh)
    verdict = found.verdicts["float32"]
    assert (verdict.verdict, verdict.severity) == ("ok", "none")
    assert 0 < (verdict.effect.relative_error or 0.0) < 1e-6
    assert "float64's" in verdict.reason
    assert list(found.verdicts) == ["float32"]


def test_the_error_is_that_of_the_model_in_float64() -> None:
    torch.manual_seed(0)
    model, x = Program(lambda h: (h * 1e4).sin()).eval(), torch.randn(4, 8)
    with torch.no_grad():
        wide = Program(model.after).double()
        wide.load_state_dict(model.state_dict())
        expected, got = wide(x.double()), model(x)
    truth = float((got.double() - expected).norm() / expected.norm())
    found = overflow_lab.scan(model, {"x": x}, precisions=("float32",))
    assert found.verdicts["float32"].effect.relative_error == pytest.approx(truth, rel=0.05)


def test_an_overflow_of_float32_names_the_operation_and_what_float64_has_there() -> None:
    found = scan(lambda h: torch.softmax((h - h + 3e38) * 4, -1) + h)
    verdict = found.verdicts["float32"]
    assert (verdict.verdict, verdict.severity) == ("overflow", "error")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.op) == ("", "aten.mul")
    assert verdict.value == pytest.approx(1.2e39, rel=1e-6)
    assert verdict.limit == torch.finfo(torch.float32).max
    assert "float64 has" in verdict.reason


def test_what_float32_swamps_is_seen() -> None:
    found = scan(lambda h: ((h - h + 2.0**24) + 1.0 - 2.0**24) * h)
    verdict = found.verdicts["float32"]
    assert (verdict.verdict, verdict.mechanism) == ("precision", "swamped-add")
    assert verdict.origin is not None
    assert verdict.origin.op == "aten.add"


def test_a_nan_that_float64_makes_too_is_found_without_being_asked_for() -> None:
    found = scan(lambda h: torch.softmax(h.masked_fill(h == h, -torch.inf), -1), precisions=("fp16",))
    own, half = found.verdicts["float32"], found.verdicts["float16"]
    assert (own.verdict, own.severity, own.mechanism) == ("nan", "error", "nan-in-any-precision")
    assert own.origin is not None
    assert own.origin.op == "aten._softmax"
    assert half.verdict == "ok"
    assert "as float32's own does" in half.reason
    assert found.diagnosis.findings[0].precision == "float32"


def test_infinities_of_a_mask_in_the_output_are_no_fault_of_float32() -> None:
    found = scan(lambda h: h.masked_fill(h > 0, -torch.inf), precisions=("fp32", "bf16"))
    assert {name: v.verdict for name, v in found.verdicts.items()} == {"float32": "ok", "bfloat16": "ok"}


def test_the_float32_run_is_recorded_once_whoever_asks_for_it() -> None:
    found = scan(torch.tanh, precisions=("fp32", "fp16"))
    assert found.recording.header.precisions == ("float32", "float16")
    assert sum(row.precision == "float32" for row in found.recording.of(RunRow)) == 1
    assert {row.precision for row in found.recording.of(OperationRow)} == {"float32", "float16"}
    assert {row.precision for row in found.recording.of(OutputRow)} == {"float32", "float16"}
    assert {row.precision for row in found.recording.of(NoiseRow)} == {"float16"}


def test_without_a_shadow_run_float32_is_not_judged_and_that_is_said() -> None:
    found = scan(torch.tanh, precisions=("fp32", "fp16"), level="module")
    assert list(found.verdicts) == ["float16"]
    reasons = [row.reason for row in found.recording.of(BlindSpotRow) if row.precision == "float32"]
    assert reasons == ["float32 is judged by its shadow run, which was left out"]


def test_outputs_and_weights_are_as_without_us() -> None:
    torch.manual_seed(0)
    model, x = Program(torch.tanh).eval(), torch.randn(4, 8)
    with torch.no_grad():
        before, weight = model(x), model.linear.weight.clone()
        overflow_lab.scan(model, {"x": x}, precisions=("fp32",))
        assert torch.equal(model(x), before)
    assert torch.equal(model.linear.weight, weight)
