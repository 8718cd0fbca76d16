"""The models of the sample reports, each as `overflow-lab scan tests/sample_models.py:NAME` takes it."""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers as hf
from torch import nn

_TOKENS = 200


class _Attention(nn.Module):
    """One head of attention over rotated queries and keys."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = self._rotated(self.query(x)), self._rotated(self.key(x))
        scores = query @ key.transpose(-1, -2) / math.sqrt(x.shape[-1])
        return self.out(scores.softmax(-1) @ self.value(x))  # type: ignore[no-any-return]

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        half = x.shape[-1] // 2
        frequency = 100.0 ** (-torch.arange(half) / half)
        # The fault: positions in the activations' own dtype. bfloat16 has no 257.
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), _Attention(width)
        wide = 4 * width
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class _Encoder(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(_TOKENS, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _TOKENS)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x))}


def positions() -> tuple[nn.Module, dict[str, Any]]:
    """Return an encoder with rotary positions that counts them in its own dtype, and 512 tokens."""
    torch.manual_seed(0)
    model = _Encoder(width=32, depth=3)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _Attention):  # one that looks at where things are, as trained ones do
                for layer in (module.query, module.key, module.out):
                    layer.weight.mul_(3)
    return model.eval(), {"input_ids": torch.randint(0, _TOKENS, (2, 512))}


def fourier() -> tuple[nn.Module, dict[str, Any]]:
    """Return a small FNet at random weights: its Fourier transform has no kernel in half precision on a CPU."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    model = hf.FNetForMaskedLM(hf.FNetConfig(vocab_size=_TOKENS, **size))
    return model.eval(), {"input_ids": torch.randint(4, _TOKENS, (2, 16))}
