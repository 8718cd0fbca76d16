"""The noise floor: random rounding of weights, against the format's own grid, and what it does to an output."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overflow_lab
from overflow_lab.capture.noise import rounded_weights, stochastically_rounded
from overflow_lab.formats import FORMATS, round_to
from overflow_lab.recording import BlindSpotRow, NoiseRow

FLOATS = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@given(values=st.lists(FLOATS, min_size=1, max_size=20))
def test_a_random_rounding_is_one_of_the_two_neighbours_in_the_format(name: str, values: list[float]) -> None:
    tensor = torch.tensor(values)
    made = stochastically_rounded(tensor, FORMATS[name], torch.Generator().manual_seed(3)).numpy().astype(np.float64)
    np.testing.assert_array_equal(round_to(made, FORMATS[name]), made)  # on the grid
    nearest = tensor.numpy().astype(getattr(ml_dtypes, name) if name == "bfloat16" else np.float16).astype(np.float64)
    spacing = np.maximum(np.abs(nearest), FORMATS[name].smallest_normal) * FORMATS[name].eps
    assert (np.abs(made - tensor.numpy()) <= spacing).all()


def test_random_rounding_is_unbiased() -> None:
    value = torch.full((100_000,), 1.0 + 2.0**-10)  # an eighth of the way between two neighbours in bfloat16
    made = stochastically_rounded(value, FORMATS["bfloat16"], torch.Generator().manual_seed(0))
    assert set(made.tolist()) == {1.0, 1.0 + 2.0**-7}
    assert float(made.double().mean()) == pytest.approx(1.0 + 2.0**-10, abs=1e-4)


def test_values_of_the_format_stay_as_they_are() -> None:
    exact = torch.randn(1000).bfloat16().float()
    assert torch.equal(stochastically_rounded(exact, FORMATS["bfloat16"], torch.Generator()), exact)


def test_the_models_own_weights_are_untouched() -> None:
    model = nn.Linear(4, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    rounded_weights(model, FORMATS["bfloat16"])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_scan_records_the_noise_of_each_precision_and_more_of_it_in_bfloat16() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    found = overflow_lab.scan(model, (torch.randn(5, 64),)).recording
    noise = {row.precision: row.relative_error for row in found.of(NoiseRow)}
    assert noise.keys() == {"float16", "bfloat16"}
    assert 0 < noise["float16"] < noise["bfloat16"] < 0.05
    # The rounding of weights alone, 2**-9 rms a weight at most, is of this size.
    assert noise["bfloat16"] == pytest.approx(8 * noise["float16"], rel=0.5)


def test_a_model_that_cannot_be_called_with_other_weights_has_a_blind_spot() -> None:
    class Stubborn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(self.weight, nn.Parameter):
                raise TypeError("no parameter")
            return x * self.weight

    found = overflow_lab.scan(Stubborn(), (torch.ones(3),))
    assert any("noise floor" in row.reason for row in found.recording.of(BlindSpotRow))
    assert found.verdicts["bfloat16"].verdict == "ok"
