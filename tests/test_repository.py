"""What the repository's own files promise each other: README and Makefile, versions, dependencies and their pins."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import overflow_lab

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "CONTRIBUTING.md")


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _project() -> dict[str, Any]:
    return tomllib.loads(_read("pyproject.toml"))


def _normalized(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", _read("Makefile"), flags=re.MULTILINE))


def _pins() -> list[str]:
    lines = _read("constraints.txt").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("page", PAGES)
def test_every_make_command_on_a_page_is_a_target(page: str) -> None:
    # In code only: "`make demo`" or a line that starts with it; prose may make sense.
    commands = re.findall(r"(?:`|^\s*(?:\$ )?)make ([a-z]+)", _read(page), flags=re.MULTILINE)
    assert commands
    assert set(commands) - _targets() == set()


def test_help_names_every_target_that_a_person_runs() -> None:
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    hidden = {"browser"}
    assert set(re.findall(r"make ([a-z]+)", told)) == _targets() - hidden


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_every_relative_link_on_a_page_leads_to_a_file(page: str) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)[^)]*\)", _read(page))
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_package_holds_the_version_and_nothing_repeats_it() -> None:
    project = _project()
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "overflow_lab/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", overflow_lab.__version__)


def test_the_changelog_opens_with_the_version_of_the_package() -> None:
    first = re.search(r"^## (.+)$", _read("CHANGELOG.md"), flags=re.MULTILINE)
    assert first
    assert overflow_lab.__version__ in first.group(1)


def test_every_dependency_is_pinned_for_development() -> None:
    project = _project()["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    pinned = {_normalized(pin) for pin in _pins()}
    assert {_normalized(one) for one in wanted} - pinned - {"overflow-lab"} == set()


def test_every_constraint_is_one_public_version() -> None:
    # A local version such as 2.13.0+cpu would exclude every other build of the same release.
    pin = re.compile(r"[a-z0-9-]+==[\w.]+(; python_(full_)?version (<|>=) \"[\d.]+\")?")
    assert [line for line in _pins() if not pin.fullmatch(line)] == []


def test_the_licence_is_the_one_that_the_metadata_names() -> None:
    project = _project()["project"]
    assert _read("LICENSE").startswith(f"{project['license']} License")


def test_what_the_package_needs_beside_its_code_is_in_it() -> None:
    assert (ROOT / "overflow_lab" / "py.typed").exists()
    assert list((ROOT / "overflow_lab" / "subjects" / "demo" / "model").glob("*.safetensors"))
    assert list((ROOT / "overflow_lab" / "report" / "template").glob("*.html*"))
