"""One walk over everything that modules take and return, giving each tensor a name."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch

Found = list[tuple[str, torch.Tensor]]
_PLAIN = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, slice, range, type)
_DEEPEST = 8


def tensors(value: Any, name: str, *, unknown: set[str] | None = None, caches: bool = True) -> Found:
    """Return the tensors inside `value` with names such as "output", "output[0]" or "output['logits']".

    Walks tensors, mappings (ModelOutput among them), sequences, named tuples, dataclasses and caches of keys and values
    (left out with `caches=False`). A nested tensor gives the values of all its parts in one dimension or two. The type
    names of anything else that is no plain value, and of tensors that cannot be read, are added to `unknown`.
    """
    found: Found = []
    _walk(value, name, found, set() if unknown is None else unknown, caches, _DEEPEST)
    return found


def _walk(value: Any, name: str, found: Found, unknown: set[str], caches: bool, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        flat = value.values() if value.is_nested else value
        if is_readable(flat):
            found.append((name, flat))
        else:
            unknown.add(f"{type(value).__name__} ({value.device.type}, {value.layout}, {value.dtype})")
        return
    if value is None or isinstance(value, _PLAIN):
        return
    children = _children(value, name, caches) if depth else None
    if children is None:
        unknown.add(f"{type(value).__module__}.{type(value).__qualname__}")
        return
    for child, item in children:
        _walk(item, child, found, unknown, caches, depth - 1)


def _children(value: Any, name: str, caches: bool) -> list[tuple[str, Any]] | None:
    """Return the named items of a container, None where it is not understood."""
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f"{name}.{field}", item) for field, item in zip(value._fields, value, strict=True)]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{i}]", item) for i, item in enumerate(value)]
    if is_cache(value):
        return _attributes(value, name) if caches else []
    if dataclasses.is_dataclass(value):
        return [(f"{name}.{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value)]
    if isinstance(value, (set, frozenset)) and all(isinstance(item, _PLAIN) for item in value):
        return []
    return [] if callable(value) else None


def is_readable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values to read: it is not meta, fake, lazy, sparse, quantized or a mere wrapper."""
    if torch.nn.parameter.is_lazy(tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    try:
        return tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:  # a wrapper subclass without storage
        return False


def is_cache(value: Any) -> bool:
    """Return whether `value` is a cache of past keys, values or states, or a layer of one."""
    return any(cls.__name__.endswith(("Cache", "CacheLayerMixin")) for cls in type(value).__mro__)


def _attributes(value: Any, name: str) -> list[tuple[str, Any]]:
    """Return the attributes of a cache that can hold tensors."""
    held = (torch.Tensor, list, tuple, dict)
    attributes = vars(value) if hasattr(value, "__dict__") else {}
    return [(f"{name}.{key}", item) for key, item in attributes.items() if isinstance(item, held) or is_cache(item)]


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any, *, caches: bool = True) -> Any:
    """Return a copy of the nested inputs with `function` applied to each tensor; unknown objects are passed on.

    A cache of keys and values is copied too: a model appends to it. With `caches=False` it is passed on as it is.
    """

    def each(item: Any) -> Any:
        return map_tensors(function, item, caches=caches)

    if isinstance(value, torch.Tensor):
        return function(value)
    if not caches and is_cache(value):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(each(item) for item in value))
    if isinstance(value, (list, tuple, set)):
        return type(value)([each(item) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _replaced(value, {f.name: f.init for f in dataclasses.fields(value)}, each)
    if isinstance(value, Mapping):
        return _mapped(value, {key: each(item) for key, item in value.items()})
    if is_cache(value) and hasattr(value, "__dict__"):
        made = copy.copy(value)
        vars(made).update({name: each(item) for name, item in vars(value).items()})
        return made
    return value


def _replaced(value: Any, fields: dict[str, bool], each: Callable[[Any], Any]) -> Any:
    """Return a dataclass with its fields mapped (`fields` says which are arguments of its `__init__`)."""
    items = {name: each(getattr(value, name)) for name in fields if hasattr(value, name)}
    try:  # the way that ModelOutput needs, whose items are to be its attributes
        return dataclasses.replace(value, **{name: item for name, item in items.items() if fields[name]})
    except Exception:  # an `__init__` of its own, an InitVar, a check that refuses copies
        made = copy.copy(value)
        for name, item in items.items():
            object.__setattr__(made, name, item)  # frozen ones, too
        return made


def _mapped(value: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same class with other items, a dict where that cannot be written to."""
    if not isinstance(value, MutableMapping):
        return items
    made = copy.copy(value)
    made.update(items)
    return made
