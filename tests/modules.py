"""Small modules, one for each way in which a model can behave or break; all of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Calling(nn.Module):
    """Does what a function says, with a linear layer `lin` of ones and the module itself in its hands."""

    def __init__(self, function: Callable[..., Any], size: int = 4) -> None:
        super().__init__()
        self.lin = nn.Linear(size, size, bias=False)
        nn.init.eye_(self.lin.weight)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Step(nn.Module):
    """Applies a function of one tensor; a leaf that `named_modules` lists."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


class Nested(nn.Module):
    """Calls itself `depth` times around one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        seen = self.lin(x)
        deeper: torch.Tensor = self(seen, depth - 1) if depth else seen
        return deeper


def chain(*functions: Callable[[torch.Tensor], Any]) -> nn.Sequential:
    """Return modules "0", "1", ... that apply the functions one after the other."""
    return nn.Sequential(*(Step(function) for function in functions))
