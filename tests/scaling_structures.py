"""Small models of torch's own layers, each with values inside that float16 cannot hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HUGE = 16, 2.0**19
Built = tuple[nn.Module, tuple[Any, ...]]


class Of(nn.Module):
    """Layers by name, and a function that is given the module and its input."""

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


class Rms(nn.Module):
    """An RMS norm by hand; with a shift of 1, as Gemma has it."""

    def __init__(self, width: int = WIDTH, *, shift: float = 0.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.shift, self.eps = nn.Parameter(torch.ones(width) - shift), shift, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return normed * (self.weight + self.shift) if self.shift else normed * self.weight


class Attention(nn.Module):
    """Attention by hand, with separate projections; `scaling` is multiplied onto the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scaling = 1 / 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x) @ self.k(x).transpose(-1, -2) * self.scaling
        return self.o(scores.softmax(-1) @ self.v(x))  # type: ignore[no-any-return]


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose matrix is stored the other way round."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) / math.sqrt(width))
        self.bias = nn.Parameter(torch.randn(out) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return made.view(*x.shape[:-1], -1)


class Resnet(nn.Module):
    """A block of an SDXL-style decoder."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width, eps=1e-6), nn.GroupNorm(4, out, eps=1e-6)
        self.conv1, self.conv2 = nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1) if width != out else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(F.silu(self.norm1(x)))
        hidden = self.conv2(F.silu(self.norm2(hidden)))
        return (x if self.shortcut is None else self.shortcut(x)) + hidden  # type: ignore[no-any-return]


class ImageAttention(nn.Module):
    """The attention in the middle of such a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(2).transpose(1, 2)
        made = F.scaled_dot_product_attention(*(layer(flat).unsqueeze(1) for layer in (self.q, self.k, self.v)))
        return x + self.o(made.squeeze(1)).transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A small decoder of images: convolutions, blocks, attention, upsampling, and a norm before the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.mid, self.attention, self.up = Resnet(16, 16), ImageAttention(16), nn.Conv2d(16, 16, 3, padding=1)
        self.block, self.norm = Resnet(16, 8), nn.GroupNorm(4, 8, eps=1e-6)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.mid(self.conv_in(z)))
        x = self.block(self.up(F.interpolate(x, scale_factor=2.0, mode="nearest")))
        return self.conv_out(F.silu(self.norm(x)))  # type: ignore[no-any-return]


class Stream(nn.Module):
    """A pre-norm language model whose head is tied to its embeddings."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.norms = nn.ModuleList(norm() for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.final = norm()
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(self.final(x))  # type: ignore[no-any-return]


def linear(width: int = WIDTH, out: int = WIDTH, *, times: float = 1.0, bias: bool = True) -> nn.Linear:
    """Return a linear layer whose weight and bias are multiplied by something."""
    layer: nn.Linear = blown(nn.Linear(width, out, bias=bias), times)
    return layer


def blown(layer: Any, times: float) -> Any:
    """Multiply the weights of a layer."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(times)
    return layer


def rows() -> tuple[Any, ...]:
    return (torch.randn(3, 5, WIDTH),)


def images(width: int = 4) -> tuple[Any, ...]:
    return (torch.randn(2, width, 8, 8),)


def between(function: Callable[[torch.Tensor], torch.Tensor], **layers: Any) -> Built:
    """Return two linear layers, much too large and much too small, with something between."""
    more = {"large": linear(times=HUGE), "small": linear(times=1 / HUGE), **layers}
    model = Of(lambda m, x: m.small(function(m.large(x))), **more)
    nn.init.normal_(more["small"].bias)
    return model, rows()


def between_convolutions(large: nn.Module, small: nn.Module, *inside: nn.Module, width: int = 4) -> Built:
    return nn.Sequential(blown(large, HUGE), *inside, blown(small, 1 / HUGE)), images(width)


def batch_norm() -> Built:
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(blown(nn.Conv2d(4, 8, 3), HUGE), norm, nn.ReLU(), nn.Conv2d(8, 3, 3))
    inputs = images()
    norm.momentum = 1.0
    model(*inputs)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return model.eval(), inputs


def before_a_norm(norm: nn.Module) -> Built:
    return nn.Sequential(linear(times=HUGE), norm, linear()), rows()


def gated() -> Built:
    layers = {"gate": linear(), "up": linear(times=HUGE), "down": linear(times=1 / HUGE)}
    return Of(lambda m, x: m.down(F.silu(m.gate(x)) * m.up(x)), **layers), rows()


def gated_in_one() -> Built:
    layers = {"both": linear(WIDTH, 2 * WIDTH), "down": linear(times=1 / HUGE)}
    with torch.no_grad():
        layers["both"].weight[WIDTH:] *= HUGE

    def forward(m: Any, x: torch.Tensor) -> Any:
        gate, up = m.both(x).chunk(2, dim=-1)
        return m.down(F.silu(gate) * up)

    return Of(forward, **layers), rows()


def attention(**times: float) -> Built:
    model = Attention()
    for name, factor in times.items():
        blown(getattr(model, name), factor)
    return model, rows()


def attention_in_parts(split: Callable[[torch.Tensor], Any], project: nn.Module, values: Any) -> Built:
    """Return attention whose queries, keys and values are one product; the values are large."""
    with torch.no_grad():
        for parameter in project.parameters():
            values(parameter).mul_(HUGE)

    def forward(m: Any, x: torch.Tensor) -> Any:
        q, k, v = split(m.qkv(x))
        return m.out(F.scaled_dot_product_attention(q, k, v).reshape(x.shape))

    return Of(forward, qkv=project, out=linear(times=1 / HUGE)), rows()


def of_gpt2() -> Built:
    return attention_in_parts(lambda x: x.split(WIDTH, dim=-1), Conv1D(WIDTH, 3 * WIDTH), lambda p: p[..., 2 * WIDTH :])


def of_timm() -> Built:
    def split(x: torch.Tensor) -> Any:
        return x.reshape(3, 5, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(m: Any, x: torch.Tensor) -> Any:
        q, k, v = split(m.qkv(x))
        return m.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))

    project = linear(WIDTH, 3 * WIDTH)
    with torch.no_grad():
        for parameter in project.parameters():
            parameter[2 * WIDTH :] *= HUGE
    return Of(forward, qkv=project, out=linear(times=1 / HUGE)), rows()


def of_phi3() -> Built:
    def split(x: torch.Tensor) -> Any:
        return x[..., :WIDTH], x[..., WIDTH : 2 * WIDTH], x[..., 2 * WIDTH :]

    return attention_in_parts(split, linear(WIDTH, 3 * WIDTH), lambda p: p[2 * WIDTH :])


def with_a_learned_bias() -> Built:
    model, inputs = attention(v=HUGE, o=1 / HUGE)
    layers = {**dict(model.named_children()), "bias": nn.Parameter(torch.randn(1, 5, 5))}

    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.o(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), attn_mask=m.bias))

    return Of(forward, **layers), inputs


def stream(norm: Callable[[], nn.Module], *, large: float = 2.0**15) -> Built:
    model = Stream(norm)
    blown(model.layers[0], large)
    return model, (torch.randint(0, 50, (2, 7)),)


def decoder() -> Built:
    model = Decoder()
    blown(model.mid.conv2, 2.0**20)
    blown(model.block.conv1, 2.0**20)
    return model, images()


def shared_weight() -> Built:
    return Of(lambda m, x: m.small(m.twice(m.twice(x).relu()).relu()), twice=linear(times=2.0**11, bias=False),
              small=linear(times=2.0**-22)), rows()  # fmt: skip


def whole_and_parts() -> Built:
    layers = {"large": linear(WIDTH, 2 * WIDTH, times=HUGE), "first": linear(times=1 / HUGE),
              "both": linear(2 * WIDTH, WIDTH, times=1 / HUGE)}  # fmt: skip

    def forward(m: Any, x: torch.Tensor) -> Any:
        hidden = m.large(x)
        a, b = hidden.chunk(2, dim=-1)
        return m.first((a + b).relu()) + m.both(hidden.relu())

    return Of(forward, **layers), rows()


def every_second() -> Built:
    layers = {"both": linear(WIDTH, 4 * WIDTH), "down": linear(times=1 / HUGE)}
    with torch.no_grad():
        layers["both"].weight[1::2] *= HUGE
        layers["both"].bias[1::2] *= HUGE

    def forward(m: Any, x: torch.Tensor) -> Any:
        made = m.both(x)
        (a, b), (c, d) = made[..., 1::2].chunk(2, -1), made[..., ::2].chunk(2, -1)
        return m.down((a + b).relu()) + (c - d).relu() * 1e-3

    return Of(forward, **layers), rows()


def in_place() -> Built:
    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.enter(x)
        x += m.large(m.norm(x))
        x.mul_(0.5)
        return m.out(m.final(x))

    layers = {"enter": linear(), "large": linear(times=HUGE), "out": linear()}
    return Of(forward, norm=nn.LayerNorm(WIDTH), final=nn.LayerNorm(WIDTH), **layers), rows()


def collected() -> Built:
    """Return experts that add what they make to zeros, by index."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        made = torch.zeros_like(x)
        made.index_add_(1, torch.tensor([0, 2]), m.large(x[:, [0, 2]]))
        made[:, 1] += m.large(x[:, 1]).relu()
        return m.small(made)

    return Of(forward, large=linear(times=HUGE), small=linear(times=1 / HUGE)), rows()


def rotated() -> Built:
    """Return attention whose queries and keys are turned as complex numbers; the keys are large, the queries small."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        angle = torch.arange(5.0)[:, None] * torch.linspace(0.1, 1.0, WIDTH // 2)
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        made = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2)
        return made.type_as(x)

    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.o(F.scaled_dot_product_attention(turned(m.q(x)), turned(m.k(x)), m.v(x)))

    layers = {"q": linear(times=1 / HUGE), "k": linear(times=HUGE), "v": linear(), "o": linear()}
    return Of(forward, **layers), rows()


def without_bias(norm: Any) -> Any:
    nn.init.zeros_(norm.bias)
    return norm


def wide_norm() -> Built:
    """Return a norm whose weight, stored less one, makes large values."""
    norm = Rms(shift=1.0)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(WIDTH) * HUGE)
    return nn.Sequential(norm, linear(times=1 / HUGE)), rows()


def outliers() -> Built:
    """Return a layer whose scores, after all scaling, are too large for float16."""
    return attention(q=2.0**12, k=2.0**12)
