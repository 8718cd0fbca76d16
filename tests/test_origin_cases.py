"""Each way in which half precision breaks is found where it begins, and what only looks like it is left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.cases import controls, kernels, overflow, rounding, underflow
from tests.cases.judge import OK, first_bad, judged, off

CAST = "aten._to_copy"


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def rows(count: int = 4, width: int = 8, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(count, width) * scale


def overflows_at(model: nn.Module, module: str, op: str, **inputs: torch.Tensor) -> None:
    """Expect the origin in float16, which the observer without shadows confirms, and a healthy bfloat16."""
    assert first_bad(model, torch.float16, **inputs) == (module, op)
    found = judged(model, **inputs)
    assert found["float16"] == ("overflow", module, op)
    assert found["bfloat16"] == OK


# ---- overflow ----


def test_an_exponential_without_the_maximum_is_the_origin() -> None:
    overflows_at(overflow.EnergyHead(), "energy", "aten.exp", x=rows(width=6))


def test_a_square_in_a_norm_by_hand_is_the_origin() -> None:
    overflows_at(overflow.Normed(overflow.GroupNormByHand()), "norm", "aten.mul", x=rows())


def test_a_square_whose_inverse_is_a_silent_zero_is_found_though_all_outputs_are_finite() -> None:
    model, x = overflow.Normed(overflow.LengthByHand()), rows()
    assert off(model, torch.float16, x=x) < float("inf")
    overflows_at(model, "norm", "aten.pow", x=x)


def test_a_residual_add_is_told_from_the_branches_that_fit() -> None:
    overflows_at(overflow.Stream(), "layers.1", "aten.add", x=rows())


def test_a_sum_over_all_tokens_is_the_origin_and_not_the_division() -> None:
    overflows_at(overflow.SentenceEncoder(), "pool", "aten.sum", x=torch.randn(1, 3000, 4))


def test_scores_before_their_scale_are_the_origin() -> None:
    overflows_at(overflow.Scores(300.0), "", "aten.bmm", x=torch.randn(1, 6, 16))


def test_a_layer_called_three_times_is_named_by_its_path() -> None:
    overflows_at(overflow.SharedLayer(), "layer", "aten.mm", x=rows())


def test_an_input_that_does_not_fit_is_the_origin_and_one_that_is_rounded_is_imprecise() -> None:
    found = judged(overflow.Timestamps(), seconds=1.7e9 + torch.arange(12.0) * 43200)
    assert found == {"float16": ("overflow", "", CAST), "bfloat16": ("precision", "", CAST)}


# ---- underflow ----


def test_an_eps_that_flushes_is_an_underflow_where_it_divides() -> None:
    a = rows(5, 6)
    a[3] = 0.0
    found = judged(underflow.TwoTowers(), a=a, b=rows(5, 6))
    assert found == {"float16": ("underflow", "similarity", "aten.div"), "bfloat16": OK}


def test_flushed_powers_are_named_and_not_the_logarithm_that_shows_them() -> None:
    x = torch.rand(2, 8) + 0.1
    x[1] *= 1e-5
    assert judged(underflow.LogPower(), x=x) == {"float16": ("underflow", "", "aten.mul"), "bfloat16": OK}


def test_an_infinity_that_a_module_hands_out_for_a_value_that_fits_is_a_fault_though_it_is_absorbed() -> None:
    x = torch.rand(2, 8) + 0.1
    x[1] *= 1e-5
    model = underflow.FrontEnd()
    assert off(model, torch.float16, x=x) < 0.01
    assert judged(model, x=x)["float16"] == ("underflow", "log_power", "aten.mul")


def test_a_running_product_that_flushes_is_named_and_not_the_division_by_it() -> None:
    found = judged(underflow.CumulativeDecay(), x=torch.randn(1, 40, 4))
    assert found["float16"] == ("underflow", "", "aten.cumprod")


def test_a_product_of_scales_that_flushes_is_named() -> None:
    found = judged(underflow.Dequantised(), x=rows())
    assert found == {"float16": ("underflow", "", "aten.mul"), "bfloat16": OK}


def test_weights_that_flush_in_the_cast_are_named_and_not_the_norm_of_zeros() -> None:
    found = judged(underflow.TinyWeights(), x=rows())
    assert found == {"float16": ("underflow", "down", CAST), "bfloat16": OK}


# ---- rounding ----


def test_positions_in_bfloat16_are_rounded_where_they_are_cast() -> None:
    found = judged(rounding.Located(), x=rows(700))
    assert found == {"float16": OK, "bfloat16": ("precision", "positions", CAST)}


def test_a_decay_that_becomes_one_in_the_cast_is_named_by_its_module() -> None:
    found = judged(rounding.Decay(), x=rows(16), age=(torch.arange(16) * 256)[:, None])
    assert found == dict.fromkeys(("float16", "bfloat16"), ("precision", "", CAST))


def test_an_average_that_stands_still_is_found() -> None:
    found = judged(rounding.Average(), values=torch.rand(600, 4) * 0.1 + 1.5)
    assert found["bfloat16"] == ("precision", "", "aten.lerp_")


def test_a_gate_that_saturates_is_named_where_experts_change() -> None:
    model, x = rounding.Routed(), rows(5)
    assert off(model, torch.bfloat16, x=x) > 0.5
    assert judged(model, x=x) == {"float16": OK, "bfloat16": ("precision", "gate", "aten.sigmoid")}


def test_scores_that_become_equal_are_named_where_every_choice_changes() -> None:
    model, x = rounding.TwoTokens(), rows(4, 6)
    assert off(model, torch.bfloat16, x=x) < 0.01
    assert judged(model, x=x) == {"float16": OK, "bfloat16": ("precision", "lm_head", "aten.addmm")}


def test_a_variance_that_cancels_is_named_at_the_subtraction() -> None:
    x = (50 + 0.5 * torch.randn(2, 64)).bfloat16().float()
    assert judged(rounding.SpreadByMoments(), x=x)["bfloat16"] == ("precision", "", "aten.sub")


def test_an_eps_of_the_dtype_is_named_though_the_shadow_has_it_too() -> None:
    found = judged(rounding.Quiet(), x=rows(4, 16, 0.02))
    assert found == dict.fromkeys(("float16", "bfloat16"), ("precision", "norm", "aten.add"))


# ---- kernels ----


def test_a_constant_that_cannot_be_written_is_named_by_its_operation() -> None:
    found = judged(kernels.Behind(kernels.Sentinel()), x=rows(3, 4))
    assert found == {"float16": ("unsupported", "last", "aten.full"), "bfloat16": OK}


def test_a_missing_kernel_is_named_by_its_operation() -> None:
    found = judged(kernels.Behind(kernels.Inverse(), 3), x=torch.eye(3) * 2 + 0.1 * torch.randn(3, 3))
    assert {name: said[:2] for name, said in found.items()} == dict.fromkeys(found, ("unsupported", "last"))
    assert all(said[2] in ("aten.linalg_inv", "aten.linalg_inv_ex") for said in found.values())


def test_two_dtypes_that_meet_are_named_where_they_meet() -> None:
    found = judged(kernels.Sinusoids(), step=torch.arange(5))
    assert found == dict.fromkeys(found, ("unsupported", "layer", "aten.addmm"))


def test_the_first_of_several_refusals_is_named() -> None:
    found = judged(kernels.Spectrum(), x=rows(2, 9))
    assert found == dict.fromkeys(found, ("unsupported", "", "aten._fft_r2c"))


# ---- controls ----


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (controls.MishByHand(), {"x": torch.linspace(-20, 20, 64)[None]}),
        (controls.Segments(), {"x": -torch.arange(24.0)[None]}),
        (controls.Guarded(), {"total": torch.arange(4.0), "count": torch.tensor([0, 1, 3, 2])}),
        (controls.Compensated(), {"values": torch.linspace(0, 1, 900).reshape(300, 3) * torch.tensor([1.0, 2.0, 3.0])}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_values_that_are_thrown_away_are_no_fault(model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    assert max(off(model, dtype, **inputs) / eps for dtype, eps in ((torch.float16, 0.005), (torch.bfloat16, 0.03))) < 1
    assert judged(model, **inputs) == {"float16": OK, "bfloat16": OK}


def test_a_soft_cap_absorbs_scores_beyond_the_limit() -> None:
    model, x = controls.SoftCapped(), torch.rand(4, 8) + 0.5
    assert first_bad(model, torch.float16, x=x) == ("lm_head", "aten.mm")
    assert judged(model, x=x) == {"float16": OK, "bfloat16": OK}


@pytest.mark.parametrize("custom", ["added", "added twice", "too large", "filled"])
def test_masks_are_no_fault_where_every_row_keeps_something(custom: str) -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 4:] = 0
    model, x = controls.MaskedAttention(custom), torch.randn(2, 7, 8)
    assert judged(model, x=x, mask=mask) == {"float16": OK, "bfloat16": OK}


def test_a_mask_constant_that_does_not_fit_is_a_fault_where_a_row_has_nothing_left() -> None:
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1] = 0
    found = judged(controls.MaskedAttention("too large"), x=torch.randn(2, 7, 8), mask=mask)
    assert found["bfloat16"] == OK
    assert found["float16"][0] in ("nan", "overflow")
    assert found["float16"][2] in ("aten.where", "aten._softmax")


def test_a_model_that_writes_its_buffers_is_replayed_from_the_same_state() -> None:
    assert judged(controls.Cached(), x=rows(3, 4)) == {"float16": OK, "bfloat16": OK}


def test_other_random_numbers_are_no_imprecision() -> None:
    assert judged(controls.Sampled(), x=rows(3, 4)) == {"float16": OK, "bfloat16": OK}


def test_a_saturated_mask_is_no_tie() -> None:
    assert judged(controls.Saturated(), x=rows(6)) == {"float16": OK, "bfloat16": OK}


# ---- a program that raises because of what it was given ----


class Peak(nn.Module):
    """Looks for the place of its largest value, which NaN has none of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8, eps=1e-12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(torch.ones_like(x))  # its scale does not fit float16 either, and nobody asks for it
        h = self.linear(x) * 1e3
        scores = (h * h).softmax(-1)
        row: torch.Tensor = h[(scores == scores.max()).nonzero()[0, 0]]
        return row


def test_the_value_that_makes_a_program_raise_is_named_and_so_is_the_exception() -> None:
    import overflow_lab

    verdict = overflow_lab.scan(Peak().eval(), {"x": rows()}, precisions=("float16",)).verdicts["float16"]
    assert (verdict.verdict, verdict.severity) == ("overflow", "error")
    assert verdict.origin is not None
    assert (verdict.origin.module, verdict.origin.op) == ("", "aten.mul")
    assert "IndexError" in verdict.chain[0].text
    assert verdict.value is not None
    assert verdict.value > torch.finfo(torch.float16).max
