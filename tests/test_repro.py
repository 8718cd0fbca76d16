"""Reproductions from a recording alone: the scripts run without overflow-lab, and no text of it becomes code."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import overflow_lab
from overflow_lab.analysis import analyze
from overflow_lab.analysis.results import Diagnosis, Origin, Verdict
from overflow_lab.cli.app import run
from overflow_lab.errors import UsageError
from overflow_lab.recording import Header, PrecisionRow, Recording
from overflow_lab.report.repro import script
from overflow_lab.subjects.demo import built_in_texts
from tests.repro_models import checkpoint, overflowing_linear, overflowing_t5, python, user_file
from tests.sample_recording import HOSTILE, sample_diagnosis, sample_recording


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small T5 whose feed-forward overflows in float16."""
    return overflowing_t5(tmp_path_factory.mktemp("models") / "t5-big")


def test_the_script_of_a_recording_shows_the_failure_of_a_checkpoint(t5: Path, tmp_path: Path) -> None:
    kept = tmp_path / "t5.jsonl"
    found = overflow_lab.scan(str(t5), precisions="float16-to", recording=kept, texts=("a b", "c"), store_texts=True)
    text = script(overflow_lab.load(kept), found.diagnosis)
    assert str(t5.parent) not in text
    assert "'a b'" in text or '"a b"' in text
    path = tmp_path / "repro.py"
    path.write_text(text.replace('MODEL = "t5-big"', f"MODEL = {str(t5)!r}"))
    done = python(path)
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("it breaks\n")
    origin = found.verdicts["float16-to"].origin
    assert origin is not None
    assert done.stdout.startswith(f"{origin.module}: float32 up to ")


@pytest.mark.parametrize(
    ("name", "weight", "padding"),
    [
        ("llama", "model.layers.1.mlp.down_proj.weight", 'padding_side = "left"'),
        ("bert", "bert.encoder.layer.1.output.dense.weight", "max_length=limit"),
    ],
)
def test_the_built_in_texts_are_given_as_the_scan_gave_them(
    name: str, weight: str, padding: str, tmp_path: Path
) -> None:
    model = checkpoint(tmp_path / name, name, {weight: 1e9})
    found = overflow_lab.scan(model, precisions="float16", generate=False)
    built_in = built_in_texts(found.recording.header.subject)
    text = script(found.recording, found.diagnosis, built_in=built_in)
    assert padding in text
    texts = next(
        node for node in ast.parse(text).body if isinstance(node, ast.Assign) and isinstance(node.value, ast.List)
    )
    assert ast.literal_eval(texts.value) == list(built_in[:4])
    path = tmp_path / "repro.py"
    path.write_text(text.replace(f'MODEL = "{name}"', f"MODEL = {model!r}"))
    done = python(path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "it breaks"), done.stderr


def test_inputs_that_are_no_text_are_a_place_to_fill_in(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "whisper", "whisper", {"model.encoder.layers.1.fc1.weight": 1e6})
    found = overflow_lab.scan(model, precisions="float16", generate=False)
    text = script(found.recording, found.diagnosis)
    ast.parse(text)
    assert "put here the inputs of the model" in text
    assert "TEXTS" not in text


def test_texts_that_were_not_stored_are_a_place_to_fill_in(t5: Path, tmp_path: Path) -> None:
    found = overflow_lab.scan(str(t5), precisions="float16-to", texts=("my secret",), generate=False)
    text = script(found.recording, found.diagnosis)
    assert "secret" not in text
    assert "# The texts that failed are not in the recording: put them here." in text


def test_the_script_of_a_users_file_lies_beside_it(tmp_path: Path) -> None:
    path = user_file(tmp_path)
    found = overflow_lab.scan(f"{path}:nested", precisions="float16")
    made = tmp_path / "repro.py"
    made.write_text(script(found.recording, found.diagnosis))
    done = python(made)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("hidden: float32 up to ")


def test_a_model_that_was_in_memory_is_a_place_to_fill_in(tmp_path: Path) -> None:
    made = tmp_path / "repro.py"
    model = overflowing_linear()
    found = overflow_lab.scan(model, (torch.ones(2, 4),), precisions="float16-autocast")
    text = script(found.recording, found.diagnosis)
    made.write_text(text)
    done = python(made)
    assert done.returncode == 1
    assert "put here what makes the Sequential and its inputs" in done.stderr
    filled = "    m = torch.nn.Sequential(torch.nn.Linear(4, 4))\n    m[0].weight.data.fill_(2.0**15)\n"
    filled += "    return m, torch.ones(2, 4)\n"
    made.write_text(re.sub(r"    raise SystemExit\(.*\)\n", filled, text))
    done = python(made)
    assert (done.returncode, done.stderr) == (1, "")
    assert "0: float32 up to 131,072; float16-autocast up to 0, 8 not finite" in done.stdout


def test_a_precision_can_be_chosen_and_must_break() -> None:
    recording, diagnosis = sample_recording(), sample_diagnosis()
    assert "torch.float16" in script(recording, diagnosis, precision="float16")
    with pytest.raises(UsageError, match="nothing breaks in bfloat16"):
        script(recording, diagnosis, precision="bfloat16")
    with pytest.raises(UsageError, match="no verdict on 'fp8'; choose among float16, bfloat16"):
        script(recording, diagnosis, precision="fp8")


def hostile(text: str, **subject: Any) -> tuple[Recording, Diagnosis]:
    """Return a recording whose every text is `text`."""
    facts = {"name": text, "kind": "hub", "class": "T5ForConditionalGeneration", "tokenizer": text, "task": text}
    environment: dict[str, Any] = {"torch": text, "transformers": text}
    options: dict[str, Any] = {"device": text, "attn_implementation": text, "max_length": text, "batch_size": text}
    header = Header(1, text, text, {**facts, **subject}, ("float16",), environment, options)
    verdict = Verdict("float16", "overflow", "error", text, text, Origin(text, text), text)
    return Recording(header, (PrecisionRow("float16", text, text),)), Diagnosis({"float16": verdict})


@pytest.mark.parametrize(
    "text", [HOSTILE, '"""\nimport os\n', "'; import os; '", "x\nimport os", "\\", "{{ 7 }}", "\ud800", "a\u2028b\x0cc"]
)
@pytest.mark.parametrize("kind", ["hub", "folder", "python-file", "module"])
def test_a_hostile_recording_puts_no_code_into_the_script(text: str, kind: str) -> None:
    plain = [type(node) for node in ast.walk(ast.parse(script(*hostile("plain text", kind=kind))))]
    tree = ast.parse(script(*hostile(text, kind=kind)).encode(errors="backslashreplace"))
    assert [type(node) for node in ast.walk(tree)] == plain
    assert "os" not in {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_a_hostile_class_name_is_not_imported() -> None:
    text = script(*hostile("m", **{"class": "X\nimport os"}))
    assert "import os" not in text.replace("\\n", "\n").split("raise SystemExit")[0]


def test_the_command_prints_the_script_alone(t5: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "t5.jsonl"
    found = overflow_lab.scan(str(t5), precisions="float16-to", recording=kept, generate=False)
    assert run(["report", str(kept), "--repro"]) == 0
    assert capsys.readouterr().out == script(
        found.recording, analyze(found.recording), built_in=built_in_texts(found.recording.header.subject)
    )
    assert run(["report", str(kept), "--repro", str(tmp_path / "x.py")]) == 0
    assert (tmp_path / "x.py").read_text().startswith("# t5-big, float16-to, ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["t5.jsonl", "x.py"]


def test_float32_is_shown_against_float64() -> None:
    recording, diagnosis = hostile("m")
    row = PrecisionRow("float32", "float32", "none")
    verdict = dataclasses.replace(diagnosis.verdicts["float16"], precision="float32")
    text = script(dataclasses.replace(recording, rows=(row,)), Diagnosis({"float32": verdict}))
    assert "wide = load(torch.float64)" in text
    assert "torch.float16" not in text
