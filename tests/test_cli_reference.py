"""docs/cli.md is what the commands say of themselves; `python -m tests.cli_reference` writes it again."""

from __future__ import annotations

import re

import pytest

from overflow_lab.cli.app import run
from tests import cli_reference

COMMANDS = list(cli_reference.commands())


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    run([command, "--help"])
    return capsys.readouterr().out


def plain(text: str) -> str:
    """Return text without white space: `--help` wraps its lines."""
    return re.sub(r"\s+", "", text)


def test_the_page_is_what_the_commands_say() -> None:
    assert cli_reference.PAGE.read_text(encoding="utf-8") == cli_reference.page(), "run python -m tests.cli_reference"


def test_every_command_of_the_program_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    listed = help_of("--help", capsys).split("Commands:")[1]
    assert re.findall(r"^  ([\w-]+)  ", listed, flags=re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str) -> None:
    assert cli_reference.EXAMPLES[command].startswith(f"overflow-lab {command} ")


@pytest.mark.parametrize("command", COMMANDS)
def test_names_of_options_are_those_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(command, capsys).split("Options:")[1]
    ours = {name for p in cli_reference.parameters(cli_reference.commands()[command]) for name in p.names}
    named = set(re.findall(r"^  ((?:--?[\w-]+(?:, | / )?)+)", shown, flags=re.MULTILINE))
    theirs = {name for line in named for name in re.split(r", | / ", line.strip())} - {"--help"}
    assert {name for name in ours if name.startswith("-")} == theirs


@pytest.mark.parametrize("command", COMMANDS)
def test_meanings_and_defaults_are_those_of_the_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = plain(help_of(command, capsys))
    for parameter in cli_reference.parameters(cli_reference.commands()[command]):
        assert plain(parameter.help) in shown
        if parameter.default:
            value = parameter.default.strip("`").removeprefix("--")
            assert f"[default:{value}]" in shown, parameter.names
