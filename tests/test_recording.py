"""The recording: written, read, merged, cut short, refused."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overflow_lab.errors import OverflowLabError, RecordingFormatError, UsageError
from overflow_lab.ranges import Range
from overflow_lab.recording import (
    FORMAT,
    AnswerCountRow,
    AnswerRow,
    AttributionRow,
    BatchRow,
    BlindSpotRow,
    CastRow,
    ErrorRow,
    EventRow,
    FailureRow,
    Header,
    LookRow,
    ModuleRow,
    Moment,
    NoiseRow,
    OperationRow,
    OutputRow,
    PrecisionRow,
    ProgressRow,
    ProofRow,
    RangeRow,
    RunRow,
    ShareRow,
    StepRow,
    TensorRow,
    load,
    load_progress,
)
from overflow_lab.recording.codec import decode, dump, encode
from overflow_lab.recording.rows import ROW_TYPES
from overflow_lab.recording.writer import Writer, append

SAMPLES = Path(__file__).parent / "recordings"
HEADER = Header(FORMAT, "0.1.0", "2026-01-01T00:00:00+00:00", {"name": "m"}, ("float32", "float16"))
RANGE = Range(count=4, nan=1, posinf=1, min=-2.0, max=3.0, smallest=2.0, sum=1.0, sum_of_squares=13.0, exponents={1: 2})
ROWS: list[Any] = [
    ModuleRow("a", "Linear", 0, aliases=("b",)),
    TensorRow("a.weight", "a", "parameter", "float32", (2, 3), RANGE),
    CastRow("float16", "a.weight", "a", "parameter", "float32", "float16", 6, to_infinity=1, absmax=1e6),
    PrecisionRow("float16", "float16", "to", kept=("a",)),
    RunRow("float16", "forward", 1, 2, 30, 0.5, 40),
    RangeRow("float16", "a", "output['logits']", 3, "float16", 2, RANGE, Moment(3, "forward", 0, 1)),
    ErrorRow("float16", "a", "output", 3, 100, 1, 2.0, 8.0),
    OutputRow("float16", "output", 100, 1, 2.0, 8.0, 10, 1, 0.5, 9),
    AnswerRow("float16", "beam", 0, 1, "changed", 3, 4, first_difference=2, text="four", reference_text="fünf"),
    AnswerCountRow("float16", "beam", same=5, changed=2, failed=1, margins={-3: 1}),
    FailureRow("float16", "forward", 0, "a", "RuntimeError: \"x\" not implemented for 'Half'", unsupported=True),
    OperationRow(
        "float16", "a", "aten.mm", 0, 3, "float16", 2, 100, nonfinite=1, absmax=1e6, error=math.inf, error_in=0.1
    ),
    EventRow("float16", "bad", "a", "aten.mm", 0, 3, "forward", 0, 0, inf=1, value=1e6, harmed=("b", "aten.add")),
    EventRow(
        "float16", "decision", "a", "aten.topk", 0, 4, "beam", 0, 3, changed=2, row=4, rows=6, beams=3, margin=0.5
    ),
    AttributionRow("float16", "relative", 0.5, "a", "aten.add", 1, 0.9, 12, amplifier=("b", "aten.sub")),
    LookRow("float16", "forward", 3, off=True),
    BatchRow("float16", 3, 6, 2, 40),
    ShareRow(4, 8, "00ff"),
    NoiseRow("bfloat16", 0.01),
    StepRow("float16", "beam", 0, 1, 2, (3.5, 0.0), (0, 9), (0.25, None)),
    ProofRow(
        "island",
        "Keep `a` in float32",
        "float16",
        "float16",
        proven=True,
        before={"verdict": "overflow", "value": "inf"},
        after={"verdict": "ok"},
        held_back={"verdict": "ok"},
        inputs=3,
        held_inputs=1,
        figures={"headroom_before": -1.5},
        members=("a",),
        snippets={"torch": "model.half()\n"},
        notes=("costs nothing",),
        tightest=(("a", -1.5, math.inf),),
    ),
    BlindSpotRow("a", "was never called"),
]


def write(path: Path | None, rows: list[Any] = ROWS) -> Writer:
    with Writer(path, HEADER) as writer:
        for row in rows:
            writer.append(row)
    return writer


def test_there_is_a_sample_of_every_kind_of_row() -> None:
    assert {type(row) for row in ROWS} == set(ROW_TYPES.values())


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    writer = write(tmp_path / name)
    made = load(tmp_path / name)
    assert made.header == HEADER
    assert list(made.rows) == ROWS
    assert made.complete
    assert made == writer.recording()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.kind)
def test_every_line_is_strict_json(row: Any) -> None:
    def refuse(text: str) -> None:
        raise AssertionError(text)

    assert decode(json.loads(encode(row), parse_constant=refuse)) == row


@given(st.sampled_from([math.inf, -math.inf, math.nan, 1.0]))
def test_nonfinite_numbers_come_back(value: float) -> None:
    row = ErrorRow("float16", "a", "output", 0, 1, 0, value, 1.0)
    back = decode(json.loads(encode(row)))
    assert back.error_squares == value or (math.isnan(value) and math.isnan(back.error_squares))


def test_rows_of_the_same_site_are_merged_on_reading(tmp_path: Path) -> None:
    later = RangeRow("float16", "a", "output['logits']", 1, "float16", 1, RANGE)
    write(tmp_path / "r.jsonl", [ROWS[5], later, ROWS[6], ROWS[6], ROWS[7], ROWS[7]])
    found, error, output = load(tmp_path / "r.jsonl").rows
    assert isinstance(found, RangeRow)
    assert (found.order, found.calls, found.range, found.first_bad) == (1, 3, RANGE + RANGE, Moment(3, "forward", 0, 1))
    assert isinstance(error, ErrorRow)
    assert (error.compared, error.relative_error) == (200, 0.5)
    assert isinstance(output, OutputRow)
    assert (output.decisions, output.changed, output.kl_sum) == (20, 2, 1.0)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_run_that_was_killed_is_readable_up_to_its_last_whole_row(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writer = Writer(path, HEADER)
    writer.__enter__()
    for row in ROWS:
        writer.append(row)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    made = load(path)
    assert made.status == "unfinished"
    assert not made.complete
    assert list(made.rows) == ROWS[: len(made.rows)]
    if name.endswith("jsonl"):
        assert len(made.rows) == len(ROWS) - 1


def test_the_footer_says_what_ended_the_scan(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Writer(tmp_path / "r.jsonl", HEADER):
        raise KeyboardInterrupt
    assert load(tmp_path / "r.jsonl").status == "interrupted"
    with pytest.raises(ValueError, match="no"), Writer(tmp_path / "s.jsonl", HEADER):
        raise ValueError("no\nway")
    footer = load(tmp_path / "s.jsonl").footer
    assert footer is not None
    assert (footer.status, footer.error) == ("failed", "ValueError: no way")


def test_a_newer_file_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = tmp_path / "new.jsonl"
    path.write_text(json.dumps({"kind": "header", "format": FORMAT + 6}) + "\n")
    with pytest.raises(RecordingFormatError, match=f"format {FORMAT + 6}.*up to {FORMAT}"):
        load(path)


def test_rows_and_keys_of_a_later_minor_version_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, [ROWS[0]])
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace("{", '{"future":1,', 1)
    path.write_text("\n".join([*lines[:2], '{"kind":"hologram"}', lines[2]]) + "\n")
    assert list(load(path).rows) == [ROWS[0]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello\n",
        b"[1]\n",
        b'{"kind":"range"}\n',
        b"\x00\xff\xfe",
        b"\x1f\x8b broken",
        b'{"kind":"header","format":"x"}',
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(RecordingFormatError) as caught:
        load(tmp_path / "x.jsonl")
    assert "\n" not in str(caught.value)


def test_a_row_with_wrong_fields_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(encode(HEADER) + '\n{"kind":"range","module":3}\n')
    with pytest.raises(RecordingFormatError, match="record again"):
        load(path)


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recording"):
        load(tmp_path / "absent.jsonl")


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OverflowLabError, match="choose another place"):
        write(tmp_path / "file" / "r.jsonl")


def test_a_full_disk_keeps_the_rows_in_memory() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    writer = Writer(full, HEADER)
    with pytest.raises(OverflowLabError, match="free some disk"), writer:
        writer.append(ROWS[0])
    assert not writer.recording().complete


def test_without_a_path_the_rows_stay_in_memory() -> None:
    assert list(write(None).recording().rows) == ROWS


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl.gz")
    write(tmp_path / "b.jsonl.gz")
    a, b = ((tmp_path / name).read_bytes() for name in ("a.jsonl.gz", "b.jsonl.gz"))
    assert gzip.decompress(a) == gzip.decompress(b)


@pytest.mark.parametrize("path", sorted(SAMPLES.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_sample_of_every_old_format_is_read(path: Path) -> None:
    made = load(path)
    assert made.complete
    assert made.of(RangeRow)


def test_there_is_a_sample_of_every_format() -> None:
    assert [path.stem for path in sorted(SAMPLES.glob("*.jsonl"))] == [
        f"format-{number}" for number in range(1, FORMAT + 1)
    ]


def test_plain_text_in_other_scripts_is_kept_readable() -> None:
    assert "fünf" in dump({"text": "fünf"})


def test_events_of_two_calls_add_up_to_the_earlier_place_and_the_largest_margin() -> None:
    first = EventRow("float16", "decision", "a", "aten.topk", 0, 4, "beam", 0, 3, changed=2, row=4, rows=6, beams=3)
    later = dataclasses.replace(first, batch=1, call=5, changed=1, row=0, margin=0.25)
    last = dataclasses.replace(first, batch=2, margin=0.125)
    assert first + later + last == dataclasses.replace(first, changed=5, margin=0.25)


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_rows_are_added_to_a_recording_that_is_whole(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = write(path).recording()
    proof = next(row for row in ROWS if isinstance(row, ProofRow))
    append(path, [proof, proof])
    read = load(path)
    assert read.rows == (*whole.rows, proof, proof)
    assert read.complete


def test_rows_that_cannot_be_added_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(OverflowLabError, match="could not be written further") as raised:
        append(tmp_path / "no" / "r.jsonl", [])
    assert "\n" not in str(raised.value)


# ---- many inputs ----


def grown(path: Path, batches: int) -> Writer:
    """Write one range row, one answer and a progress row for each batch."""
    with Writer(path, HEADER) as writer:
        for batch in range(batches):
            writer.append(RangeRow("float16", "a", "output", 3, "float16", 2, RANGE, Moment(3, "forward", batch, 1)))
            writer.append(OutputRow("float16", "output", 100, 1, 2.0, 8.0, 10, 1, 0.5, 9))
            writer.progress(ProgressRow(batch + 1, 4 * batch + 4, "d"))
    return writer


@pytest.mark.parametrize("name", ["r.jsonl", "r.jsonl.gz"])
def test_a_file_does_not_grow_with_the_number_of_batches(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writer = grown(path, 12_000)
    assert path.stat().st_size < 1.5 * 2**20
    assert len(writer.rows) == 2
    made = load(path)
    assert made == writer.recording()
    assert made.of(RangeRow)[0].calls == 24_000
    assert [place.name for place in tmp_path.iterdir()] == [name]


def test_a_recording_is_compacted_at_its_last_progress(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with Writer(path, HEADER) as writer:
        for _ in range(10):
            writer.append(RunRow("float16", "forward", 1, 2, 30, 0.5))
        writer.progress(ProgressRow(10, 20, "d", {"clocks": {"float16": 4}}), last=True)
        writer.append(BlindSpotRow("a", "was never called"))
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["header", "run", "progress", "blind_spot", "footer"]
    assert load(path).of(RunRow) == [RunRow("float16", "forward", 10, 20, 300, 5.0)]
    found = load_progress(path)
    assert found is not None
    assert found.progress == ProgressRow(10, 20, "d", {"clocks": {"float16": 4}})
    assert found.complete
    assert not found.recording.of(BlindSpotRow)


def test_where_a_file_cannot_be_compacted_it_goes_on_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", refuse)
    path = tmp_path / "r.jsonl"
    grown(path, 8_000)
    assert load(path).of(RangeRow)[0].calls == 16_000
    assert [place.name for place in tmp_path.iterdir()] == ["r.jsonl"]


def test_a_resumed_recording_is_left_alone_until_a_row_is_added(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    grown(path, 3)
    with path.open("a") as file:
        file.write('{"kind":"run","precision":"float16","run":"forw')
    data = path.read_bytes()
    found = load_progress(path)
    assert found is not None
    with pytest.raises(ValueError, match="no"), Writer(path, HEADER, resumed=found):
        raise ValueError("no")
    assert path.read_bytes() == data
    with Writer(path, HEADER, resumed=found) as writer:
        writer.append(BlindSpotRow("a", "was never called"))
    assert load(path).of(RangeRow)[0].calls == 6
    assert load(path).complete
    again = load_progress(path)
    assert again is not None
    assert again.progress == found.progress
