"""The shadow run's operations, as a pandas table and in the report: what is shown is what was recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.recording import AttributionRow, EventRow, OperationRow, Recording
from overflow_lab.report import html
from overflow_lab.report.operation_table import operation_table, trouble
from tests.conftest import OpenPage
from tests.modules import Step, chain
from tests.sample_recording import HOSTILE, sample_diagnosis, sample_recording

X = torch.linspace(0.5, 2.0, 8).reshape(2, 4)


def row(number: int, **fields: float) -> OperationRow:
    site = OperationRow("float16", f"m.{number}", "aten.mm", 0, number, "float16", 1, 100, absmax=8.0, error=1e-3)
    return dataclasses.replace(site, error_in=1e-3, **fields)  # type: ignore[arg-type]


def made(number: int) -> EventRow:
    """Return the event that the operation of that number made a bad value."""
    return EventRow("float16", "bad", f"m.{number}", "aten.mm", 0, number, "forward", 0, 0, reaches_output=True)


def with_rows(*rows: object) -> Recording:
    sample = sample_recording()
    return dataclasses.replace(sample, rows=(*sample.rows, *rows))  # type: ignore[arg-type]


def test_each_operation_is_a_row_with_what_float32_would_have_there() -> None:
    model = nn.Sequential(Step(lambda x: x * 100), nn.Linear(4, 4, bias=False), Step(lambda x: x * x))
    nn.init.constant_(model[1].weight, 200.0)  # type: ignore[arg-type]
    found = overflow_lab.operations(overflow_lab.scan(model, (X,), precisions=["float16"]).recording)
    seen = found[found["ordinal"] >= 0].set_index("module")
    assert list(seen["op"]) == ["aten.mul", "aten.mm", "aten.mul"]
    expected = [float((X * 100).max()), float((X * 100).sum(1).max()) * 200, (float((X * 100).sum(1).max()) * 200) ** 2]
    assert list(seen["absmax"]) == pytest.approx(expected)
    assert list(seen["headroom"] < 0) == [value > torch.finfo(torch.float16).max for value in expected]
    assert list(seen["nonfinite"]) == [0, 8, 8]
    casts = found[found["ordinal"] < 0]
    assert set(casts["detail"]) == {"1.weight", "#0"} or "1.weight" in set(casts["detail"])


def test_a_recording_of_modules_alone_has_no_operations_but_the_columns() -> None:
    found = overflow_lab.operations(overflow_lab.scan(nn.ReLU(), (X,), level="module").recording)
    assert found.empty
    assert {"module", "op", "headroom", "error_in", "flushed"} <= set(found.columns)


def test_the_cap_keeps_the_worst_of_each_kind_in_order_of_execution() -> None:
    rows = [row(i) for i in range(50)]
    rows[7], rows[20], rows[33], rows[41] = (
        row(7, nonfinite=3),
        row(20, absmax=9e4),
        row(33, error=0.5),
        row(41, flushed=90),
    )
    recording = with_rows(*rows, made(7))
    table = operation_table(overflow_lab.operations(recording), recording, cap=4)
    assert [line.module for line in table.lines] == ["m.7", "m.20", "m.33", "m.41"]
    assert table.caption.startswith("Showing 4 of 50 operations")
    assert "NaN" in table.caption


def test_trouble_is_a_place_for_each_row_and_none_twice_first_in_one_list() -> None:
    places = trouble(overflow_lab.operations(with_rows(row(0), row(1, nonfinite=1), row(2, flushed=5), made(1))))
    assert list(places) == [1.0, 0.0, 0.0]
    assert isinstance(places, pd.Series)


def test_an_error_of_which_nothing_finite_is_left_is_not_called_zero() -> None:
    recording = with_rows(row(0, nonfinite=100, error=0.0))
    assert operation_table(overflow_lab.operations(recording), recording).lines[0].cells[2].text == "–"


def test_a_mask_of_inf_before_the_first_fault_is_no_trouble_and_what_follows_is() -> None:
    rows = [row(i, nonfinite=n) for i, n in enumerate((5, 0, 5, 9))]
    frame = overflow_lab.operations(with_rows(*rows, made(2)))
    assert list(frame["tainted"]) == [False, False, True, True]
    assert not overflow_lab.operations(with_rows(*rows))["tainted"].any()
    table = operation_table(frame, with_rows(*rows, made(2)))
    assert [line.cells[-1].tone for line in table.lines] == ["", "", "bad", "bad"]


def test_the_section_shows_rows_and_notes_and_escapes_both() -> None:
    blame = AttributionRow("bfloat16", "relative", 0.31, "m.1", "aten.add", 0, 0.9, 12, detail=HOSTILE)
    event = EventRow("float16", "bad", HOSTILE, "aten.mul", 0, 1, "forward", 0, 0, inf=2, absorbed=("t", "aten.tanh"))
    recording = with_rows(row(0), dataclasses.replace(row(1), module=HOSTILE), blame, event)
    page = html.render(recording, sample_diagnosis())
    assert 'id="operations"' in page
    assert "<img" not in page
    assert "makes 90% of the output&#39;s error of 31%" in page
    assert "makes harmless: no fault" in page


def test_without_operations_there_is_no_section() -> None:
    assert 'id="operations"' not in html.render(sample_recording(), sample_diagnosis())


def test_a_hundred_thousand_operations_stay_below_1_mb() -> None:
    rows = [dataclasses.replace(row(i), module=f"model.layers.{i}.{'long_name.' * 12}proj") for i in range(100_000)]
    page = html.render(with_rows(*rows), sample_diagnosis())
    assert len(page.encode()) < 1_000_000
    assert "Showing 60 of 100,000 operations" in page


def test_a_card_says_the_place_once_and_explains_and_lists_further_origins() -> None:
    model = chain(lambda x: x * 7e4, torch.nan_to_num, lambda x: x / 6e4, lambda x: x * 9e4, lambda x: x / 1e9)
    scan = overflow_lab.scan(model, (X,), precisions=["float16"])
    page = html.page(scan.recording, scan.diagnosis)
    card = page.cards[0]
    assert (card.where, card.operation) == ("0", "aten.mul")
    assert card.reason.startswith("Makes infinities")
    assert scan.verdicts["float16"].reason.startswith("`0`, aten.mul, makes infinities")
    assert [step.where for step in card.chain][-1] == "0"
    assert card.also[0].startswith("`3` `aten.mul` (")
    assert '<ol class="chain"' in html.render(scan.recording, scan.diagnosis)


def test_both_tables_sort_and_filter_apart(browser_page: OpenPage, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    rows = [row(i, absmax=float(2 + (7 * i) % 11)) for i in range(6)]
    path.write_text(html.render(with_rows(*rows), sample_diagnosis()), encoding="utf-8")
    with browser_page(path) as page:
        table = page.locator("#operations table")
        table.locator("thead button", has_text="absmax").click()
        shown = [float(text) for text in table.locator("tbody tr td:nth-child(5)").all_inner_texts()]
        assert shown == sorted(shown)
        layers = page.locator("#table tbody tr:visible").count()
        page.locator("#operations input[type=search]").fill("m.3")
        assert table.locator("tbody tr:visible").count() == 1
        assert page.locator("#operations output").inner_text() == "1 of 6 rows"
        assert page.locator("#table tbody tr:visible").count() == layers
        page.locator("#operations input[type=search]").fill("")
        table.locator("thead button", has_text="module").click()
        assert table.locator("tbody tr th").first.inner_text() == "m.0"
