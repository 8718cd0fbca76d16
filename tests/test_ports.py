"""Ports: what stands at each, measured and merged, however often it is settled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overflow_lab.capture import ports as ports_module
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.statistics import Tape
from overflow_lab.recording import Moment, RangeRow

CPU = torch.device("cpu")
PORTS = ["input[0]", "output"]
SIGHTINGS = st.lists(
    st.tuples(
        st.sampled_from(["", "a", "a.b"]),
        st.sampled_from(PORTS),
        st.lists(st.sampled_from([0.0, 1.5, -3.0, 1e-40, float("inf"), float("nan")]), max_size=4),
    ),
    max_size=25,
)


def new() -> Ports:
    return Ports("float16", Tape(CPU, kernel="eager"))


def by_site(rows: list[RangeRow]) -> dict[tuple[str, str], RangeRow]:
    return {(row.module, row.port): row for row in rows}


@settings(max_examples=40, deadline=None)
@given(SIGHTINGS, st.sets(st.integers(0, 24)))
def test_settling_and_writing_at_any_time_gives_the_same_rows(
    seen: list[tuple[str, str, list[float]]], pauses: set[int]
) -> None:
    whole, parts = new(), new()
    merged: dict[tuple[str, str], RangeRow] = {}
    for number, (module, port, values) in enumerate(seen):
        for ports in (whole, parts):
            ports.begin("forward", number)
            ports.see(module, port, torch.tensor(values), 0)
        if number in pauses:
            parts.settle()
            for site, row in by_site(parts.rows()).items():
                merged[site] = merged[site] + row if site in merged else row
    whole.settle()
    parts.settle()
    for site, row in by_site(parts.rows()).items():
        merged[site] = merged[site] + row if site in merged else row
    assert merged == by_site(whole.rows())


@settings(max_examples=40, deadline=None)
@given(SIGHTINGS)
def test_counts_calls_and_first_bad_moments_are_those_of_a_plain_loop(seen: list[tuple[str, str, list[float]]]) -> None:
    ports = new()
    values: dict[tuple[str, str], list[float]] = {}
    calls: dict[tuple[str, str], int] = {}
    bad: dict[tuple[str, str], int] = {}
    for clock, (module, port, elements) in enumerate(seen):
        ports.see(module, port, torch.tensor(elements), 0)
        values.setdefault((module, port), []).extend(elements)
        calls[module, port] = calls.get((module, port), 0) + 1
        if not np.isfinite(elements).all():
            bad.setdefault((module, port), clock)
    ports.settle()
    rows = by_site(ports.rows())
    assert {site: row.calls for site, row in rows.items()} == calls
    assert {site: row.range.count for site, row in rows.items()} == {site: len(v) for site, v in values.items()}
    assert {site: row.range.nan for site, row in rows.items()} == {s: int(np.isnan(v).sum()) for s, v in values.items()}
    assert {site: row.first_bad.clock for site, row in rows.items() if row.first_bad} == bad


def test_a_moment_names_the_run_the_batch_and_the_call() -> None:
    ports = new()
    ports.begin("beam", 7)
    ports.see("a", "output", torch.ones(2), 0)
    ports.see("a", "output", torch.tensor([float("inf")]), 3)
    ports.settle()
    (row,) = ports.rows()
    assert row.first_bad == Moment(1, "beam", 7, 3)
    assert (row.order, row.calls, row.dtype) == (0, 2, "float32")


def test_a_long_run_is_settled_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports_module, "MOST_ROWS", 4)
    ports = new()
    numbers = [ports.see("a", "output", torch.full((1,), float(i)), i) for i in range(10)]
    assert len(ports.tape) <= 4
    assert len(set(numbers)) == 10
    ports.settle()
    (row,) = ports.rows()
    assert (row.range.count, row.range.sum, row.range.max) == (10, 45.0, 9.0)


def test_the_same_unchanged_tensor_has_one_number_and_counts_at_each_port() -> None:
    ports = new()
    tensor = torch.ones(3)
    assert ports.see("a", "output", tensor, 0) == ports.see("b", "input[0]", tensor, 0)
    tensor.add_(1)
    assert ports.see("b", "output", tensor, 0) == 1
    ports.settle()
    assert [row.range.sum for row in ports.rows()] == [3.0, 3.0, 6.0]


def test_rows_start_anew_and_silent_ports_are_not_repeated() -> None:
    ports = new()
    ports.see("a", "output", torch.ones(1), 0)
    ports.settle()
    assert len(ports.rows()) == 1
    assert ports.rows() == []
