"""Verdicts and advice on recordings written by hand, and numbers as they are said."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overflow_lab
from overflow_lab.analysis import analyze
from overflow_lab.analysis.numbers import module_name, number, percent
from overflow_lab.analysis.results import Diagnosis, Verdict
from overflow_lab.recording import AnswerRow, CastRow, FailureRow, OutputRow, RunRow
from tests.recordings_by_hand import recording, seen

FAILURE = FailureRow("float16", "beam", 0, "a", "RuntimeError: on purpose")


def test_nothing_seen_is_nothing_said() -> None:
    assert analyze(recording(ran=False)).verdicts == {}
    assert analyze(recording(RunRow("float16", "forward", 0, 0, 0), ran=False)).verdicts == {}


def test_what_was_seen_before_an_interruption_is_said() -> None:
    bad = seen("float16", "a", "output", 0, [math.inf])
    found = analyze(recording(bad, ran=False)).verdicts["float16"]
    assert (found.verdict, found.origin.module if found.origin else None) == ("overflow", "a")


def test_an_exception_is_a_fault_with_its_message() -> None:
    found = analyze(recording(FAILURE, FAILURE)).verdicts["float16"]
    assert (found.verdict, found.severity, found.mechanism) == ("unsupported", "error", "raises")
    assert "RuntimeError: on purpose" in found.reason


def test_a_bad_value_before_an_exception_is_the_cause() -> None:
    found = analyze(recording(FAILURE, seen("float16", "a", "output", 0, [math.nan]))).verdicts["float16"]
    assert (found.verdict, found.severity) == ("nan", "error")


def test_a_flushed_weight_is_a_note_as_long_as_the_output_is_right() -> None:
    cast = CastRow(
        "float16", "a.w", "a", "parameter", "float32", "float16", 10, to_zero=5, absmax=1e-8, energy_lost=0.5
    )
    right = OutputRow("float16", "output", 10, 0, 0.0, 1.0)
    wrong = OutputRow("float16", "output", 10, 0, 0.5, 1.0)
    fine, broken = (analyze(recording(cast, output)) for output in (right, wrong))
    assert fine.verdicts["float16"].verdict == "ok"
    assert [f.mechanism for f in fine.findings] == ["cast-parameter"]
    assert broken.verdicts["float16"].severity == "error"


def test_the_sentence_of_a_healthy_precision_counts_inputs_and_answers() -> None:
    answers = [AnswerRow("float16", "beam", 0, i, "same", 3, 3) for i in range(3)]
    output = OutputRow("float16", "output", 10, 0, 1e-8, 1.0)
    reason = analyze(recording(output, *answers)).verdicts["float16"].reason
    assert reason == (
        "everything is finite on 2 inputs, the output is within 0.01% of float32's, 3 of 3 answers are the same."
    )


def test_runs_of_several_chunks_are_counted_together() -> None:
    more = RunRow("float16", "forward", 3, 5, 0)
    assert "on 7 inputs" in analyze(recording(more)).verdicts["float16"].reason


def test_the_worst_severity_of_a_diagnosis() -> None:
    one = {name: Verdict(name, "overflow", name, "") for name in ("none", "error", "warning")}
    assert Diagnosis(one).worst == "error"
    assert Diagnosis({}).worst == "none"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((547171.25, "547,171"), (65504.0, "65,504"), (0.00031, "0.00031"), (3.2e9, "3.2e+09"), (6e-8, "6e-08")),
        *((0.0, "0"), (None, "?"), (math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf"), (-1234.5, "-1,234")),
    ],
)
def test_numbers_are_said_as_a_person_writes_them(value: float | None, text: str) -> None:
    assert number(value) == text


@given(st.floats(-1e300, 1e300))
def test_a_number_that_is_said_is_the_number_to_a_thousandth(value: float) -> None:
    assert float(number(value).replace(",", "")) == pytest.approx(value, rel=6e-3)


@given(st.floats(0.0, 1.0))
def test_zero_percent_is_said_only_of_zero(share: float) -> None:
    assert (percent(share) == "0%") is (share == 0.0)


def test_the_root_has_no_path() -> None:
    assert (module_name(""), module_name("a.b")) == ("the model itself", "`a.b`")


def test_an_output_that_nobody_understands_is_not_called_right() -> None:
    class Box:
        def __init__(self, value: torch.Tensor) -> None:
            self.value = value

    class Boxed(nn.Linear):
        def forward(self, input: torch.Tensor) -> Box:  # type: ignore[override]
            return Box(super().forward(input))

    found = overflow_lab.scan(Boxed(4, 4).eval(), {"input": torch.ones(2, 4)}, precisions=("float16",))
    assert "nothing of its output could be compared" in found.verdicts["float16"].reason


def test_a_running_sum_is_said_to_lose_little_by_little() -> None:
    class Counter(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x[0])
            for row in x:
                total = total + row
            return total

    found = overflow_lab.scan(Counter(), {"x": torch.full((600, 8), 1.1)}, precisions=("bfloat16",))
    verdict = found.verdicts["bfloat16"]
    assert verdict.mechanism == "swamped-add"
    assert "little by little, over 600 calls" in verdict.reason
