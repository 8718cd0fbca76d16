"""The public call: modules in, verdicts out; options, files and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab import OverflowLabError, ScanInterrupted, UsageError
from overflow_lab.analysis.frame import layers
from overflow_lab.recording import BlindSpotRow, OperationRow
from tests.modules import Step, chain

X = torch.ones(2, 4)


def broken() -> nn.Module:
    return chain(lambda x: x * 7e4, lambda x: x / 7e4)


def test_a_scan_says_what_it_found() -> None:
    found = overflow_lab.scan(broken(), {"input": X})
    assert list(found.verdicts) == ["float16", "bfloat16"]
    lines = repr(found).splitlines()
    assert lines[0] == "<Scan of Sequential"
    assert lines[1].startswith("  float16: overflow (error): `0`")
    assert lines[2].startswith("  bfloat16: ok: ")
    assert "70,000" in lines[1]
    assert "65,504" in lines[1]


def test_the_dict_is_json_and_follows_the_contract() -> None:
    found = overflow_lab.scan(broken(), {"input": X}).to_dict()
    again = json.loads(json.dumps(found, allow_nan=False))
    assert {"overflow_lab", "schema", "model", "recording", "report", "verdicts", "findings"} <= again.keys()
    verdict = again["verdicts"]["float16"]
    assert {"verdict", "severity", "origin", "mechanism", "value", "limit", "output"} <= verdict.keys()
    assert verdict["origin"]["module"] == "0"
    assert {"nonfinite", "relative_error", "changed_decisions"} <= verdict["output"].keys()
    assert again["verdicts"]["bfloat16"]["origin"] is None


def test_the_frame_is_that_of_the_recording() -> None:
    found = overflow_lab.scan(broken(), {"input": X})
    frame = found.to_frame()
    assert frame.equals(layers(found.recording))
    assert list(frame["module"]) == ["0", "1", ""]
    assert list(frame["absmax"]) == [pytest.approx(7e4), 1.0, 1.0]


def test_a_notebook_and_a_page_can_show_it(tmp_path: Path) -> None:
    found = overflow_lab.scan(broken(), {"input": X})
    assert "<" in found._repr_html_()
    assert found.save_report(tmp_path / "r.html").read_text(encoding="utf-8").lstrip().startswith("<!")


INPUTS: list[Any] = [
    {"input": X},
    (X,),
    X,
    [X, X],
    [{"input": X}, (X,)],
]


@pytest.mark.parametrize("inputs", INPUTS, ids=lambda value: type(value).__name__)
def test_inputs_may_be_given_in_any_of_the_usual_ways(inputs: Any) -> None:
    assert overflow_lab.scan(broken(), inputs).verdicts["float16"].verdict == "overflow"


def test_inputs_may_come_from_a_generator() -> None:
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for _ in range(3):
            yield {"input": X}

    assert "on 6 inputs" in overflow_lab.scan(nn.Identity(), batches()).verdicts["float16"].reason


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("fp16", ["float16"]),
        (["bf16", "fp16"], ["bfloat16", "float16"]),
        (("fp32",), ["float32"]),
        (iter(["fp16-autocast", "float16-autocast", "bfloat16-to"]), ["float16-autocast", "bfloat16-to"]),
    ],
)
def test_precisions_are_given_by_short_or_long_names(names: Any, expected: list[str]) -> None:
    found = overflow_lab.scan(nn.Linear(4, 4), (X,), precisions=names)
    assert list(found.verdicts) == expected
    assert found.recording.header.precisions == tuple(dict.fromkeys(["float32", *expected]))


def test_a_recording_that_was_written_is_scanned_again_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    found = overflow_lab.scan(broken(), (X,), recording=path)
    again = overflow_lab.Scan.from_recording(path)
    assert again.verdicts == found.verdicts
    assert again.recording.rows == found.recording.rows
    assert again.recording.complete


WRONG: list[tuple[Any, Any, dict[str, Any], str]] = [
    (object(), X, {}, "a torch.nn.Module is needed, not object"),
    (nn.Identity(), X, {"precisions": "int8"}, "unknown precision 'int8'"),
    (nn.Identity(), X, {"batchsize": 3}, "no option 'batchsize'"),
    (nn.Identity(), "text", {}, "the inputs are of type str"),
    (nn.Identity(), [], {}, "the inputs are empty"),
    (nn.Identity(), X, {"device": "nowhere"}, "device 'nowhere' cannot be used here"),
    ("no/such/folder/at all", None, {}, "there is no folder"),
    ("demo", X, {}, "inputs are given for a model by name"),
]


@pytest.mark.parametrize(("model", "inputs", "options", "message"), WRONG, ids=[row[3][:30] for row in WRONG])
def test_wrong_use_is_one_line_that_says_what_is_wrong(
    model: Any, inputs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        overflow_lab.scan(model, inputs, **options)
    assert "\n" not in str(caught.value)


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("two\nlines")


def test_a_model_that_fails_in_float32_ends_the_scan_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with pytest.raises(ScanInterrupted, match="fails in float32 already in 1: ValueError: two lines") as caught:
        overflow_lab.scan(chain(torch.relu, fail), (X,), recording=path)
    assert caught.value.recording == str(path)
    assert overflow_lab.load(path).status == "failed"
    assert isinstance(caught.value, OverflowLabError)


def test_a_data_loader_that_raises_ends_the_scan_and_keeps_what_was_recorded(tmp_path: Path) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            yield (X,)
            raise OSError("the disk\nis gone")

    path = tmp_path / "r.jsonl"
    with pytest.raises(ScanInterrupted, match="ended early: OSError: the disk is gone") as caught:
        overflow_lab.scan(nn.Linear(4, 4), Loader(), recording=path)
    assert caught.value.recording == str(path)
    assert "range" in path.read_text(encoding="utf-8")


def test_a_place_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OverflowLabError, match="cannot be written"):
        overflow_lab.scan(chain(fail), (X,), recording=tmp_path / "file" / "r.jsonl")


def test_hostile_names_come_through(tmp_path: Path) -> None:
    model = nn.Sequential()
    hostile = "</script><img src=x>\n\ud800 ünï"
    model.add_module(hostile, Step(lambda x: x * 7e4))
    path = tmp_path / "r.jsonl"
    found = overflow_lab.scan(model, (X,), recording=path)
    again = overflow_lab.Scan.from_recording(path)
    assert again.verdicts["float16"].origin == found.verdicts["float16"].origin
    assert found.verdicts["float16"].origin is not None
    assert found.verdicts["float16"].origin.module == hostile


def test_a_module_in_double_precision_is_scanned_from_float32() -> None:
    found = overflow_lab.scan(nn.Linear(4, 4).double(), (X.double(),))
    assert set(found.recording.header.precisions) == {"float32", "float16", "bfloat16"}
    assert {verdict.verdict for verdict in found.verdicts.values()} == {"ok"}


@pytest.mark.parametrize("first", ["overflow_lab.scan", "overflow_lab.report.plots", "overflow_lab.kernels"])
def test_the_public_functions_are_not_hidden_by_the_modules_of_their_names(first: str) -> None:
    program = f"import {first}, overflow_lab; print(overflow_lab.scan.__name__, overflow_lab.report.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["scan", "report"]


def test_the_level_says_whether_operations_are_followed_and_stands_in_the_header() -> None:
    for level, followed in (("operation", True), ("module", False), ("auto", True)):
        found = overflow_lab.scan(broken(), (X,), level=level).recording
        assert bool(found.of(OperationRow)) is followed
        assert found.header.options["level"] == level
    with pytest.raises(UsageError, match="the level is 'deep'; choose among auto"):
        overflow_lab.scan(broken(), (X,), level="deep")


def test_a_large_model_is_scanned_at_its_borders_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overflow_lab.capture.record.MOST_PARAMETERS", 10)
    large = overflow_lab.scan(nn.Linear(4, 4), (X,))
    assert not large.recording.of(OperationRow)
    reasons = [row.reason for row in large.recording.of(BlindSpotRow)]
    assert any("above 10 parameters (--level operation runs it)" in reason for reason in reasons)
    assert "above 10 parameters" in overflow_lab.report(large.recording)
    asked = overflow_lab.scan(nn.Linear(4, 4), (X,), level="operation")
    assert asked.recording.of(OperationRow)
    assert overflow_lab.scan(nn.Linear(2, 2), (torch.ones(2, 2),)).recording.of(OperationRow)
