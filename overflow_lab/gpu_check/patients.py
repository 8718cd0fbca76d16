"""Small models for the checks: healthy ones, and some with one fault that is known."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

WIDTH = 64


class Block(nn.Module):
    """A residual block of two products; `gain` multiplies the first."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        with torch.no_grad():
            self.up.weight.mul_(gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x and what the block adds, [batch, length, WIDTH]."""
        added: torch.Tensor = self.down(self.up(x))
        return x + added


class Norm(nn.Module):
    """A norm written by hand, which squares in the dtype that it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over its root mean square."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Edge(nn.Module):
    """Adds up to 2^128 - 2^119: the last value but one of float32's octave, and nearer to inf in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, scaled down after a sum that float32 alone can hold."""
        half = torch.full_like(x, 2.0**127)
        whole = half + (half - 2.0**119)
        return x + torch.tanh(whole * 2.0**-127) - whole * 2.0**-127


def stack(*modules: nn.Module) -> nn.Sequential:
    """Return modules one after the other."""
    return nn.Sequential(*modules)


def inputs(scale: float = 1.0) -> torch.Tensor:
    """Return a batch for the blocks, [2, 5, WIDTH]."""
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)) * scale


class Drawing(nn.Module):
    """Draws random numbers in three ways: by a dropout, like a tensor, and out of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a linear function of x and of draws."""
        dropped = nn.functional.dropout(x, 0.3, training=True)
        drawn = torch.rand(WIDTH, device=x.device, dtype=x.dtype)
        result: torch.Tensor = self.linear(dropped + torch.randn_like(x) + drawn)
        return result


class Attention(nn.Module):
    """Attention in one kernel; `heads` of keys and values for four of queries, causal or with a `masked` bias."""

    def __init__(self, heads: int = 4, *, masked: bool = False) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, 4 * 32)
        self.key, self.value = nn.Linear(WIDTH, heads * 32), nn.Linear(WIDTH, heads * 32)
        self.masked, self.grouped = masked, heads != 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what four heads of 32 make of x, [batch, length, 128]."""
        parts = [linear(x).unflatten(-1, (-1, 32)).transpose(1, 2) for linear in (self.query, self.key, self.value)]
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mask = torch.zeros(length, length, dtype=x.dtype, device=x.device).masked_fill(~allowed, -1e4)
        attention: Any = nn.functional.scaled_dot_product_attention
        made = attention(
            *parts, attn_mask=mask if self.masked else None, is_causal=not self.masked, enable_gqa=self.grouped
        )
        result: torch.Tensor = made.transpose(1, 2).flatten(2)
        return result


def llama(
    hidden: int = 64, *, layers: int = 2, heads: int = 4, kv_heads: int = 2, inner: int = 128, vocabulary: int = 256
) -> Any:
    """Return a Llama of transformers at random weights, in torch's default dtype, on its default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=None,
        bos_token_id=1,
    )
    return LlamaForCausalLM(config).eval()


def tokens(batch: int, length: int, vocabulary: int = 256) -> torch.Tensor:
    """Return random tokens, [batch, length], on the CPU."""
    return torch.randint(2, vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))
