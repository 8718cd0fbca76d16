"""Operations that half precision does not have, or not with these operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Sentinel(nn.Module):
    """A constant of -1e30 in a tensor of the activations' dtype."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.maximum(torch.full(x.shape, -1e30, dtype=x.dtype), x)


class Inverse(nn.Module):
    """Inverts a matrix."""

    def forward(self, matrix: torch.Tensor) -> Any:
        return torch.linalg.inv(matrix)


class Behind(nn.Module):
    """A layer, and something behind it."""

    def __init__(self, last: nn.Module, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.last = last

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.layer(x))


class Sinusoids(nn.Module):
    """A table that stays float32 meets a layer that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, step: torch.Tensor) -> Any:
        angle = step.float()[:, None] * torch.arange(4)
        return self.layer(torch.cat([angle.sin(), angle.cos()], -1))


class Spectrum(nn.Module):
    """Several refusals in a row: the transform, then a product of complex halves."""

    def __init__(self) -> None:
        super().__init__()
        self.re, self.im = (nn.Parameter(torch.randn(4, 4)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        waves = torch.fft.rfft(x)[..., :4]
        return torch.einsum("bi,io->bo", waves, torch.complex(self.re, self.im)).abs()
