"""`overflow-lab convert`: exit codes, what it prints, and one object for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from overflow_lab.cli.app import run
from overflow_lab.cli.convert import lines
from overflow_lab.remedies.convert import convert
from tests.test_convert import with_weight
from tests.tiny_models import save

SHORT = ["--max-new-tokens", "4", "--num-beams", "2"]


@pytest.fixture
def t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return save("t5", tmp_path, tokenizer=True)


def test_it_ends_with_0_and_says_what_was_lost_kept_checked_and_written(
    t5: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["convert", "t5", "--to", "fp16", "--save", "half", *SHORT]) == 0
    out = capsys.readouterr().out
    said = {line[:10].strip(): line[11:] for line in out.splitlines() if line[:10].strip()}
    assert "float16  works" in out
    assert said["lost"] == "nothing: every weight fits"
    assert said["kept"].startswith("encoder.block.0.layer.1.DenseReluDense.wo and 3 more in float32")
    assert "bit-identical with the cast in memory" in said["checked"]
    assert "outputs on 8 inputs, 16 answers" in said["checked"]
    assert said["saved"] == "half"
    assert said["load it"] == 'T5ForConditionalGeneration.from_pretrained("half", dtype="auto")'
    assert "remedy" not in said
    assert sorted(p.name for p in Path().iterdir()) == ["half", "t5"]


def test_a_refusal_is_one_line_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ["--text", "seven", "--no-generate"]
    assert run(["convert", "demo", "--to", "float16", "--save", str(tmp_path / "half"), *text]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    told = [line for line in shown.err.splitlines() if line.startswith("overflow-lab: ")]
    assert len(told) == 1
    assert "demo breaks in float16: `" in told[0]
    assert not (tmp_path / "half").exists()


def test_wrong_usage_is_one_line_and_exit_code_2(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "t5", "--to", "fp8", "--save", "half"]) == 2
    assert run(["convert", "t5", "--to", "fp16", "--save", "t5"]) == 2
    assert run(["convert", "t5", "--to", "fp16"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 3
    assert all(line.startswith("overflow-lab: ") for line in told)


def test_json_is_one_object_alone_refused_or_not(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["convert", "t5", "--to", "fp16", "--save", "half", "--json", *SHORT]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["conversion"]["folder"] == "half"
    assert written["schema"] == 1
    with_weight(t5, "shared.weight", 99, 1e6)
    assert run(["convert", "t5", "--to", "fp16", "--save", "half2", "--json", "--text", "w5", *SHORT]) == 1
    refused = json.loads(capsys.readouterr().out)
    assert refused["conversion"]["folder"] is None
    assert "`shared.weight`, makes infinities" in refused["conversion"]["refused"]
    assert refused["conversion"]["lost"][0]["name"] == "shared.weight"


def test_the_worst_tensors_are_named_with_their_counts(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_weight(t5, "shared.weight", 99, 1e6)
    with_weight(t5, "shared.weight", 98, 1e-9)
    assert run(["convert", "t5", "--to", "fp16", "--save", "half", "--force", "--text", "w5", *SHORT]) == 0
    out = capsys.readouterr().out
    assert "32 to infinity, 32 to zero, in 1 tensor" in out
    assert "shared.weight: 32 to infinity, 32 to zero of 3,200" in out


def test_the_recording_is_kept_on_request_and_never_over_another(t5: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("scan.jsonl").write_text("mine")
    command = ["convert", "t5", "--to", "fp16", "--save", "half", "--recording", "scan.jsonl", *SHORT]
    assert run(command) == 2
    assert Path("scan.jsonl").read_text() == "mine"
    assert run([*command, "--overwrite"]) == 0
    assert json.loads(Path("scan.jsonl").read_text().splitlines()[0])["kind"] == "header"
    capsys.readouterr()


def test_a_hostile_tensor_name_is_one_safe_line(t5: Path) -> None:
    import dataclasses

    from overflow_lab.recording import CastRow

    done = convert(t5, "fp16", t5.parent / "half", max_new_tokens=4, num_beams=2)
    row = CastRow("float16", "a\x1b[31m\nb", "", "parameter", "float32", "float16", 4, to_infinity=1)
    recording = dataclasses.replace(done.scan.recording, rows=(*done.scan.recording.rows, row))
    hostile = dataclasses.replace(done, scan=dataclasses.replace(done.scan, recording=recording))
    assert all("\x1b" not in line and "\n" not in line for line in lines(hostile))
