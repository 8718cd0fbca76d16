"""How much float32 prefers its own choice to a low precision's: whether a changed decision is a near tie.

Any rounding flips the choice between two scores that are almost equal, so a changed token says little by itself.
Margins are differences of float32's scores in units of the root mean square of the scores of that decision, so that
they compare with the format's relative rounding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

# Exponents beyond these are one key: an exact tie has no exponent of its own.
LOWEST, HIGHEST = -64, 64


def margin_exponents(scores: torch.Tensor, chosen: torch.Tensor) -> Counter[int]:
    """Return how often each floor(log2(margin)) occurs where another choice was made than float32's.

    `scores` are float32's, [decisions, choices]; `chosen` the low precision's choices, [decisions]. A choice that
    float32 holds for impossible (-inf), or scores without a finite maximum, are not counted.
    """
    found: Counter[int] = Counter()
    for rows, picks in _chunks(scores, chosen):
        margins = _margins(rows, picks)
        margins = margins[torch.isfinite(margins)].cpu()  # few, and not every device has frexp
        exponents = torch.frexp(margins).exponent - 1
        exponents = torch.where(margins == 0, LOWEST, exponents.clamp(LOWEST, HIGHEST))
        found.update(exponents.tolist())
    return found


def _chunks(scores: torch.Tensor, chosen: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = max(1, (1 << 22) // max(scores.shape[-1], 1))
    return list(zip(scores.split(rows), chosen.split(rows), strict=True))


def _margins(scores: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return (largest score - chosen score) / rms of the finite scores of each row, in float32, [decisions]."""
    wide = scores.float()
    margin = wide.amax(-1) - wide.gather(-1, chosen[:, None])[:, 0]
    return torch.where(margin == 0, margin, margin / _scale(wide))


def _scale(scores: torch.Tensor) -> torch.Tensor:
    kept = torch.isfinite(scores)
    squares = torch.where(kept, scores, 0.0).square().sum(-1)
    return (squares / kept.sum(-1).clamp(min=1)).sqrt()


class Step(NamedTuple):
    """How float32 scores one token of an answer: margin (see above), log-probability in nats, rms of the scores."""

    margin: float
    logprob: float
    scale: float


@dataclass
class Forced:
    """A logits processor that makes `generate` repeat given answers, and notes how float32 scores each of their tokens.

    Going through `generate` itself leaves caches, positions and prefixes to the model: an answer begins where
    `generate` asks for the first time. `steps` holds one list for each answer.
    """

    answers: Sequence[Sequence[int]]
    steps: list[list[Step]] = field(default_factory=list)
    _before: int | None = None

    def __post_init__(self) -> None:
        self.steps = [[] for _ in self.answers]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Note this step's tokens, and return scores that leave no other choice; answers that have ended are free."""
        if self._before is None:
            self._before = input_ids.shape[1]
        step = input_ids.shape[1] - self._before
        live = [i for i, answer in enumerate(self.answers) if step < len(answer)]
        if not live:
            return scores
        picks = torch.tensor([self.answers[i][step] for i in live], device=scores.device)
        rows = scores[live].float()
        logprobs = rows.log_softmax(-1).gather(-1, picks[:, None])[:, 0]
        noted = torch.stack([_margins(rows, picks), logprobs, _scale(rows)], dim=-1).tolist()
        for i, values in zip(live, noted, strict=True):
            self.steps[i].append(Step(*values))
        forced = scores.clone()
        forced[live] = -torch.inf
        forced[live, picks] = 0.0
        return forced


def step_margin(low: Sequence[Step], step: int | None) -> float | None:
    """Return the margin of a greedy answer: float32's preference at the first token that differs."""
    return low[step].margin if step is not None and step < len(low) and math.isfinite(low[step].margin) else None


def search_margin(reference: Sequence[Step], low: Sequence[Step]) -> float | None:
    """Return the margin of a beam search's answer, from the mean log-probabilities that float32 gives to both answers.

    In units of the scores' root mean square, and times the root of the number of tokens, since the roundings of n steps
    add up as sqrt(n) (Higham and Mary, 2019). An answer that float32 likes better than its own has the margin 0.
    """
    scale = sum(step.scale for step in reference)
    if not reference or not low or not scale:
        return None
    own, other = (sum(step.logprob for step in steps) / len(steps) for steps in (reference, low))
    margin = max(0.0, own - other) * max(len(reference), len(low)) ** 0.5 / (scale / len(reference))
    return margin if math.isfinite(margin) else None
