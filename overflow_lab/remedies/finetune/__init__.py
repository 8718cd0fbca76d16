"""Fine-tunes a model into the range of a format: outputs as they were, activations smaller."""

from __future__ import annotations

from overflow_lab.remedies.finetune.run import Finetuned, finetune
from overflow_lab.remedies.finetune.settings import Settings

__all__ = ["Finetuned", "Settings", "finetune"]
