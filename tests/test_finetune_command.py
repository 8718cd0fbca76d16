"""`overflow-lab finetune`: exit codes, what it prints, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import T5ForConditionalGeneration

from overflow_lab.cli.app import run
from tests.tiny_models import save

SHORT = ["--level", "module", "--no-generate", "--no-prove", "--batch-size", "4", "--steps", "3"]


@pytest.fixture
def t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a T5 with a large `wo`, beside a file of texts; both in the current folder."""
    monkeypatch.chdir(tmp_path)
    folder = save("t5", tmp_path, tokenizer=True)
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e6)
    model.save_pretrained(folder)
    lines = (json.dumps({"text": f"w{i} w{i + 1}", "answer": f"w{i}"}) for i in range(3, 19))
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    return folder


def test_it_says_before_and_after_keeps_the_training_and_saves_nothing_that_missed_the_goal(
    t5: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["finetune", "t5", "--data", "data.jsonl", "--save", "mended", *SHORT]) == 1
    shown = capsys.readouterr()
    said = {line[:10].strip(): line[11:] for line in shown.out.splitlines()}
    assert said["goal"].startswith("not reached after 3 steps")
    assert "bits of headroom" in said["before"]
    assert "% of decisions the same" in said["after"]
    assert said["training"] == "reports/t5-finetune"
    assert "the goal was not reached, so mended was not written" in shown.err
    assert not Path("mended").exists()
    assert (Path("reports/t5-finetune") / "weights.safetensors").exists()
    assert said["report"] == "reports/t5-finetune.html"
    assert Path(said["report"]).exists()
    assert Path(said["recording"]).exists()


def test_a_training_is_not_overwritten_and_goes_on_with_resume(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["finetune", "t5", "--data", "data.jsonl", *SHORT]
    assert run(arguments) == 1
    assert run(arguments) == 2
    assert "holds a training already; give --resume" in capsys.readouterr().err
    assert run([*arguments, "--resume", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["finetune"]["steps"] == 3


def test_labels_are_a_column_of_the_file(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = [each for each in SHORT if each != "--no-generate"] + ["--max-new-tokens", "3", "--num-beams", "1"]
    assert run(["finetune", "t5", "--data", "data.jsonl", "--labels", "answer", "--json", *more]) == 1
    made = json.loads(capsys.readouterr().out)["finetune"]
    assert made["before"]["task_loss"] > 0.0
    assert run(["finetune", "t5", "--data", "data.jsonl", "--labels", "nothing", "--overwrite", *more]) == 2
    assert "there is no column 'nothing'" in capsys.readouterr().err


def test_wrong_usage_is_one_line_and_exit_code_2(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["finetune", "t5", "--data", "none.txt"]) == 2
    assert run(["finetune", "t5", "--data", "data.jsonl", "--save", "t5"]) == 2
    assert run(["finetune", "t5", "--data", "data.jsonl", "--resume"]) == 2
    assert run(["finetune", "t5", "--data", "data.jsonl", "--lr", "3"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4
