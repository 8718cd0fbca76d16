"""`ActivationPenalty`: its value by hand, its gradient, what it counts, and that nothing is left behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import overflow_lab
from overflow_lab.errors import UsageError
from overflow_lab.remedies.penalty import ActivationPenalty
from tests.tiny_models import build

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_forward_hooks_with_kwargs")


def linear(*values: float) -> nn.Linear:
    """Return a layer that multiplies each input by one of `values`."""
    layer = nn.Linear(len(values), len(values), bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.diag(torch.tensor(values)))
    return layer


def weight_of(model: nn.Sequential, index: int) -> torch.Tensor:
    layer = model[index]
    assert isinstance(layer, nn.Linear)
    return layer.weight


def hooks_of(model: nn.Module) -> int:
    return sum(len(getattr(module, name)) for module in model.modules() for name in HOOKS)


def test_the_penalty_is_the_mean_square_of_the_excess_in_bits() -> None:
    model = nn.Sequential(linear(64.0, 8.0, 1.0, 0.0))
    with ActivationPenalty(model, ["0"], limit=32.0, headroom_bits=3.0) as penalty:  # 4 and above are too large
        model(torch.ones(1, 4))
        assert penalty.penalty().item() == pytest.approx((4.0**2 + 1.0**2) / 2)  # 64 is 4 bits above, 8 is 1


def test_the_penalty_is_zero_with_zero_gradient_where_everything_fits() -> None:
    model = nn.Sequential(linear(1.0, -2.0, 0.0))
    with ActivationPenalty(model, limit=8.0, headroom_bits=1.0) as penalty:
        model(torch.ones(2, 3))
        found = penalty.penalty()
        found.backward()
    assert found.item() == 0.0
    grad = weight_of(model, 0).grad
    assert grad is not None
    assert not grad.any()


def test_the_gradient_is_that_of_finite_differences_and_points_down() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    inputs = torch.randn(4, 5, dtype=torch.float64)
    with ActivationPenalty(model, ["2"], limit=1.0, headroom_bits=6.0) as penalty:

        def value() -> float:
            with torch.enable_grad():
                model(inputs)
                return penalty.penalty().item()

        model(inputs)
        penalty.penalty().backward()
        weight = weight_of(model, 2)
        assert weight.grad is not None
        expected, step = weight.grad[1, 2].item(), 1e-3
        with torch.no_grad():
            weight[1, 2] += step
            above = value()
            weight[1, 2] -= 2 * step
            below = value()
    assert expected != 0.0
    assert (above - below) / (2 * step) == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("healthy", [1, 1000])
def test_healthy_elements_do_not_dilute_it(healthy: int) -> None:
    model = nn.Sequential(nn.Identity())
    inputs = torch.ones(1 + healthy, requires_grad=True)
    inputs = torch.cat([inputs[:1] * 64.0, inputs[1:]])
    with ActivationPenalty(model, limit=32.0, headroom_bits=1.0) as penalty:
        model(inputs)
        assert penalty.penalty().item() == pytest.approx(4.0)


def test_it_knows_only_the_ratio_to_the_limit() -> None:
    found = []
    for scale in (1.0, 1024.0):
        model = nn.Sequential(linear(3.0, 50.0, 700.0))
        with ActivationPenalty(model, limit=16.0 * scale, headroom_bits=1.0) as penalty:
            model(torch.full((2, 3), scale))
            found.append(penalty.penalty().item())
    assert found[0] == found[1] > 0.0


def test_sites_add_up_and_calls_of_one_are_averaged() -> None:
    model = nn.ModuleDict({"a": linear(8.0), "b": linear(32.0)})
    one = torch.ones(1, 1)
    with ActivationPenalty(model, ["a", "b"], limit=4.0, headroom_bits=0.0) as penalty:
        model["a"](one)
        model["a"](2 * one)
        model["b"](one)
        assert penalty.penalty().item() == pytest.approx((1.0 + 4.0) / 2 + 9.0)
        assert penalty.penalty().item() == 0.0  # reset


def test_calls_without_gradient_add_nothing_to_it_but_their_largest_value_is_known() -> None:
    model = nn.Sequential(linear(2.0**16))
    with ActivationPenalty(model, ["0"]) as penalty, torch.no_grad():
        model(torch.ones(1, 1))
        assert penalty.penalty().item() == 0.0
        assert penalty.largest() == {("0", ""): 2.0**16}
        assert penalty.headroom() == pytest.approx(math.log2(65504.0) - 16.0)
        assert penalty.headroom() == math.inf


def test_values_that_are_not_finite_give_no_nan_and_no_headroom() -> None:
    model = nn.Sequential(nn.Identity())
    inputs = torch.tensor([math.inf, math.nan, -math.inf, 2.0**17], requires_grad=True)
    with ActivationPenalty(model, headroom_bits=1.0) as penalty:
        model(inputs)
        found = penalty.penalty()
        assert penalty.headroom() == -math.inf
    found.backward()
    assert math.isfinite(found.item())
    assert inputs.grad is not None
    assert inputs.grad.isfinite().all()
    assert inputs.grad[3] > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_activations_give_a_float32_penalty(dtype: torch.dtype) -> None:
    model = nn.Sequential(linear(1.0, 60000.0)).to(dtype)
    with ActivationPenalty(model, headroom_bits=2.0) as penalty:
        model(torch.ones(1, 2, dtype=dtype))
        found = penalty.penalty()
    assert found.dtype == torch.float32
    largest = float(torch.tensor(60000.0).to(dtype))
    assert found.item() == pytest.approx(math.log2(largest * 4 / 65504.0) ** 2, rel=1e-4)


def test_it_works_under_autocast() -> None:
    model = nn.Sequential(linear(60000.0, 1.0))
    with ActivationPenalty(model, headroom_bits=2.0) as penalty, torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(1, 2))
        penalty.penalty().backward()
    grad = weight_of(model, 0).grad
    assert grad is not None
    assert grad[0, 0] > 0


def test_the_first_tensor_of_an_output_is_watched_or_the_one_that_is_named() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            return x * 8.0, {"bias": x * 1e35, "more": [x * 64.0]}

    model = nn.Sequential(Pair())
    inputs = torch.ones(1, requires_grad=True)
    for port, bits in (("", 3.0), ("output[1]['more'][0]", 6.0)):
        with ActivationPenalty(model, [("0", port)], limit=1.0, headroom_bits=0.0) as penalty:
            model(inputs)
            assert penalty.penalty().item() == pytest.approx(bits**2)


def test_a_checkpointed_module_counts_once_and_gives_the_same_gradients() -> None:
    found = []
    for with_checkpoint in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
        inputs = torch.ones(3, 4)
        with ActivationPenalty(model, limit=0.01, headroom_bits=0.0) as penalty:
            output = checkpoint(model, inputs, use_reentrant=False) if with_checkpoint else model(inputs)
            loss = output.sum() + penalty.penalty()
            loss.backward()
            assert penalty.penalty().item() == 0.0
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_reentrant_checkpoint_is_refused_with_the_way_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    inputs = torch.ones(3, 4, requires_grad=True)
    with ActivationPenalty(model, limit=0.01) as penalty:
        output = checkpoint(model, inputs, use_reentrant=True)
        with pytest.raises(UsageError, match=r'"use_reentrant": False'):
            (output.sum() + penalty.penalty()).backward()


def test_outputs_are_the_same_bits_and_no_hook_stays_after_an_exception() -> None:
    model = build("t5").eval()
    inputs = {"input_ids": torch.tensor([[4, 5, 6]]), "decoder_input_ids": torch.tensor([[0, 7]])}
    plain, before = model(**inputs).logits, hooks_of(model)
    penalty = ActivationPenalty(model)
    assert hooks_of(model) == before
    with penalty:
        assert torch.equal(model(**inputs).logits, plain)
        assert hooks_of(model) == before + len({module for module, _ in penalty.sites})
    with pytest.raises(ValueError, match="input_ids"), penalty:
        model()
    assert hooks_of(model) == before
    assert not penalty.attached


def test_attaching_twice_is_an_error() -> None:
    penalty = ActivationPenalty(nn.Sequential(nn.Linear(1, 1)))
    with penalty, pytest.raises(UsageError, match="attached already"):
        penalty.attach()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sites": ["nowhere"]}, "no module 'nowhere'"),
        ({"sites": []}, "no sites"),
        ({"limit": -1.0}, "the limit is -1.0"),
        ({"headroom_bits": math.nan}, "headroom_bits is nan"),
    ],
)
def test_wrong_options_are_told_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        ActivationPenalty(nn.Sequential(nn.Linear(1, 1)), **options)
    assert "\n" not in str(raised.value)


def test_a_scan_names_the_sites_that_lack_headroom_each_tensor_once() -> None:
    model = nn.Sequential(linear(1.0), nn.Sequential(linear(30000.0)), linear(0.001))
    scan = overflow_lab.scan(model, (torch.ones(1, 1),), precisions=["float16"], level="module")
    penalty = ActivationPenalty.from_scan(model, scan, "fp16", headroom_bits=1.0)
    assert penalty.sites == (("1.0", "output"),)
    with penalty:
        model(torch.ones(1, 1))
        assert penalty.penalty().item() == 0.0  # watched, since within a bit of it
        penalty.headroom_bits = 2.0
        model(torch.ones(1, 1))
        assert penalty.penalty().item() == pytest.approx(math.log2(30000 * 4 / 65504.0) ** 2, rel=1e-5)


def test_a_scan_of_a_model_that_fits_has_nothing_to_penalise() -> None:
    model = nn.Sequential(linear(1.0))
    scan = overflow_lab.scan(model, (torch.ones(1, 1),), precisions=["float16"], level="module")
    with pytest.raises(UsageError, match="nothing to penalise"):
        ActivationPenalty.from_scan(model, scan)


def test_a_plain_loop_shrinks_what_is_too_large_and_keeps_the_function() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4), nn.LayerNorm(4))
    with torch.no_grad():
        weight_of(model, 2).mul_(1000.0)
    inputs = torch.randn(64, 4)
    wanted = model(inputs).detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    with ActivationPenalty(model, ["2"], limit=512.0, headroom_bits=1.0) as penalty:
        model(inputs)
        before = penalty.headroom()
        penalty.reset()
        for _ in range(600):
            loss = nn.functional.mse_loss(model(inputs), wanted) + penalty.penalty()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rates.step()
        penalty.reset()
        error = nn.functional.mse_loss(model(inputs), wanted).item()
        after = penalty.headroom()
    assert before < 0.0
    assert after > 0.95
    assert error < 0.02
