"""What `generate` answers in each precision, token by token beside float32's answer."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch

from overflow_lab.capture.margins import HIGHEST, LOWEST
from overflow_lab.capture.precisions import device_of
from overflow_lab.recording import AnswerCountRow, AnswerRow
from overflow_lab.subjects import Batch, Generation

# So many answers of each precision and search have a row of their own, and of those beyond so many that differ.
MOST_ANSWERS, MOST_DIFFERING = 256, 64


@dataclass(frozen=True)
class Answers:
    """The generated tokens of one batch by one strategy, or the error that took their place."""

    tokens: tuple[tuple[int, ...], ...] = ()
    error: str | None = None


def answers_of(sequences: torch.Tensor, batch: Batch, generation: Generation) -> Answers:
    """Return the generated tokens of each input: prompt, start token and padding removed, the end token kept."""
    rows = sequences.tolist()
    return Answers(tuple(_trim(row[_before(rows, batch, generation) :], generation) for row in rows))


def _before(rows: list[list[int]], batch: Batch, generation: Generation) -> int:
    """Return how many tokens stand before the answers in what `generate` returns: the prompt, or a start token.

    Whisper's `generate` takes its start tokens away itself.
    """
    if not generation.encoder_decoder:
        prompt = batch.inputs.get("input_ids")
        return 0 if prompt is None else int(prompt.shape[1])
    return int(generation.start is None or all(row[:1] == [generation.start] for row in rows))


def _trim(tokens: Sequence[int], generation: Generation) -> tuple[int, ...]:
    """Cut an answer after its first end token, or before the padding behind it."""
    for index, token in enumerate(tokens):
        if token in generation.ends:
            return tuple(tokens[: index + 1])
    end = len(tokens)
    while end and tokens[end - 1] == generation.padding:
        end -= 1
    return tuple(tokens[:end])


def decoder_ids(model: Any, answers: Mapping[str, Answers], samples: int, generation: Generation) -> torch.Tensor:
    """Return float32's first answers as decoder inputs, so that the plain forward sees what generation sees.

    [inputs, tokens], on the model's device; without answers, one start token and one of padding for each input.
    """
    start = generation.start or getattr(model.config, "decoder_start_token_id", None) or 0
    padding = generation.padding or 0
    given = next(iter(answers.values()), Answers()).tokens or ((),) * max(samples, 1)
    width = max(2, *(len(answer) for answer in given)) - 1
    rows = [[start, *answer[:width], *[padding] * (width - len(answer))] for answer in given]
    return torch.tensor(rows, device=device_of(model))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first token that differs, None where the answers are the same."""
    if tuple(a) == tuple(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@dataclass(frozen=True)
class AnswerContext:
    """What identifies a set of answers: the precision, the strategy, the batch and its number."""

    precision: str
    strategy: str
    number: int
    batch: Batch


def answer_rows(
    context: AnswerContext,
    reference: Answers,
    low: Answers,
    generation: Generation,
    *,
    texts: bool,
    margins: Sequence[float | None] = (),
) -> list[AnswerRow]:
    """Return one row for each input; texts and prompts only where asked for, `margins` where they are known."""
    rows = [
        _row(
            context,
            sample,
            expected,
            low.tokens[sample] if sample < len(low.tokens) else None,
            low.error,
            generation if texts else None,
        )
        for sample, expected in enumerate(reference.tokens)
    ]
    return [dataclasses.replace(r, margin=m) for r, m in zip_longest(rows, margins)] if margins else rows


def _row(
    context: AnswerContext,
    sample: int,
    expected: tuple[int, ...],
    got: tuple[int, ...] | None,
    error: str | None,
    shown: Generation | None,
) -> AnswerRow:
    difference = None if got is None else first_difference(got, expected)
    decode = shown.decode if shown else None
    prompts = context.batch.texts if shown else ()
    return AnswerRow(
        precision=context.precision,
        strategy=context.strategy,
        batch=context.number,
        sample=sample,
        status="failed" if got is None else "same" if difference is None else "changed",
        tokens=len(got or ()),
        reference_tokens=len(expected),
        first_difference=difference,
        error=error,
        prompt=prompts[sample] if sample < len(prompts) else None,
        text=decode(got) if decode and got is not None else None,
        reference_text=decode(expected) if decode else None,
    )


@dataclass
class AnswerLimit:
    """Lets the first answers of each precision and search into the recording, and counts the rest.

    Beyond `most` only answers that differ from float32's are kept, `differing` of them.
    """

    most: int = MOST_ANSWERS
    differing: int = MOST_DIFFERING
    _seen: Counter[tuple[str, str]] = field(default_factory=Counter)
    _late: Counter[tuple[str, str]] = field(default_factory=Counter)

    def resume(self, rows: Iterable[AnswerRow | AnswerCountRow]) -> None:
        """Go on behind these rows."""
        for row in rows:
            if isinstance(row, AnswerCountRow):
                self._seen[row.precision, row.strategy] += row.total
            else:
                self._admit(row)

    def limited(self, rows: Sequence[AnswerRow]) -> list[AnswerRow | AnswerCountRow]:
        """Return the rows to write of one batch's: those that are kept, then a count of the others, if any."""
        kept: list[AnswerRow | AnswerCountRow] = []
        left: AnswerCountRow | None = None
        for row in rows:
            if self._admit(row):
                kept.append(row)
            else:
                left = _counted(row) if left is None else left + _counted(row)
        return kept if left is None else [*kept, left]

    def _admit(self, row: AnswerRow) -> bool:
        key = (row.precision, row.strategy)
        self._seen[key] += 1
        if self._seen[key] <= self.most:
            return True
        if row.status == "same" or self._late[key] >= self.differing:
            return False
        self._late[key] += 1
        return True


def _counted(row: AnswerRow) -> AnswerCountRow:
    margins = {} if row.margin is None or row.status != "changed" else {_exponent(row.margin): 1}
    return AnswerCountRow(row.precision, row.strategy, **{row.status: 1}, margins=margins)


def _exponent(margin: float) -> int:
    """Return floor(log2(margin)) within the limits that margins of decisions have."""
    return LOWEST if margin == 0 else min(max(math.frexp(margin)[1] - 1, LOWEST), HIGHEST)
