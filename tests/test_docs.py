"""The README is true: its help is the commands' own, its code runs, its tables name what exists.

`python -m tests.test_docs` writes the help and the demo's first verdict into the README again.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.mechanisms import MECHANISMS
from overflow_lab.cli.app import run

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COMMANDS = ("scan", "fix", "convert", "finetune", "weights", "report", "diff", "merge", "export", "kernels")
# The other commands have theirs in docs/cli.md.
WITH_HELP = ("scan", "fix")
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


def shown(*arguments: str) -> list[str]:
    """Return the lines that a command prints about the demo."""
    command = [sys.executable, "-c", "from overflow_lab.cli import main; main()", *arguments, "demo"]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=True, cwd=folder)
    return [line.rstrip() for line in done.stdout.splitlines()]


def demo_verdict() -> str:
    """Return the terminal's title and first verdict of a scan of the demo."""
    lines = shown("scan")
    return "\n".join(lines[: lines.index("", 2)])


def demo_mended() -> str:
    """Return what `fix` says of the demo's remedies in one precision."""
    lines = shown("fix", "--precision", "fp16")
    first = next(i for i, line in enumerate(lines) if line.startswith("float16  breaks"))
    return "\n".join(lines[first : lines.index("", first)])


@pytest.mark.parametrize("command", WITH_HELP)
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


def test_what_mends_the_demo_in_the_readme_names_a_rescale_and_its_proof() -> None:
    said = block("fix")
    assert said.splitlines()[0].startswith("float16  breaks: overflow → works")
    assert max(len(line) for line in said.splitlines()) <= 80
    assert all(word in said for word in ("✓ Rescale", "proof", "least headroom", "in float32 the same bits"))


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
    texts = {f"help:{name}": help_of(name) for name in WITH_HELP} | {"demo": demo_verdict(), "fix": demo_mended()}
    for name, text in texts.items():
        filled = BLOCK.format(name=name, text=text)
        pattern = rf"<!-- {name} -->(?:\n\n```text\n.*?\n```\n\n<!-- /{name} -->)?"
        made = re.sub(pattern, lambda _, filled=filled: str(filled), made, count=1, flags=re.DOTALL)  # type: ignore[misc]
    README.write_text(made, encoding="utf-8")


if __name__ == "__main__":
    _write()
