from __future__ import annotations

import itertools

import pytest

from overflow_lab.remedies.islands.ddmin import ddmin


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("needed", [{3}, {0, 7}, {1, 2, 6}, set(range(8))])
def test_what_is_needed_remains_and_nothing_else(needed: set[int], tight: bool) -> None:
    assert ddmin(range(8), lambda chosen: needed <= chosen, tight=tight) == needed


@pytest.mark.parametrize("tight", [False, True])
def test_of_alternatives_one_remains_that_is_minimal(tight: bool) -> None:
    alternatives = [frozenset({0, 5}), frozenset({1, 2, 3})]

    def passes(chosen: frozenset[int]) -> bool:
        return any(a <= chosen for a in alternatives)

    found = ddmin(range(7), passes, tight=tight)
    assert passes(found)
    assert not any(passes(found - {item}) for item in found)


def test_every_family_of_needed_items_is_found_exactly() -> None:
    for size in range(1, 6):
        for needed in itertools.combinations(range(5), size):
            assert ddmin(range(5), frozenset(needed).issubset) == frozenset(needed)


def test_one_of_many_takes_few_trials() -> None:
    trials: list[frozenset[int]] = []

    def passes(chosen: frozenset[int]) -> bool:
        trials.append(chosen)
        return 200 in chosen

    assert ddmin(range(256), passes) == {200}
    assert len(trials) <= 2 * 8  # two for each halving


def test_a_tight_set_takes_one_trial_for_each_item() -> None:
    trials: list[frozenset[int]] = []

    def passes(chosen: frozenset[int]) -> bool:
        trials.append(chosen)
        return len(chosen) == 20

    assert ddmin(range(20), passes, tight=True) == frozenset(range(20))
    assert len(trials) == 20


def test_a_single_item_is_not_tried_without_itself() -> None:
    def passes(chosen: frozenset[int]) -> bool:
        raise AssertionError("nothing is to be tried")

    assert ddmin([4], passes) == {4}
