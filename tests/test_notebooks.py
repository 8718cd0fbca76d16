"""The notebooks run, call public names only, define nothing, and carry the pictures that they talk about.

`python -m tests.test_notebooks` executes them and writes their outputs again.
"""

from __future__ import annotations

import ast
import base64
import os
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import overflow_lab

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 300_000


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def code(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def executed(path: Path) -> Any:
    """Return the notebook with the outputs of a run from top to bottom; a cell that raises raises here."""
    notebook = read(path)
    resources = {"metadata": {"path": str(path.parent)}}
    # As in Jupyter, whatever the tests' own backend is: a figure is shown below its cell.
    environment = {**os.environ, "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    client = NotebookClient(notebook, timeout=180, kernel_name="python3", resources=resources)
    client.execute(env=environment)
    return notebook


def pictures(notebook: Any) -> list[bytes]:
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", []) if "data" in out]
    return [base64.b64decode(out["data"]["image/png"]) for out in outputs if "image/png" in out["data"]]


def test_they_are_numbered_in_the_order_in_which_they_are_read() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"{number:02}_" for number in range(1, len(NOTEBOOKS) + 1)]
    assert len(NOTEBOOKS) >= 4


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_gives_the_kinds_of_output_that_are_committed(path: Path) -> None:
    before, after = read(path), executed(path)
    assert len(pictures(after)) == len(pictures(before)) > 0
    assert all(picture.startswith(b"\x89PNG") for picture in pictures(after))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_defines_nothing_but_models_to_scan(path: Path) -> None:
    nodes = [node for cell in code(read(path)) for node in ast.walk(ast.parse(cell))]
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    models = {"nn.Module"}
    for node in classes:
        assert {ast.unparse(base) for base in node.bases} <= models, f"{node.name} is no model"
        models.add(node.name)
    methods = {id(part) for node in classes for part in node.body}
    functions = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    assert [node for node in functions if id(node) not in methods] == []
    assert {node.name for node in functions if isinstance(node, ast.FunctionDef)} <= {"__init__", "forward"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_takes_public_names_of_the_package_only(path: Path) -> None:
    nodes = [node for cell in code(read(path)) for node in ast.walk(ast.parse(cell))]
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports if (node.module or "").startswith("overflow_lab")] == []
    named = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    assert {name for name in named if name.startswith("overflow_lab.")} == set()
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    used = {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == "overflow_lab"}
    assert used
    assert used <= set(overflow_lab.__all__)
    assert [node.attr for node in attributes if node.attr.startswith("_") and node.attr != "__init__"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_small_was_executed_in_order_and_tells_no_place(path: Path) -> None:
    assert path.stat().st_size < MOST_BYTES
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [out for cell in cells for out in cell.outputs]
    assert all(out.output_type != "error" and out.get("name") != "stderr" for out in outputs)
    texts = " ".join(str(out.get("text", out.get("data", {}).get("text/html", ""))) for out in outputs)
    assert not re.search(r"(?:/home/|/root/|/Users/|/tmp/|[A-Z]:\\)", texts)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_its_links_lead_to_files(path: Path) -> None:
    prose = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", prose)
    assert [link for link in links if not (FOLDER / link).exists()] == []


def _write(path: Path) -> None:
    """Execute and write; warnings of the machine that wrote it (standard error) are left out."""
    notebook = executed(path)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
    nbformat.write(notebook, path)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    for each in NOTEBOOKS:
        _write(each)
