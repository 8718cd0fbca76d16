"""`overflow-lab report`: what it prints, what it writes, and that a zip holds nothing private."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

import overflow_lab
from overflow_lab.analysis import analyze
from overflow_lab.cli.app import run
from overflow_lab.cli.optional import completed
from overflow_lab.errors import UsageError
from overflow_lab.recording import AnswerRow, BlindSpotRow, FailureRow, Footer, Recording
from overflow_lab.recording.codec import encode
from overflow_lab.report import markdown
from overflow_lab.report.exports_zip import shareable, write_zip
from tests.sample_recording import sample_recording

OLD = Path(__file__).parent / "recordings" / "format-1.jsonl"
PRIVATE = "/home/alice/secret-project/model.safetensors"


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Return a recording in a folder of its own."""
    path = tmp_path / "run.jsonl"
    path.write_bytes(OLD.read_bytes())
    return path


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_markdown_goes_to_standard_output_alone(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(recorded), "--markdown"]) == 0
    found = overflow_lab.load(recorded)
    assert capsys.readouterr().out == markdown.render(found, analyze(found))
    assert listed(recorded.parent) == ["run.jsonl"]


def test_markdown_goes_to_a_file_that_is_named(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recorded.parent / "new" / "issue.md"
    assert run(["report", str(recorded), "--markdown", str(target)]) == 0
    assert capsys.readouterr().out == f"markdown   {target}\n"
    assert target.read_text(encoding="utf-8").startswith("### ")


def test_the_option_may_stand_before_the_recording(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", "--markdown", str(recorded)]) == 0
    assert capsys.readouterr().out.startswith("### ")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["report", "r", "--markdown"], ["report", "r", "--markdown=-"]),
        (["report", "--markdown", "r.jsonl"], ["report", "--markdown=-", "r.jsonl"]),
        (["report", "r", "--markdown", "x.MD"], ["report", "r", "--markdown", "x.MD"]),
        (["report", "r", "--markdown=x"], ["report", "r", "--markdown=x"]),
        (["report", "r", "--markdown", "--quiet"], ["report", "r", "--markdown=-", "--quiet"]),
        (["report", "r", "--repro", "a.py", "--zip", "b.zip"], ["report", "r", "--repro", "a.py", "--zip", "b.zip"]),
        (["report", "r", "--repro", "-"], ["report", "r", "--repro", "-"]),
        (["scan", "m", "--repro", "folder"], ["scan", "m", "--repro", "folder"]),
        ([], []),
    ],
)
def test_a_value_that_is_left_out_is_standard_output(given: list[str], expected: list[str]) -> None:
    assert completed(given) == expected


def test_a_failing_verdict_still_fails_the_command(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worst = analyze(overflow_lab.load(recorded)).worst
    assert run(["report", str(recorded), "--markdown", "--fail-on", "error"]) == int(worst == "error")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--markdown", "--json"], "--markdown and --json both go to standard output; give one of them a file."),
        (["--markdown", "--repro"], "--markdown and --repro both go to standard output"),
        (["-p", "float16"], "--precision is about --repro; give that, too."),
        (["--repro", "-p", "float8"], "the recording has no verdict on 'float8'; choose among "),
        (["--markdown", "taken.md"], "taken.md exists; choose another name, or give --overwrite."),
        (["--zip", "taken.md"], "taken.md exists; choose another name, or give --overwrite."),
        (["--zip", "taken.md/x.zip"], "x.zip cannot be written"),
    ],
)
def test_a_wrong_wish_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(recorded.parent)
    Path("taken.md").write_text("mine")
    assert run(["report", "run.jsonl", *arguments]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("\n") == 1
    assert Path("taken.md").read_text() == "mine"
    assert listed(recorded.parent) == ["run.jsonl", "taken.md"]


def test_json_beside_files_is_still_one_object(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recorded.parent / "x.md"
    assert run(["report", str(recorded), "--markdown", str(target), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["report"] is None
    assert target.exists()


def test_the_zip_holds_all_that_an_issue_needs(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = recorded.parent / "issue.zip"
    assert run(["report", str(recorded), "--zip", str(target)]) == 0
    assert capsys.readouterr().out == f"zip        {target}\n"
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert set(archive.namelist()) >= {"recording.jsonl.gz", "report.html", "issue.md"}
        archive.extractall(recorded.parent / "out")
    again = overflow_lab.load(recorded.parent / "out" / "recording.jsonl.gz")
    assert again.rows == overflow_lab.load(recorded).rows
    assert (recorded.parent / "out" / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def private_recording(*, texts: bool = False) -> Recording:
    """Return a recording into which messages have brought a path of the user's."""
    recording = sample_recording(texts=texts)
    header = dataclasses.replace(
        recording.header,
        subject={**recording.header.subject, "name": PRIVATE, "notes": [f"reads {PRIVATE}"], "tokenizer": "T"},
        environment={"torch": PRIVATE, "python": "3.11"},
    )
    rows: Any = (
        *recording.rows,
        FailureRow("float16", "forward", 0, "m", f"OSError: {PRIVATE} is missing"),
        BlindSpotRow("m", f"cannot read '{PRIVATE}'"),
    )
    return Recording(header, rows, Footer("failed", f"OSError: {PRIVATE}"), path=PRIVATE)


def contents(path: Path) -> dict[str, str]:
    """Return the texts in a zip, the recording unpacked."""
    with zipfile.ZipFile(path) as archive:
        raw = {name: archive.read(name) for name in archive.namelist()}
    return {n: (gzip.decompress(data) if n.endswith(".gz") else data).decode() for n, data in raw.items()}


def test_a_zip_names_no_path_of_the_users(tmp_path: Path) -> None:
    files = contents(write_zip(private_recording(), tmp_path / "x.zip"))
    assert len(files) >= 3
    for name, text in files.items():
        assert "alice" not in text, name
        assert "secret-project" not in text, name
    assert "model.safetensors is missing" in files["recording.jsonl.gz"]


def test_a_zip_holds_texts_only_where_they_were_stored(tmp_path: Path) -> None:
    stored = next(row.prompt for row in sample_recording(texts=True).of(AnswerRow) if row.prompt)
    with_texts = contents(write_zip(private_recording(texts=True), tmp_path / "a.zip"))
    without = contents(write_zip(private_recording(), tmp_path / "b.zip"))
    assert stored in with_texts["recording.jsonl.gz"]
    assert not any(stored in text for text in without.values())


def test_two_zips_of_one_recording_are_the_same(tmp_path: Path) -> None:
    one, two = (write_zip(sample_recording(), tmp_path / name).read_bytes() for name in ("a.zip", "b.zip"))
    assert one == two


def test_what_names_no_path_is_shared_as_it_was_recorded() -> None:
    recording = sample_recording(texts=True)
    shared = shareable(recording)
    assert [encode(row) for row in shared.rows] == [encode(row) for row in recording.rows]
    cut = {**recording.header.options, "inputs_file": "…/inputs.txt"}
    assert encode(shared.header) == encode(dataclasses.replace(recording.header, options=cut))


def test_a_zip_that_cannot_be_written_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"x.zip cannot be written \(.*\); choose another place\."):
        write_zip(sample_recording(), tmp_path / "file" / "x.zip")
