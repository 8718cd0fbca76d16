"""What a fine-tuning is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overflow_lab.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """How a model is fine-tuned; the defaults take a small T5 by one bit in some hundred steps.

    `precision` is what the model is to work in, with `headroom_bits` to spare at each site. `learning_rate` is relative
    to each weight's own size (see `RelativeAdam`). The loss is the distillation from the original plus `penalty_weight`
    times the penalty, plus `task_weight` times the task loss where there are labels: the column `labels` of the file.
    Every `evaluate_every` steps the held-back batches are run; the goal is reached where they have the headroom, their
    KL divergence is at most `most_kl` nats and their decisions are the original's but for a share of
    1 - `least_agreement`. With a tenth of these twice in a row, the training ends early. A checkpoint is written every
    `save_every` steps.
    """

    precision: str = "float16"
    steps: int = 400
    learning_rate: float = 0.01
    headroom_bits: float = 1.0
    penalty_weight: float = 1.0
    task_weight: float = 0.1
    labels: str | None = None
    evaluate_every: int = 25
    save_every: int = 100
    most_kl: float = 0.01
    least_agreement: float = 0.995
    seed: int = 20

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate_every", "save_every"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if not 0 < self.learning_rate < 1:
            raise UsageError(f"learning_rate is {self.learning_rate}; give a share between 0 and 1, such as 0.01.")
        if not 0 <= self.headroom_bits <= 12:
            raise UsageError(f"headroom_bits is {self.headroom_bits}; give 0 to 12.")


def taken(options: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return the settings among some options, and the rest of these."""
    names = {field.name for field in dataclasses.fields(Settings)}
    own = {name: value for name, value in options.items() if name in names}
    return Settings(**own), {name: value for name, value in options.items() if name not in names}
