"""What an island is made of: modules, and operations of a module's own code; and how much of the weights they keep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, order=True)
class Member:
    """A part of a model that runs in float32: the module at a path with all below it, or one operation of its code.

    `op` is an operation without its overload, such as "aten.bmm", in all its calls by that module's own code; "" is
    the whole module. The output of an `open` module stays in float32, and what it is added to is promoted by torch.
    """

    module: str
    op: str = ""
    open: bool = False

    def __str__(self) -> str:
        if self.open:
            return f"{self.module} (output in float32, too)"
        return f"{self.module or 'the model itself'}: {self.op}" if self.op else self.module


Members = frozenset[Member]


def modules_of(members: Iterable[Member]) -> tuple[str, ...]:
    """Return the paths of the members that are whole modules, sorted, without those that lie inside another."""
    paths = sorted({member.module for member in members if not member.op})
    return tuple(path for path in paths if not any(lies_in(path, other) for other in paths if other != path))


def open_of(members: Iterable[Member]) -> frozenset[str]:
    """Return the paths of the members whose output stays in float32."""
    return frozenset(member.module for member in members if member.open)


def lies_in(path: str, island: str) -> bool:
    """Return whether the module at `path` is the one at `island` or lies below it."""
    return path == island or not island or path.startswith(f"{island}.")


def parent_of(path: str) -> str:
    """Return the path of a module's parent; that of the root is itself, ""."""
    return path.rpartition(".")[0]


def children_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """Return the paths of a module's children; those of a bare list of modules are its items."""
    found: list[str] = []
    for name, child in model.get_submodule(path).named_children():
        own = f"{path}.{name}" if path else name
        found += [own] if is_called(child) else children_of(model, own)
    return tuple(found)


def is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward that can be wrapped: a list or dict of modules has none."""
    import torch

    bare = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
    return not isinstance(module, (*bare, torch.jit.ScriptModule))


def kept_weights(model: nn.Module, members: Iterable[Member]) -> int:
    """Return how many elements of parameters and floating buffers lie in the members that are modules, ties once."""
    return sum({id(t): t.numel() for path in modules_of(members) for t in _tensors(model.get_submodule(path))}.values())


def all_weights(model: nn.Module) -> int:
    """Return how many elements the parameters and floating buffers of a model have, ties once."""
    return sum({id(t): t.numel() for t in _tensors(model)}.values())


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from (buffer for buffer in module.buffers() if buffer.is_floating_point())
