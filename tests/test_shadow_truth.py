"""The shadow after a low-precision program is what the same program gives in float64, to within float32's rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.shadowed import HALVES, Program, check, run, values

A, B, V, M = (3, 4), (4, 5), (4,), (2, 3, 4)
INDEX = torch.tensor([2, 0, 1])
BOOLS = torch.tensor([[True, False, True, False]] * 3)


def _in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[1:].mul_(3).add_(y[:2].clone())
    y.t()[0].copy_(x[:, 1])
    y.view(-1)[::5].exp_()
    return y


def _aliases(x: torch.Tensor) -> list[torch.Tensor]:
    y = x * 2
    parts = y.split(1)
    parts[0].add_(1)
    seen = y.as_strided((2, 3), (4, 1), 1)
    seen.sqrt_().nan_to_num_()
    return [y, seen, y.expand(2, 3, 4), parts[2]]


def _written(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    out, part = torch.empty(0, dtype=x.dtype), torch.zeros(5, 4, dtype=x.dtype)
    torch.add(x, 0.1, out=out)
    torch.mul(x, 0.3, out=part[1:4])
    return [out, part, torch.mm(x, y, out=torch.empty(3, 5, dtype=x.dtype))]


def _put(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    z, w = x.clone(), x.clone()
    z[INDEX[:2]] = y[:2]
    z[BOOLS] = 0.25  # torch itself rounds this constant, before any operation is seen
    w.index_add_(0, INDEX, y).scatter_(1, torch.zeros(3, 1, dtype=torch.long), 0.7)
    return [z, w, x.index_put((INDEX,), y, accumulate=True), x.scatter_add(0, INDEX[:, None].expand(3, 4), y)]


def _norms(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    return [
        F.layer_norm(x, (4,), w, w),
        F.group_norm(x.reshape(3, 4, 1), 2, w),
        F.normalize(x),
        F.rms_norm(x, (4,), w),
        F.instance_norm(x[None].expand(2, 3, 4).clone()),
    ]


def _running(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> list[torch.Tensor]:
    m, v = mean.clone(), var.abs() + 1
    first = F.batch_norm(x, m, v, training=True, momentum=0.3)
    return [first, F.batch_norm(x, m, v), m, v]


def _many(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = [x.clone(), y.clone()]
    torch._foreach_mul_(z, 0.3)
    torch._foreach_add_(z, torch._foreach_exp([y, x]))
    return [*z, *torch._foreach_norm(z)]


def _cell(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> Any:
    gates = F.linear(x, w) + F.linear(h, w)
    i, f, g, o = gates.chunk(4, 1)
    return [torch.lstm_cell(x, (h, h), w, w), torch.sigmoid(o) * torch.tanh(f * h + i.sigmoid() * g.tanh())]


def _complex(x: torch.Tensor) -> Any:
    z = torch.view_as_complex(x.float().view(3, 2, 2))
    turned = z * torch.polar(torch.ones(2), torch.tensor([0.1, 0.2]))
    torch.view_as_real(turned).mul_(0.5)
    return [torch.view_as_real(turned).to(x.dtype), turned.conj() * 2, turned.conj().imag, turned.abs()]


def _image(x: torch.Tensor) -> Any:
    y = x[None, None]
    # The grid is written in float64, so that its own rounding moves no sample.
    grid = F.affine_grid(
        torch.tensor([[[0.9, 0.1, 0], [0, 0.8, 0.1]]], dtype=x.dtype), [1, 1, 3, 3], align_corners=False
    )
    return [F.interpolate(y, scale_factor=2, mode="bilinear"), F.grid_sample(y, grid * 0 + 0.25, align_corners=False)]


def _dtypes(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.sum(dtype=torch.float32), x.to(torch.float32).mul(0.1).to(x.dtype), x.softmax(-1, dtype=torch.float32),
            torch.ones_like(x) * 0.1 + x, torch.full((2,), 0.1, dtype=x.dtype) + x[0, 0]]  # fmt: skip


PROGRAMS: dict[str, tuple[Program, list[tuple[int, ...]]]] = {
    "elementwise": (lambda x, y: [x * y - x / (y.abs() + 1), x.tanh(), F.gelu(x), x.abs().pow(1.7), x.erf()], [A, A]),
    "broadcast": (lambda x, y: torch.addcmul(x, x, y, value=0.3).lerp(y, 0.1), [A, V]),
    "reductions": (lambda x: [x.sum(), x.mean(1), x.std(0), x.norm(), x.logsumexp(1), x.prod(1), x.amax(0)], [A]),
    "cumulative": (lambda x: [x.cumsum(1), x.cumprod(0), x.logcumsumexp(1)], [A]),
    "matmul": (lambda x, y: [x @ y, torch.addmm(y[0], x, y, alpha=0.3), torch.einsum("ij,jk->ki", x, y)], [A, B]),
    "batched": (lambda x, y: [torch.bmm(x, y), torch.baddbmm(x @ y, x, y), x.matmul(y[0, :, 0])], [M, (2, 4, 3)]),
    "convolution": (lambda x, w: [F.conv1d(x, w, padding=1), F.conv_transpose1d(x, w)], [(2, 3, 8), (3, 3, 3)]),
    "pools": (lambda x: [F.avg_pool1d(x, 2), F.max_pool1d(x, 2), F.adaptive_avg_pool1d(x, 3)], [(2, 3, 8)]),
    "norms": (_norms, [A, V]),
    "running": (_running, [A, V, V]),
    "softmax": (lambda x: [x.softmax(1), x.log_softmax(0), F.softmin(x, 1), F.cross_entropy(x, INDEX)], [A]),
    "attention": (lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True), [(1, 2, 4, 8), (1, 2, 4, 8)]),
    "indexing": (lambda x: [x[INDEX], x[:, 1], x[BOOLS], x.gather(1, INDEX[:, None]), x.index_select(0, INDEX)], [A]),
    "putting": (_put, [A, A]),
    "joining": (lambda x, y: [torch.cat([x, y]), torch.stack([x, y], 1), x.repeat(2, 2), torch.roll(x, 1)], [A, A]),
    "moving": (lambda x: [x.t().contiguous(), x.flip(0), x.diagonal(), x.tril(), F.pad(x, (1, 1))], [A]),
    "in place": (_in_place, [A]),
    "aliases": (_aliases, [A]),
    "out": (_written, [A, B]),
    "clamps": (lambda x: [x.clamp(-0.3, 0.4), x.clamp_min(0.1), x.relu(), F.hardtanh(x), x.maximum(x * 0.9)], [A]),
    "masks": (lambda x: [torch.where(BOOLS, x, 0.1), x.masked_fill(BOOLS, 0.3), x.masked_scatter(BOOLS, x)], [A]),
    "dtypes": (_dtypes, [A]),
    "foreach": (_many, [A, A]),
    "embedding": (lambda w: [F.embedding(INDEX, w), F.embedding_bag(INDEX[None], w, mode="mean")], [A]),
    "image": (_image, [(4, 4)]),
    "recurrent": (_cell, [(2, 3), (2, 3), (12, 3)]),
    "complex": (_complex, [A]),
    "fourier": (lambda x: torch.fft.irfft(torch.fft.rfft(x.float()) * 0.3).to(x.dtype), [A]),
    "empty": (lambda x: [x[:0] * 2, x[:0].sum(), torch.cat([x[:0], x]), x[0, 0] * 0.1], [A]),
    "linear algebra": (lambda x: [torch.outer(x[0], x[1]), torch.cdist(x, x + 1), torch.kron(x, x)], [A]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_shadow_is_what_float64_gives(name: str, dtype: torch.dtype) -> None:
    program, shapes = PROGRAMS[name]
    check(program, list(values(*shapes)), dtype)


STEPS: list[Program] = [
    lambda x: x * 0.3, lambda x: x + x.flip(-1), lambda x: x.t(), lambda x: x.t().contiguous(), lambda x: x[1:],
    lambda x: x.sub_(0.1), lambda x: x.clone().t().mul_(0.7), lambda x: x.softmax(-1), lambda x: torch.cat([x, x[:1]]),
    lambda x: x @ (x.t() * 0.2), lambda x: x.tanh(), lambda x: x.view(x.shape).add_(x[:1].clone()),
    lambda x: x - x.mean(0), lambda x: x.unsqueeze(0).expand(2, *x.shape)[1], lambda x: x.fill_diagonal_(0.3),
]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, len(STEPS) - 1), min_size=1, max_size=8), *[st.integers(1, 5)] * 2, st.sampled_from(HALVES)
)
def test_any_chain_of_operations_is_followed(steps: list[int], rows: int, columns: int, dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> list[torch.Tensor]:
        first = y = x.clone()
        for step in steps:
            y = STEPS[step](y)
        return [first, y]

    def sound(x: torch.Tensor) -> bool:
        return all(bool(torch.isfinite(t).all()) for t in program(x))

    given_values = values((rows, columns), seed=rows * 7 + columns)
    if min(rows, columns) > 1 and sound(given_values[0].double()):
        check(program, list(given_values), dtype, tolerance=1e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.sort(descending=True),
        lambda x: x.topk(2),
        lambda x: x.max(0),
        lambda x: x.min(1, keepdim=True),
        lambda x: x.kthvalue(2, 1),
        lambda x: x.median(1),
        lambda x: x.cummax(1),
        lambda x: torch.sort(x, stable=True, dim=0),
    ],
)
def test_the_program_chooses_and_the_shadow_follows(choose: Program, dtype: torch.dtype) -> None:
    # 1 and 1.0001 are one value in half precision: which is found is the program's to say.
    x = torch.tensor([[1.0, 1.0001, 3.0], [2.0, 2.0001, 1.9999]])
    mode, result = run(choose, [x], dtype)
    found, indices = result
    dim = 0 if found.shape in ((3,), (2, 3)) and torch.equal(_at(x, indices, 0), mode.shadows.of(found)) else 1
    assert torch.equal(mode.shadows.of(found), _at(x, indices, dim))
    assert mode.unreplayed == set()


def _at(x: torch.Tensor, indices: torch.Tensor, dim: int) -> torch.Tensor:
    whole = indices.ndim == x.ndim
    if not whole and indices.shape != x.select(dim, 0).shape:
        return torch.empty(0)
    found = x.gather(dim, (indices if whole else indices.unsqueeze(dim)).clamp(max=x.shape[dim] - 1))
    return found if whole else found.squeeze(dim)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_dropout_takes_the_program_s_mask(dtype: torch.dtype) -> None:
    (x,) = values((40, 50))
    for program in (lambda x: F.dropout(x, 0.3), lambda x: torch.native_dropout(x, 0.3, True)[0]):
        torch.manual_seed(3)
        mode, result = run(program, [x], dtype)
        assert 0.2 < float((result == 0).float().mean()) < 0.4
        torch.testing.assert_close(mode.shadows.of(result), torch.where(result == 0, 0.0, x / 0.7))
        assert mode.random
        assert mode.unreplayed == set()


def test_values_that_were_drawn_are_the_shadow_s_too() -> None:
    mode, result = run(lambda x: torch.randn_like(x) * 0.1 + x, list(values((50,))), torch.bfloat16)
    torch.manual_seed(0)
    noise = result.float() - mode.shadows.of(result)
    assert float(noise.abs().max()) < 0.05


def test_an_explicit_generator_is_drawn_from_once() -> None:
    ours, theirs = (torch.Generator().manual_seed(5) for _ in range(2))

    def program(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return torch.normal(x, 1.0, generator=generator)

    low = torch.zeros(20, dtype=torch.float16)
    _, got = run(program, [low, ours], torch.float16)
    assert torch.equal(got, program(low, theirs))
    assert torch.equal(ours.get_state(), theirs.get_state())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_modules_in_training_are_followed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(16, 3)).double()
    (x,) = values((5, 2, 4, 4))
    names, weights = zip(*[(n, p.detach().float()) for n, p in model.named_parameters()], strict=True)

    def program(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        buffers = {n: b.clone().to(x.dtype) if b.is_floating_point() else b.clone() for n, b in model.named_buffers()}
        out = torch.func.functional_call(model, {**dict(zip(names, weights, strict=True)), **buffers}, (x,))
        return [out, buffers["1.running_mean"], buffers["1.running_var"]]

    check(program, [x, *weights], dtype, tolerance=1e-3)
