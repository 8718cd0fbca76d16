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
from overflow_lab.capture.precisions import parse_precision, prepare
from overflow_lab.capture.shadow.attribute import changed_decisions
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.run import log_program
from overflow_lab.formats import FORMATS, round_to
from overflow_lab.recording import AttributionRow, BlindSpotRow, NoiseRow
from overflow_lab.subjects.module import from_module

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


class Codes(nn.Module):
    """Looks up a value for the best of many keys: whichever key that is, the values are as far apart."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keys = nn.Linear(16, 4096, bias=False)
        self.values = nn.Parameter(torch.randn(4096, 8))
        self.offset = offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values[(self.keys(x) + self.offset).argmax(-1)]


def test_decisions_that_noise_changes_are_those_of_the_model_with_rounded_weights() -> None:
    model, x = Codes(), torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    base, call = prepare(from_module(model, (x,)), parse_precision("float32")), Call({}, (x,))
    rounded = rounded_weights(model, FORMATS["bfloat16"])
    apart = (x @ model.keys.weight.T).argmax(-1) != (x @ rounded["keys.weight"].T).argmax(-1)
    shown = model.values[(x @ model.keys.weight.T).argmax(-1)].argmax(-1)  # the output's rows are ranked too
    moved = rounded["values"][(x @ rounded["keys.weight"].T).argmax(-1)].argmax(-1)
    with torch.no_grad():
        found = changed_decisions(base, call, log_program(base, call), "bfloat16")
    assert found == int(apart.sum()) + int((shown != moved).sum()) > 0


def test_decisions_are_compared_as_far_as_both_programs_go_the_same_way() -> None:
    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 4001))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.weight[self.weight > 0.5 + x]
            return (kept > kept.mean()).sum() + x

    x = torch.tensor(1e-4)
    base, call = prepare(from_module(Kept(), (x,)), parse_precision("float32")), Call({}, (x,))
    with torch.no_grad():
        found = changed_decisions(base, call, log_program(base, call), "bfloat16")
        exact, noisy = Kept().weight, rounded_weights(Kept(), FORMATS["bfloat16"])["weight"]
    assert found == int(((exact > 0.5 + x) != (noisy > 0.5 + x)).sum()) > 0


def test_choices_as_loose_as_the_model_makes_them_are_no_fault() -> None:
    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    found = overflow_lab.scan(Codes(), (x,), precisions=("bfloat16",))
    (blame,) = found.recording.of(AttributionRow)
    verdict = found.verdicts["bfloat16"]
    assert blame.metric == "decisions"
    assert blame.noise
    assert verdict.verdict == "ok"
    assert verdict.effect.conditioned
    assert (verdict.effect.relative_error or 0.0) > 0.1
    assert "the model's own conditioning" in verdict.reason


def test_choices_that_the_format_loses_are_a_fault() -> None:
    x = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    verdict = overflow_lab.scan(Codes(offset=100.0), (x,), precisions=("bfloat16",)).verdicts["bfloat16"]
    assert (verdict.verdict, verdict.severity) == ("precision", "error")
    assert verdict.origin is not None
    assert verdict.origin.op == "aten.add"
    assert not verdict.effect.conditioned
