"""Structures that hide values beyond float16's 65504, in real layers of torch: the rescale fits them, bit for bit.

Each is far too large inside, while what it returns is of ordinary size.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.rescaled import LIMIT, error, in_half, largest, mended, output
from tests.scaling_structures import (
    HUGE,
    WIDTH,
    Built,
    Rms,
    attention,
    batch_norm,
    before_a_norm,
    between,
    between_convolutions,
    collected,
    decoder,
    every_second,
    gated,
    gated_in_one,
    in_place,
    linear,
    of_gpt2,
    of_phi3,
    of_timm,
    outliers,
    rotated,
    rows,
    shared_weight,
    stream,
    whole_and_parts,
    wide_norm,
    with_a_learned_bias,
    without_bias,
)

POSSIBLE: dict[str, Callable[[], Built]] = {
    "linear layers around a ReLU": lambda: between(F.relu),
    "linear layers around a leaky ReLU": lambda: between(lambda x: F.leaky_relu(x, 0.2)),
    "linear layers around a learned leaky ReLU": lambda: between_convolutions(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 3), nn.PReLU(8)
    ),
    "linear layers around nothing": lambda: between(lambda x: x),
    "convolutions around a ReLU": lambda: between_convolutions(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 3), nn.ReLU()),
    "convolutions around pooling": lambda: between_convolutions(
        nn.Conv2d(4, 8, 3), nn.Conv2d(8, 3, 1), nn.ReLU(), nn.MaxPool2d(2), nn.AvgPool2d(2)
    ),
    "a transposed convolution": lambda: between_convolutions(
        nn.ConvTranspose2d(4, 8, 3), nn.ConvTranspose2d(8, 3, 3), nn.ReLU()
    ),
    "grouped convolutions": lambda: between_convolutions(
        nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU()
    ),
    "a convolution before a batch norm": batch_norm,
    "a linear layer before a layer norm": lambda: before_a_norm(nn.LayerNorm(WIDTH)),
    "a linear layer before a layer norm without weights": lambda: before_a_norm(
        nn.LayerNorm(WIDTH, elementwise_affine=False)
    ),
    "a linear layer before an RMS norm by hand": lambda: before_a_norm(Rms()),
    "a linear layer before torch's RMS norm": lambda: before_a_norm(nn.RMSNorm(WIDTH, eps=1e-6)),
    "a gated product": gated,
    "a gated product in one matrix": gated_in_one,
    "values and outputs of attention": lambda: attention(v=HUGE, o=1 / HUGE),
    "queries and keys whose scores are scaled too late": lambda: attention(q=2.0**8, k=2.0**8),
    "queries, keys and values in one matrix, as in GPT-2": of_gpt2,
    "queries, keys and values in one matrix, as in timm": of_timm,
    "queries, keys and values in one matrix, as in Phi-3": of_phi3,
    "attention with a learned bias": with_a_learned_bias,
    "a residual stream with layer norms and a tied head": lambda: stream(lambda: nn.LayerNorm(WIDTH), large=2.0**18),
    "a residual stream with RMS norms and a tied head": lambda: stream(Rms),
    "a residual stream with norms of one and a weight": lambda: stream(lambda: Rms(shift=1.0)),
    "a decoder of images": decoder,
    "a residual connection in place": in_place,
    "a weight that is used twice": shared_weight,
    "zero biases": lambda: before_a_norm(without_bias(nn.LayerNorm(WIDTH))),
    "a product that is used as a whole and in parts": whole_and_parts,
    "parts that are added to zeros": collected,
    "a rotation by complex numbers": rotated,
}


def built(name: str, table: dict[str, Callable[[], Built]]) -> Built:
    torch.manual_seed(3)
    model, inputs = table[name]()
    return model.eval(), inputs


@pytest.mark.parametrize("name", POSSIBLE)
def test_values_beyond_the_limit_come_to_fit_and_the_outputs_are_the_same_bits(name: str) -> None:
    model, inputs = built(name, POSSIBLE)
    right = output(model, *inputs)
    assert largest(model, *inputs) > LIMIT
    assert error(right, in_half(model, *inputs)) > 0.1
    found = mended(model, *inputs)
    assert found.missing == pytest.approx(0.0, abs=1e-6)
    assert largest(found.after, *inputs) <= LIMIT / 4
    assert torch.equal(output(found.after, *inputs), right)
    assert error(right, in_half(found.after, *inputs)) < 0.01


def test_a_norm_that_stores_its_weight_less_one_is_scaled_through_one_plus_the_weight() -> None:
    torch.manual_seed(3)
    model, inputs = wide_norm()
    right = output(model, *inputs)
    assert not in_half(model, *inputs).isfinite().all()
    found = mended(model, *inputs)
    assert found.missing == pytest.approx(0.0, abs=1e-6)
    assert [knob.shift for knob in found.exponents if knob.name == "0.weight"] == [1.0]
    assert error(right, output(found.after, *inputs)) < 1e-6
    assert error(right, in_half(found.after, *inputs)) < 0.01


IMPOSSIBLE: dict[str, Callable[[], Built]] = {
    "a GELU between": lambda: between(F.gelu),
    "a sigmoid between": lambda: between(lambda x: x.sigmoid() * x),
    "an output that is itself too large": lambda: (nn.Sequential(linear(), nn.ReLU(), linear(times=HUGE)), rows()),
    "scores that are too large for a softmax": outliers,
    "shares of a softmax that are made large": lambda: between(lambda x: F.silu(x.softmax(-1) * HUGE * 4)),
    "a comparison with a number": lambda: between(lambda x: torch.where(x > 1.0, x, 0.0)),
    "a number that is added": lambda: between(lambda x: (x + 1.0).relu()),
    "positions that are added": lambda: between(lambda x: (x + torch.arange(WIDTH)).relu()),
    "a product whose every second row is pinned": every_second,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_where_nothing_can_make_the_values_fit_that_is_said_and_the_function_is_kept(name: str) -> None:
    model, inputs = built(name, IMPOSSIBLE)
    assert largest(model, *inputs) > LIMIT
    found = mended(model, *inputs)
    assert found.missing > 1.0
    assert torch.equal(output(found.after, *inputs), output(model, *inputs))
