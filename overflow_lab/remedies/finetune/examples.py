"""What is trained on: the batches of a subject, with the answers that the original gives or the labels of a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.precisions import device_of
from overflow_lab.errors import UsageError
from overflow_lab.subjects.quiet import quiet
from overflow_lab.subjects.subject import Batch, Generation, Subject

IGNORED = -100
# One in so many batches is held back, at most so many of them.
_HELD_SHARE, _HELD_MOST = 8, 4
# What the rows after an answer's end weigh: nobody reads them, but a second scan compares them.
_AFTER_END = 0.25


@dataclass(frozen=True)
class Example:
    """A batch as the model is called with it.

    `mask` (of the rows of the logits) says which rows count; None for all of them. The others weigh `outside` in the
    training, and nothing where it is measured. `targets` are int64 labels in the
    shape of the mask, IGNORED where there is none; None without labels.
    """

    inputs: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()
    mask: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    outside: float = 0.0


def divided(batches: Sequence[Batch]) -> tuple[list[int], list[int]]:
    """Return the numbers of the batches to train on, and of those that are held back: evenly spread, none of a single
    one."""
    count = len(batches)
    held = min(_HELD_MOST, max(1, count // _HELD_SHARE)) if count > 1 else 0
    apart = {((2 * i + 1) * count) // (2 * held) for i in range(held)}
    return [i for i in range(count) if i not in apart], sorted(apart)


def first_batches(subject: Subject, most: int) -> list[Batch]:
    """Return at most `most` batches of a subject. Raises UsageError where it has none."""
    batches = list(islice(subject.batches, most))
    if not batches:
        raise UsageError(f"{subject.name} has no inputs to train on; give a file that holds some.")
    return batches


@dataclass(frozen=True)
class Maker:
    """Makes examples of batches: `labels` are the texts beside the inputs of all batches in order, None without."""

    subject: Subject
    teacher: nn.Module
    labels: Sequence[str] | None = None

    def all(self, batches: Sequence[Batch]) -> Iterator[Example]:
        """Yield an example for each batch. Raises UsageError where labels are no answers to this kind of model."""
        at = 0
        for batch in batches:
            part = None if self.labels is None else self.labels[at : at + batch.samples]
            at += batch.samples
            yield self._example(batch, part)

    def _example(self, batch: Batch, labels: Sequence[str] | None) -> Example:
        generation = self.subject.generation
        if (
            generation is not None
            and generation.encoder_decoder
            and not {"labels", "decoder_input_ids"} & {*batch.inputs}
        ):
            return self._two_sided(batch, labels, generation)
        if labels is not None and generation is not None:
            return self._continued(batch, labels, generation)
        if labels is not None:
            return dataclasses.replace(_plain(batch), targets=self._classes(labels))
        return _plain(batch)

    def _two_sided(self, batch: Batch, labels: Sequence[str] | None, generation: Generation) -> Example:
        """Let the decoder read the labels, or what the original answers by greedy search."""
        if labels is None:
            model: Any = self.teacher
            with quiet(), torch.no_grad():
                made = model.generate(**batch.inputs, **generation.strategies["greedy"])
            ids = getattr(made, "sequences", made)
            known = _until_end(ids[:, 1:], generation.ends)
        else:
            target, known = self._tokens(labels, generation)
            start = torch.full_like(target[:, :1], self._start(generation))
            ids = torch.cat([start, target], 1)
        inputs = {**batch.inputs, "decoder_input_ids": ids[:, :-1]}
        targets = None if labels is None else ids[:, 1:].masked_fill(~known, IGNORED)
        return Example(inputs, batch.positional, known, targets, outside=_AFTER_END)

    def _continued(self, batch: Batch, labels: Sequence[str], generation: Generation) -> Example:
        """Append the labels to the inputs of a decoder; each of their tokens is the target of the one before."""
        target, known = self._tokens(labels, generation)
        ids = batch.inputs["input_ids"]
        mask = batch.inputs.get("attention_mask", torch.ones_like(ids))
        inputs = {**batch.inputs, "input_ids": torch.cat([ids, target], 1)}
        inputs["attention_mask"] = torch.cat([mask, known.to(mask.dtype)], 1)
        targets = torch.full_like(inputs["input_ids"], IGNORED)
        targets[:, ids.shape[1] - 1 : -1] = target.masked_fill(~known, IGNORED)
        return Example(inputs, batch.positional, inputs["attention_mask"].bool(), targets)

    def _tokens(self, labels: Sequence[str], generation: Generation) -> tuple[torch.Tensor, torch.Tensor]:
        """Return label tokens, each row closed by the end token, and which of them are no padding."""
        tokenizer = getattr(generation.decode, "tokenizer", None)
        if tokenizer is None:
            raise UsageError("labels need a tokenizer and the model has none; leave them out.")
        plain = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in labels]
        rows = [[*row, *generation.ends[:1]] for row in plain]
        longest = max(len(row) for row in rows)
        padding = generation.padding or 0
        place = device_of(self.teacher)
        ids = torch.tensor([row + [padding] * (longest - len(row)) for row in rows], device=place)
        lengths = torch.tensor([len(row) for row in rows], device=place)
        return ids, torch.arange(longest, device=place)[None] < lengths[:, None]

    def _start(self, generation: Generation) -> int:
        if generation.start is None:
            raise UsageError(
                "the model names no decoder_start_token_id, so labels cannot be fed to it; leave them out."
            )
        return generation.start

    def _classes(self, labels: Sequence[str]) -> torch.Tensor:
        """Return class numbers: labels are such numbers, or names in the config's label2id."""
        names = getattr(getattr(self.teacher, "config", None), "label2id", None) or {}
        numbers = [names.get(label, label) for label in labels]
        wrong = next((n for n in numbers if not isinstance(n, int) and not str(n).strip().isdigit()), None)
        if wrong is not None:
            raise UsageError(f"the label {wrong!r} is no class of the model; give its numbers, or names in label2id.")
        return torch.tensor([int(n) for n in numbers], device=device_of(self.teacher))


def _plain(batch: Batch) -> Example:
    """Return the batch as it is: rows count that are no padding, by its labels or else its mask."""
    labels, mask = batch.inputs.get("labels"), batch.inputs.get("attention_mask")
    if isinstance(labels, torch.Tensor) and labels.dim() == 2 and "decoder_input_ids" not in batch.inputs:
        if isinstance(mask, torch.Tensor) and mask.shape == labels.shape:
            return Example(dict(batch.inputs), batch.positional, mask.bool())
        return Example(dict(batch.inputs), batch.positional, labels != IGNORED)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and "decoder_input_ids" not in batch.inputs:
        return Example(dict(batch.inputs), batch.positional, mask.bool())
    return Example(dict(batch.inputs), batch.positional)


def _until_end(targets: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Return which tokens of generated answers belong to them: all until the first end, that included."""
    is_end = torch.isin(targets, torch.tensor(list(ends), device=targets.device, dtype=targets.dtype))
    return (is_end.cumsum(1) - is_end.long()) == 0
