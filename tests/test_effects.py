"""What reaches the output, and when it is called wrong or imprecise."""

from __future__ import annotations

import dataclasses

import pytest

from overflow_lab.analysis.effects import effect, is_imprecise, is_wrong
from overflow_lab.analysis.results import Effect
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AnswerRow, AttributionRow, OutputRow
from overflow_lab.tolerances import tolerance
from tests.recordings_by_hand import recording

FLOAT16 = FORMATS["float16"]
LOGITS = OutputRow("float16", "output['logits']", 1000, 10, 4.0, 100.0, decisions=50, changed=5, kl_sum=2.0, kl_rows=40)
HIDDEN = OutputRow("float16", "output['hidden_states'][0]", 1000, 0, 81.0, 100.0)
INDICES = OutputRow("float16", "output[1]", 30, decisions=30, changed=3)
FLOATS = OutputRow("float16", "output[0]", 500, 0, 25.0, 100.0)


def answer(status: str) -> AnswerRow:
    return AnswerRow("float16", "beam", 0, 0, status, 3, 3)


def test_scores_are_judged_where_an_output_has_them_but_every_nan_counts() -> None:
    found = effect(recording(LOGITS, HIDDEN), "float16", FLOAT16)
    assert found.relative_error == pytest.approx(0.2)  # not the 0.9 of the hidden states
    assert found.nonfinite == pytest.approx(10 / 2000)
    assert found.changed_decisions == pytest.approx(0.1)
    assert found.kl == pytest.approx(2.0 / 40)


def test_indices_beside_floats_do_not_hide_the_error_of_the_floats() -> None:
    found = effect(recording(FLOATS, INDICES), "float16", FLOAT16)
    assert found.relative_error == pytest.approx(0.5)
    assert found.changed_decisions == pytest.approx(0.1)


def test_indices_beside_scores_count_as_decisions() -> None:
    found = effect(recording(LOGITS, INDICES), "float16", FLOAT16)
    assert found.changed_decisions == pytest.approx(8 / 80)
    assert found.relative_error == pytest.approx(0.2)


def test_other_precisions_are_not_mixed_in() -> None:
    assert effect(recording(LOGITS), "bfloat16", FLOAT16) == Effect()


def test_an_all_zero_output_is_right_when_it_is_all_zero() -> None:
    assert effect(recording(OutputRow("float16", "output", 10)), "float16", FLOAT16).relative_error is None
    wrong = effect(recording(OutputRow("float16", "output", 10, error_squares=1.0)), "float16", FLOAT16)
    assert wrong.relative_error == float("inf")


def test_decisions_that_float32_hardly_makes_are_near_ties() -> None:
    # Sixteen roundings of float16 are 2**-7: three of the five changes are below it, one is just there.
    row = dataclasses.replace(LOGITS, margins={-64: 1, -8: 2, -7: 1, 0: 1})
    found = effect(recording(row), "float16", FLOAT16)
    assert found.tied_decisions == pytest.approx(3 / 50)
    assert found.overruled_decisions == pytest.approx(2 / 50)


def test_answers_are_counted_by_status() -> None:
    found = effect(recording(*map(answer, ["same", "changed", "changed", "failed"])), "float16", FLOAT16)
    assert (found.answers, found.changed_answers, found.failed_answers) == (4, 2, 1)


@pytest.mark.parametrize(
    ("found", "wrong", "imprecise"),
    [
        (Effect(), False, False),
        (Effect(relative_error=0.9 * 2**-7), False, False),  # float16 rounds by 2**-11, sixteen of which are tolerated
        (Effect(relative_error=1.1 * 2**-7), True, True),
        (Effect(relative_error=0.05, noise_floor=0.01), False, False),  # the model's own conditioning
        (Effect(relative_error=0.3, noise_floor=0.3), True, True),  # more than a quarter is no noise
        (Effect(relative_error=0.9, noise_floor=0.3, conditioned=True), False, False),  # but that of decisions
        (Effect(relative_error=0.9, noise_floor=0.1, conditioned=True), True, True),
        (Effect(changed_decisions=0.5, conditioned=True), False, False),
        (Effect(evened_choices=0.75, conditioned=True), True, True),  # an even score is the format's doing
        (Effect(relative_error=0.001, evened_choices=0.75), True, True),
        (Effect(relative_error=0.001, evened_choices=0.25), False, False),
        (Effect(nonfinite=1e-6), True, False),
        (Effect(changed_decisions=0.04), False, False),
        (Effect(changed_decisions=0.06), True, False),
        (Effect(changed_decisions=0.25), True, True),
        (Effect(answers=4, changed_answers=1), False, False),
        (Effect(answers=4, changed_answers=2), True, True),
        (Effect(answers=8, failed_answers=1), True, False),
        (Effect(answers=8, failed_answers=3), True, True),
    ],
)
def test_thresholds(found: Effect, wrong: bool, imprecise: bool) -> None:
    assert (is_wrong(found, FLOAT16), is_imprecise(found, FLOAT16)) == (wrong, imprecise)


def test_the_tolerance_is_sixteen_roundings_of_the_format() -> None:
    assert tolerance(FORMATS["float16"]) == 16 * 2.0**-11
    assert tolerance(FORMATS["bfloat16"]) == 16 * 2.0**-8


def test_few_rows_do_not_tell_whether_rounding_chooses() -> None:
    two = OutputRow("float16", "output", 8, ranked=2, evened=2)
    assert effect(recording(two), "float16", FLOAT16).evened_choices == 0.0
    assert effect(recording(two + two), "float16", FLOAT16).evened_choices == 1.0


def blamed(metric: str, total: float, noise: int | None) -> AttributionRow:
    return AttributionRow("float16", metric, total, "router", "aten.topk", 0, 0.9, 12, noise=noise)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([], False),
        ([blamed("decisions", 60.0, 10)], True),
        ([blamed("decisions", 61.0, 10)], False),  # more than six times what one rounding of the weights changes
        ([blamed("decisions", 1.0, 0)], False),
        ([blamed("decisions", 1.0, None)], False),
        ([blamed("relative", 0.01, None)], False),  # the values themselves are off
        ([blamed("decisions", 1.0, 1), blamed("relative", 0.3, None)], False),
    ],
)
def test_decisions_are_judged_against_those_that_noise_changes(rows: list[AttributionRow], expected: bool) -> None:
    assert effect(recording(*rows), "float16", FLOAT16).conditioned is expected
    assert not effect(recording(*rows), "bfloat16", FLOAT16).conditioned
