"""What the shadow run needs to know of an operation: its name, whether it views, draws, writes; and how to replay it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from overflow_lab.capture.shadow.shadows import has_shadow, wide

Op = Any

# What these return is not a value yet.
_UNSET = frozenset({"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided", "aten.empty_permuted",
                    "aten.new_empty_strided", "aten.resize_", "aten.set_"})  # fmt: skip
# Operations that return values with the indices they were found at: the program's indices decide for the shadow too.
CHOOSING = frozenset({"aten.topk", "aten.sort", "aten.max", "aten.min", "aten.kthvalue", "aten.mode", "aten.median",
                      "aten.nanmedian", "aten.cummax", "aten.cummin"})  # fmt: skip
# Integer results of these are decisions over scores.
DECIDING = CHOOSING | {"aten.argmax", "aten.argmin", "aten.argsort"}
COMPARING = frozenset({"aten.gt", "aten.lt", "aten.ge", "aten.le", "aten.eq", "aten.ne"})
# Operations that make a non-finite value of a zero that should not be one.
ZERO_SENSITIVE = frozenset({"aten.div", "aten.reciprocal", "aten.rsqrt", "aten.log", "aten.log2", "aten.log10", "aten.pow",
                            "aten.log1p", "aten.remainder", "aten.fmod", "aten.atan2", "aten.logit"})  # fmt: skip
LOWEST = frozenset({"aten.min", "aten.argmin", "aten.cummin"})
CLAMPS = frozenset({"aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.minimum", "aten.maximum"})
# Adding up and taking apart: where nearly equal terms leave few bits.
ADDING = frozenset({"aten.add", "aten.sub", "aten.add_", "aten.sub_", "aten.rsub", "aten.addmm", "aten.baddbmm", "aten.addbmm"})


def name_of(op: Op) -> str:
    """Return an operation's name without its overload, such as "aten.mm"."""
    return f"{op.namespace}.{op._schema.name.rpartition('::')[2]}"


def is_unset(name: str) -> bool:
    """Return whether the result of an operation is memory that was not written yet."""
    return name in _UNSET


def may_draw(op: Op) -> bool:
    """Return whether an operation can draw random numbers; attention can, and mostly does not."""
    return torch.Tag.nondeterministic_seeded in op.tags


def written(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to: in-place and out= arguments."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            found += [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]
    return found


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested arguments or results."""
    return [t for t in tree_flatten(value)[0] if isinstance(t, torch.Tensor)]


def scalars_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[float, ...]:
    """Return the plain numbers among the arguments: constants that the program wrote."""
    flat = tree_flatten((args, kwargs))[0]
    return tuple(float(v) for v in flat if isinstance(v, (int, float)) and not isinstance(v, bool))


def as_shadow(value: Any, shadow_of: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested arguments with tensors replaced by their shadows and low dtypes by the shadow's."""

    def one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return shadow_of(item) if has_shadow(item) else item
        if isinstance(item, torch.dtype) and (item.is_floating_point or item.is_complex):
            return wide(item)
        return item

    return tree_map(one, value)


def replay(op: Op, name: str, shadow_args: Any, shadow_kwargs: Any, result: Any) -> Any:
    """Return an operation's result on the shadows; where it chooses among values, the program's choice holds."""
    made = op(*shadow_args, **shadow_kwargs)
    if name in CHOOSING and isinstance(result, (tuple, list)) and len(result) == 2:
        return (_chosen(op, shadow_args, shadow_kwargs, result[1], made[0]), result[1])
    return made


def _chosen(op: Op, args: Any, kwargs: Any, indices: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Return the shadow's values at the program's indices."""
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    dim = given.get("dim", defaults.get("dim", -1))
    source = given["self"]
    if source.ndim == 0:
        return made
    kept = indices if indices.ndim == source.ndim else indices.unsqueeze(dim)
    values = source.gather(dim, kept)
    return values if indices.ndim == source.ndim else values.squeeze(dim)


def pairs(result: Any, shadow: Any) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield (index, program's tensor, shadow's tensor) of each floating result."""
    for index, (low, high) in enumerate(zip(tree_flatten(result)[0], tree_flatten(shadow)[0], strict=False)):
        if isinstance(low, torch.Tensor) and isinstance(high, torch.Tensor) and has_shadow(low):
            yield index, low, high


def nonfinite_scalars(scalars: tuple[float, ...]) -> bool:
    """Return whether the program wrote an infinity or NaN as a constant."""
    return any(not math.isfinite(s) for s in scalars)
