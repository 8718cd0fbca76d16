"""What is asked of a model: a plain forward, or an answer by `generate`, on uncast inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.capture.precisions import Prepared


@dataclass(frozen=True)
class Call:
    """One call of a model; `settings` are those of `generate`, None for a plain forward, and `run` its name."""

    inputs: Mapping[str, Any]
    positional: tuple[Any, ...] = ()
    settings: Mapping[str, Any] | None = None
    run: str = "forward"

    def named(self) -> dict[str, Any]:
        """Return all inputs by name, positional ones as "#0", "#1"."""
        return {**dict(self.inputs), **{f"#{i}": value for i, value in enumerate(self.positional)}}

    def place(self, row: int, rows: int) -> tuple[int, int, int]:
        """Return an index along a first dimension as (row, rows, beams) of the inputs; beams 0 where it is none.

        A model may flatten tokens or heads of a batch into the first dimension, and a beam search beams: whatever of
        them is in there, an input's follow each other, and the input is told by division. A dimension that is as long
        as the inputs are may be their length.
        """
        tensors = [value for value in self.named().values() if isinstance(value, torch.Tensor) and value.dim()]
        samples = len(tensors[0]) if tensors else 0
        beams = int((self.settings or {}).get("num_beams") or 1)
        if not samples or not rows or rows % samples:
            return row, rows, 0
        if rows == samples * beams:
            return row, rows, beams
        if rows != samples and rows in tensors[0].shape[1:2]:
            return row, rows, 0
        return row // (rows // samples), samples, 1

    def cast(self, prepared: Prepared) -> Call:
        """Return the call with its inputs cast as a precision's are, all of them copies."""
        inputs, positional = prepared.inputs(dict(self.inputs)), prepared.inputs(tuple(self.positional))
        return Call(inputs, positional, self.settings, self.run)

    def make(self, model: Any) -> Any:
        """Make the call of a model."""
        if self.settings is None:
            return model(*self.positional, **self.inputs)
        return model.generate(**self.inputs, **self.settings)
