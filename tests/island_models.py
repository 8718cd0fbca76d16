"""Models that break in half precision, for the tests of islands; all of our own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 8


class SquareNorm(nn.Module):
    """A norm by hand: its squares do not fit where its input is some hundreds."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width) + 1e-4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    """A linear map to `loud` times ordinary values, and a norm by hand."""

    def __init__(self, loud: float) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), SquareNorm()
        with torch.no_grad():
            self.up.weight.mul_(loud)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.up(x))


class Layers(nn.Module):
    """Four layers of which the second and the fourth are loud, and a head."""

    def __init__(self, loud: float = 900.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(gain) for gain in (1.0, loud, 1.0, loud))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    """Adds what it computes to the stream: nothing of its own is large, the stream is."""

    def __init__(self, peak: float) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.branch.bias.data[2] = peak

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.branch(self.norm(x))


class Encoder(nn.Module):
    """Blocks, of which two add 40,000 to the same place, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(peak) for peak in (4e4, 0.0, 4e4, 0.0))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Streamed(nn.Module):
    """An encoder whose residual stream does not fit, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x))


class Scores(nn.Module):
    """Query times key before they are scaled, in the model's own code."""

    def __init__(self, gain: float = 60.0) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.gain = gain

    def forward(self, x: torch.Tensor) -> Any:
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(1, 2) / self.gain**2
        return scores.softmax(-1) @ self.v(x)


class Fourier(nn.Module):
    """Has no kernel in half precision."""

    def forward(self, x: torch.Tensor) -> Any:
        return torch.fft.rfft(x).real


class Spectral(nn.Module):
    """A layer, a Fourier transform, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fourier, self.head = nn.Linear(WIDTH, WIDTH), Fourier(), nn.Linear(WIDTH // 2 + 1, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.fourier(self.layer(x)))


class Pooled(nn.Module):
    """Pools in float32, and gives that to a layer that is not: dtypes clash."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dense = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.dense(self.layer(x).float().mean(1))


class Tied(nn.Module):
    """Embeddings, whose weights are the head's too, and a loud layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(20, WIDTH), Layer(900.0), nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> Any:
        return self.head(self.layer(self.embed(ids)))


def seeded(build: Any, *args: Any) -> nn.Module:
    """Return a model at random weights that are the same each time."""
    torch.manual_seed(3)
    model: nn.Module = build(*args)
    return model.eval()


def values(*shape: int) -> torch.Tensor:
    """Return ordinary values that are the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))
