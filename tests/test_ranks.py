"""Many processes: two of them make the recording of one, and one that is killed takes nothing along."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import overflow_lab
from overflow_lab.capture.team import Place, Team, join, launched
from overflow_lab.errors import UsageError
from overflow_lab.recording import BatchRow, BlindSpotRow, RangeRow, Recording, RunRow, ShareRow, load
from tests.merged import assert_same

ROOT = Path(__file__).resolve().parent.parent
SUBJECT = """
import os, signal, torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        if os.environ.get("RANK") == "1" and float(x[0, 0]) == float(os.environ.get("ENDS_AT", "-1")):
            if os.environ["ENDS_BY"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("no more")
        return self.down(self.up(x * 20))

def build():
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 4, generator=generator) for _ in range(40)]
    for number, batch in enumerate(batches):
        batch[0, 0] = number
    return Net(), batches
"""


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("subject") / "net.py"
    path.write_text(SUBJECT)
    return f"{path}:build"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "RANK"))}
    return {**known, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OVERFLOW_LAB_RANK_TIMEOUT": "5", **more}


def torchrun(subject: str, out: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Scan by two processes under torchrun, which ends all when one fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "-m", "overflow_lab.cli"]
    arguments = ["scan", subject, "--recording", str(out), "--report", str(out.with_suffix(".html"))]
    return subprocess.run(
        [*launcher, *arguments], capture_output=True, text=True, check=False, timeout=150, env=environment(**more)
    )


def by_hand(subject: str, out: Path, **more: str) -> list[tuple[int, str, str]]:
    """Scan by two processes that nobody watches over; return the exit code, output and errors of each."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    arguments = ["scan", subject, "--recording", str(out), "--report", str(out.with_suffix(".html"))]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "overflow_lab.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**meeting, RANK=str(rank), LOCAL_RANK=str(rank), **more),
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=150) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


def gaps(recording: Recording) -> list[str]:
    return [row.reason for row in recording.of(BlindSpotRow) if row.reason.startswith("rank")]


def test_two_processes_make_the_recording_of_one(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    done = torchrun(subject, out)
    assert done.returncode == 0, done.stderr
    assert_same(overflow_lab.scan(subject).recording, load(out))
    assert done.stdout.count("bfloat16  works") == 1  # the other rank is quiet
    assert sorted(path.name for path in tmp_path.iterdir()) == ["two.jsonl.gz", "two.jsonl.html"]


def test_a_process_that_is_killed_takes_nothing_along_that_it_had_written(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    (code, text, said), (killed, nothing, _) = by_hand(subject, out, ENDS_AT="29", ENDS_BY="kill")
    assert (code, killed) == (3, -signal.SIGKILL)
    made = load(out)
    # Rank 1 takes batches 1, 3, ...; of these it had written the first eight when it came to batch 29.
    lost = ", ".join(f"{2 * batch + 1}-{2 * batch + 2}" for batch in range(17, 32, 2))
    assert gaps(made) == [f"rank 1 of 2 was killed: inputs {lost} and 4 more stretches of 80 were not run"]
    assert made.status == "interrupted"
    assert "float16" in text
    assert nothing == ""
    assert f"rank 1 of 2 was killed. What was recorded is in {out}" in said
    runs = {(row.precision, row.run): row.batches for row in made.of(RunRow)}
    assert runs == {(name, "forward"): 28 for name in ("float32", "float16", "bfloat16")}
    assert not made.of(BatchRow)
    assert len(list(tmp_path.glob("two.rank*-of-2.jsonl.gz"))) == 2  # kept, since not all is there


def test_what_is_left_of_a_killed_process_equals_those_batches_of_one(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    by_hand(subject, out, ENDS_AT="29", ENDS_BY="kill")
    from overflow_lab.subjects.find import find

    batches = [b for n, b in enumerate(find(subject).batches) if n % 2 == 0 or n < 16]
    whole = overflow_lab.scan(find(subject).load(None), [batch.positional for batch in batches]).recording

    def ranges(recording: Recording) -> dict[Any, Any]:
        return {row.key: (row.calls, row.range.exponents, row.range.min) for row in recording.of(RangeRow)}

    assert ranges(load(out)) == ranges(whole)


def test_under_torchrun_which_ends_all_the_rest_is_merged(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    began = time.monotonic()
    done = torchrun(subject, out, ENDS_AT="29", ENDS_BY="kill")
    assert done.returncode != 0
    assert time.monotonic() - began < 100
    made = load(out)
    assert made.status == "interrupted"
    assert gaps(made)
    assert gaps(made)[0].startswith("rank ")
    assert "rank 1 of 2 was killed" in done.stderr
    assert out.with_suffix(".html").exists()


def test_a_model_that_fails_in_one_process_leaves_the_others_to_end_theirs(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    done = torchrun(subject, out, ENDS_AT="29", ENDS_BY="raise")
    assert done.returncode != 0
    made = load(out)
    assert made.status == "failed"
    # Float32 had run batches 17 to 27 of rank 1 when it failed, the other precisions none of them.
    assert {row.batches for row in made.of(RunRow) if row.precision == "float32"} == {34}
    assert {row.batches for row in made.of(RunRow) if row.precision == "float16"} == {28}
    assert "rank 1 of 2 ended early (OverflowLabError: the model fails in float32 already" in done.stderr
    assert "rank 1 of 2: the model fails in float32 already" in done.stderr


def test_wrong_usage_is_said_once_and_ends_all(tmp_path: Path) -> None:
    (code, _, said), (other, text, silent) = by_hand("nothing/here", tmp_path / "x.jsonl.gz")
    assert (code, other) == (2, 2)
    assert "overflow-lab:" in said
    assert (text, silent) == ("", "")


def test_parts_of_an_earlier_scan_are_not_written_over(subject: str, tmp_path: Path) -> None:
    out = tmp_path / "two.jsonl.gz"
    (tmp_path / "two.rank1-of-2.jsonl.gz").write_text("")
    (code, _, said), (other, _, _) = by_hand(subject, out)
    assert (code, other) == (2, 2)
    assert "is of an earlier scan that was not merged" in said


def test_a_process_knows_its_place_from_its_launcher() -> None:
    given = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    assert launched(given) == Place(1, 4, 1)
    assert launched({**given, "WORLD_SIZE": "1"}) is None
    assert launched({**given, "RANK": "4"}) is None
    assert launched({**given, "RANK": "x"}) is None
    assert launched({name: value for name, value in given.items() if name != "MASTER_ADDR"}) is None
    assert launched({}) is None


def test_one_who_is_silent_is_lost_and_one_who_ends_is_not() -> None:
    dist: Any = torch.distributed
    store = dist.HashStore()
    leader, other = (Team(Place(rank, 3), store, silence=0.5) for rank in (0, 1))
    with other.alive():
        began = time.monotonic()
        assert leader.wait_for([1, 2], lambda: began + 2.0) == [1, 2]  # one is past the deadline, one is silent
        assert 1.5 < time.monotonic() - began < 4
        other.end("it is done")
        assert leader.wait_for([1, 2], lambda: time.monotonic() + 1) == [2]
    assert leader.said(1) == "it is done"
    assert leader.said(2) is None


def test_one_whom_nobody_answers_is_told_how_to_scan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overflow_lab.capture.team._JOIN", 1.0)
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(UsageError, match="unset WORLD_SIZE"):
        join(Place(1, 2), meeting)
    with pytest.raises(UsageError, match="OVERFLOW_LAB_RANK_TIMEOUT is 'soon'"):
        join(Place(0, 2), {**meeting, "OVERFLOW_LAB_RANK_TIMEOUT": "soon"})


def test_a_share_says_what_there_was_to_divide(subject: str) -> None:
    parts = [overflow_lab.scan(subject, share=(rank, 2)).recording for rank in range(2)]
    ends = [part.of(ShareRow) for part in parts]
    assert ends[0] == ends[1]
    assert (ends[0][0].batches, ends[0][0].inputs) == (40, 80)
    assert [row.batch for row in parts[1].of(BatchRow) if row.precision == "float32"] == list(range(1, 40, 2))
