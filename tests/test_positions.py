"""Which positions are padding, and that nothing of theirs is compared."""

from __future__ import annotations

import torch
from torch import nn

import overflow_lab
from overflow_lab.capture.positions import RealPositions
from overflow_lab.capture.samples import Samples, sample

MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def test_real_positions_are_those_that_a_boolean_mask_selects() -> None:
    hidden = torch.randn(2, 5, 3)
    positions = RealPositions.in_inputs({"attention_mask": MASK})
    assert torch.equal(positions.select(hidden), hidden[MASK.bool()])
    assert torch.equal(sample(hidden, positions), hidden[MASK.bool()].reshape(-1))


def test_a_large_value_is_sampled_at_real_positions_and_in_every_channel() -> None:
    mask = torch.zeros(4, 256, dtype=torch.long)
    mask[:, 100:] = 1
    hidden = torch.arange(64.0).expand(4, 256, 64) + (1 - mask[..., None]) * 1000.0
    taken = sample(hidden, RealPositions.in_inputs({"attention_mask": mask}))
    assert 2048 <= len(taken) <= 8192
    assert set(taken.tolist()) == set(map(float, range(64)))


def test_without_padding_or_with_another_shape_everything_is_real() -> None:
    hidden = torch.randn(2, 5, 3)
    for mask in (torch.ones(2, 5), torch.zeros(2, 5), torch.ones(2, 1, 5, 5), torch.ones(5), "no tensor"):
        assert RealPositions.in_inputs({"attention_mask": mask}).select(hidden) is hidden
    other = torch.randn(3, 5)
    assert RealPositions.in_inputs({"attention_mask": MASK}).select(other) is other


def test_samples_of_padding_are_not_kept() -> None:
    samples = Samples(positions=RealPositions.in_inputs({"attention_mask": MASK}))
    samples.keep(("", "output", 0), torch.where(MASK == 0, 7.0, 1.0), 0)
    assert samples.kept["", "output", 0][0].tolist() == [1.0] * 8


class Noisy(nn.Module):
    """Gives exact values at real positions and badly rounded ones at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return x, [2, 5, 3], with a small difference of large values at padding."""
        lost = (x * self.weight + 2000.0) - 2000.0
        return torch.where(attention_mask[..., None].bool(), x * self.weight, lost)


def test_what_a_model_makes_of_padding_is_no_error_of_its_output() -> None:
    x = torch.full((2, 5, 3), 0.25)
    found = overflow_lab.scan(Noisy(), {"x": x, "attention_mask": MASK}, precisions=["bfloat16"])
    assert found.verdicts["bfloat16"].effect.relative_error == 0.0
    unpadded = overflow_lab.scan(Noisy(), {"x": x, "attention_mask": torch.zeros_like(MASK)})
    assert (unpadded.verdicts["bfloat16"].effect.relative_error or 0.0) > 0.5
