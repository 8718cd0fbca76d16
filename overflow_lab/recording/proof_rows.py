"""What a remedy did: the row that a second scan of the mended model gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class ProofRow:
    """A remedy that was applied to a copy, and what a second scan showed.

    `remedy` is its kind ("rescale", "island", "clamp", "precision", "penalty"), `title` an imperative sentence;
    `precision` is the one that it mends, `runs_in` the one in which the mended model ran. `proven` says that it is
    offered. `before`, `after` and `held_back` are verdicts as in the JSON contract: of the model as it was, of the
    mended one on the same `inputs` inputs, and on `held_inputs` others that its search never saw (None where there
    are none). `reason` is one sentence, where it is not proven. `figures` are numbers by name, those that are known:

    `function_error`  relative error of the mended model's float32 output against the original's; 0 is bit-identical
    `function_ulp`    the largest difference of these outputs in units in the last place of their largest magnitude
    `function_kl`     KL divergence of the float32 decisions, in nats
    `same_tokens`, `same_answers`   share of generated tokens (up to the first that differs), and of whole answers, that
                      are float32's
    `loss_before`, `loss_low`, `loss_after`   task loss: in float32, in the precision as it was, and mended
    `headroom_before`, `headroom_after`   least headroom of any module's output, in bits
    `seconds`, `bytes`  time of a forward and memory of the weights, as ratios to the plain precision
    `runs`            how many runs its search took

    `tightest` are the modules with the least headroom before, as (module, bits before, bits after).
    """

    kind: ClassVar[str] = "proof"
    remedy: str
    title: str
    precision: str
    runs_in: str
    proven: bool
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    held_back: Mapping[str, Any] | None = None
    inputs: int = 0
    held_inputs: int = 0
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    snippets: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tightest: tuple[tuple[str, float, float], ...] = ()
