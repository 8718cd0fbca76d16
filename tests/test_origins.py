"""Where a fault began, on recordings written by hand."""

from __future__ import annotations

import math

import pytest

from overflow_lab.analysis.index import bits, index, role
from overflow_lab.analysis.origins import (
    Event,
    bad_rows,
    blame,
    first_error,
    first_flushed,
    fresh_rows,
    largest_error,
)
from tests.recordings_by_hand import error, recording, seen

INF, NAN = math.inf, math.nan
CLASSES = {"": "Model", "blocks": "ModuleList", "blocks.0": "Block", "blocks.0.fc": "Linear", "out": "Linear"}


def test_a_bad_output_is_the_modules_own_and_a_bad_input_is_its_callers() -> None:
    found = index(recording(seen("float16", "blocks.0", "output", 0, [1.0]), classes=CLASSES))
    assert blame(found, Event(0, "blocks.0.fc", "output")).module == "blocks.0.fc"
    assert blame(found, Event(0, "blocks.0.fc", "input[0]")).module == "blocks.0"
    assert blame(found, Event(0, "blocks.0", "input['x']")).module == ""  # a ModuleList is never called
    assert blame(found, Event(0, "", "input[0]")).module == ""


def bad(*pairs: tuple[list[float], list[float]]) -> list[int]:
    """Which of the sites, given as (float32, float16), are bad."""
    rows = [seen("float32", "a", f"output[{i}]", i, wide) for i, (wide, _) in enumerate(pairs)]
    rows += [seen("float16", "a", f"output[{i}]", i, low) for i, (_, low) in enumerate(pairs)]
    return [row.order for row in bad_rows(index(recording(*rows)), "float16")]


def test_a_deliberate_mask_is_no_fault_and_a_new_infinity_is() -> None:
    mask = [-INF, -INF, 0.0, 0.0]
    assert bad((mask, mask), ([1.0, 2.0], [1.0, INF]), ([1.0], [1.0])) == [1]


def test_nan_where_float32_has_a_mask_is_a_fault() -> None:
    assert bad(([-INF, -INF, 0.0], [NAN, NAN, 0.0])) == [0]


def test_twice_as_many_infinities_as_meant_are_a_fault() -> None:
    assert bad(([-INF, 0.0, 0.0, 0.0], [-INF, INF, 0.0, 0.0])) == [0]


def test_a_shorter_generation_has_a_larger_share_of_mask_and_no_fault() -> None:
    prompt = [-INF, 0.0, 0.0, 0.0]
    assert bad((prompt + [0.0] * 40, prompt)) == []


def test_a_site_that_float32_does_not_have_is_bad_when_it_is_not_finite() -> None:
    found = index(recording(seen("float16", "a", "output", 0, [INF])))
    assert [row.module for row in bad_rows(found, "float16")] == ["a"]


def test_carriers_are_not_makers() -> None:
    rows = [
        seen("float16", "blocks.0.fc", "input[0]", 1, [1.0]),
        seen("float16", "blocks.0.fc", "output", 2, [INF]),
        seen("float16", "blocks.0", "output", 3, [INF]),
        seen("float16", "out", "input[0]", 4, [INF]),
        seen("float16", "out", "output", 5, [NAN]),
        seen("float16", "", "output", 6, [NAN]),
    ]
    found = index(recording(*rows, classes=CLASSES))
    assert [row.module for row in fresh_rows(found, bad_rows(found, "float16"))] == ["blocks.0.fc"]


def test_a_second_maker_with_good_inputs_is_found_too() -> None:
    rows = [
        seen("float16", "blocks.0.fc", "output", 1, [INF]),
        seen("float16", "out", "input[0]", 2, [1.0]),
        seen("float16", "out", "output", 3, [INF]),
    ]
    found = index(recording(*rows, classes=CLASSES))
    assert [row.module for row in fresh_rows(found, bad_rows(found, "float16"))] == ["blocks.0.fc", "out"]


def test_errors_are_looked_for_in_time_and_by_size() -> None:
    found = index(
        recording(error("c", "output", 9, 0.5), error("a", "output", 3, 0.02), error("a", "input[0]", 1, 0.001))
    )
    first, largest = first_error(found, "float16", 0.01), largest_error(found, "float16")
    assert first is not None
    assert largest is not None
    assert (first.module, largest.module) == ("a", "c")
    assert first_error(found, "float16", 0.9) is None
    assert largest_error(found, "bfloat16") is None


@pytest.mark.parametrize(
    ("wide", "low", "flushed"),
    [
        ([1e-9, 2e-9, 3e-9, 1.0], [0.0, 0.0, 0.0, 1.0], True),
        ([1e-9, 2e-9, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], False),  # half of it: a note at most
        ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0], False),  # as in float32
        ([], [], False),
    ],
)
def test_a_site_is_flushed_when_most_of_it_became_zero(wide: list[float], low: list[float], flushed: bool) -> None:
    rows = [seen("float32", "a", "output", 0, wide), seen("float16", "a", "output", 0, low)]
    assert (first_flushed(index(recording(*rows)), "float16") is not None) is flushed


def test_effective_bits() -> None:
    assert bits(2.0**-8) == 8.0
    assert bits(0.0) == INF
    assert bits(INF) == -INF
    assert bits(None) is None
    assert bits(NAN) is None


def test_ports_have_roles_by_their_names() -> None:
    assert role("input['output']") == "input"
    assert role("output['input_ids']") == "output"
