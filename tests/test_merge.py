"""Merging: recordings made apart are that of one process over all inputs; what is of another scan is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import overflow_lab
from overflow_lab import merge
from overflow_lab.cli.app import run
from overflow_lab.errors import UsageError
from overflow_lab.ranges import Range
from overflow_lab.recording import (
    BatchRow,
    BlindSpotRow,
    CastRow,
    ErrorRow,
    EventRow,
    FailureRow,
    Footer,
    LookRow,
    ModuleRow,
    ProofRow,
    RangeRow,
    Recording,
    Row,
    RunRow,
    ShareRow,
    StepRow,
    load,
)
from overflow_lab.recording.looks import kept_looks
from overflow_lab.recording.uncalled import uncalled, uncalled_row
from overflow_lab.recording.writer import Writer
from tests import tiny_models
from tests.merged import assert_same, near
from tests.sample_recording import sample_recording

WORDS = ("one", "twenty three", "five hundred", "nine", "eleven")
DEMO = tuple(f"{w} {v}" for w in WORDS for v in ("thousand four", "hundred two"))
OPTIONS: dict[str, Any] = {"batch_size": 2, "max_new_tokens": 6, "num_beams": 2}


class Picky(nn.Module):
    """Calls one of its layers for large inputs only, and overflows in float16 for the largest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.always, self.seldom, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.always(x)
        return self.seldom(y) if x.abs().max() > 10 else y


def batches(scales: list[float]) -> list[tuple[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2 + n % 3, 4, generator=generator) * scale,) for n, scale in enumerate(scales)]


def picky(inputs: list[tuple[torch.Tensor]], share: tuple[int, int] | None = None) -> Recording:
    """Return a scan; from one place in the code, which events name as their source."""
    return overflow_lab.scan(Picky(), inputs, share=share).recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("merge")


def test_shares_of_a_model_that_breaks_are_the_scan_of_one_process(folder: Path) -> None:
    whole = overflow_lab.scan("demo", texts=DEMO, **OPTIONS)
    paths = [folder / f"{rank}.jsonl.gz" for rank in range(3)]
    for rank, path in enumerate(paths):
        overflow_lab.scan("demo", texts=DEMO, share=(rank, 3), recording=path, **OPTIONS)
    made = merge([paths[2], paths[0], paths[1]], recording=folder / "all.jsonl.gz")
    assert_same(whole.recording, made)
    assert_same(made, load(folder / "all.jsonl.gz"))
    assert near(overflow_lab.analyze(made).verdicts, whole.verdicts)
    assert whole.verdicts["float16"].verdict == "overflow"
    assert made.header.environment["processes"] == 3
    assert "rank" not in made.header.options


def test_recordings_of_other_inputs_are_the_scan_of_all_of_them(folder: Path) -> None:
    path = tiny_models.save("t5", folder, tokenizer=True)
    texts = tuple(f"text {n} " + "and more " * (n % 4) for n in range(10))
    whole = overflow_lab.scan(str(path), texts=texts, **OPTIONS)
    parts = [overflow_lab.scan(str(path), texts=t, **OPTIONS).recording for t in (texts[:2], texts[2:6], texts[6:])]
    assert_same(whole.recording, merge(parts))
    assert_same(merge([merge(parts[:2]), parts[2]]), merge(parts))


def test_modules_that_only_some_inputs_call_and_inputs_that_overflow_are_dated_as_by_one_process() -> None:
    inputs = batches([1.0, 1.0, 1.0, 50.0, 1e6, 1.0, 1e6])
    whole = picky(inputs)
    parts = [picky(inputs, (rank, 2)) for rank in range(2)]
    assert_same(whole, merge(parts))
    assert [r.module for r in whole.of(BlindSpotRow) if "never" in r.reason] == ["never"]
    halves = [picky(part) for part in (inputs[:3], inputs[3:])]
    assert [r.module for r in halves[0].of(BlindSpotRow) if "never" in r.reason] == ["seldom", "never"]
    assert_same(whole, merge(halves))


def test_a_process_without_a_share_changes_nothing() -> None:
    inputs = batches([1.0, 20.0])
    parts = [picky(inputs, (rank, 4)) for rank in range(4)]
    assert_same(picky(inputs), merge(parts))


def test_a_share_that_was_killed_is_kept_and_its_inputs_are_named(folder: Path) -> None:
    inputs = batches([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    parts = [picky(inputs, (rank, 2)) for rank in range(2)]
    rows = [r for r in parts[1].rows if not ((isinstance(r, BatchRow) and r.batch == 5) or isinstance(r, ShareRow))]
    killed = dataclasses.replace(parts[1], rows=tuple(rows), footer=None)
    made = merge([parts[0], killed])
    assert made.status == "interrupted"
    assert made.footer == Footer("interrupted", "rank 1 of 2 was killed")
    gap = [row for row in made.of(BlindSpotRow) if "rank" in row.reason]
    # Batches hold 2, 3 and 4 inputs in turn, so batch 5 is inputs 15 to 18.
    assert gap == [BlindSpotRow("", "rank 1 of 2 was killed: inputs 15-18 of 18 were not run")]


def test_a_share_that_is_absent_is_named_with_its_inputs() -> None:
    inputs = batches([1.0, 2.0, 3.0, 4.0])
    parts = [picky(inputs, (rank, 3)) for rank in (0, 2)]
    made = merge(parts)
    assert made.footer == Footer("interrupted", "rank 1 of 3 left no recording")
    assert [r.reason for r in made.of(BlindSpotRow) if "rank" in r.reason] == [
        "rank 1 of 3 left no recording: inputs 3-5 of 11 were not run"
    ]


def test_precisions_that_lack_other_inputs_are_named_one_by_one() -> None:
    inputs = batches([1.0, 2.0, 3.0, 4.0])
    parts = [picky(inputs, (rank, 2)) for rank in range(2)]
    rows = [r for r in parts[1].rows if not (isinstance(r, BatchRow) and r.precision == "bfloat16")]
    made = merge([parts[0], dataclasses.replace(parts[1], rows=tuple(rows), footer=Footer("failed", "no disk"))])
    assert made.footer == Footer("failed", "rank 1 of 2 ended early (no disk)")
    gaps = [row for row in made.of(BlindSpotRow) if "rank" in row.reason]
    assert [(row.precision, row.reason.split(": ")[1]) for row in gaps] == [
        ("bfloat16", "inputs 3-5, 10-11 of 11 were not run")
    ]


def write(recording: Recording, path: Path) -> Path:
    with Writer(path, recording.header) as writer:
        for row in [*recording.rows, *([recording.footer] if recording.footer else [])]:
            writer.append(row)
    return path


def changed(recording: Recording, **header: Any) -> Recording:
    return dataclasses.replace(recording, header=dataclasses.replace(recording.header, **header))


SAMPLE = sample_recording()
OTHER_WEIGHTS = dataclasses.replace(
    SAMPLE,
    rows=tuple(dataclasses.replace(r, class_name="Conv2d") if isinstance(r, ModuleRow) else r for r in SAMPLE.rows),
)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (changed(SAMPLE, precisions=("float32", "float16")), "lacks bfloat16"),
        (changed(SAMPLE, subject={**SAMPLE.header.subject, "attn_implementation": "x"}), "attn_implementation is"),
        (OTHER_WEIGHTS, "are not of one model: the module"),
        (dataclasses.replace(SAMPLE, rows=SAMPLE.rows[3:]), "has no module"),
        (changed(SAMPLE, options={"rank": 0, "ranks": 2}), "is no share of a scan"),
    ],
)
def test_what_does_not_belong_together_is_refused_in_one_line(other: Recording, said: str) -> None:
    sample = changed(SAMPLE, subject={"attn_implementation": "eager", **SAMPLE.header.subject})
    with pytest.raises(UsageError, match=said) as raised:
        merge([sample, other])
    assert "\n" not in str(raised.value)


def test_shares_of_two_scans_are_refused() -> None:
    parts = [picky(batches([s, s]), (r, 2)) for r, s in ((0, 1.0), (1, 2.0))]
    with pytest.raises(UsageError, match="different inputs"):
        merge(parts)
    with pytest.raises(UsageError, match="both rank 0's"):
        merge([parts[0], parts[0]])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge([])


@pytest.mark.parametrize("share", [(2, 2), (-1, 2), (0,), "0/2", (0.0, 2)])
def test_a_share_that_is_none_is_refused(share: Any) -> None:
    with pytest.raises(UsageError, match=r"give \(rank, ranks\)"):
        overflow_lab.scan(Picky(), batches([1.0]), share=share)


def test_proofs_are_left_out_and_that_is_said() -> None:
    proof = ProofRow("island", "Keep `a`", "float16", "float16", True, {"verdict": "nan"}, {"verdict": "ok"})
    made = merge([dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, proof)), SAMPLE])
    assert not made.of(ProofRow)
    assert any("1 proofs of remedies were left out" in row.reason for row in made.of(BlindSpotRow))


def test_the_command_merges_and_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(write(SAMPLE, tmp_path / f"{name}.jsonl")) for name in "ab")
    assert run(["merge", a, b, "--recording", str(tmp_path / "c.jsonl.gz")]) == 0
    assert f"overflow-lab report {tmp_path / 'c.jsonl.gz'}" in capsys.readouterr().out.replace("\n", " ")
    sample, made = load(a), load(tmp_path / "c.jsonl.gz")
    doubled = {row.key: (row.calls, row.range) for row in made.of(RangeRow)}
    assert doubled == {row.key: (2 * row.calls, row.range + row.range) for row in sample.of(RangeRow)}
    assert run(["merge", a, b, "--recording", a]) == 2
    assert run(["merge", a, b, "--recording", a, "--overwrite"]) == 2
    assert "one of the recordings to merge" in capsys.readouterr().err
    assert run(["merge", a]) == 2


def test_the_command_exits_with_3_where_something_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = str(write(SAMPLE, tmp_path / "a.jsonl"))
    b = str(write(dataclasses.replace(SAMPLE, footer=Footer("interrupted")), tmp_path / "b.jsonl"))
    out = tmp_path / "c.jsonl"
    assert run(["merge", a, b, "--recording", str(out), "--quiet"]) == 3
    said = capsys.readouterr()
    assert "b.jsonl ended early (interrupted)" in said.err
    assert str(out) in said.err
    assert any("b.jsonl" in row.reason for row in load(out).of(BlindSpotRow))


def test_steps_are_kept_of_as_many_batches_as_one_process_keeps() -> None:
    steps = tuple(StepRow("float16", "greedy", batch, 0, 1, (1.0,), (0,)) for batch in range(4))
    run_row = RunRow("float32", "greedy", 3, 6, 0)
    part = dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, *steps[:3], run_row))
    assert [row.batch for row in merge([part, part]).of(StepRow)] == [0, 1, 2, 3]


def test_of_failures_the_first_of_each_kind_stays() -> None:
    failures = [FailureRow("float16", "forward", batch, "a", f"batch {batch}") for batch in (1, 0)]
    parts = [dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, failure)) for failure in failures]
    found = [row for row in merge(parts).of(FailureRow) if row.module == "a"]
    assert [row.error for row in found] == ["batch 1"]  # the second recording's batch 0 comes after all of the first's


def test_what_was_called_in_one_recording_was_called() -> None:
    def part(*silent: str, called: tuple[str, ...] | None = None) -> Recording:
        modules = [ModuleRow(path, "M", n) for n, path in enumerate(("", "a", "a.b", "a.c", "d"))]
        ranges = [RangeRow("float32", name, "output", 0, "float32", 1, Range(count=1)) for name in called or ()]
        rows: tuple[Row, ...] = (*modules, *(uncalled_row(path, "M") for path in silent), *ranges)
        return Recording(SAMPLE.header, rows, Footer("complete") if called is None else None)

    def found(*parts: Recording) -> list[str]:
        return [row.module for row in uncalled(parts)]

    assert found(part("a", "d"), part("a.b")) == ["a.b"]
    assert found(part(""), part("a", "d")) == ["a", "d"]
    assert found(part("a"), part("d")) == []
    assert found(part("a", "d"), part(called=("a", "a.c"))) == ["a.b", "d"]
    assert found(part(called=())) == []


looks = st.lists(
    st.builds(
        LookRow,
        st.just("float16"),
        st.sampled_from(["forward", "greedy"]),
        st.integers(0, 5),
        st.booleans(),
    ),
    unique_by=lambda look: look.name,
)


@given(looks, st.sets(st.integers(0, 5)))
def test_of_looks_those_of_one_process_are_kept(found: list[LookRow], faults: set[int]) -> None:
    events = [EventRow("float16", "unsupported", "a", "op", 0, 0, "forward", n, 0, look=f"forward {n}") for n in faults]
    kept = [row for row in kept_looks([*found, *events]) if isinstance(row, LookRow)]
    # The rule once more, as the process that walks the batches applies it.
    by_batch = sorted(found, key=lambda look: (look.batch, look.run != "forward"))
    expected, seen, explained = [], set[str](), False
    for look in by_batch:
        if look.run == "forward":
            if "off" in seen or ("first" in seen and not look.off):
                continue
            seen |= {"first", "off"} if look.off else {"first"}
            explained |= look.batch in faults
        elif "answer" in seen or explained:
            seen.add("answer")
            continue
        else:
            seen.add("answer")
        expected.append(look)
    assert kept == expected


def test_casts_of_inputs_are_those_of_the_first_batch() -> None:
    cast = CastRow("float16", "x", "", "input", "float32", "float16", 4, to_infinity=1)
    ran = RunRow("float16", "forward", 1, 1, 0)
    a = dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, ran))
    b = dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, ran, cast))
    assert cast not in merge([a, b]).rows
    assert cast in merge([b, a]).rows


def test_errors_of_unequal_parts_are_weighed_by_their_sums() -> None:
    rows = [ErrorRow("float16", "zz", "output", 9, n, 0, error, 1.0 * n) for n, error in ((1, 1.0), (99, 0.0))]
    made = merge([dataclasses.replace(SAMPLE, rows=(*SAMPLE.rows, row)) for row in rows])
    found = next(row for row in made.of(ErrorRow) if row.module == "zz")
    assert found.relative_error == pytest.approx(0.1)
