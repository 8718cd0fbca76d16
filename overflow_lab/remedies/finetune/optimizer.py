"""Adam whose steps are relative to the size of each weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# Rows much smaller than the rest of their weight move as if they had this share of its root mean square.
_LEAST_SHARE = 0.1
_TINY = 1e-12


class RelativeAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) on weights in units of their own size.

    A model with large activations has weights of very different sizes, and one absolute step is too small for some or
    too large for others. Here a row of a matrix moves by `lr` times its root mean square at the start, a vector's
    element by `lr` times its magnitude: the idea of Adafactor's relative steps (Shazeer and Stern, 2018), for each row.
    A model whose weights are rescaled takes the same steps, rescaled.
    """

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], lr: float, *, betas: tuple[float, float] = (0.9, 0.98)
    ) -> None:
        super().__init__(list(parameters), {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move each parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["betas"])

    def _move(self, parameter: torch.nn.Parameter, lr: float, betas: tuple[float, float]) -> None:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
            state["size"] = size_of(parameter)
        state["step"] += 1
        assert parameter.grad is not None
        gradient = parameter.grad * state["size"]  # with regard to the weight in units of its size
        state["mean"].lerp_(gradient, 1 - betas[0])
        state["square"].lerp_(gradient.square(), 1 - betas[1])
        mean = state["mean"] / (1 - betas[0] ** state["step"])
        spread = (state["square"] / (1 - betas[1] ** state["step"])).sqrt_().add_(_TINY)
        parameter.sub_(mean.div_(spread).mul_(state["size"]), alpha=lr)


def size_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the size of each row of a matrix (root mean square), of each element of a vector; at least a tenth of the
    whole's, and 1 where that is 0."""
    wide = parameter.detach()
    rows = wide.abs() if wide.dim() < 2 else wide.flatten(1).square().mean(1).sqrt()
    whole = wide.square().mean().sqrt()
    size = torch.maximum(rows, _LEAST_SHARE * whole)
    size = torch.where(size > 0, size, torch.ones_like(size))
    return size.reshape([-1] + [1] * (wide.dim() - 1)) if wide.dim() > 1 else size
