"""The README is true: its help is the commands' own, its code runs, its tables name what exists.

`python -m tests.test_docs` writes the help and the demo's first verdict into the README again.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.mechanisms import MECHANISMS
from overflow_lab.cli.app import run

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMANDS = ("scan", "report", "diff", "export", "kernels")
BLOCK = "<!-- {name} -->\n\n```text\n{text}\n```\n\n<!-- /{name} -->"


def read() -> str:
    return README.read_text(encoding="utf-8")


def block(name: str) -> str:
    """Return the text between a name's marks."""
    found = re.search(rf"<!-- {name} -->\n\n```text\n(.*?)\n```\n\n<!-- /{name} -->", read(), flags=re.DOTALL)
    assert found, f"README.md has no block {name}; python -m tests.test_docs writes it"
    return found.group(1)


def help_of(command: str) -> str:
    """Return what the command says of itself on a terminal of 80 columns."""
    program = "from overflow_lab.cli import main; main()"
    environment = {"COLUMNS": "80", "NO_COLOR": "1", "PATH": "", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-c", program, command, "--help"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def demo_verdict() -> str:
    """Return the terminal's title and first verdict of a scan of the demo."""
    program = "from overflow_lab.cli import main; main()"
    arguments = [sys.executable, "-c", program, "scan", "demo", "--overwrite", "--quiet"]
    places = ["--report", "reports/demo.html", "--recording", "reports/demo.jsonl.gz"]
    done = subprocess.run([*arguments, *places], capture_output=True, text=True, check=True, cwd=ROOT)
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    return "\n".join(lines[: lines.index("", 2)])


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_in_the_readme_is_the_commands_own(command: str) -> None:
    assert block(f"help:{command}") == help_of(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_shown_with_an_example(command: str) -> None:
    assert f"overflow-lab {command} " in read()


def test_every_command_of_the_program_is_in_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--help"])
    listed = capsys.readouterr().out.split("Commands:")[1]
    assert re.findall(r"^  (\w+)  ", listed, flags=re.MULTILINE) == list(COMMANDS)


def test_every_option_of_scan_is_explained_in_the_table() -> None:
    table = read().split("### Options of `scan`")[1].split("<details>")[0]
    options = set(re.findall(r"--[a-z][a-z-]+", block("help:scan"))) - {"--help", "--generate"}
    assert {option for option in options if f"`{option}" not in table and f", `{option}" not in table} == set()


def test_the_mechanisms_of_the_readme_are_those_that_exist() -> None:
    table = read().split("## What it finds")[1].split("\n## ")[0]
    named = re.findall(r"`([a-z]+(?:-[a-z]+)*)`", "\n".join(row for row in table.splitlines() if row.startswith("| ")))
    assert sorted(named) == sorted(set(MECHANISMS) - {"other"})


def test_the_demo_in_the_readme_names_what_the_demo_breaks_at() -> None:
    shown = block("demo")
    assert shown.splitlines()[2] == "✕ float16  breaks: overflow"
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert all(word in shown for word in ("where", "why", "chain", "output", "next"))


def test_the_python_of_the_readme_runs() -> None:
    snippets = re.findall(r"```python\n(.*?)```", read(), flags=re.DOTALL)
    assert len(snippets) == 2
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    names: dict[str, object] = {"model": model, "inputs": {"input": torch.ones(2, 4)}}
    # The demo takes half a minute, and tests of its own.
    exec("\n".join(snippets).replace('scan("demo")', "scan(model, inputs)"), names)
    built, given = names["build"]()  # type: ignore[operator]
    assert list(overflow_lab.scan(built, given).verdicts) == ["float16", "bfloat16"]


def test_the_names_of_the_manual_are_public() -> None:
    said = (overflow_lab.__doc__ or "").split("The pieces")[1].split("Words\n")[0]
    names = re.findall(r"`([a-z_]+|[A-Z][a-z]+)`", said)
    assert set(names) - {"verdicts", "findings"} <= set(overflow_lab.__all__)


def _write() -> None:
    """Write every block of the README anew."""
    made = read()
    texts = {f"help:{name}": help_of(name) for name in COMMANDS} | {"demo": demo_verdict()}
    for name, text in texts.items():
        filled = BLOCK.format(name=name, text=text)
        pattern = rf"<!-- {name} -->(?:\n\n```text\n.*?\n```\n\n<!-- /{name} -->)?"
        made = re.sub(pattern, lambda _, filled=filled: str(filled), made, count=1, flags=re.DOTALL)  # type: ignore[misc]
    README.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    _write()
