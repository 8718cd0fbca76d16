from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overflow_lab.errors import UsageError
from overflow_lab.subjects.find import SubjectOptions, find
from tests.tiny_models import save


def complaint(model: str, options: SubjectOptions | None = None) -> str:
    """Return the message of the UsageError, which is one line."""
    with pytest.raises(UsageError) as caught:
        find(model, options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_demo_answers_from_its_own_prompts() -> None:
    subject = find("demo")
    assert (subject.name, subject.kind) == ("demo", "demo")
    batch = next(iter(subject.batches))
    assert batch.texts
    assert subject.generation is not None
    assert subject.generation.decode is not None


def test_a_folder_is_loaded_and_named_by_its_last_part(tmp_path: Path) -> None:
    subject = find(str(save("bert", tmp_path)))
    assert (subject.name, subject.kind) == ("bert", "folder")


def test_the_folder_of_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(save("bert", tmp_path))
    assert find(".").name == "bert"


def test_a_python_file_is_found_by_its_function(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 3), {'input': torch.ones(4, 2)}\n")
    subject = find(f"{file}:build")
    assert (subject.name, subject.kind) == ("own.py:build", "python-file")


@pytest.mark.parametrize("model", ["./nowhere/at/all", "a/b/c", "/no/such/folder", "bad name", "-x"])
def test_what_is_neither_a_folder_nor_a_possible_name_is_told_with_the_ways(model: str) -> None:
    message = complaint(model)
    assert repr(model) in message
    assert "path/to/file.py:function" in message


def test_an_empty_name_is_not_the_working_directory() -> None:
    assert "empty" in complaint("")


def test_a_file_that_is_no_python_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in complaint(str(file))


def test_a_name_that_is_not_in_the_cache_is_told_when_the_hub_is_off() -> None:
    message = complaint("nobody/no-such-model")
    assert "nobody/no-such-model" in message
    assert "HF_HUB_OFFLINE" in message


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (SubjectOptions(batch_size=0), "--batch-size is 0"),
        (SubjectOptions(num_beams=0), "--num-beams is 0"),
        (SubjectOptions(max_new_tokens=-1), "--max-new-tokens is -1"),
        (SubjectOptions(max_length=0), "--max-length is 0"),
        (SubjectOptions(texts=("a",), inputs_file="b.txt"), "choose one"),
        (SubjectOptions(texts=(" ",)), "--text is empty"),
        (SubjectOptions(column="question"), "--inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_loaded(options: SubjectOptions, part: str) -> None:
    assert part in complaint("demo", options)


def test_a_device_that_is_not_there_is_refused(tmp_path: Path) -> None:
    folder = str(save("bert", tmp_path))
    assert "'no-such'" in complaint(folder, SubjectOptions(device="no-such"))
    if not torch.cuda.is_available():
        assert "--device cpu" in complaint(folder, SubjectOptions(device="cuda"))


def test_a_task_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    assert "causal-lm" in complaint(str(save("bert", tmp_path)), SubjectOptions(task="poetry"))
