"""The rows of `generate`, step by step: how large the logits are, and how far from float32's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

# Steps of further batches are not kept: the picture shows no more, and the file would grow with every input.
STEP_BATCHES = 4


@dataclass(frozen=True)
class StepRow:
    """One call of the model itself in a `generate` of one precision: a step, for each row of its logits.

    `run` is the search ("greedy", "beam"), `call` counts the steps of the batch from 0. A row of the logits is an
    input, or one of its `beams`, which follow each other. `peaks` are their largest finite magnitudes, `bad` how many
    logits are NaN or inf. `errors` are relative errors against float32's logits, over a sample of the vocabulary where
    it is large: only as long as float32 was given the same tokens in all steps before, None from then on.
    """

    kind: ClassVar[str] = "step"
    precision: str
    run: str
    batch: int
    call: int
    beams: int
    peaks: tuple[float, ...]
    bad: tuple[int, ...]
    errors: tuple[float | None, ...] = ()
