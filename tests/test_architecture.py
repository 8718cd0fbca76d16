"""The shape of the package: imports go one way, `import overflow_lab` is cheap, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "overflow_lab"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# progress is how long work tells whoever called where it is: a callable, no more; every side may have one.
WAIST = {"errors", "formats", "ranges", "recording", "progress", "tolerances"}
SIDES = WAIST | {"subjects", "capture", "analysis", "report"}
# What each room may import of the others. "" is overflow_lab/__init__.py.
MAY_IMPORT = {
    "errors": set[str](),
    "formats": {"errors"},
    "ranges": {"errors", "formats"},
    "recording": {"errors", "formats", "ranges"},
    "progress": set[str](),
    "tolerances": {"errors", "formats"},
    "subjects": WAIST,
    "capture": WAIST | {"subjects"},
    "analysis": WAIST,
    "report": WAIST | {"analysis"},
    "reproduce": SIDES,
    "scan": SIDES | {"reproduce"},
    "kernels": SIDES | {"scan"},
    "testing": SIDES | {"scan"},
    "weights": SIDES,
    "remedies": SIDES | {"scan"},
    "training": SIDES | {"scan"},
    "": SIDES | {"scan", "kernels", "testing", "weights", "remedies", "training"},
    "cli": SIDES | {"", "scan", "kernels", "testing", "weights", "remedies", "training"},
    "__main__": {"cli"},
    "benchmark": SIDES,
    "gpu_check": SIDES | {"scan"},
}
HEAVY = ("torch", "transformers", "pandas", "matplotlib", "llvmlite", "pyarrow")
NEVER = {
    "errors": HEAVY,
    "formats": HEAVY,
    "ranges": HEAVY,
    "recording": HEAVY,
    "progress": HEAVY,
    "analysis": ("torch", "transformers"),
    "report": ("torch", "transformers"),
}
# Rooms whose modules, all of them imported, must not have loaded these: what AST cannot see, a process can.
LOADS_NOTHING_OF = [
    ("overflow_lab", HEAVY),
    ("overflow_lab.recording", HEAVY),
    ("overflow_lab.cli", ("torch", "transformers", "pandas", "matplotlib")),
    ("overflow_lab.analysis", ("torch", "transformers")),
    ("overflow_lab.report", ("torch", "transformers")),
    ("overflow_lab.subjects", ("transformers",)),
]


def _room(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


def _imported(path: Path) -> Iterator[str]:
    """Yield the absolute dotted name of everything that `path` imports, wherever in the file it does."""
    package = ("overflow_lab", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *(node.module or "").split("."))).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _rooms_imported(path: Path) -> set[str]:
    rooms = set[str]()
    for name in _imported(path):
        parts = name.split(".")
        # The version is the root's only value that the rooms may ask for: it is there before any of them is imported.
        if parts[0] == "overflow_lab" and name != "overflow_lab.__version__":
            # `from overflow_lab import scan` names a room or something that __init__ defines.
            rooms.add(parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "")
    return rooms


def _names(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_stands_in_a_known_room() -> None:
    assert SOURCES
    assert {_room(path) for path in SOURCES} <= MAY_IMPORT.keys()


def test_imports_go_one_way() -> None:
    wrong = {
        _names(path): sorted(found)
        for path in SOURCES
        if (found := _rooms_imported(path) - MAY_IMPORT[_room(path)] - {_room(path)})
    }
    assert wrong == {}


def test_the_waist_the_analysis_and_the_report_never_import_torch() -> None:
    wrong = {
        _names(path): sorted(found)
        for path in SOURCES
        if (found := {name.split(".")[0] for name in _imported(path)} & set(NEVER.get(_room(path), ())))
    }
    assert wrong == {}


@pytest.mark.parametrize(("name", "unwanted"), LOADS_NOTHING_OF)
def test_importing_a_room_does_not_load_what_only_others_need(name: str, unwanted: tuple[str, ...]) -> None:
    # The root is asked for alone, since below it lie all the others; of a room every module but the scripts.
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({name!r})
if {name != "overflow_lab"}:
    for module in pkgutil.walk_packages(package.__path__, {name + "."!r}):
        if not module.name.endswith((".__main__", ".train")):
            importlib.import_module(module.name)
print(*sorted(set({unwanted!r}) & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_only_the_command_line_prints() -> None:
    wrong = [
        f"{_names(path)}:{node.lineno}"
        for path in SOURCES
        if _room(path) != "cli"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert wrong == []


def test_no_file_has_more_than_400_lines() -> None:
    lengths = {_names(path): len(path.read_text(encoding="utf-8").splitlines()) for path in (*SOURCES, *TESTS)}
    assert {name: length for name, length in lengths.items() if length > 400} == {}


def test_no_function_has_more_than_60_lines() -> None:
    wrong = {}
    for path in (*SOURCES, *TESTS):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    wrong[f"{_names(path)}:{node.lineno} {node.name}"] = length
    assert wrong == {}
