"""What users of a shell, of Windows, of Jupyter and of transformers' own commands take for granted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path, PureWindowsPath

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.capture.precisions import parse_precision
from overflow_lab.cli import options, places
from overflow_lab.cli.app import run
from overflow_lab.subjects import python_file
from overflow_lab.subjects.find import find
from overflow_lab.subjects.quiet import quiet

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = str(ROOT / "tests/recordings/format-1.jsonl")
FILE = """
import sys, time
import torch
from torch import nn


def build():
    return nn.Linear(2, 2).eval(), {"input": torch.ones(1, 2)}


class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.2)
        return super().forward(x)


def slow():
    print("started", file=sys.stderr, flush=True)
    return Slow(2, 2).eval(), [torch.ones(1, 2)] * 200


class Exits(nn.Linear):
    def forward(self, x):
        sys.exit(5)


def exits():
    return Exits(2, 2), torch.ones(1, 2)
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*[39][0-7][0-9;]*m")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "m.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    """Return a plain environment, without what the shell that runs the tests may have set."""
    kept = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "OMP_NUM_THREADS") if name in os.environ}
    return {**kept, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **more}


def completed(typed: str) -> list[str]:
    """Return what bash is offered for a line that ends where the cursor is."""
    words = typed.split(" ")
    asked = {"_OVERFLOW_LAB_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-m", "overflow_lab"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment(**asked))
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_their_values() -> None:
    assert completed("overflow-lab sc") == ["scan"]
    assert "--num-beams" in completed("overflow-lab scan demo --num")
    assert completed("overflow-lab scan demo --precision bfloat16-") == ["bfloat16-to", "bfloat16-autocast"]
    assert completed("overflow-lab report r.jsonl --fail-on ") == ["never", "warning", "error"]
    assert completed("overflow-lab scan my") == []  # nothing of ours: the shell offers files


def test_completion_does_not_wait_for_torch() -> None:
    program = "import sys; from overflow_lab.cli.app import run; run([]); print('torch' in sys.modules)"
    asked = {"_OVERFLOW_LAB_COMPLETE": "complete_bash", "COMP_WORDS": "overflow-lab scan --level ", "COMP_CWORD": "3"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment(**asked)
    )
    assert done.stdout.split() == ["auto", "operation", "module", "False"]


@pytest.mark.skipif(sys.platform == "win32", reason="bash")
def test_completion_is_installed_on_request(tmp_path: Path) -> None:
    told = environment(HOME=str(tmp_path), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    command = [sys.executable, "-m", "overflow_lab", "--install-completion", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, env=told)
    assert done.returncode == 0, done.stderr
    assert "bash completion installed" in done.stdout
    assert "overflow-lab" in (tmp_path / ".bashrc").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*options.PRECISIONS, "float32"])
def test_every_precision_that_is_offered_exists(name: str) -> None:
    assert parse_precision(name).name == name


def test_options_may_be_typed_as_in_the_scripts_of_transformers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--dtype", "bf16", "--num_beams", "2", "--max_new_tokens=3", "--trust_remote_code", "--batch_size", "1"]
    assert run(["scan", "m.py:build", "-q", *words]) == 0
    assert "bfloat16  works" in capsys.readouterr().out
    assert run(["kernels", "m.py:build", "-q", "--dtype", "float16", "--attn_implementation", "eager"]) == 0


def on_a_terminal(*arguments: str, **variables: str) -> str:
    """Return what a command writes to a terminal of its own."""
    pty = pytest.importorskip("pty")
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "overflow_lab", *arguments]
    with subprocess.Popen(command, stdout=its, stderr=its, env=environment(**variables)) as process:
        os.close(its)
        seen = b""
        try:
            while chunk := os.read(ours, 65536):
                seen += chunk
        except OSError:  # how Linux says that the other end is closed
            pass
        assert process.wait(timeout=60) == 0
    os.close(ours)
    return seen.decode()


@pytest.mark.skipif(sys.platform == "win32", reason="pseudo-terminals")
def test_colour_is_for_terminals_that_want_it(tmp_path: Path) -> None:
    shown = ["report", SAMPLE, "-o", str(tmp_path / "r.html"), "--overwrite"]
    assert COLOUR.search(on_a_terminal(*shown, TERM="xterm-256color"))
    assert not COLOUR.search(on_a_terminal(*shown, TERM="xterm-256color", NO_COLOR="1"))
    assert "\x1b" not in on_a_terminal(*shown, TERM="dumb")
    assert "\x1b" not in on_a_terminal("--help", TERM="xterm-256color", NO_COLOR="1")


@pytest.mark.skipif(sys.platform == "win32", reason="a shell with pipes")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["report", "--help", "--version", "report --json"])
def test_a_reader_that_has_gone_is_no_verdict(command: str, unbuffered: str, tmp_path: Path) -> None:
    first, *more = command.split()
    words = [first, SAMPLE, *more, "-o", str(tmp_path / "r.html")] if first == "report" else [first]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "overflow_lab", *words],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(PYTHONUNBUFFERED=unbuffered),
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_is_one_line_and_3_in_every_command(folder: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "overflow_lab", "kernels", "m.py:slow"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (3, "", "overflow-lab: interrupted.\n")


def test_a_model_that_exits_does_not_choose_the_exit_code_of_kernels(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kernels", "m.py:exits", "-q"]) == 3
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "sys.exit(5)" in err


def test_the_package_runs_as_a_module() -> None:
    for name in ("overflow_lab", "overflow_lab.cli"):
        command = [sys.executable, "-m", name, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment())
        assert done.stdout == f"overflow-lab {overflow_lab.__version__}\n"


class Windows(PureWindowsPath):
    """A path as on Windows, where every file exists."""

    def is_file(self) -> bool:
        return True

    def is_dir(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("typed", "name", "function"),
    [
        (r"C:\x\model.py:build", "model.py", "build"),
        (r"c:model.py:build", "model.py", "build"),
        (r"C:/x y/my.model.py:build_2", "my.model.py", "build_2"),
        (r"\\server\share\model.py:build", "model.py", "build"),
        (r"..\x.py.old\model.py:build", "model.py", "build"),
    ],
)
def test_a_path_with_a_drive_is_split_at_its_last_colon(
    typed: str, name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python_file, "Path", Windows)
    monkeypatch.setattr(places, "Path", Windows)
    assert python_file.is_python_file(typed)
    path, found = python_file._split(typed)
    assert (path.name, found) == (name, function)
    assert str(path) + ":" + found == str(Windows(typed.rpartition(":")[0])) + ":" + function
    assert places.stem_of(typed) == f"{Path(name).stem}-{function}"


@pytest.mark.skipif(sys.platform == "win32", reason="here the colon is a drive's")
def test_a_file_whose_name_has_a_colon_is_built_from(folder: Path) -> None:
    (folder / "C:\\x\\model.py").write_text(FILE, encoding="utf-8")
    assert find("C:\\x\\model.py:build").name == "C:\\x\\model.py:build"


def test_a_notebook_shows_a_table_and_a_console_the_text() -> None:
    formatters = pytest.importorskip("IPython.core.formatters")
    found = overflow_lab.scan(nn.Linear(2, 2), torch.ones(1, 2))
    data, _ = formatters.DisplayFormatter().format(found)
    assert data["text/html"] == found._repr_html_()
    assert data["text/html"].count("<tr>") == 3
    assert data["text/plain"] == repr(found)


def test_the_hub_is_told_nothing_but_versions_and_the_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers
    from transformers.utils.hub import http_user_agent

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", False)
    with quiet():
        assert http_user_agent({"model_class": "Secret"}).endswith("; telemetry/off")
        assert "; torch/" not in build_hf_headers()["user-agent"]
    assert constants.HF_HUB_DISABLE_TELEMETRY is False
    assert "Secret" in http_user_agent({"model_class": "Secret"})


def test_the_package_itself_opens_no_connection() -> None:
    """Whatever is fetched is fetched by transformers and its hub client, for a model that was named."""
    asks = re.compile(
        r"^\s*(?:import|from) (?:requests|urllib(?!\.parse)|http|httpx|aiohttp|socket)\b", flags=re.MULTILINE
    )
    files = (ROOT / "overflow_lab").rglob("*.py")
    assert [path.name for path in files if asks.search(path.read_text(encoding="utf-8"))] == []
