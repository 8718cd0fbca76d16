"""What looks like a fault and is none."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


class SoftCapped(nn.Module):
    """Raw scores beyond float16's limit, soft-capped: tanh of inf is tanh of 100,000 / 30."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight.data[:3] = torch.tensor([1.0, -1.0, 1.0])[:, None] * 2e4

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.lm_head(x) / 30.0) * 30.0


class MishByHand(nn.Module):
    """exp overflows at 12, its logarithm is inf, and tanh of that is 1."""

    def forward(self, x: torch.Tensor) -> Any:
        return x * torch.tanh(torch.log(1 + torch.exp(x)))


class Segments(nn.Module):
    """The unused triangle overflows and is filled over."""

    def forward(self, x: torch.Tensor) -> Any:
        upper = torch.ones(x.shape[-1], x.shape[-1]).triu(1).bool()
        return torch.exp(x[:, :, None] - x[:, None, :]).masked_fill(upper, 0.0)


class Guarded(nn.Module):
    """Divides by zero where it does not look."""

    def forward(self, total: torch.Tensor, count: torch.Tensor) -> Any:
        count = count.to(total.dtype)
        return torch.where(count > 0, total / count, torch.zeros_like(total))


class MaskedAttention(nn.Module):
    """Attention with a mask written by one of several customs."""

    def __init__(self, custom: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.custom = custom

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        scores, gone = self.q(x) @ self.k(x).transpose(1, 2), mask[:, None] == 0
        lowest = torch.finfo(x.dtype).min
        if self.custom == "added":
            scores = scores + gone.to(x.dtype) * lowest
        elif self.custom == "added twice":
            causal = torch.full(scores.shape[1:], lowest, dtype=x.dtype).triu(1)
            scores = scores + (causal + gone.to(x.dtype) * lowest)
        elif self.custom == "too large":
            scores = torch.where(gone, torch.tensor(-1e9), scores)
        else:
            scores = scores.masked_fill(gone, -math.inf)
        return scores.softmax(-1) @ self.v(x)


class Compensated(nn.Module):
    """Kahan's sum: its correction is nothing but rounding error."""

    def forward(self, values: torch.Tensor) -> Any:
        total = torch.zeros_like(values[0])
        lost = torch.zeros_like(total)
        for value in values:
            wanted = value - lost
            more = total + wanted
            lost, total = (more - total) - wanted, more
        return total


class Cached(nn.Module):
    """Writes a cache and a counter in its forward."""

    cache: torch.Tensor
    step: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)
        self.register_buffer("cache", torch.zeros(16, 4))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        places = (torch.arange(len(x)) + self.step) % 16
        self.cache.index_copy_(0, places, self.key(x))
        self.step += len(x)
        return self.cache.sum(0)[None] + x


class Sampled(nn.Module):
    """Draws few numbers, which torch draws otherwise in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        mean = self.mean(x)
        return mean + torch.randn_like(mean)


class Saturated(nn.Module):
    """A mask whose sigmoid is 1 in many places: ties that nobody ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> Any:
        return (self.layer(x) * 12).sigmoid()
