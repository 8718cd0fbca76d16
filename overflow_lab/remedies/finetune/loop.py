"""The training: distillation from the original, and the penalty; measured, saved, resumed, and ended early."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.randomness import kept_random_state, reseed
from overflow_lab.errors import OverflowLabError, UsageError
from overflow_lab.progress import Progress
from overflow_lab.remedies.finetune import state
from overflow_lab.remedies.finetune.examples import Example
from overflow_lab.remedies.finetune.losses import Measured, distance, task_loss
from overflow_lab.remedies.finetune.optimizer import RelativeAdam
from overflow_lab.remedies.finetune.settings import Settings
from overflow_lab.remedies.penalty import ActivationPenalty, Site

# Evaluations in a row that are within so small a part of what may be lost, before the training ends early.
_ENOUGH, _PART = 2, 0.1
_WARMUP = 20
# The share of the steps in which the headroom asked for grows.
_RAMP = 0.4
# The penalty asks for a little more than what is to be reached: inputs that were not seen go beyond those that were.
MORE = 0.25


@dataclass
class Training:
    """A training at some step. `student` is trained in place; `teacher` is the original and stays as it is.

    `mark` names what the training is of, and a checkpoint of another is not resumed. `room` is the least headroom seen
    in training since the last evaluation; `history` has a plain dict for each evaluation, the first before any step.
    """

    student: nn.Module
    teacher: nn.Module
    penalty: ActivationPenalty
    examples: Sequence[Example]
    held: Sequence[Example]
    settings: Settings
    progress: Progress
    folder: Path | None = None
    mark: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    streak: int = 0
    room: float = math.inf
    best: dict[str, torch.Tensor] | None = None
    best_rank: tuple[float, float] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped: bool = False

    def __post_init__(self) -> None:
        trained = [p for p in self.student.parameters() if p.requires_grad]
        if not trained:
            raise UsageError("no weight of the model takes a gradient; set requires_grad on those to be trained.")
        self.optimizer = RelativeAdam(trained, self.settings.learning_rate)

    @property
    def reached(self) -> bool:
        """Whether the best weights have the headroom that was asked for, and the original's decisions."""
        return self.best_rank is not None and self.best_rank[0] <= 0 and self._agrees(self.history_of_best)

    @property
    def history_of_best(self) -> dict[str, Any]:
        """The evaluation of the best weights."""
        return next(row for row in reversed(self.history) if row["best"])

    def run(self, *, resume: bool = False) -> None:
        """Train until the goal is reached or the steps are done; the student then has the best weights.

        Ctrl-C ends it after the step at work, with a checkpoint, and raises KeyboardInterrupt.
        """
        # On the way out torch's generators are as before: resuming sets them.
        with kept_random_state(), torch.inference_mode(False), torch.enable_grad(), self.penalty:
            reseed(self.settings.seed)
            if resume:
                self._resume()
            elif not self.history:
                self._evaluate()
            with self._interruptible():
                self._train()
        if self.best is not None:
            state.put(self.student, self.best)

    def _train(self) -> None:
        self.progress.stage("fine-tuning", self.settings.steps)
        for _ in range(self.step):
            self.progress.advance()
        while self.step < self.settings.steps and self.streak < _ENOUGH and not self.stopped:
            self._one()
            self.progress.advance()
            if self.step % self.settings.evaluate_every == 0 or self.step == self.settings.steps:
                self._evaluate()
            if self.step % self.settings.save_every == 0:
                self._save()
        self._save()
        if self.stopped:
            raise KeyboardInterrupt

    def _one(self) -> None:
        """Do one step."""
        example = self._example()
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate()
        self.penalty.headroom_bits = self._asked()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            original = self.teacher(*example.positional, **example.inputs)
        output = self.student(*example.positional, **example.inputs)
        loss = distance(output, original, example).loss + self.penalty.penalty()
        task = task_loss(output, example)
        if task is not None:
            loss = loss + self.settings.task_weight * task
        if not math.isfinite(float(loss.detach())):
            raise OverflowLabError(f"the loss is not finite at step {self.step + 1}; try a smaller --lr.")
        loss.backward()
        self.optimizer.step()
        self.room = min(self.room, self.penalty.headroom())
        self.step += 1

    def _example(self) -> Example:
        """Return the example of this step: each epoch in an order of its own, which the seed alone decides."""
        count = len(self.examples)
        generator = torch.Generator().manual_seed(self.settings.seed + self.step // count)
        return self.examples[int(torch.randperm(count, generator=generator)[self.step % count])]

    def _rate(self) -> float:
        """Return the learning rate: a short warm-up, then half a cosine."""
        done, steps = self.step / self.settings.steps, self.settings.steps
        warm = min(1.0, (self.step + 1) / max(1, min(_WARMUP, steps // 5)))
        return self.settings.learning_rate * warm * 0.5 * (1.0 + math.cos(math.pi * done))

    def _asked(self) -> float:
        """Return the headroom that is asked for at this step, in bits: from what is there down to the goal, evenly.

        Asked for all at once, a model whose activations are many bits too large breaks before it can follow.
        """
        goal = self.settings.headroom_bits + MORE
        start = self.history[0]["headroom"]
        start = goal if start is None else min(goal, start)
        return float(start + (goal - start) * min(1.0, (self.step + 1) / (_RAMP * self.settings.steps)))

    def _evaluate(self) -> None:
        """Measure the held-back examples and keep the weights where they are the best so far."""
        found = self.measure()
        room = min(found.headroom, self.room) if self.step else found.headroom
        rank = (max(0.0, self.settings.headroom_bits - room), found.kl)
        row = {"step": self.step, **found.plain(), "training_headroom": None if math.isinf(self.room) else self.room}
        better = self.step > 0 and (self.best_rank is None or rank < self.best_rank)
        self.history.append({**row, "best": better})
        if better:
            self.best_rank, self.best = rank, state.copied(self.student)
        reached = self.step > 0 and rank[0] <= 0 and self._agrees(self.history[-1], part=_PART)
        self.streak = self.streak + 1 if reached else 0
        self.room = math.inf

    def _agrees(self, row: Mapping[str, Any], *, part: float = 1.0) -> bool:
        """Return whether an evaluation is the original's within `part` of what may be lost."""
        kl, lost = row["kl"], 1.0 - row["same"]
        return kl is not None and kl <= part * self.settings.most_kl and lost <= part * self._may_differ

    @property
    def _may_differ(self) -> float:
        return 1.0 - self.settings.least_agreement

    def measure(self) -> Measured:
        """Run the held-back examples, or where there are none the first, without gradients."""
        self.penalty.reset()
        losses: list[float] = []
        tasks: list[float] = []
        rows = same = 0
        with torch.no_grad():
            for example in self.held or self.examples[:1]:
                output = self.student(*example.positional, **example.inputs)
                apart = distance(output, self.teacher(*example.positional, **example.inputs), example)
                losses.append(float(apart.kept))
                rows, same = rows + apart.rows, same + apart.same
                task = task_loss(output, example)
                tasks += [] if task is None else [float(task)]
        (module, port), largest = _worst(self.penalty.largest())
        return Measured(
            headroom=self.penalty.headroom(),
            site=module if port in ("", "output") else f"{module} {port}",
            largest=largest,
            kl=sum(losses) / len(losses),
            same=same / rows if rows else 1.0,
            task_loss=sum(tasks) / len(tasks) if tasks else None,
        )

    def _save(self) -> None:
        if self.folder is None:
            return
        notes = {
            "of": dict(self.mark),
            "step": self.step,
            "streak": self.streak,
            "room": None if math.isinf(self.room) else self.room,
            "best": None if self.best_rank is None else list(self.best_rank),
            "history": self.history,
        }
        state.write(self.folder, self.student, self.optimizer, best=self.best, notes=notes)

    def _resume(self) -> None:
        assert self.folder is not None
        check_mark(state.notes_in(self.folder), self.mark, self.folder)
        notes, self.best = state.read(self.folder, self.student, self.optimizer)
        self.step, self.streak = notes["step"], notes["streak"]
        self.room = math.inf if notes["room"] is None else notes["room"]
        self.best_rank = None if notes["best"] is None else (notes["best"][0], notes["best"][1])
        self.history = notes["history"]

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let Ctrl-C and SIGTERM end the training after the step at work: in the middle of one, weights are half moved.

        A second Ctrl-C is as it was before.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {int(n): signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}

        def stop(number: int, frame: object) -> None:
            self.stopped = True
            signal.signal(number, before[number])

        try:
            for number in before:
                signal.signal(number, stop)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def check_mark(notes: Mapping[str, Any], mark: Mapping[str, Any], folder: Path) -> None:
    """Raise UsageError where a checkpoint is of another training than `mark` names."""
    kept = notes["of"]
    for name, value in mark.items():
        if kept.get(name) != value:
            raise UsageError(
                f"the checkpoint in {folder} was made with {name} {kept.get(name)!r}, now it is {value!r}; "
                "give the same, or start anew in another folder."
            )


def _worst(largest: Mapping[Site, float]) -> tuple[Site, float]:
    return max(largest.items(), key=lambda item: item[1], default=(("", ""), 0.0))
