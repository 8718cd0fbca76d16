"""Values and constants that are too small for float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class CosineByHand(nn.Module):
    """A divisor with + 1e-8."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


class TwoTowers(nn.Module):
    """Embeds two batches and compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6, bias=False)
        self.similarity = CosineByHand()

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return self.similarity(self.embed(a), self.embed(b))


class LogPower(nn.Module):
    """The logarithm of squares, with a floor that is zero in float16."""

    def forward(self, x: torch.Tensor) -> Any:
        return (x * x).clamp(min=1e-9).log()


class FrontEnd(nn.Module):
    """A front-end, and what takes its output with a floor of its own: the infinities of silence do not go on."""

    def __init__(self) -> None:
        super().__init__()
        self.log_power = LogPower()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.log_power(x)
        return self.layer(torch.maximum(y, y.amax() - 8.0))


class CumulativeDecay(nn.Module):
    """Divides keys by a running product of gates."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.key = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.key(x) / self.gate(x).sigmoid().cumprod(1)


class Dequantised(nn.Module):
    """Two scales whose product is 8e-9."""

    codes: torch.Tensor
    scale: torch.Tensor
    scale_of_scales: torch.Tensor
    gain: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randint(-127, 128, (8, 8), dtype=torch.int8))
        self.register_buffer("scale", torch.full((8, 1), 2e-4))
        self.register_buffer("scale_of_scales", torch.tensor(4e-5))
        self.register_buffer("gain", torch.tensor(2e4))

    def forward(self, x: torch.Tensor) -> Any:
        weight = self.codes.to(x.dtype) * (self.scale * self.scale_of_scales)
        return nn.functional.linear(x, weight) * self.gain


class TinyWeights(nn.Module):
    """Weights that are all zero in float16, and a norm that cannot do without them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8, eps=0.0)
        self.down.weight.data.mul_(1e-9)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.down(x) * 3e4)
