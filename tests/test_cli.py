"""The command line: exit codes, one line for each error, JSON alone on standard output, and nothing lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from overflow_lab import load
from overflow_lab.cli.app import run
from tests import tiny_models

SUBJECTS = """
import sys, time
import torch
from torch import nn


def healthy():
    torch.manual_seed(0)
    return nn.Linear(4, 4), {"input": torch.ones(2, 4)}


def breaks():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with torch.no_grad():
        model[0].weight.fill_(2.0**15)
        model[0].bias.zero_()
    return model, (torch.ones(2, 4),)


class Prints(nn.Linear):
    def forward(self, x):
        print("in forward")
        return super().forward(x)


def prints():
    print("in build")
    return Prints(4, 4), (torch.ones(2, 4),)


def raises():
    raise ValueError("on\\npurpose")


def exits():
    sys.exit(7)


class Exits(nn.Linear):
    def forward(self, x):
        sys.exit(5)


def exits_in_forward():
    return Exits(4, 4), (torch.ones(2, 4),)


def wrong():
    return nn.Linear(4, 4)


def fails_in_float32():
    return nn.Linear(4, 4), (torch.ones(2, 3),)


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)


def slow():
    return Slow(4, 4), [(torch.ones(2, 4),)] * 200
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, with a file of subjects in it."""
    (tmp_path / "s.py").write_text(SUBJECTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that fails, and return its error, which is one line; nothing is on standard output."""
    assert run(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert err.startswith("overflow-lab: ")
    return err


def started(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "overflow_lab", *arguments]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    # A shell that runs the tests in the background makes its children ignore Ctrl-C, and theirs too.
    return subprocess.Popen(
        command,
        cwd=cwd,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(path: Path, text: str) -> None:
    """Wait until a file that a scan writes holds `text`."""
    for _ in range(1200):
        if path.exists() and text in path.read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"{path.name} never held {text}")


def test_a_scan_prints_its_verdicts_and_names_its_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scan", "s.py:breaks"]) == 0
    out, err = capsys.readouterr()
    assert "float16  breaks: overflow" in out
    assert "bfloat16  works" in out
    for name in ("reports/s-breaks.html", "reports/s-breaks.jsonl.gz"):
        assert name in out
        assert (place / name).stat().st_size > 100
    assert err == ""


def test_a_second_scan_overwrites_nothing_unless_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert run(["scan", "s.py:healthy", "-q"]) == 0
    assert (place / "reports/s-healthy-2.html").exists()
    taken = "reports/s-healthy.html"
    capsys.readouterr()
    assert "exists" in error_of(capsys, "scan", "s.py:healthy", "--report", taken)
    assert run(["scan", "s.py:healthy", "-q", "--report", taken, "--overwrite"]) == 0


def test_json_is_one_object_and_all_that_is_on_standard_output(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scan", "s.py:prints", "--json"]) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)["verdicts"]) == {"float16", "bfloat16"}
    assert "in build" in err
    assert "in forward" in err


def test_json_of_the_report_is_that_of_the_scan(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scan", "s.py:breaks", "--json"]) == 0
    first: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert run(["report", "reports/s-breaks.jsonl.gz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first


@pytest.mark.parametrize(
    ("subject", "fail_on", "code"),
    [("breaks", "never", 0), ("breaks", "warning", 1), ("breaks", "error", 1), ("healthy", "warning", 0)],
)
def test_fail_on_decides_the_exit_code_of_scan_and_report(place: Path, subject: str, fail_on: str, code: int) -> None:
    assert run(["scan", f"s.py:{subject}", "-q", "--fail-on", fail_on]) == code
    assert run(["report", f"reports/s-{subject}.jsonl.gz", "-q", "--fail-on", fail_on]) == code


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["scan", "s.py:raises"], "ValueError: on purpose (s.py:"),
        (["scan", "s.py:exits"], "SystemExit: 7"),
        (["scan", "s.py:wrong"], "return (module, inputs)"),
        (["scan", "s.py"], "names no function"),
        (["scan", "s.py:nothing"], "has no function 'nothing'; it has healthy"),
        (["scan", "t.py:build"], "there is no file 't.py'"),
        (["scan", "some/model-that-is-not"], "no folder here"),
        (["scan", "s.py:healthy", "-p", "fp8"], "unknown precision 'fp8'"),
        (["scan", "s.py:healthy", "--device", "nonsense"], "device 'nonsense' cannot be used here"),
        (["scan", "s.py:healthy", "--fail-on", "sometimes"], "choose never, warning or error"),
        (["scan", "s.py:healthy", "--nonsense"], "--nonsense"),
        (["scan", "s.py:healthy", "--report", "s.py/r.html"], "s.py/r.html cannot be written"),
        (["scan", "s.py:healthy", "--recording", "s.py/r.jsonl"], "r.jsonl cannot be written"),
        (["scan"], "Missing argument"),
        (["report", "nothing.jsonl"], "there is no recording nothing.jsonl"),
        (["report", "s.py"], "s.py is not a recording"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_done_as_asked_is_one_line_and_2(
    place: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert said in error_of(capsys, *arguments)


def test_damaged_checkpoints_are_one_line_and_2(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.save("bert", place)
    capsys.readouterr()
    weights, config = folder / "model.safetensors", folder / "config.json"
    whole, settings = weights.read_bytes(), config.read_text()
    weights.write_bytes(whole[:5000])
    assert "damaged" in error_of(capsys, "scan", "bert")
    weights.write_bytes(whole)
    config.write_text(settings.replace('"intermediate_size": 64', '"intermediate_size": 48'))
    assert "do not fit its config" in error_of(capsys, "scan", "bert")
    config.write_text(settings.replace('"model_type": "bert"', '"model_type": "zorp"'))
    assert "zorp" in error_of(capsys, "scan", "bert")
    config.write_text(settings)
    weights.rename(folder / "pytorch_model.bin")
    assert "--allow-pickle" in error_of(capsys, "scan", "bert")


def test_inputs_that_cannot_be_read_are_one_line_and_2(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tiny_models.save("gpt2", place, tokenizer=True))
    capsys.readouterr()
    (place / "empty.txt").write_text("")
    (place / "bad.jsonl").write_text('{"text": "w5"}\n{bad\n')
    assert "holds no input" in error_of(capsys, "scan", folder, "--inputs", "empty.txt")
    assert "bad.jsonl, line 2" in error_of(capsys, "scan", folder, "--inputs", "bad.jsonl")
    assert "no file" in error_of(capsys, "scan", folder, "--inputs", "none.txt")


def test_a_model_that_fails_in_float32_is_3_and_what_was_recorded_is_named(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    err = error_of(capsys, "scan", "s.py:fails_in_float32", code=3)
    assert "fails in float32 already" in err
    assert "reports/s-fails_in_float32.jsonl.gz" in err
    assert load("reports/s-fails_in_float32.jsonl.gz").status == "failed"


def test_a_model_that_exits_does_not_choose_our_exit_code(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "ended the process" in error_of(capsys, "scan", "s.py:exits_in_forward", code=3)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("option", ["--recording", "--report"])
def test_a_full_disk_is_one_line_and_3(place: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    err = error_of(capsys, "scan", "s.py:healthy", option, "/dev/full", "--overwrite", code=3)
    assert "No space left" in err
    if option == "--report":
        assert load("reports/full.jsonl.gz").status == "complete"


def test_a_folder_of_ones_own_called_demo_does_not_hide_the_demo(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "demo").mkdir()
    assert run(["scan", "demo", "-q", "-p", "bf16", "--no-generate", "--text", "one"]) == 0
    assert "bfloat16  works" in capsys.readouterr().out


def test_no_arguments_show_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Usage: overflow-lab")


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from overflow_lab import __version__

    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"overflow-lab {__version__}\n"


@pytest.mark.parametrize("variable", ["NO_COLOR", "COLUMNS"])
def test_a_narrow_terminal_without_colour_is_honoured(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv(variable, "60")
    assert run(["scan", "s.py:breaks"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 60


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "terminate"])
def test_a_stopped_scan_is_one_line_and_3_and_can_be_reported(place: Path, number: signal.Signals) -> None:
    process = started("scan", "s.py:slow", "--recording", "r.jsonl", cwd=place)
    wait_for(place / "r.jsonl", '"header"')
    time.sleep(1.0)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "")
    assert err == "overflow-lab: interrupted. What was recorded is in r.jsonl.\n"
    assert load(place / "r.jsonl").status == "interrupted"
    assert run(["report", "r.jsonl", "-q"]) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_killed_scan_is_readable_up_to_its_last_row(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    process = started("scan", "s.py:slow", "--recording", "r.jsonl", cwd=place)
    wait_for(place / "r.jsonl", '"module"')
    process.kill()
    process.communicate(timeout=60)
    assert load(place / "r.jsonl").status == "unfinished"
    assert run(["report", "r.jsonl"]) == 0
    assert "did not finish" in capsys.readouterr().out


@pytest.mark.skipif(sys.platform == "win32", reason="a shell with pipes")
def test_a_reader_that_has_seen_enough_is_no_error(place: Path) -> None:
    process = started("scan", "s.py:healthy", cwd=place)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0
