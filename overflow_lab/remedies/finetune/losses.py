"""How far a trained model is from its original: the distillation loss, and what is measured beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from overflow_lab.remedies.finetune.examples import IGNORED, Example
from overflow_lab.subjects.containers import tensors

_LOGITS = "output['logits']"


@dataclass(frozen=True)
class Distance:
    """How far an output is from the original's, in nats, or as a relative square error where there are no logits.

    `loss` is to be trained on; `kept` is the same over the rows that count alone. Of these `rows`, `same` have the same
    largest logit.
    """

    loss: torch.Tensor
    kept: torch.Tensor
    rows: int = 0
    same: int = 0


def distance(output: Any, original: Any, example: Example) -> Distance:
    """Return the distance of an output from the original model's output on the same example.

    With logits it is the KL divergence KL(original || trained) at temperature 1 (Hinton et al., 2015), the mean over
    the rows that the example's mask names, and with a smaller weight over the others; without, the squared error of
    each floating output, relative to its mean square.
    """
    mine, theirs = _floats(output), _floats(original)
    logits = mine.get(_LOGITS)
    if logits is not None and logits.shape[-1] > 1:
        return _kl(_rows(logits), _rows(theirs[_LOGITS]), example)
    errors = [_relative(mine[name], theirs[name]) for name in mine if name in theirs and name != "output['loss']"]
    if not errors:
        raise ValueError("the output holds no floating tensor to compare")
    mean = torch.stack(errors).mean()
    return Distance(mean, mean)


def task_loss(output: Any, example: Example) -> torch.Tensor | None:
    """Return the cross-entropy with the example's targets, or the loss that the model returned; None without either."""
    found = _floats(output)
    if example.targets is None:
        loss = found.get("output['loss']")
        return loss if loss is not None and loss.dim() == 0 else None
    logits = found[_LOGITS]
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), example.targets.reshape(-1), ignore_index=IGNORED
    )


def _floats(output: Any) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors(output, "output", caches=False) if t.is_floating_point() and t.numel()}


def _rows(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(-1, logits.shape[-1]).float()


def _kl(mine: torch.Tensor, theirs: torch.Tensor, example: Example) -> Distance:
    mask = example.mask
    whole = mask is None or mask.numel() != len(mine)
    counts = torch.ones_like(mine[:, 0], dtype=torch.bool) if whole or mask is None else mask.reshape(-1)
    pair = (functional.log_softmax(mine, -1), functional.log_softmax(theirs, -1))
    # Where the original rules a token out by a logit of -inf, 0 * inf is meant to be 0.
    terms = torch.where(pair[1].isneginf(), 0.0, pair[1].exp() * (pair[1] - pair[0])).sum(-1)
    weights = torch.where(counts, 1.0, example.outside)
    loss = (terms * weights).sum() / weights.sum().clamp(min=1e-6)
    kept = terms.detach()[counts].mean() if bool(counts.any()) else loss.detach()
    same = int((mine.argmax(-1) == theirs.argmax(-1))[counts].sum())
    return Distance(loss, kept, int(counts.sum()), same)


def _relative(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    kept = theirs.isfinite() & mine.isfinite()
    error = torch.where(kept, mine - theirs, 0.0).square().mean()
    scale = torch.where(kept, theirs, 0.0).square().mean()
    return error / scale.clamp(min=torch.finfo(scale.dtype).tiny)


@dataclass(frozen=True)
class Measured:
    """What the held-back batches show: the least `headroom` of any site in bits and its site and largest value, the
    distance from the original (`kl`), the share of `same` decisions, and the task loss where there is one."""

    headroom: float
    site: str
    largest: float
    kl: float
    same: float
    task_loss: float | None = None

    def plain(self) -> dict[str, Any]:
        """Return it as JSON has it: what is not finite as None."""
        return {k: (None if isinstance(v, float) and not math.isfinite(v) else v) for k, v in vars(self).items()}
