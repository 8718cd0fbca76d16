"""Values whose distinctions a mantissa of 8 or 11 bits does not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Positions(nn.Module):
    """Positions counted in the activations' dtype."""

    def forward(self, x: torch.Tensor) -> Any:
        position = torch.arange(x.shape[0]).to(x.dtype)
        angle = position.float()[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        return torch.cat([angle.sin(), angle.cos()], -1).to(x.dtype)


class Located(nn.Module):
    """Adds positions."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + self.positions(x)


class Decay(nn.Module):
    """A decay of 1 - 2^-12 in a buffer, to the power of an age."""

    decay: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(1 - 2.0**-12))

    def forward(self, x: torch.Tensor, age: torch.Tensor) -> Any:
        return self.decay ** age.to(x.dtype) * x


class Average(nn.Module):
    """A running average that moves by a thousandth at a time."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, values: torch.Tensor) -> Any:
        mean = self.mean.clone()
        for value in values:
            mean.lerp_(value, 1e-3)
        return mean


class Gate(nn.Module):
    """Sigmoid scores of 6.5 and 7: both are 1 in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([1.0, 6.5, 7.0]))

    def forward(self, x: torch.Tensor) -> Any:
        return (torch.zeros(len(x), 3, dtype=x.dtype) + self.bias).sigmoid().argmax(-1)


class Routed(nn.Module):
    """Sends each row to the expert that the gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        return torch.stack([self.experts[int(i)](row) for i, row in zip(self.gate(x), x, strict=True)])


class TwoTokens(nn.Module):
    """Two tokens 0.06 apart at 30: equal in bfloat16, where the first of them wins."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(6, 40)
        self.lm_head.weight.data.mul_(0.05)
        self.lm_head.weight.data[[7, 9]] = 0.0
        self.lm_head.bias.data[[7, 9]] = torch.tensor([30.0, 30.06])

    def forward(self, x: torch.Tensor) -> Any:
        return {"logits": self.lm_head(x)}


class SpreadByMoments(nn.Module):
    """E[x^2] - E[x]^2 of values far from zero."""

    def forward(self, x: torch.Tensor) -> Any:
        mean = x.mean(-1, keepdim=True)
        return (x - 50.0) / ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=1e-3).sqrt()


class OwnEps(nn.Module):
    """Takes its eps from the dtype."""

    def forward(self, x: torch.Tensor) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps)).to(x.dtype)


class Quiet(nn.Module):
    """A norm over values of a hundredth."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnEps()
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(x))
