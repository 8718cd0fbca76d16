"""Torch's own operator samples through the shadow run: every tenth operator here, all of them for the page."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("expecttest", reason="torch's operator database imports it")

from tests.operations_table import PAGE, Outcome, operators, page, survey


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return survey(operators()[::10])


@pytest.mark.parametrize("status", ["crash", "changed", "wrong"])
def test_no_operator_crashes_is_changed_or_has_a_wrong_shadow(outcomes: list[Outcome], status: str) -> None:
    assert {one.name: one.why[status] for one in outcomes if one.counts[status]} == {}


def test_nearly_all_operators_with_values_are_replayed(outcomes: list[Outcome]) -> None:
    with_values = [one for one in outcomes if one.status not in ("no values", "raises")]
    blind = [one.name for one in with_values if one.status == "blind spot"]
    assert len(with_values) > 100
    assert len(blind) <= 0.03 * len(with_values)


def test_a_blind_spot_has_its_reason(outcomes: list[Outcome]) -> None:
    assert all(one.why[one.status] for one in outcomes if one.status == "blind spot")


def test_the_page_counts_every_operator_once(outcomes: list[Outcome]) -> None:
    counts = re.findall(r"\| (\d+) \| (\d+) \|$", page(outcomes), flags=re.MULTILINE)
    assert [sum(map(int, column)) for column in zip(*counts, strict=True)] == [len(outcomes) // 2] * 2


def test_the_page_in_the_documentation_lists_no_fault() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for title in ("Unequal", "Changed", "Crashes"):
        assert f"## {title}\n\nNone." in text
