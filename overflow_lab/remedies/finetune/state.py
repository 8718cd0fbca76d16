"""The checkpoints of a fine-tuning: weights as safetensors, the optimizer as tensors and plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from overflow_lab.errors import UsageError, one_line
from overflow_lab.remedies.checkpoint import new_folder

WEIGHTS, BEST, STATE, NOTES = "weights.safetensors", "best.safetensors", "optimizer.pt", "finetune.json"
# 1: the first.
FORMAT = 1


def copied(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a model's parameters by name, each tied one once, on the CPU."""
    return {name: p.detach().to("cpu", copy=True).contiguous() for name, p in model.named_parameters()}


def put(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Write weights into the parameters of those names, cast to their dtypes, in place; return the model."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    best: Mapping[str, torch.Tensor] | None,
    notes: Mapping[str, Any],
) -> None:
    """Write a checkpoint; the folder is replaced when the new one is whole. `notes` are JSON."""
    with new_folder(folder, overwrite=True) as made:
        save_file(copied(model), made / WEIGHTS)
        if best is not None:
            save_file(dict(best), made / BEST)
        kept = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(kept, made / STATE)
        text = json.dumps({"format": FORMAT, **notes}, indent=1, allow_nan=False)
        (made / NOTES).write_text(text + "\n", encoding="utf-8")


def read(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], Any]:
    """Put a checkpoint into a model and its optimizer; return the notes, and the best weights or None.

    Nothing in it is code: weights are safetensors, the rest is read with `weights_only=True`. Raises UsageError, in one
    line, for a folder that is no checkpoint of this model.
    """
    try:
        put(model, load_file(folder / WEIGHTS))
        kept = torch.load(folder / STATE, weights_only=True)
        optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        best = load_file(folder / BEST) if (folder / BEST).exists() else None
        return notes_in(folder), best
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{folder} cannot be resumed ({one_line(error, limit=160)}); start anew in another."
        ) from error


def notes_in(folder: Path) -> dict[str, Any]:
    """Return the notes of a checkpoint. Raises UsageError where there is none, or one of a newer overflow-lab."""
    try:
        notes: dict[str, Any] = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"there is no checkpoint in {folder} to resume; leave --resume out.") from error
    if notes.get("format") != FORMAT:
        raise UsageError(
            f"{folder} has checkpoint format {notes.get('format')}, this overflow-lab reads {FORMAT}; start anew."
        )
    return notes
