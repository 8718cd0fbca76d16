"""Watches the steps of `generate`: the logits of each call of the model itself, in float32 and beside float32's."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from overflow_lab.capture.answers import AnswerContext
from overflow_lab.capture.devices import widened
from overflow_lab.recording import StepRow

# Of a large vocabulary so many logits, evenly spaced, stand for all in the comparison with float32.
_COMPARED = 4096
_MOST_STEPS = 128


@dataclass
class StepLog:
    """The steps of one `generate`: of each the tokens it was given, its logits' extremes, and a sample of them."""

    tokens: list[torch.Tensor | None] = field(default_factory=list)
    facts: list[torch.Tensor] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes held for comparison."""
        return sum(t.nbytes for t in (*self.facts, *self.samples))


class Steps:
    """Hooks a model's own calls while entered, and fills `log`, unless nothing is to be `kept`.

    Nothing is moved off the device until the log is read.
    """

    def __init__(self, model: nn.Module, *, kept: bool = True) -> None:
        self.log = StepLog()
        self._model = model
        self._handle: Any = None
        self._failed = not kept

    def __enter__(self) -> Steps:
        if not self._failed and not isinstance(self._model, torch.jit.ScriptModule):
            self._handle = self._model.register_forward_hook(self._see, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _see(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._failed or len(self.log.facts) >= _MOST_STEPS:
            return
        try:
            with _disable_current_modes(), torch.no_grad():
                self._note(output, _given(args, kwargs))
        except Exception:  # what cannot be noted is missing in a picture, and must not end the run
            self._failed = True

    def _note(self, output: Any, given: torch.Tensor | None) -> None:
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3:
            return
        last = logits[:, -1].float()  # before that stands the prompt
        finite = torch.isfinite(last)
        peaks = torch.where(finite, last, 0).abs().amax(-1)
        self.log.facts.append(torch.stack([widened(peaks), widened((~finite).sum(-1))]))
        self.log.samples.append(last[:, :: max(1, math.ceil(last.shape[1] / _COMPARED))].clone())
        self.log.tokens.append(None if given is None else given[:, -1].clone())


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Return the tokens of a step, (rows, tokens); None where the model is given something else."""
    named = next((kwargs[key] for key in ("decoder_input_ids", "input_ids") if kwargs.get(key) is not None), None)
    found = args[0] if named is None and args else named
    return found if isinstance(found, torch.Tensor) and found.dim() == 2 else None


def step_rows(context: AnswerContext, low: StepLog, base: StepLog) -> list[StepRow]:
    """Return a row for each step of a low precision, compared with float32's as long as their tokens are the same."""
    rows: list[StepRow] = []
    same: torch.Tensor | None = None
    samples = context.batch.samples
    for call, facts in enumerate(low.facts):
        width = facts.shape[1]
        beams = width // samples if samples and width % samples == 0 else 1
        same = _same_so_far(same, call, beams, low, base)
        errors = [math.nan] * width if same is None else _errors(call, low, base)
        known = [False] * width if same is None else same.tolist()
        peaks, bad = facts.tolist()
        rows.append(
            StepRow(
                *(context.precision, context.strategy, context.number, call, beams),
                peaks=tuple(_short(peak) for peak in peaks),
                bad=tuple(int(count) for count in bad),
                errors=tuple(_short(e) if k and math.isfinite(e) else None for e, k in zip(errors, known, strict=True)),
            )
        )
    return rows


def _same_so_far(same: torch.Tensor | None, call: int, beams: int, low: StepLog, base: StepLog) -> torch.Tensor | None:
    """Return for which rows float32 was given the same tokens until this step; None from where that cannot be told.

    Beams change places by their scores: so an input's beams count as the same only all together.
    """
    if call >= len(base.facts) or (call and same is None) or low.facts[call].shape != base.facts[call].shape:
        return None
    mine, theirs = low.tokens[call], base.tokens[call]
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return None
    equal = (mine.cpu() == theirs.cpu()).reshape(-1, beams).all(-1).repeat_interleave(beams)
    return equal if same is None else equal & same


def _errors(call: int, low: StepLog, base: StepLog) -> list[float]:
    """Return the relative error of each row of logits, over what is finite in both; NaN where nothing is."""
    mine, theirs = (widened(log.samples[call].to(low.samples[call].device)) for log in (low, base))
    finite = torch.isfinite(mine) & torch.isfinite(theirs)
    off = torch.where(finite, mine - theirs, 0).square().sum(-1)
    whole = torch.where(finite, theirs, 0).square().sum(-1)
    relative = torch.where(finite.any(-1), (off / whole).sqrt(), math.nan)
    return [float(value) for value in relative.tolist()]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
