from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from overflow_lab.errors import UsageError
from overflow_lab.subjects import Subject
from overflow_lab.subjects.find import find

GOOD = """
import torch
from helper_of_mine import WIDTH

def build():
    torch.manual_seed(1)
    return torch.nn.Linear(WIDTH, 3), {"input": torch.ones(4, WIDTH, dtype=torch.float64)}
"""
UNCOPYABLE = """
import torch

class Locked(torch.nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("no copies of me")

def build():
    torch.manual_seed(1)
    return Locked(2, 2), (torch.ones(1, 2),)
"""


def write(folder: Path, text: str) -> str:
    path = folder / "own.py"
    path.write_text(text)
    (folder / "helper_of_mine.py").write_text("WIDTH = 2\n")
    return f"{path}:build"


def complaint(model: str) -> str:
    """Return the message of the UsageError, which is one line."""
    with pytest.raises(UsageError) as caught:
        find(model)
    message = str(caught.value)
    assert "\n" not in message
    return message


def call(subject: Subject, dtype: torch.dtype | None = None) -> torch.Tensor:
    batch = next(iter(subject.batches))
    result = subject.load(dtype)(*batch.positional, **batch.inputs)
    assert isinstance(result, torch.Tensor)
    return result


def test_the_function_is_called_and_its_module_copied(tmp_path: Path) -> None:
    subject = find(write(tmp_path, GOOD))
    first, second = subject.load(None), subject.load(None)
    assert first is not second
    assert torch.equal(next(first.parameters()), next(second.parameters()))
    assert call(subject).shape == (4, 3)
    assert next(subject.load(torch.float16).parameters()).dtype == torch.float16
    assert subject.facts["inputs_source"] == "file: own.py:build"
    assert str(tmp_path) not in str(subject.facts)


def test_path_and_modules_are_left_as_found(tmp_path: Path) -> None:
    paths, modules = list(sys.path), set(sys.modules)
    find(write(tmp_path, GOOD))
    complaint(write(tmp_path, "import helper_of_mine\nraise ValueError('x')\n"))
    assert sys.path == paths
    assert set(sys.modules) == modules


def test_each_folder_gets_its_own_helper(tmp_path: Path) -> None:
    for width in (2, 5):
        folder = tmp_path / str(width)
        folder.mkdir()
        model = write(folder, GOOD)
        (folder / "helper_of_mine.py").write_text(f"WIDTH = {width}\n")
        assert next(iter(find(model).batches)).inputs["input"].shape == (4, width)


def test_a_module_that_cannot_be_copied_is_built_again(tmp_path: Path) -> None:
    subject = find(write(tmp_path, UNCOPYABLE))
    first, second = subject.load(None), subject.load(torch.bfloat16)
    assert first is not second
    assert torch.equal(next(first.parameters()).bfloat16(), next(second.parameters()))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("def build():\n    raise ValueError('no\\nweights')\n", ("calling own.py:build", "no weights", "own.py:2")),
        ("import helper_of_mine\n1 / 0\n", ("importing own.py", "ZeroDivisionError", "own.py:2")),
        ("def build(:\n", ("SyntaxError", "own.py:1")),
        ("import no_such_module_at_all\n", ("no_such_module_at_all", "own.py:1")),
        ("raise SystemExit(3)\n", ("SystemExit", "own.py:1")),
        ("def make():\n    pass\n", ("no function 'build'", "it has make")),
        ("x = 1\n", ("no function 'build'", "it has none")),
        ("build = 3\n", ("is of type int",)),
        ("def build(size):\n    pass\n", ("TypeError", "size")),
        ("def build():\n    return 3\n", ("returned int", "(module, inputs)")),
        ("def build():\n    return 1, 2, 3\n", ("a tuple of 3",)),
        ("def build():\n    return 1, {}\n", ("not int",)),
        ("import torch\ndef build():\n    return torch.nn.Identity(), 'text'\n", ("type str",)),
        ("import torch\ndef build():\n    return torch.nn.Identity(), []\n", ("empty",)),
        ("import torch\ndef build():\n    return torch.nn.Identity(), [torch.ones(2), 7]\n", ("batch 1", "type int")),
        ("import torch\ndef build():\n    return torch.nn.Identity(), {1: 2}\n", ("the key 1",)),
    ],
)
def test_what_goes_wrong_in_the_file_is_one_line_that_says_where(
    text: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    message = complaint(write(tmp_path, text))
    for part in parts:
        assert part in message


def test_the_cause_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        find(write(tmp_path, "def build():\n    raise KeyError('x')\n"))
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_file_that_is_missing_or_names_no_function_is_told(tmp_path: Path) -> None:
    assert "there is no file" in complaint(str(tmp_path / "nowhere.py:build"))
    model = write(tmp_path, GOOD)
    assert "own.py:build" in complaint(model.removesuffix(":build"))
    assert "not the name of a function" in complaint(model + "()")
