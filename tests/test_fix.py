"""`overflow-lab fix` and `scan --fix` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from overflow_lab.cli.app import run
from overflow_lab.subjects import demo

FILE = """
import torch
from torch import nn


def pair(peak=60_000.0):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        model[0].weight.mul_(peak)
        model[2].weight.div_(peak)
    return model, {"input": torch.linspace(-2.0, 2.0, 64).reshape(8, 8)}


def hopeless():
    model = nn.Linear(8, 4).eval()
    with torch.no_grad():
        model.weight.fill_(1e6)
    return model, {"input": torch.ones(8, 8)}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "m.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fix_ends_with_0_where_all_is_mended_and_shows_the_proof(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fix", "m.py:pair", "-p", "fp16", "--remedy", "rescale"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "float16 breaks: overflow → works" in said
    assert "✓ Rescale 3 weights" in said
    assert "on 6 inputs, and on 2 that the search did not see" in said
    assert "in float32 the same bits" in said
    assert (folder / "reports" / "m-pair.html").exists()


def test_fix_ends_with_1_where_nothing_is_proven_and_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fix", "m.py:hopeless", "-p", "fp16", "--remedy", "rescale", "--remedy", "clamp"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "no rescale mends it" in said


def test_json_is_one_object_with_the_remedies(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fix", "m.py:pair", "-p", "fp16", "--remedy", "rescale", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["verdicts"]["float16"]["verdict"] == "overflow"
    (row,) = made["remedies"]
    assert row["remedy"] == "rescale"
    assert row["proven"] is True
    assert row["held_inputs"] == 2


def test_scan_with_fix_does_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["scan", "m.py:pair", "-p", "fp16", "--fix", "--json"]) == 0
    kinds = {row["remedy"] for row in json.loads(capsys.readouterr().out)["remedies"] if row["proven"]}
    assert {"rescale", "island"} <= kinds


def test_report_shows_the_proofs_again_without_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["fix", "m.py:pair", "-p", "fp16", "--remedy", "rescale", "-q"])
    (folder / "m.py").unlink()
    capsys.readouterr()
    assert run(["report", "reports/m-pair.jsonl.gz", "--overwrite"]) == 0
    assert "Rescale" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fix", "m.py:pair", "--remedy", "magic"], "--remedy is 'magic'"),
        (["fix", "m.py:pair", "--save", "full"], "full exists"),
        (["scan", "m.py:pair", "--fix", "--repro", "r"], "--fix and --repro"),
        (["fix", "m.py:pair", "--holdout", "other.txt"], "brings its own"),
        (["fix", "demo", "--holdout", "none.txt"], "none.txt"),
    ],
)
def test_bad_input_gets_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (folder / "full").mkdir()
    (folder / "full" / "x").touch()
    assert run(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line


def test_a_module_cannot_be_saved_as_a_checkpoint_and_that_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["fix", "m.py:pair", "-p", "fp16", "--remedy", "rescale", "--save", "m"]) == 0
    assert "saved      nothing" in capsys.readouterr().out
    assert not (folder / "m").exists()


def test_the_demo_is_mended_and_its_checkpoint_answers_right_in_plain_float16(folder: Path) -> None:
    assert run(["fix", "demo", "-p", "fp16", "--remedy", "rescale", "--save", "mended", "-q"]) == 0
    model = AutoModelForSeq2SeqLM.from_pretrained("mended", dtype=torch.float16)
    tokenizer = AutoTokenizer.from_pretrained("mended")
    inputs = tokenizer(list(demo.PROMPTS + demo.HELD_BACK), padding=True, return_tensors="pt")
    tokens = model.generate(**inputs, num_beams=4, max_new_tokens=32)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    assert texts[: len(demo.ANSWERS)] == list(demo.ANSWERS)
    original = AutoModelForSeq2SeqLM.from_pretrained(demo.folder(), dtype=torch.float32)
    expected = original.generate(**inputs, num_beams=4, max_new_tokens=32)
    assert texts == tokenizer.batch_decode(expected, skip_special_tokens=True)
