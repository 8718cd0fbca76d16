"""What each operation is said to do to scales, against the operation itself: operands times powers of two, run anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from overflow_lab.remedies.scaling import rules
from overflow_lab.remedies.scaling.expressions import value_of
from tests.operations_table import operators
from tests.rescaled import Imposed, floats, imposed, others, rescaled, same_values

aten = torch.ops.aten
NAMED = (
    rules._SAME
    | rules._EQUAL
    | rules._PRODUCTS
    | rules._CONVOLUTIONS
    | rules._COMPARED
    | rules._UNMOVED
    | rules._ATTENTION
    | rules._RULES.keys()
)
# Operations that no CPU runs, or that torch keeps under a further name which it does not call any more.
ELSEWHERE = {
    "_conv_depthwise2d", "convolution_overrideable", "cudnn_convolution", "miopen_convolution", "mkldnn_convolution",
    "cudnn_batch_norm", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math_for_mps", "_convolution",
}  # fmt: skip
# What torch 2.6, the oldest that we run on, does not have yet.
RECENT = {"_fused_rms_norm", "_grouped_mm"}
ABSENT = {word for word in RECENT if not hasattr(aten, word)}
# Powers of these are rounded, which no power of two outlives exactly.
ROUNDED = {"norm", "linalg.norm", "linalg.vector_norm", "nn.functional.normalize"}
SAMPLES = 5


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, Y, ROW, IMAGE, KERNEL = tensor(3, 4), tensor(3, 4, seed=1), tensor(4, seed=2), tensor(2, 4, 6, 6), tensor(6, 4, 3, 3)
INDEX = torch.tensor([[0, 2, 1, 3], [1, 0, 3, 2], [3, 3, 0, 0]])
HEADS = tuple(tensor(1, 2, 5, 4, seed=seed) for seed in range(3))

# What a model's layers run, each with operands that may all be scaled.
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a linear layer": (F.linear, (X, tensor(5, 4), tensor(5))),
    "a linear layer without bias": (F.linear, (X, tensor(5, 4))),
    "a product with the matrix as it is": (torch.mm, (X, tensor(4, 5))),
    "a product and a sum": (torch.addmm, (tensor(3, 5), X, tensor(4, 5))),
    "a batch of products": (torch.bmm, (tensor(2, 3, 4), tensor(2, 4, 3))),
    "a batch of products and a sum": (torch.baddbmm, (tensor(2, 3, 3), tensor(2, 3, 4), tensor(2, 4, 3))),
    "grouped products": (
        lambda x, w, offsets: F.grouped_mm(x, w, offs=offsets),
        (tensor(8, 16), tensor(2, 16, 16), torch.tensor([4, 8], dtype=torch.int32)),
    ),
    "a convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGE, KERNEL, tensor(6))),
    "a grouped convolution": (lambda x, w, b: F.conv2d(x, w, b, groups=2), (IMAGE, tensor(6, 2, 3, 3), tensor(6))),
    "a transposed convolution": (F.conv_transpose2d, (IMAGE, tensor(4, 5, 3, 3), tensor(5))),
    "the slow convolution": (
        lambda x, w, b: aten._slow_conv2d_forward(x, w, [3, 3], b, [1, 1], [0, 0]), (IMAGE, KERNEL, tensor(6))
    ),
    "a residual connection": (lambda x, y: (x + y) * y, (X, Y)),
    "an in-place residual connection": (lambda x, y: (x * 2.0).add_(y).mul_(3.0), (X, Y)),
    "a mask": (lambda x: x.masked_fill(X > 0, float("-inf")), (X,)),
    "a mask that is added": (lambda x: x + torch.zeros(3, 4).masked_fill_(X > 0, -torch.inf), (X,)),
    "parts": (lambda x: torch.cat([x[:, 2:].relu(), -x[:, :2].abs()], -1), (X,)),
    "parts that are written": (lambda x, y: torch.zeros(3, 4).index_copy_(0, torch.arange(3), x) + y, (X, Y)),
    "a slice that is written": (lambda x, y: _written(x, y), (X, Y)),
    "weighed values": (lambda p, v: p.softmax(-1) @ v, (X, tensor(4, 5))),
    "fused attention": (F.scaled_dot_product_attention, HEADS),
    "fused attention with a bias": (F.scaled_dot_product_attention, (*HEADS, tensor(1, 2, 5, 5, seed=3))),
    "attention by the mathematics": (
        lambda q, k, v, m: aten._scaled_dot_product_attention_math(q, k, v, m)[0], (*HEADS, tensor(1, 2, 5, 5, seed=3))
    ),
    "a root mean square": (lambda x, w: x * x.pow(2).mean(-1, keepdim=True).rsqrt() * w, (X, ROW)),
    "a variance": (lambda x, w: (x - x.mean()) / x.var().sqrt() * w, (X, ROW)),
    "a layer norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b, eps=0.0), (X, ROW, tensor(4, seed=5))),
    "a group norm": (lambda x, w, b: F.group_norm(x, 2, w, b, eps=0.0), (IMAGE, ROW, tensor(4, seed=5))),
    "a batch norm": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v, w, b, eps=0.0),
        (IMAGE, ROW, tensor(4, seed=4).abs(), tensor(4, seed=5), tensor(4, seed=6)),
    ),
    "a batch norm, as compilers call it": (
        lambda x, m, v, w, b: aten._native_batch_norm_legit_no_training(x, w, b, m, v, 0.1, 0.0)[0],
        (IMAGE, ROW, tensor(4, seed=4).abs(), tensor(4, seed=5), tensor(4, seed=6)),
    ),
    "a fused RMS norm": (lambda x, w: aten._fused_rms_norm(x, [4], w, 0.0)[0], (X, ROW)),
    "a gate": (lambda x, y: F.silu(x) * y, (X, Y)),
    "leaky ReLU": (F.leaky_relu, (X,)),
    "PReLU": (F.prelu, (X, torch.tensor([0.3]))),
    "a rotation of halves": (lambda x: x * Y.cos() + torch.cat([-x[:, 2:], x[:, :2]], -1) * Y.sin(), (X,)),
    "a rotation by complex numbers": (
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(3, 2, 2)) * torch.polar(Y.abs(), Y)[:, :2]), (X,)
    ),
    "the largest": (lambda x: x.topk(2).values.sum() / x.amax(), (X,)),
    "an embedding": (lambda w: F.embedding(INDEX, w, padding_idx=1), (tensor(5, 3),)),
    "dropout in training": (lambda x: F.dropout(x, 0.5, training=True) + aten.native_dropout(x, 0.5, True)[0], (X,)),
    "copies and padding": (lambda x: F.pad(x.repeat(2, 1).roll(1), (1, 1)).flip(0), (X,)),
    "pooling and interpolation": (
        lambda x: F.interpolate(F.avg_pool2d(F.max_pool2d(x, 2), 2), scale_factor=2.0, mode="bilinear"), (IMAGE,)
    ),
    "bicubic interpolation without aliasing": (
        lambda x: F.interpolate(x, size=(4, 4), mode="bicubic", antialias=True), (IMAGE,)
    ),
    "pooling of lines": (lambda x: F.adaptive_avg_pool1d(F.avg_pool1d(x[0], 2), 2), (IMAGE,)),
    "mirrored borders": (lambda x: F.pad(F.pad(x, (1, 1, 1, 1), "reflect"), (1, 1, 1, 1), "replicate"), (IMAGE,)),
    "mirrored borders of volumes": (
        lambda x: F.pad(F.pad(x[None], (1, 1) * 3, "reflect"), (1, 1) * 3, "replicate"), (IMAGE,)
    ),
    "interpolation in one to three dimensions": (
        lambda x: sum(_resized(x, mode).sum() for mode in ("nearest", "nearest-exact", "linear", "bicubic")), (IMAGE,)
    ),
    "windows": (lambda x: F.fold(F.unfold(x, 3), (6, 6), 3), (IMAGE,)),
    "an index without checks": (lambda x: aten._unsafe_index(x, [torch.tensor([2, 0])]), (X,)),
    "an index that is written": (lambda x, y: aten._index_put_impl_(x * 2.0, [torch.tensor([0])], y[0]), (X, Y)),
    "copies of views": (lambda x: aten._reshape_copy(aten.slice_copy(x, 1, 0, 2), [6]), (X,)),
    "a mean of what is not negative": (lambda x: x.clamp(min=0.0).mean() + x.nan_to_num().sum(), (X,)),
    "norms": (lambda x: x.norm() + torch.linalg.vector_norm(x, 1) + torch.linalg.vector_norm(x, torch.inf), (X,)),
    "a cast": (lambda x: x.double().float(), (X,)),
}  # fmt: skip

if "_fused_rms_norm" in ABSENT:
    del CALLS["a fused RMS norm"]
if not hasattr(F, "grouped_mm"):
    del CALLS["grouped products"]

PINNING: dict[str, Callable[[torch.Tensor], Any]] = {
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "log": lambda x: x.abs().log(),
    "erf": torch.erf,
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "hardtanh": F.relu6,
    "sin": torch.sin,
    "round": torch.round,
    "a number that is added": lambda x: x + 1.0,
    "a number that it is taken from": lambda x: 1.0 - x,
    "a truth that is added": lambda x: torch.add(x, True),
    "positions that are added": lambda x: x + torch.arange(4),
    "positions beside it": lambda x: torch.cat([x, INDEX]),
    "a number in some places": lambda x: torch.where(X > 0, x, 5),
    "a mask of some number": lambda x: x.masked_fill(X > 0, -1e4),
    "a padding of ones": lambda x: F.pad(x, (1, 1), value=1.0),
    "a comparison with a number": lambda x: x > 0.5,
    "a comparison with positions": lambda x: x > INDEX,
    "a cast to integers": lambda x: x.long(),
    "bounds": lambda x: x.clamp(-1.0, 1.0),
    "a power of two": lambda x: 2.0**x,
    "a power of its own": lambda x: x.abs() ** x,
    "a product of all": lambda x: x.prod(),
    "a cumulative product": lambda x: x.cumprod(0),
    "a floor of a quotient": lambda x: torch.div(x, 3.0, rounding_mode="floor"),
    "a remainder": lambda x: x % 2.0,
    "a count": lambda x: torch.linalg.vector_norm(x, 0),
    "a number that is scattered": lambda x: x.scatter(1, INDEX, 3.0),
    "a product that is scattered": lambda x: x.scatter_reduce(1, INDEX, Y, "prod"),
    "a fill": lambda x: torch.fill(x, 2.0),
    "a Python number": lambda x: x.sum().item(),
    "a Fourier transform": lambda x: torch.fft.rfft(x),
    "sampling places": lambda x: F.grid_sample(IMAGE, x[None, :, :2, None].expand(2, 3, 2, 2), align_corners=False),
}


def _written(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(6, 4)
    whole[:3] = x
    whole[3:] = y
    return whole.relu()


def _resized(x: torch.Tensor, mode: str) -> torch.Tensor:
    """Return an image twice as large; for the modes that know lines and volumes, what becomes of these."""
    if mode == "bicubic":
        return F.interpolate(x, scale_factor=2.0, mode=mode)
    line = F.interpolate(x[0], scale_factor=2.0, mode=mode)
    volume = F.interpolate(x[None], scale_factor=2.0, mode="trilinear" if mode == "linear" else mode)
    plane = F.interpolate(x, scale_factor=2.0, mode="bilinear" if mode == "linear" else mode)
    smooth = F.interpolate(plane, size=(3, 3), mode="bilinear", antialias=True)
    return line.mean() + volume.mean() + smooth.mean()


def run(function: Callable[..., Any], operands: Any) -> Any:
    torch.manual_seed(1)  # dropout draws the same each time
    return function(*(t.clone() if isinstance(t, torch.Tensor) else t for t in operands))


def complaint(function: Callable[..., Any], operands: Any, found: Imposed, exponents: dict[Any, int]) -> str:
    """Return what is wrong when operands are scaled by these exponents; "" where the results are as they should be."""
    plain, made = run(function, operands), run(function, rescaled(operands, exponents))
    for before, after, expression in zip(floats(plain), floats(made), found.results, strict=True):
        if not same_values(before, after, value_of(expression, exponents)):
            return f"{sorted(found.names)} is not scaled by 2^{value_of(expression, exponents):g}: {exponents}"
    for before, after in zip(others(plain), others(made), strict=True):
        if before.shape != after.shape or not torch.equal(before, after):
            return f"{sorted(found.names)} gives other integers or truths: {exponents}"
    return ""


@pytest.mark.parametrize("name", CALLS)
@given(steps=st.lists(st.integers(-4, 4), min_size=8, max_size=8))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_operands_scaled_as_the_rules_allow_give_the_result_scaled_as_they_say(name: str, steps: list[int]) -> None:
    function, operands = CALLS[name]
    torch.manual_seed(1)
    found = imposed(function, operands)
    basis = found.solutions()
    assert any(exponents[knob] for exponents in basis for knob in found.operands), "nothing may be scaled"
    together = {k: sum(n * vector[k] for n, vector in zip(steps, basis, strict=False)) for k in found.knobs}
    assert complaint(function, operands, found, together) == ""


@pytest.mark.parametrize("name", PINNING)
def test_whatever_is_no_homogeneous_function_keeps_its_operand_as_it_is(name: str) -> None:
    found = imposed(PINNING[name], (X,))
    (operand,) = found.operands
    assert [exponents[operand] for exponents in found.solutions() if exponents[operand]] == []


def test_a_weight_and_a_number_is_a_weight_that_is_shifted_by_as_much_as_is_added() -> None:
    for add, shift in ((lambda w: w + 1.0, 1.0), (lambda w: torch.add(w, 1.0, alpha=2), 2.0)):
        (made,) = imposed(add, (X,)).results
        assert [(knob.kind, knob.shift) for knob in made] == [("shifted", shift)]


def test_a_small_number_that_is_added_is_an_eps_and_a_large_one_is_none() -> None:
    for number, kinds in ((1e-5, {"weight", "constant"}), (0.5, {"weight"})):
        found = imposed(lambda x, number=number: x.square() + number, (X,))
        assert {knob.kind for key in found.equations.zeros for knob, _ in key} == kinds


@pytest.fixture(scope="module")
def database() -> tuple[list[str], set[str], int]:
    """What is wrong with the samples of torch's own operators, the operations seen, and how many could be scaled.

    In a thread of its own: torch's samples look up the whole stack each time they are made, and pytest's is deep.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(survey).result()


def survey() -> tuple[list[str], set[str], int]:
    wrong: list[str] = []
    seen: set[str] = set()
    scaled = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in operators():
            for function, operands in samples(op):
                found = tried(function, operands)
                if found is None:
                    continue
                seen |= found.names
                for vector in found.solutions():
                    if any(vector[knob] for knob in found.operands):
                        scaled += 1
                        problem = "" if op.name in ROUNDED else complaint(function, operands, found, vector)
                        wrong += [f"{op.name}: {problem}"] if problem else []
    return wrong, seen, scaled


def samples(op: Any) -> Iterator[tuple[Callable[..., Any], list[Any]]]:
    """Yield an operator as a function of a flat list of operands, and such lists; none where values are unset."""
    if op.name.startswith(("empty", "new_empty", "jiterator")):
        return
    torch.manual_seed(0)
    try:
        for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=False)):
            if number == SAMPLES:
                return
            flat, spec = tree_flatten((sample.input, sample.args, sample.kwargs))

            def function(*operands: Any, spec: Any = spec) -> Any:
                first, args, kwargs = tree_unflatten(list(operands), spec)
                return op.op(first, *args, **kwargs)

            yield function, flat
    except Exception:
        return  # the sampler itself has no kernel for this dtype


def tried(function: Callable[..., Any], operands: list[Any]) -> Imposed | None:
    """Return what a sample imposes; None where it does not run at all, or on a sparse layout."""
    try:
        run(function, operands)
        torch.manual_seed(1)
        return imposed(function, [t.clone() if isinstance(t, torch.Tensor) else t for t in operands])
    except Exception:
        return None


def test_no_operator_of_torchs_own_database_breaks_its_rule(database: tuple[list[str], set[str], int]) -> None:
    wrong, _, scaled = database
    assert wrong == []
    assert scaled > 500


def test_every_word_of_the_rules_is_an_operation_of_torch() -> None:
    assert sorted(word for word in NAMED - ABSENT if not hasattr(aten, word) and not hasattr(aten, word + "_")) == []


def test_every_word_of_the_rules_was_seen_running_or_is_decomposed_before_it_runs(
    database: tuple[list[str], set[str], int],
) -> None:
    seen = database[1].union(*(imposed(*call).names for call in CALLS.values()))
    assert sorted(word for word in NAMED - ABSENT - seen - ELSEWHERE if not is_composite(word)) == []
    assert sorted(ELSEWHERE & seen) == []


def is_composite(word: str) -> bool:
    """Return whether torch's dispatcher makes other operations of all overloads of this one."""
    packet, has = getattr(aten, word), torch._C._dispatch_has_kernel_for_dispatch_key
    names = [getattr(packet, overload)._schema for overload in packet.overloads()]
    full = [f"{schema.name}.{schema.overload_name}".rstrip(".") for schema in names]
    known = [name for name in full if torch._C._dispatch_has_kernel(name) and not name.endswith("out")]
    return all(has(name, "CompositeImplicitAutograd") for name in known)
