"""Tensors that are spread over processes (DTensor: tensor parallelism, FSDP2): what of them lies in this one.

A DTensor is told by its attributes, so that torch.distributed is imported only where it is in use.
"""

from __future__ import annotations

from typing import Any, cast

import torch

# What a row says of the tensor that it measured: a part that no other process has, or one that another counts.
PART, COPY = "part", "copy"


def is_spread(tensor: Any) -> bool:
    """Return whether a tensor is a DTensor."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lies in this process; a plain tensor as it is."""
    return cast(torch.Tensor, cast(Any, tensor).to_local()) if is_spread(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor: for a DTensor a collective, which every process has to call."""
    return cast(torch.Tensor, cast(Any, tensor).full_tensor()) if is_spread(tensor) else tensor


def is_partial(tensor: torch.Tensor) -> bool:
    """Return whether the values here are terms of a sum that is still to be made: they are nobody's values yet."""
    return is_spread(tensor) and any(placement.is_partial() for placement in cast(Any, tensor).placements)


def kind_of(tensor: torch.Tensor) -> str | None:
    """Return PART or COPY for a DTensor, None for a plain tensor, of which nothing is known.

    Along each dimension of the mesh in which a tensor is replicated, the first process counts it.
    """
    if not is_spread(tensor):
        return None
    spread = cast(Any, tensor)
    here = spread.device_mesh.get_coordinate()
    if here is None:
        return COPY
    placed = zip(spread.placements, here, strict=True)
    return COPY if any(place.is_replicate() and coordinate for place, coordinate in placed) else PART


def spread_over(module: torch.nn.Module) -> str | None:
    """Return how a model's weights are spread, such as "DTensor, mesh (2,)"; None where they are not."""
    for tensor in (*module.parameters(), *module.buffers()):
        if is_spread(tensor):
            return f"DTensor, mesh {tuple(cast(Any, tensor).device_mesh.shape)}"
    return None


def reshard(module: torch.nn.Module) -> None:
    """Let FSDP2 modules give back the weights that they gathered for their last forward."""
    for part in module.modules():
        if hasattr(part, "reshard") and hasattr(part, "unshard"):
            cast(Any, part).reshard()
