"""How each operation scales: which exponents it asks to be equal or zero, and those of its results.

An operation that is not named here is taken to be no better than a GELU: its operands must keep their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from overflow_lab.remedies.scaling.calls import Call
from overflow_lab.remedies.scaling.expressions import ZERO, Expression, Knob, plus, scaled
from overflow_lab.remedies.scaling.products import Leaf, Product

# An eps that keeps a division from being one by zero, where it is a bound and where it is added; and what no float16
# value reaches.
TINY, SMALL, HUGE = 1e-6, 1e-2, 6e4


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SAME = _words("""
    neg abs relu leaky_relu clone sum mean cumsum amax amin max min topk sort kthvalue median mode
    cummax cummin gather index index_select embedding take masked_select repeat roll flip tril triu rot90
    native_dropout dropout std nansum lift_fresh unfold im2col col2im
    pixel_shuffle pixel_unshuffle channel_shuffle
    max_pool1d max_pool2d_with_indices max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_avg_pool1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d _unsafe_view
    _reshape_copy contiguous view_copy expand_copy permute_copy slice_copy transpose_copy squeeze_copy unsqueeze_copy
    _unsafe_index diag diagonal_copy repeat_interleave nan_to_num
""")  # fmt: skip
_EQUAL = _words("""
    cat stack where maximum minimum copy index_put _index_put_impl index_copy index_add scatter_add masked_scatter
    slice_scatter select_scatter as_strided_scatter hstack vstack fmax fmin
""")  # fmt: skip
_PRODUCTS = _words("mm bmm mv dot matmul mul outer ger vdot inner _grouped_mm linalg_vecdot kron")
_CONVOLUTIONS = _words("""
    convolution _convolution mkldnn_convolution cudnn_convolution miopen_convolution
    _conv_depthwise2d thnn_conv2d _slow_conv2d_forward slow_conv3d convolution_overrideable
""")  # fmt: skip
_COMPARED = _words("gt lt ge le eq ne")
# These make truths and indices of values, and any positive factor leaves those as they are.
_UNMOVED = _words("isnan isinf isfinite argmax argmin argsort any all sign signbit nonzero count_nonzero")
_ATTENTION = _words("""
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
""")  # fmt: skip


Rule = Callable[[Call], Expression | Product | Sequence[Expression]]


def apply(call: Call) -> list[Expression | Product]:
    """Return the exponents of an operation's floating results, after writing down what it imposes."""
    rule = _RULES.get(call.short)
    made: Any = (rule or _general)(call)
    return list(made) if isinstance(made, (list, tuple)) else [made] * max(len(call.results), 1)


def _general(call: Call) -> Expression | Product | Sequence[Expression]:
    short = call.short
    if short in _SAME:
        return call.trace.of(call.floats()[0])
    if short in _EQUAL:
        return _equal(call)
    if short in _PRODUCTS:
        return _product(call)
    if short in _CONVOLUTIONS:
        return _convolution(call)
    if short in _ATTENTION:
        return _attention(call)
    if short in _COMPARED:
        return _compared(call)
    if short in _UNMOVED:
        return ZERO
    return _pinned(call)


def _pinned(call: Call) -> Expression:
    """Demand that all operands keep their values."""
    for tensor in call.floats():
        call.zero(call.trace.of(tensor))
    return ZERO


def _equal(call: Call) -> Expression:
    first, *others = [call.trace.of(t) for t in call.floats()]
    for other in others:
        call.equal(first, other)
    if any(bool((tensor != 0).any()) for tensor in call.whole_numbers()):
        call.zero(first)
    return first


def _product(call: Call) -> Expression | Product:
    factors = call.floats()
    number = call.number("other")
    if number is not None and len(factors) == 1:
        made = call.trace.of(factors[0])
        known = call.attribute(number, "scal")
        return plus(made, known) if _reachable(known) else made
    if call.short == "mm":
        return _linear(call, factors[0], factors[1], None)
    total: Expression = ZERO
    for factor in factors:
        total = plus(total, call.trace.of(factor))
    return total


def _linear(call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Expression | Product:
    """Return what a product with a weight gives, which may still be taken apart."""
    leaf = call.trace.peek(weight)
    beside = None if bias is None else call.trace.peek(bias)
    if isinstance(leaf, Leaf) and (bias is None or isinstance(beside, Leaf)):
        # The results run along the columns of the second factor, which in W.t() are the rows of W.
        dim, axis = (0 if leaf.turned else 1), call.results[0].dim() - 1
        return Product(leaf.name, dim, beside.name if isinstance(beside, Leaf) else None, call.trace.of(x), axis)
    made = plus(call.trace.of(x), call.trace.of(weight))
    if bias is not None:
        call.equal(call.trace.of(bias), made)
    return made


def _addmm(call: Call) -> Expression | Product:
    given = call.given
    if call.number("beta") == 0.0:
        return _linear(call, given["mat1"], given["mat2"], None)
    return _linear(call, given["mat1"], given["mat2"], given["self"])


def _added_product(*factors: str) -> Rule:
    """Return the rule of self + a product of these arguments."""

    def rule(call: Call) -> Expression:
        made = ZERO
        for name in factors:
            made = plus(made, call.of(name))
        if call.number("beta") != 0.0:
            call.equal(call.of("self"), made)
        return made

    return rule


def _convolution(call: Call) -> Expression | Product:
    given = call.given
    x: torch.Tensor = given["input"] if "input" in given else given["self"]
    weight, bias = given["weight"], given.get("bias")
    leaf = call.trace.peek(weight)
    beside = None if bias is None else call.trace.peek(bias)
    plain = given.get("groups", 1) == 1 and not given.get("transposed", False)
    if plain and isinstance(leaf, Leaf) and (bias is None or isinstance(beside, Leaf)):
        axis = call.results[0].dim() - weight.dim() + 1
        return Product(leaf.name, 0, beside.name if isinstance(beside, Leaf) else None, call.trace.of(x), axis)
    made = plus(call.trace.of(x), call.trace.of(weight))
    if bias is not None:
        call.equal(call.trace.of(bias), made)
    return made


def _add(call: Call) -> Expression:
    number = call.number("other")
    if number is None:
        return _equal(call)
    number *= call.number("alpha") or 1.0
    first = call.given["self"]
    if number == 0.0:
        return call.trace.of(first)
    leaf = call.trace.peek(first)
    if isinstance(leaf, Leaf) and call.short == "add":
        knob = Knob("shifted", leaf.name, shift=number)
        return {knob: 1.0}
    made, known = call.trace.of(first), call.attribute(number, "eps")
    # Whatever its size, an eps that has a name can follow the scale; one that has none may be left only if it is small.
    if _reachable(known) or abs(number) <= SMALL:
        call.equal(made, known)
    else:
        call.zero(made)
    return made


def _divided(call: Call) -> Expression:
    if call.given.get("rounding_mode") is not None:
        return _pinned(call)
    number = call.number("other")
    if number is not None:
        known = call.attribute(number, "scal")
        return plus(call.of("self"), known, times=-1.0) if _reachable(known) else call.of("self")
    return plus(call.of("self"), call.of("other"), times=-1.0)


def _power(call: Call) -> Expression:
    exponent = call.number("exponent")
    if exponent is None:
        return _pinned(call)
    return scaled(call.of("self"), exponent)


def _times(factor: float) -> Rule:
    return lambda call: scaled(call.of("self"), factor)


def _clamp(call: Call) -> Expression:
    made = call.of("self")
    for name in ("min", "max"):
        bound = call.given.get(name)
        if isinstance(bound, torch.Tensor):
            call.equal(made, call.of(name))
        elif bound is not None and TINY < abs(bound) < HUGE:  # others are an eps, zero, or the end of a format
            call.zero(made)
    return made


def _masked_fill(call: Call) -> Expression:
    made = call.of("self")
    value = call.given.get("value")
    if isinstance(value, torch.Tensor):
        call.equal(made, call.trace.of(value))
    elif value is not None and value != 0 and abs(value) < 1e30:
        call.zero(made)
    return made


def _padded(call: Call) -> Expression:
    if call.number("value"):
        call.zero(call.of("self"))
    return call.of("self")


def _compared(call: Call) -> Expression:
    number = call.number("other")
    if number is None:
        _equal(call)
    elif number != 0.0 and abs(number) < 1e30:
        call.zero(call.of("self"))
    return ZERO


def _layer_norm(call: Call) -> Sequence[Expression]:
    return _normed(call, "input", means=2)


def _normed(call: Call, source: str, *, means: int) -> Sequence[Expression]:
    """Return the exponents of a norm: its weight's; it forgets the scale of what it is given, but for its eps."""
    x = call.of(source)
    eps = call.number("eps") or call.number("epsilon")  # cudnn's name for it
    if eps:
        call.equal(scaled(x, 2.0), call.attribute(eps, "eps"))
    weight, bias = call.of("weight"), call.given.get("bias")
    if bias is not None:
        call.equal(call.of("bias"), weight)
    return (weight, *((x, scaled(x, -1.0)) if means == 2 else (scaled(x, -1.0),) * means))


def _batch_norm(call: Call) -> Sequence[Expression]:
    x = call.of("input")
    made = _normed(call, "input", means=2)
    if call.given.get("running_mean") is not None:
        call.equal(call.of("running_mean"), x)
        call.equal(call.of("running_var"), scaled(x, 2.0))
    return (made[0], ZERO, ZERO)


def _variance_and_mean(call: Call) -> Sequence[Expression]:
    x = call.of("self")
    return (scaled(x, 2.0), x)


def _attention(call: Call) -> Sequence[Expression]:
    """Return the exponent of fused attention: its scores must keep their values, its results are linear in v."""
    scores = plus(call.of("query"), call.of("key"))
    scale = call.number("scale")
    if scale is not None and _reachable(known := call.attribute(scale, "scal")):
        scores = plus(scores, known)
    call.zero(scores)
    for mask in ("attn_mask", "attn_bias"):
        call.zero(call.of(mask))
    return (call.of("value"), *[ZERO] * (len(call.results) - 1))


def _reachable(constant: Expression) -> bool:
    return not next(iter(constant)).nameless


def _addcmul(call: Call) -> Expression:
    made = plus(call.of("tensor1"), call.of("tensor2"))
    call.equal(call.of("self"), made)
    return made


def _grid_sample(call: Call) -> Expression:
    call.zero(call.of("grid"))
    return call.of("input")


def _filled(call: Call) -> Expression:
    if isinstance(call.given.get("value"), torch.Tensor):
        call.equal(call.of("self"), call.of("value"))
    elif call.number("value"):
        call.zero(call.of("self"))
    return call.of("self")


def _cast(call: Call) -> Expression:
    """Return the exponent of a cast; one to integers rounds, one to truths only asks what is zero."""
    dtype = call.given.get("dtype")
    if call.results or dtype is torch.bool:
        return call.trace.of(call.floats()[0]) if call.floats() else ZERO
    return _pinned(call)


def _vector_norm(call: Call) -> Expression:
    order = call.given.get("ord", call.given.get("p"))
    return _pinned(call) if order == 0 else call.of("self")  # 0 counts


def _scattered(call: Call) -> Expression:
    if call.given.get("reduce") in ("multiply", "prod") or call.number("value"):
        return _pinned(call)
    return _equal(call)


def _segments(call: Call) -> Expression:
    if call.given.get("reduce") == "prod" or call.number("initial"):
        return _pinned(call)
    return call.of("data")


def _prelu(call: Call) -> Expression:
    call.zero(call.of("weight"))
    return call.of("self")


def _alike(call: Call) -> Expression:
    """Return the exponent of a constant that is made in the shape of something."""
    nothing = call.short in ("zeros_like", "new_zeros") or call.number("fill_value") == 0.0
    return call.trace.free() if nothing else ZERO


_RULES: dict[str, Rule] = {
    "add": _add,
    "sub": _add,
    "addmm": _addmm,
    "baddbmm": _added_product("batch1", "batch2"),
    "addbmm": _added_product("batch1", "batch2"),
    "addmv": _added_product("mat", "vec"),
    "addcmul": _addcmul,
    "div": _divided,
    "true_divide": _divided,
    "pow": _power,
    "square": _times(2.0),
    "sqrt": _times(0.5),
    "rsqrt": _times(-0.5),
    "reciprocal": _times(-1.0),
    "var": _times(2.0),
    "var_mean": _variance_and_mean,
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp,
    "masked_fill": _masked_fill,
    "constant_pad_nd": _padded,
    "fill": _filled,
    "zero": lambda call: call.of("self"),
    "_to_copy": _cast,
    "linalg_vector_norm": _vector_norm,
    "norm": _vector_norm,
    "_prelu_kernel": _prelu,
    "scatter": _scattered,
    "scatter_reduce": _scattered,
    "segment_reduce": _segments,
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"), _alike),
    "native_layer_norm": _layer_norm,
    "native_group_norm": lambda call: _normed(call, "input", means=2),
    "_fused_rms_norm": lambda call: _normed(call, "input", means=1),
    "rms_norm": lambda call: _normed(call, "input", means=0),
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "grid_sampler_2d": _grid_sample,
    "grid_sampler_3d": _grid_sample,
}
