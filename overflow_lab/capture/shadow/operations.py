"""What the shadow run needs to know of an operation: its name, whether it views, draws, writes; how to replay it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.capture.shadow.shadows import Shadows, has_shadow

Op = Any

# What these return is not a value yet.
_UNSET = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.empty_permuted",
                    "aten.new_empty_strided"})  # fmt: skip
# These change where a tensor looks, not what is there; their schemas do not call them views.
_MOVING = frozenset({"aten.set_", "aten.resize_", "aten.resize_as_", "aten.swap_"})
# What these write does not depend on the values that they read.
_OVERWRITING = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
# Random values that depend on no operand, or choose between 0 and 1: the program's are the shadow's.
_FILLING = frozenset({"bernoulli", "normal", "uniform", "exponential", "cauchy", "geometric", "log_normal", "random",
                      "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "multinomial", "poisson",
                      "binomial"})  # fmt: skip
# Running statistics that are written though the schema does not say so: (index, name) of each, and of `training`.
_BATCH_NORMS = ("aten.native_batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
_RUNNING = ((3, "running_mean"), (4, "running_var"), (5, "training"))
# Operations that return values with the indices they were found at: the program's indices decide for the shadow too.
CHOOSING = frozenset({"aten.topk", "aten.sort", "aten.max", "aten.min", "aten.kthvalue", "aten.mode", "aten.median",
                      "aten.nanmedian", "aten.cummax", "aten.cummin"})  # fmt: skip
# Integer results of these are decisions over scores.
DECIDING = CHOOSING | {"aten.argmax", "aten.argmin", "aten.argsort"}
# These sort values into buckets between borders.
SORTING_IN = frozenset({"aten.bucketize", "aten.searchsorted"})
COMPARING = frozenset({"aten.gt", "aten.lt", "aten.ge", "aten.le", "aten.eq", "aten.ne"})
# Operations that make a non-finite value of a zero that should not be one.
ZERO_SENSITIVE = frozenset({"aten.div", "aten.reciprocal", "aten.rsqrt", "aten.log", "aten.log2", "aten.log10",
                            "aten.pow", "aten.log1p", "aten.remainder", "aten.fmod", "aten.atan2",
                            "aten.logit", "aten.native_layer_norm", "aten.native_group_norm",
                            "aten._fused_rms_norm"})  # fmt: skip
# Attention in one kernel; its further results (sums of exponentials, states of generators) are for its gradient alone.
_HALF_ATTENTION = frozenset({"aten._scaled_dot_product_flash_attention",
                             "aten._scaled_dot_product_efficient_attention",
                             "aten._scaled_dot_product_cudnn_attention"})  # fmt: skip
# Values that are kept of a draw, to see whether two programs drew the same.
_GLIMPSE = 64
LOWEST = frozenset({"aten.min", "aten.argmin", "aten.cummin"})
CLAMPS = frozenset({"aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.minimum", "aten.maximum"})
# Adding up and taking apart: where nearly equal terms leave few bits.
ADDING = frozenset(
    {"aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub", "aten.addmm", "aten.baddbmm", "aten.addbmm"}
)


@dataclass(frozen=True)
class Facts:
    """What an operation is, whatever its operands.

    `views` only looks elsewhere; `whole` has no replay, it is seen as one;
    `unset` returns memory that was not written yet; `draws` may draw random numbers, and `fills` needs nothing else;
    `writes` are the (index, name) of the arguments that it writes; `hidden` are those of them that its schema hides,
    followed by the flag that they depend on; `decides` makes integers or truths of floating values.
    """

    name: str
    views: bool = False
    whole: bool = False
    unset: bool = False
    draws: bool = False
    fills: bool = False
    overwrites: bool = False
    pointwise: bool = False
    decides: bool = False
    writes: tuple[tuple[int, str], ...] = ()
    hidden: tuple[tuple[int, str], ...] = ()


@functools.cache
def facts_of(op: Op) -> Facts:
    """Return the facts of an operation; of an operator of a higher order, only that it is one."""
    if not isinstance(op, torch._ops.OpOverload):
        return Facts(f"higher_order.{op.name() if callable(getattr(op, 'name', None)) else op}", whole=True)
    name = name_of(op)
    changed = enumerate(op._schema.arguments)
    return Facts(
        name,
        views=op.is_view or name in _MOVING,
        unset=name in _UNSET,
        # Nobody asks the author of a custom operator for the tag.
        draws=torch.Tag.nondeterministic_seeded in op.tags or op.namespace not in ("aten", "prims"),
        fills=name.rpartition(".")[2].rstrip("_") in _FILLING,
        overwrites=name in _OVERWRITING,
        pointwise=torch.Tag.pointwise in op.tags,
        decides=name in DECIDING | COMPARING | SORTING_IN or name == "aten._to_copy",
        writes=tuple((i, a.name) for i, a in changed if a.alias_info is not None and a.alias_info.is_write),
        hidden=_RUNNING if name in _BATCH_NORMS else (),
    )


def name_of(op: Op) -> str:
    """Return an operation's name without its overload, such as "aten.mm"."""
    return f"{op.namespace}.{op._schema.name.rpartition('::')[2]}"


def written(facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to: in-place and out= arguments, running statistics."""
    places = facts.writes
    if facts.hidden and _argument(facts.hidden[-1], args, kwargs):
        places += facts.hidden[:-1]
    return [t for place in places for t in tensors_in(_argument(place, args, kwargs))] if places else []


def _argument(place: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[place[0]] if place[0] < len(args) else kwargs.get(place[1])


def leaves(value: Any) -> list[Any]:
    """Return the leaves of nested arguments or results; these are tuples, lists and dicts, as of any operation."""
    if not isinstance(value, (tuple, list, dict)):
        return [value]
    found: list[Any] = []
    for item in value.values() if isinstance(value, dict) else value:
        found += leaves(item) if isinstance(item, (tuple, list, dict)) else (item,)
    return found


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments or results with `change` applied to each leaf."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [mapped(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def generator_in(kwargs: dict[str, Any]) -> torch.Generator | None:
    """Return the generator that an operation was told to draw from."""
    found = kwargs.get("generator")
    return found if isinstance(found, torch.Generator) else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments or results."""
    return [t for t in leaves(value) if isinstance(t, torch.Tensor)]


def scalars_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    """Return the plain numbers among the arguments: constants that the program wrote."""
    flat = leaves(args) + leaves(kwargs)
    return tuple(float(v) for v in flat if isinstance(v, (int, float)) and not isinstance(v, bool))


def as_shadow(value: Any, shadows: Shadows) -> Any:
    """Return nested arguments with tensors replaced by their shadows and low dtypes by the shadow's."""

    def one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return shadows.of(item) if has_shadow(item) else item
        if isinstance(item, torch.dtype) and (item.is_floating_point or item.is_complex):
            return shadows.wide(item)
        return item

    return mapped(value, one)


def replay(op: Op, name: str, shadow_args: Any, shadow_kwargs: Any, result: Any) -> tuple[Any, Any]:
    """Return an operation's result on the shadows, and the shadows' own result.

    They differ where it chooses among values: there the program's choice holds.
    """
    if name in _HALF_ATTENTION:
        made = (_attention(op, shadow_args, shadow_kwargs),)
        return made, made
    made = op(*shadow_args, **shadow_kwargs)
    if name in CHOOSING and isinstance(result, (tuple, list)) and len(result) == 2:
        return (_chosen(op, shadow_args, shadow_kwargs, result[1], made[0]), result[1]), made
    return made, made


def _attention(op: Op, args: Any, kwargs: Any) -> torch.Tensor:
    """Return the output of an attention, by the formula: a GPU's kernels take halves only, or TF32."""
    given = arguments(op, args, kwargs)
    query, key = given["query"], given["key"]
    bias, scale = given.get("attn_bias"), given.get("scale")
    grouped = query.shape[-3] != key.shape[-3]
    made = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, given["value"], bias, 0.0, given.get("is_causal", False), scale=scale, enable_gqa=grouped
    )
    output: torch.Tensor = made[0]
    return output


def arguments(op: Op, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return an operation's arguments by name, with the defaults of its schema."""
    names = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def dropped(step_args: Any, step_kwargs: Any, mask: torch.Tensor, shadow: torch.Tensor) -> torch.Tensor:
    """Return what `native_dropout` makes of a shadow with the program's mask."""
    probability = step_args[1] if len(step_args) > 1 else step_kwargs["p"]
    return shadow * mask * (0.0 if probability == 1 else 1 / (1 - probability))


def _chosen(op: Op, args: Any, kwargs: Any, indices: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return the shadow's values at the program's indices."""
    given = arguments(op, args, kwargs)
    dim, source = given.get("dim", -1), given["self"]
    if source.ndim == 0:
        return made
    kept = indices if indices.ndim == source.ndim else indices.unsqueeze(dim)
    values: torch.Tensor = source.gather(dim, kept)
    return values if indices.ndim == source.ndim else values.squeeze(dim)


def pairs(result: Any, shadow: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (index, program's tensor, shadow's tensor) of each floating result."""
    for index, (low, high) in enumerate(zip(leaves(result), leaves(shadow), strict=False)):
        if isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor) and has_shadow(low):
            yield index, low, high


def nonfinite_scalars(scalars: tuple[float, ...]) -> bool:
    """Return whether the program wrote an infinity or NaN as a constant."""
    return any(not math.isfinite(s) for s in scalars)


def glimpse(result: Any) -> torch.Tensor:
    """Return copies of the first few floating values of a result, [at most 64], float32: what was drawn, in short."""
    found = [t.detach().reshape(-1)[:_GLIMPSE].float() for t in tensors_in(result) if t.is_floating_point()]
    return torch.cat(found)[:_GLIMPSE] if found else torch.empty(0)
