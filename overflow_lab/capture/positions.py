"""Which positions of a padded batch are real: what a model makes of padding reaches nobody and is not compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_MASKS = ("attention_mask", "decoder_attention_mask")


@dataclass(frozen=True)
class RealPositions:
    """The real positions of one batch, as flat indices into [batch, length], by that shape; empty without padding."""

    by_shape: Mapping[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    @classmethod
    def in_inputs(cls, inputs: Mapping[str, Any]) -> RealPositions:
        """Return the positions that the attention masks of keyword inputs, [batch, length] and nonzero, call real."""
        masks = [inputs[name] for name in _MASKS if isinstance(inputs.get(name), torch.Tensor)]
        found = {}
        for mask in masks:
            real = (mask != 0).reshape(-1).nonzero()[:, 0] if mask.dim() == 2 else mask
            if mask.dim() == 2 and 0 < len(real) < mask.numel():
                found[mask.shape[0], mask.shape[1]] = real
        return cls(found)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the flat indices of the real positions of a [batch, length, ...] tensor, None where all are."""
        if not self.by_shape or tensor.dim() < 2:
            return None
        real = self.by_shape.get((tensor.shape[0], tensor.shape[1]))
        return None if real is None else real.to(tensor.device)

    def select(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the real positions of a tensor, [real, ...]; the tensor as it is where all are."""
        real = self.of(tensor)
        return tensor if real is None else tensor.flatten(0, 1)[real]
