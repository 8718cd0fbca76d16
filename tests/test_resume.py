"""A scan that is interrupted and goes on gives the recording of one that was not."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import overflow_lab
from overflow_lab.capture.precisions import parse_precisions
from overflow_lab.capture.record import Recorder
from overflow_lab.errors import UsageError
from overflow_lab.recording import FORMAT, AnswerRow, Header, ProgressRow, Recording, Row, RunRow, load, load_progress
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Subject
from overflow_lab.subjects.find import find
from overflow_lab.subjects.module import from_module
from overflow_lab.subjects.options import SubjectOptions
from tests import tiny_models

HEADER = Header(FORMAT, "0", "", {"name": "m"}, ("float32", "float16"))


class Killed(BaseException):
    """Stands for a signal that no program sees."""


class Dying(Writer):
    """A writer whose process ends before it writes row `last`: nothing is closed, no footer is written."""

    last = 0

    def append(self, row: Any) -> None:
        self._count()
        super().append(row)

    def progress(self, row: ProgressRow, *, last: bool = False) -> None:
        self._count()
        super().progress(row, last=last)

    def __exit__(self, *ended: object) -> None:
        pass

    def _count(self) -> None:
        if self.last == 0:
            raise Killed
        self.last -= 1


def plain(rows: tuple[Row, ...]) -> list[Row]:
    """Rows without what differs from run to run: how long it took."""
    return [dataclasses.replace(row, seconds=0.0) if isinstance(row, RunRow) else row for row in rows]


def record(subject: Subject, writer: Writer, **options: Any) -> None:
    with writer:
        Recorder(subject, parse_precisions(["float16"]), writer, memory=1, **options).run()


def interrupted(subject: Subject, path: Path, after: int) -> bool:
    """Record until row `after`; return whether it was stopped there."""
    writer = Dying(path, HEADER)
    writer.last = after
    try:
        record(subject, writer)
    except Killed:
        return True
    return False


def resumed(subject: Subject, path: Path) -> Recording | None:
    found = load_progress(path)
    if found is None:
        return None
    record(subject, Writer(path, HEADER, resumed=found), resumed=found)
    return load(path)


def small() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return from_module(model, [{"input": torch.randn(2, 4) * 10.0**n} for n in range(6)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    path = tmp_path_factory.mktemp("whole") / "r.jsonl"
    record(small(), Writer(path, HEADER))
    return load(path)


@given(after=st.integers(0, 140), zipped=st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wherever_a_scan_is_killed_resuming_it_gives_what_one_run_gives(
    tmp_path_factory: pytest.TempPathFactory, whole: Recording, after: int, zipped: bool
) -> None:
    path = tmp_path_factory.mktemp("killed") / ("r.jsonl.gz" if zipped else "r.jsonl")
    stopped = interrupted(small(), path, after)
    made = resumed(small(), path)
    if made is None:
        assert stopped
        assert sum(row.batches for row in load(path).of(RunRow) if row.precision == "float16") <= 1
        return
    assert plain(made.rows) == plain(whole.rows)
    assert made.complete


def test_a_scan_that_is_killed_twice_gives_what_one_run_gives(tmp_path: Path, whole: Recording) -> None:
    path = tmp_path / "r.jsonl"
    assert interrupted(small(), path, 80)
    found = load_progress(path)
    assert found is not None
    writer = Dying(path, HEADER, resumed=found)
    writer.last = 10
    with pytest.raises(Killed):
        record(small(), writer, resumed=found)
    made = resumed(small(), path)
    assert made is not None
    assert plain(made.rows) == plain(whole.rows)


@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_answers_and_looks_inside_go_on_where_they_were(tmp_path: Path, share: float) -> None:
    folder = str(tiny_models.save("t5", tmp_path, tokenizer=True))
    options = SubjectOptions(texts=("w5 w6", "w7", "w8 w9 w3"), batch_size=1, max_new_tokens=3, num_beams=2)
    counting = Dying(tmp_path / "whole.jsonl", HEADER)
    counting.last = 1_000_000
    record(find(folder, options), counting)
    expected = load(tmp_path / "whole.jsonl")
    path = tmp_path / "r.jsonl"
    assert interrupted(find(folder, options), path, int(share * (1_000_000 - counting.last)))
    made = resumed(find(folder, options), path)
    assert made is not None
    assert plain(made.rows) == plain(expected.rows)


def test_what_was_recorded_before_a_kill_can_be_read(tmp_path: Path) -> None:
    interrupted(small(), tmp_path / "r.jsonl", 100)
    found = load(tmp_path / "r.jsonl")
    assert found.status == "unfinished"
    assert sum(row.inputs for row in found.of(RunRow) if row.precision == "float16") > 2


def test_neither_file_nor_answers_grow_with_the_number_of_inputs(tmp_path: Path) -> None:
    folder = str(tiny_models.save("t5", tmp_path, tokenizer=True))
    options: dict[str, Any] = {
        "batch_size": 64,
        "max_new_tokens": 2,
        "num_beams": 2,
        "level": "module",
        "precisions": ["float16"],
    }
    sizes, answers = [], []
    for count in (400, 1600):
        path = tmp_path / f"{count}.jsonl"
        found = overflow_lab.scan(folder, inputs_file=lines(tmp_path / "in.txt", count), recording=path, **options)
        sizes.append(path.stat().st_size)
        answers.append(len(found.recording.of(AnswerRow)))
        assert found.verdicts["float16"].effect.answers == 2 * count
    assert answers[0] <= answers[1] <= 4 * (256 + 64)  # float16 and float16-to, two searches each
    assert sizes[1] < 1.1 * sizes[0]


# ---- through scan(), and what it refuses ----


def lines(path: Path, count: int) -> str:
    path.write_text("".join(f"w{3 + n % 90} w{4 + n % 7}\n" for n in range(count)), encoding="utf-8")
    return str(path)


def scan(folder: str, inputs: str, **options: Any) -> overflow_lab.Scan:
    chosen = {"precisions": ["float16"], "batch_size": 2, "generate": False, "level": "module", **options}
    return overflow_lab.scan(folder, inputs_file=inputs, **chosen)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("models"), tokenizer=True))


def test_a_complete_recording_is_returned_as_it_is(tmp_path: Path, folder: str) -> None:
    inputs, path = lines(tmp_path / "in.txt", 6), tmp_path / "r.jsonl.gz"
    before = scan(folder, inputs, recording=path)
    data = path.read_bytes()
    after = scan(folder, inputs, resume=path)
    assert path.read_bytes() == data
    assert after.to_dict() == before.to_dict()


def test_more_inputs_are_added_to_a_complete_recording(tmp_path: Path, folder: str) -> None:
    path = tmp_path / "r.jsonl"
    scan(folder, lines(tmp_path / "in.txt", 6), recording=path)
    more = scan(folder, lines(tmp_path / "in.txt", 10), resume=path).recording
    whole = scan(folder, lines(tmp_path / "in.txt", 10)).recording
    assert more.complete
    assert {row.inputs for row in more.of(RunRow)} == {10}
    assert [type(row) for row in more.rows] == [type(row) for row in whole.rows]


def refused(path: Path, *said: str, **options: Any) -> None:
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        scan(**options, resume=path)
    assert all(part in str(caught.value) for part in said), str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


def test_another_model_other_inputs_and_other_options_are_refused_in_one_line(tmp_path: Path, folder: str) -> None:
    inputs, path = lines(tmp_path / "in.txt", 6), tmp_path / "r.jsonl"
    scan(folder, inputs, recording=path)
    same = {"folder": folder, "inputs": inputs}
    refused(path, "precisions", **{**same, "precisions": ["bfloat16"]})
    refused(path, "the option batch_size", "2 there and 3 here", **{**same, "batch_size": 3})
    refused(path, "level", **{**same, "level": "operation"})
    refused(path, "store_texts", **{**same, "store_texts": True})
    refused(path, "6 inputs", "here are 4", **{**same, "inputs": lines(tmp_path / "few.txt", 4)})
    other = tmp_path / "other.txt"
    other.write_text(Path(inputs).read_text().replace("w5", "w6"), encoding="utf-8")
    refused(path, "the first 6 inputs are not those", **{**same, "inputs": str(other)})
    gpt2 = str(tiny_models.save("gpt2", tmp_path, tokenizer=True))
    refused(path, "the model's", **{**same, "folder": gpt2})
    with pytest.raises(UsageError, match="leave the recording"):
        scan(folder, inputs, resume=path, recording=tmp_path / "s.jsonl")
    with pytest.raises(UsageError, match="there is no recording"):
        scan(folder, inputs, resume=tmp_path / "none.jsonl")


def test_the_same_class_with_other_weights_is_refused(tmp_path: Path) -> None:
    inputs, path = lines(tmp_path / "in.txt", 6), tmp_path / "r.jsonl"
    model = tiny_models.build("llama")
    tiny_models.build_tokenizer().save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m")
    scan(str(tmp_path / "m"), inputs, recording=path)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 9.0
    model.save_pretrained(tmp_path / "m")
    refused(path, "model.layers.1.mlp.up_proj.weight differs", folder=str(tmp_path / "m"), inputs=inputs)


def test_a_recording_of_another_version_is_refused(tmp_path: Path, folder: str) -> None:
    inputs, path = lines(tmp_path / "in.txt", 4), tmp_path / "r.jsonl"
    scan(folder, inputs, recording=path)
    path.write_text(path.read_text().replace(f'"overflow_lab":"{overflow_lab.__version__}"', '"overflow_lab":"0.0"'))
    refused(path, "made by overflow-lab 0.0", folder=folder, inputs=inputs)


def test_a_recording_that_was_killed_before_any_progress_is_refused(tmp_path: Path, folder: str) -> None:
    interrupted(small(), tmp_path / "r.jsonl", 5)
    with pytest.raises(UsageError, match="scan anew"):
        scan(folder, lines(tmp_path / "in.txt", 4), resume=tmp_path / "r.jsonl")


# ---- the real thing ----


def command(folder: str, inputs: str, *more: str) -> list[str]:
    asked = ["scan", folder, "--inputs", inputs, "--batch-size", "1", "--no-generate", "--level", "module"]
    return [sys.executable, "-m", "overflow_lab", *asked, "-p", "float16", "--quiet", *more]


def test_a_scan_killed_by_the_system_goes_on_from_the_command_line(tmp_path: Path, folder: str) -> None:
    inputs = lines(tmp_path / "in.txt", 400)
    for name in ("killed", "whole"):
        (tmp_path / name).mkdir()
    recording = tmp_path / "killed" / "r.jsonl.gz"
    place = ["--report", str(tmp_path / "killed" / "r.html")]
    process = subprocess.Popen(command(folder, inputs, "--recording", str(recording), *place), env=os.environ)
    until = time.monotonic() + 120
    while not (recording.exists() and load_progress(recording)) and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    left = load_progress(recording)
    assert left is not None
    assert 0 < left.progress.inputs < 400
    assert not left.complete
    subprocess.run(command(folder, inputs, "--resume", str(recording), *place), check=True)
    whole = tmp_path / "whole" / "r.jsonl.gz"
    subprocess.run(command(folder, inputs, "--recording", str(whole), "--report", str(whole) + ".html"), check=True)
    made, expected = load(recording), load(whole)
    assert made.complete
    assert plain(made.rows) == plain(expected.rows)
