"""Values that leave the range of float16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Energy(nn.Module):
    """log sum exp without the maximum."""

    def forward(self, scores: torch.Tensor) -> Any:
        return scores.exp().sum(-1).log()


class EnergyHead(nn.Module):
    """A linear layer with one score of 13, and its energy."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(6, 8)
        self.energy = Energy()
        self.score.bias.data[2] = 13.0

    def forward(self, x: torch.Tensor) -> Any:
        return self.energy(self.score(x))


class GroupNormByHand(nn.Module):
    """Squares its input before the mean, in the input's own dtype."""

    def forward(self, x: torch.Tensor) -> Any:
        centre = x.mean(-1, keepdim=True)
        spread = (x * x).mean(-1, keepdim=True) - centre * centre
        return (x - centre) * torch.rsqrt(spread + 1e-5)


class Normed(nn.Module):
    """A layer whose outputs are some hundreds, and a norm behind it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 16)
        self.norm = norm
        self.layer.weight.data.mul_(900)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x))


class LengthByHand(nn.Module):
    """x / sqrt(sum x^2): where the square overflows, a silent zero."""

    def forward(self, x: torch.Tensor) -> Any:
        return x / x.pow(2).sum(-1, keepdim=True).sqrt().clamp(min=1e-6)


class ParallelBlock(nn.Module):
    """Attention and feed-forward beside each other: each fits, the sum does not."""

    def __init__(self, peak: float) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
        self.attn.bias.data[1] = self.mlp.bias.data[1] = peak

    def forward(self, x: torch.Tensor) -> Any:
        return self.attn(x) + self.mlp(x) + x


class Stream(nn.Module):
    """Three parallel blocks, the second of them too loud, and a final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ParallelBlock(peak) for peak in (0.0, 4e4, 0.0))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Pool(nn.Module):
    """A sum over all tokens before the division."""

    def forward(self, x: torch.Tensor) -> Any:
        return x.sum(1) / x.shape[1]


class SentenceEncoder(nn.Module):
    """Tokens of about 30, pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.pool = Pool()
        self.layer.bias.data.fill_(30.0)

    def forward(self, x: torch.Tensor) -> Any:
        return self.pool(self.layer(x))


class Scores(nn.Module):
    """Query times key, scaled afterwards."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> Any:
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(1, 2) / self.gain**2
        return scores.softmax(-1) @ self.v(x)


class SharedLayer(nn.Module):
    """One layer called three times: it overflows at the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.layer.weight.data.copy_(torch.eye(8) * 60)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(3):
            x = self.layer(x)
        return self.norm(x)


class Timestamps(nn.Module):
    """Seconds since 1970, made into a weekday."""

    def forward(self, seconds: torch.Tensor) -> Any:
        turn = (seconds.float() / 86400.0) % 7 / 7 * 2 * torch.pi
        return torch.stack([turn.sin(), turn.cos()], -1).to(seconds.dtype)
