"""Generated answers: where they end, where they part."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from overflow_lab.analysis.effects import effect
from overflow_lab.capture.answers import (
    AnswerContext,
    AnswerLimit,
    Answers,
    answer_rows,
    answers_of,
    first_difference,
)
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AnswerCountRow, AnswerRow, Header, Recording
from overflow_lab.subjects import Batch, Generation

TOKENS = st.lists(st.integers(0, 3), max_size=8)
SEQ2SEQ = Generation({}, encoder_decoder=True, padding=0, ends=(1,), decode=lambda ids: " ".join(map(str, ids)))
DECODER = Generation({}, padding=2, ends=(2,))


@given(TOKENS, TOKENS)
def test_answers_are_alike_up_to_the_first_difference(a: list[int], b: list[int]) -> None:
    index = first_difference(a, b)
    if index is None:
        assert a == b
    else:
        assert a[:index] == b[:index]
        assert a[index : index + 1] != b[index : index + 1]


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ([0, 5, 6, 1, 0, 0], (5, 6, 1)),  # the start token and what follows the end are no part of it
        ([0, 5, 6, 0, 0, 0], (5, 6)),  # cut off before an end: padding alone goes
        ([0, 0, 0, 0, 0, 0], ()),
        ([0, 5, 0, 6, 1, 1], (5, 0, 6, 1)),
    ],
)
def test_an_answer_of_an_encoder_decoder(sequence: list[int], expected: tuple[int, ...]) -> None:
    assert answers_of(torch.tensor([sequence]), Batch(), SEQ2SEQ).tokens == (expected,)


def test_an_answer_of_a_decoder_comes_after_its_prompt() -> None:
    batch = Batch({"input_ids": torch.tensor([[2, 7], [8, 9]])})
    found = answers_of(torch.tensor([[2, 7, 3, 2, 2], [8, 9, 4, 5, 6]]), batch, DECODER)
    assert found.tokens == ((3, 2), (4, 5, 6))


def rows(low: Answers, *, texts: bool = False) -> list[tuple[str, int | None, int, int]]:
    reference = Answers(((5, 6, 1), (7, 1)))
    context = AnswerContext("float16", "beam", 3, Batch(samples=2, texts=("one", "two")))
    made = answer_rows(context, reference, low, SEQ2SEQ, texts=texts)
    assert [(row.batch, row.sample, row.strategy) for row in made] == [(3, 0, "beam"), (3, 1, "beam")]
    assert all((row.prompt is not None) is texts for row in made)
    assert all((row.reference_text is not None) is texts for row in made)
    return [(row.status, row.first_difference, row.tokens, row.reference_tokens) for row in made]


def test_answers_are_the_same_changed_or_failed() -> None:
    assert rows(Answers(((5, 6, 1), (7, 3, 3)))) == [("same", None, 3, 3), ("changed", 1, 3, 2)]
    assert rows(Answers(error="RuntimeError: nan")) == [("failed", None, 0, 3), ("failed", None, 0, 2)]
    assert rows(Answers(((5, 6, 1),)), texts=True) == [("same", None, 3, 3), ("failed", None, 0, 2)]


def test_texts_are_stored_on_request_only() -> None:
    context = AnswerContext("float16", "greedy", 0, Batch(texts=("secret",)))
    for texts in (False, True):
        (row,) = answer_rows(context, Answers(((5,),)), Answers(((6,),)), SEQ2SEQ, texts=texts)
        found = (row.prompt, row.text, row.reference_text)
        assert found == (("secret", "6", "5") if texts else (None, None, None))


# ---- more answers than are kept ----

ANSWER = st.tuples(
    st.sampled_from(["same", "changed", "failed"]), st.sampled_from([None, 0.0, 1e-9, 0.01, 0.02, 0.5, 3.0])
)


def answer(batch: int, status: str, margin: float | None) -> AnswerRow:
    return AnswerRow("float16", "greedy", batch, 0, status, 3, 3, margin=margin if status == "changed" else None)


def recorded(rows: list[AnswerRow | AnswerCountRow]) -> Recording:
    return Recording(Header(1, "0", "", {}, ("float32", "float16")), tuple(rows))


@given(st.lists(ANSWER, max_size=40), st.integers(0, 40))
def test_what_reached_the_output_is_told_of_all_answers_though_few_are_kept(
    given_answers: list[tuple[str, float | None]], stopped: int
) -> None:
    rows = [answer(number, *one) for number, one in enumerate(given_answers)]
    first, second = AnswerLimit(most=5, differing=3), AnswerLimit(most=5, differing=3)
    made = [kept for row in rows[:stopped] for kept in first.limited([row])]
    second.resume(made)
    made += [kept for row in rows[stopped:] for kept in second.limited([row])]
    fmt = FORMATS["float16"]
    assert effect(recorded(made), "float16", fmt) == effect(recorded(list(rows)), "float16", fmt)
    kept = [row for row in made if isinstance(row, AnswerRow)]
    assert kept[:5] == rows[:5]
    assert len(kept) <= 8
    assert all(row.status != "same" for row in kept[5:])


def test_a_batch_has_one_count_at_most() -> None:
    rows = [answer(0, "same", None) for _ in range(9)]
    *kept, count = AnswerLimit(most=4).limited(rows)
    assert kept == rows[:4]
    assert count == AnswerCountRow("float16", "greedy", same=5)
