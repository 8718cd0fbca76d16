"""Buffers that a model writes in its forward: step counters, caches, running statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parameter import is_lazy


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Give a model's buffers their values back afterwards: a replay must not find what the last one wrote."""
    tracked = (b for b in model.buffers() if not is_lazy(b) and not b.is_inference())
    kept = [(buffer, buffer._version, buffer.detach().clone()) for buffer in tracked]
    try:
        yield
    finally:
        for buffer, version, value in kept:
            if buffer._version != version:
                buffer.copy_(value)
