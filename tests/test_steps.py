"""The steps of `generate`: what is noted of the logits, against `generate`'s own; and that nothing stays behind."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

import overflow_lab
from overflow_lab.analysis.steps import steps
from overflow_lab.capture.answers import AnswerContext
from overflow_lab.capture.steps import StepLog, Steps, step_rows
from overflow_lab.recording import AnswerRow, StepRow
from overflow_lab.scan import Scan
from overflow_lab.subjects import Batch
from tests.recordings_by_hand import recording
from tests.tiny_models import build

PROMPT = torch.tensor([[1, 5, 9, 11], [1, 7, 8, 20]])


@pytest.fixture(scope="module")
def scan() -> Scan:
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    return overflow_lab.scan(
        build("llama").eval(), inputs, precisions=["bfloat16"], generate=True, max_new_tokens=6, level="module"
    )


def _greedy(dtype: torch.dtype) -> Any:
    model = build("llama").eval().to(dtype)
    options = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **options)


def test_each_step_of_a_greedy_search_has_generates_own_logits(scan: Scan) -> None:
    exact, low = _greedy(torch.float32), _greedy(torch.bfloat16)
    frame = steps(scan.recording)
    frame = frame[frame["run"] == "greedy"]
    for name, result in (("float32", exact), ("bfloat16", low)):
        mine = frame[frame["precision"] == name].set_index(["step", "input"])
        assert len(mine) == 2 * len(result.logits)
        for step, logits in enumerate(result.logits):
            for number in range(2):
                assert mine.loc[(step, number), "absmax"] == pytest.approx(
                    float(logits[number].float().abs().max()), rel=1e-3
                )
    same = [int((a != b).float().argmax()) if bool((a != b).any()) else 99 for a, b in _tokens(exact, low)]
    mine = frame[frame["precision"] == "bfloat16"].set_index(["step", "input"])
    for step, (a, b) in enumerate(zip(exact.logits, low.logits, strict=False)):
        for number in range(2):
            error = float((a[number] - b[number].float()).norm() / a[number].norm())
            found = mine.loc[(step, number), "error"]
            assert found == pytest.approx(error, rel=2e-3) if step <= same[number] else torch.isnan(torch.tensor(found))


def _tokens(exact: Any, low: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(a[PROMPT.shape[1] :], b[PROMPT.shape[1] :]) for a, b in zip(exact.sequences, low.sequences, strict=True)]


def test_a_beam_search_has_a_row_for_each_beam(scan: Scan) -> None:
    rows = [row for row in scan.recording.of(StepRow) if row.run == "beam"]
    assert {row.precision for row in rows} == {"float32", "bfloat16"}
    assert {(row.beams, len(row.peaks), len(row.bad)) for row in rows} == {(4, 8, 8)}
    assert [row.call for row in rows if row.precision == "float32"] == list(range(6))
    assert all(row.errors == (None,) * 8 for row in rows if row.precision == "float32")
    first = next(row for row in rows if row.precision == "bfloat16")
    assert all(error is not None and 0 < error < 0.1 for error in first.errors)


def test_from_another_token_on_nothing_is_compared_for_that_input_and_its_beams() -> None:
    logits = torch.arange(40.0).reshape(4, 10)
    base = _log([[3, 3, 4, 4], [5, 6, 7, 8], [1, 1, 1, 1]], logits)
    low = _log([[3, 3, 4, 4], [5, 9, 7, 8], [1, 1, 1, 1]], logits * 1.5)
    context = AnswerContext("float16", "beam", 2, Batch(samples=2))
    rows = step_rows(context, low, base)
    assert [row.errors for row in rows] == [(0.5,) * 4, (None, None, 0.5, 0.5), (None, None, 0.5, 0.5)]
    assert [(row.batch, row.call, row.beams) for row in rows] == [(2, 0, 2), (2, 1, 2), (2, 2, 2)]
    assert rows[0].peaks == (13.5, 28.5, 43.5, 58.5)


def test_nan_and_inf_are_counted_and_compared_around() -> None:
    base = _log([[3]], torch.tensor([[3.0, 4.0, 5.0]]))
    low = _log([[3]], torch.tensor([[3.0, float("nan"), float("inf")]]))
    (row,) = step_rows(AnswerContext("float16", "greedy", 0, Batch(samples=1)), low, base)
    assert (row.peaks, row.bad, row.errors) == ((3.0,), (2,), (0.0,))
    lost = _log([[3]], torch.full((1, 3), float("nan")))
    (row,) = step_rows(AnswerContext("float16", "greedy", 0, Batch(samples=1)), lost, base)
    assert (row.peaks, row.bad, row.errors) == ((0.0,), (3,), (None,))


def test_longer_than_float32_is_noted_and_not_compared() -> None:
    logits = torch.ones(1, 3)
    rows = step_rows(AnswerContext("a", "greedy", 0, Batch()), _log([[1], [2]], logits), _log([[1]], logits))
    assert [row.errors for row in rows] == [(0.0,), (None,)]


def _log(tokens: list[list[int]], logits: torch.Tensor) -> StepLog:
    """Return the log of a model that was given these tokens, and gave the same logits each time."""

    class Output:
        def __init__(self) -> None:
            self.logits = logits[:, None]

    class Model(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Output:
            return Output()

    model = Model()
    with Steps(model) as watched:
        for row in tokens:
            model(input_ids=torch.tensor(row)[:, None])
    return watched.log


def test_a_large_vocabulary_is_compared_by_a_sample_and_its_peak_is_of_all() -> None:
    logits = torch.zeros(1, 50_000)
    logits[0, 49_999] = 7.0
    log = _log([[1]], logits)
    assert log.samples[0].shape[1] <= 4096
    assert float(log.facts[0][0, 0]) == 7.0
    assert log.nbytes < 50_000


def test_no_hook_is_left_and_what_cannot_be_noted_does_not_stop_the_model() -> None:
    class Odd:
        @property
        def logits(self) -> Any:
            raise RuntimeError("not now")

    class Model(torch.nn.Module):
        def forward(self) -> Any:
            return Odd()

    model = Model()
    before = copy.copy(model.__dict__)
    with Steps(model) as watched:
        assert isinstance(model(), Odd)
    assert watched.log.facts == []
    assert model.__dict__.keys() == before.keys()
    assert not model._forward_hooks
    with pytest.raises(ZeroDivisionError), Steps(model):
        raise ZeroDivisionError
    assert not model._forward_hooks


def test_the_table_joins_where_answers_part() -> None:
    row = StepRow("float16", "beam", 1, 0, 2, (1.0, 2.0, 3.0, 4.0), (0, 0, 0, 5), (0.25, None, 0.5, None))
    answer = AnswerRow("float16", "beam", 1, 1, "changed", 3, 3, first_difference=2)
    frame = steps(recording(row, answer))
    assert list(zip(frame["input"], frame["beam"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert frame["bits"].tolist()[0::2] == [2.0, 1.0]
    assert frame["parts_at"].isna().tolist() == [True, True, False, False]
    assert steps(recording()).empty


def test_old_recordings_without_steps_are_read_and_drawn(scan: Scan) -> None:
    old = dataclasses.replace(
        scan.recording, rows=tuple(row for row in scan.recording.rows if not isinstance(row, StepRow))
    )
    assert 'id="generation"' not in overflow_lab.report(old)
    assert 'id="generation"' in overflow_lab.report(scan.recording)
    assert 'id="answers"' in overflow_lab.report(old)
