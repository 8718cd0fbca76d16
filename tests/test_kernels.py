"""What torch lacks for a model in one precision: each operation, in order, and nothing where nothing is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab import OverflowLabError, UsageError
from overflow_lab.cli.app import run
from overflow_lab.kernels import of_recording
from overflow_lab.recording import FailureRow
from tests.modules import chain
from tests.recordings_by_hand import recording

FILE = """
import torch
from torch import nn


class Inverse(nn.Module):
    def forward(self, x):
        return torch.linalg.inv(x @ x.mT + torch.eye(4).to(x))


class Lacking(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.inverse = nn.Linear(4, 4), Inverse()

    def forward(self, x):
        return torch.fft.rfft(self.inverse(self.lin(x))).abs()


def lacking():
    torch.manual_seed(0)
    return Lacking().eval(), {"x": torch.randn(2, 4, 4)}


def complete():
    return nn.Linear(4, 4).eval(), {"input": torch.ones(2, 4)}
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(FILE, encoding="utf-8")
    return str(path)


def refused(function: object, dtype: torch.dtype) -> bool:
    """Ask torch itself."""
    try:
        function(torch.eye(4, dtype=dtype))  # type: ignore[operator]
    except RuntimeError:
        return True
    return False


def test_every_missing_operation_is_listed_in_order_and_not_only_the_first() -> None:
    assert refused(torch.linalg.inv, torch.bfloat16)
    assert refused(torch.fft.rfft, torch.bfloat16)
    model = chain(lambda x: torch.linalg.inv(x + 2 * torch.eye(4).to(x)), torch.relu, lambda x: torch.fft.rfft(x).abs())
    found = overflow_lab.missing_kernels(model, (torch.rand(4, 4),), precision="bf16")
    assert [(one.module, one.op, one.dtype) for one in found] == [
        ("0", "aten.linalg_inv_ex", "bfloat16"),
        ("2", "aten._fft_r2c", "bfloat16"),
    ]
    assert "Unsupported dtype BFloat16" in found[1].message
    assert found[1].source.startswith("test_kernels.py:")


def test_a_model_with_all_its_kernels_lacks_none() -> None:
    assert not refused(torch.relu, torch.float16)
    assert overflow_lab.missing_kernels(nn.ReLU(), (torch.ones(2, 2),), precision="float16") == []


def test_float32_is_no_precision_to_ask_for() -> None:
    with pytest.raises(UsageError, match="choose float16 or bfloat16"):
        overflow_lab.missing_kernels(nn.ReLU(), (torch.ones(2, 2),), precision="fp32")


def test_a_run_that_could_not_be_followed_is_not_called_complete() -> None:
    failed = FailureRow("float16", "forward", 0, "a", "RuntimeError: gone")
    with pytest.raises(OverflowLabError, match="could not be followed: RuntimeError: gone, in a"):
        of_recording(recording(failed), "float16", "float16")


def test_the_command_prints_a_line_for_each_and_a_sum(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", f"{file}:lacking", "--precision", "fp16", "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("inverse  aten.linalg_inv_ex  float16  RuntimeError: ")
    assert lines[0].endswith("(model.py:8 in forward)")
    assert lines[1].startswith("(the model itself)  aten._fft_r2c  float16  ")
    assert lines[2].startswith("missing: 2; ")
    assert lines[2].endswith(" ran in float16 on cpu")


def test_nothing_missing_is_said_with_how_much_ran(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", f"{file}:complete", "--quiet", "--fail-on", "warning"]) == 0
    assert capsys.readouterr().out == "nothing is missing: 1 operation ran in bfloat16 on cpu\n"


def test_the_object_holds_what_the_lines_say(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", f"{file}:lacking", "--json", "--quiet", "--fail-on", "error"]) == 1
    made = json.loads(capsys.readouterr().out)
    assert (made["schema"], made["precision"], made["device"]) == (1, "bfloat16", "cpu")
    assert [(one["module"], one["op"]) for one in made["missing"]] == [
        ("inverse", "aten.linalg_inv_ex"),
        ("", "aten._fft_r2c"),
    ]


@pytest.mark.parametrize("arguments", [["--precision", "int8"], ["--fail-on", "x"], ["--device", "nowhere"]])
def test_wrong_use_is_one_line_and_exit_code_2(
    file: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kernels", f"{file}:complete", "--quiet", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
