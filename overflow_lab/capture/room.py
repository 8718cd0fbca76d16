"""How much a scan holds at a time: how many batches of float32's outputs, and which models stay loaded."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

# float32 runs so many batches, or so many seconds, before the other precisions catch up and progress is written down.
MOST_BATCHES, MOST_SECONDS = 64, 120.0
# What float32's outputs and samples may take meanwhile, in bytes: a quarter of the model within these.
LEAST_HELD, MOST_HELD = 1 << 27, 1 << 30
# Low-precision models that are this small together stay loaded until they are needed again.
KEPT_BYTES = 1 << 29


def nbytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters, wherever they are."""
    return sum(p.nbytes for p in model.parameters() if not is_lazy(p))


def room(model: nn.Module) -> int:
    """Return how many bytes of float32's outputs and samples may be held for comparison."""
    return max(LEAST_HELD, min(MOST_HELD, nbytes(model) // 4))
