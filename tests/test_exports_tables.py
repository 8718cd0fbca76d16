"""Tables as files: what other tools read is what `layers`, `sites` and `operations` hold, non-finite numbers too."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import overflow_lab
from overflow_lab.analysis import analyze, frame
from overflow_lab.cli.app import run
from overflow_lab.errors import UsageError
from overflow_lab.recording import ErrorRow, OperationRow, Recording
from overflow_lab.report.exports import TABLES
from overflow_lab.report.exports_tables import Table, export, exported_frame
from tests.sample_recording import CULPRIT, sample_recording

OLD = Path(__file__).parent / "recordings" / "format-1.jsonl"


def odd_recording() -> Recording:
    """Return a recording with names that readers take for missing values, and numbers that are not finite."""
    recording = sample_recording()
    infinite = ErrorRow("float16", CULPRIT, "output", 1, 4, error_squares=1.0, reference_squares=0.0)
    operations = (
        OperationRow("float16", "NA", "nan", 0, 0, "float16", 1, 4, absmax=math.inf, error=math.inf, local_error=0.25),
        OperationRow("float16", "", "aten.mm", 0, 1, "float16", 1, 4, nonfinite=1, absmax=0.0, detail='a "b", c\nd'),
    )
    rows = tuple(row for row in recording.rows if not isinstance(row, ErrorRow))
    return dataclasses.replace(recording, rows=(*rows, infinite, *operations))


def read(path: Path) -> pd.DataFrame:
    """Read a file as its documentation says."""
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, keep_default_na=False, na_values="NaN")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("table", TABLES)
def test_a_table_is_read_back_by_pandas_as_it_was(table: Table, suffix: str, tmp_path: Path) -> None:
    recording = odd_recording()
    written = export(recording, tmp_path / f"{table}{suffix}", table=table)
    expected = exported_frame(recording, table)
    assert len(expected) > 0
    pd.testing.assert_frame_equal(read(written), expected, check_exact=True, check_dtype=False)


def test_the_exported_table_holds_what_the_frame_holds() -> None:
    recording = odd_recording()
    for table, made in (("layers", frame.layers), ("sites", frame.sites), ("operations", frame.operations)):
        exported, frame_ = exported_frame(recording, table), made(recording)
        assert list(exported.columns) == list(frame_.columns)
        for name in frame_.columns.difference(["exponents"]):
            for a, b in zip(exported[name], frame_[name], strict=True):
                assert a == b or (pd.isna(a) and pd.isna(b)) or (a == "" and pd.isna(b))


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_infinities_and_odd_names_survive(suffix: str, tmp_path: Path) -> None:
    found = read(export(odd_recording(), tmp_path / f"x{suffix}", table="operations"))
    assert list(found["module"]) == ["NA", ""]
    assert list(found["op"]) == ["nan", "aten.mm"]
    assert list(found["headroom"]) == [-math.inf, math.inf]
    assert found["error"][0] == math.inf
    assert math.isnan(found["local_error"][1])
    assert found["detail"][1] == 'a "b", c\nd'
    layers = read(export(odd_recording(), tmp_path / f"y{suffix}"))
    assert math.inf in set(layers["error_float16"])


def test_exponents_are_json_in_a_cell(tmp_path: Path) -> None:
    recording = sample_recording()
    found = read(export(recording, tmp_path / "layers.csv"))
    made = [{int(e): n for e, n in json.loads(text).items()} for text in found["exponents"]]
    assert made == list(frame.layers(recording)["exponents"])


@pytest.mark.parametrize("table", TABLES)
def test_json_is_strict_and_says_what_it_holds(table: Table, tmp_path: Path) -> None:
    written = export(odd_recording(), tmp_path / "x.json", table=table)
    made = json.loads(written.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (made["table"], made["schema"], made["model"]) == (table, 1, "t5-sample")
    assert len(made["rows"]) == len(exported_frame(odd_recording(), table))
    if table == "operations":
        assert [row["headroom"] for row in made["rows"]] == ["-inf", "inf"]
        assert made["rows"][1]["local_error"] is None


def test_findings_are_those_of_the_diagnosis(tmp_path: Path) -> None:
    recording = overflow_lab.load(OLD)
    found = read(export(recording, tmp_path / "f.csv", table="findings"))
    expected = analyze(recording).findings
    assert list(found["mechanism"]) == [finding.mechanism for finding in expected]
    assert list(found["kind"]) == [finding.kind for finding in expected]


def test_an_empty_recording_gives_tables_without_rows(tmp_path: Path) -> None:
    recording = dataclasses.replace(sample_recording(), rows=())
    for table in TABLES:
        written = export(recording, tmp_path / f"{table}.csv", table=table)  # type: ignore[arg-type]
        assert len(written.read_text(encoding="utf-8").splitlines()) == 1
    assert export(recording, tmp_path / "events", format="tensorboard").is_dir()


def events(folder: Path) -> Any:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sizes = {"scalars": 0, "histograms": 0, "tensors": 0}
    return accumulator.EventAccumulator(str(folder), size_guidance=sizes).Reload()


def test_tensorboard_reads_the_scalars_of_every_layer_in_order(tmp_path: Path) -> None:
    recording = sample_recording()
    layers = frame.layers(recording)
    found = events(export(recording, tmp_path / "events", format="tensorboard"))
    for tag, column in (
        ("headroom/float16", "headroom_float16"),
        ("relative_error/bfloat16", "error_bfloat16"),
        ("nonfinite/float16", "nonfinite_float16"),
        ("absmax/float32", "absmax"),
    ):
        made = {event.step: event.value for event in found.Scalars(tag)}
        expected = {i: float(v) for i, v in enumerate(layers[column], start=1) if not pd.isna(v)}
        assert made.keys() == expected.keys()
        assert list(made.values()) == pytest.approx(list(expected.values()), rel=1e-6)


def test_tensorboard_reads_the_histograms_as_they_were_counted(tmp_path: Path) -> None:
    recording = sample_recording()
    exponents = list(frame.layers(recording)["exponents"])
    found = events(export(recording, tmp_path / "events", format="tensorboard")).Histograms("log2_magnitude/float32")
    assert len(found) == len(exponents)
    for event, expected in zip(found, exponents, strict=True):
        histogram = event.histogram_value
        made = {limit - 1: n for limit, n in zip(histogram.bucket_limit, histogram.bucket, strict=True) if n}
        assert made == expected
        assert histogram.num == sum(expected.values())


def test_tensorboard_shows_the_names_of_the_steps(tmp_path: Path) -> None:
    found = events(export(sample_recording(), tmp_path / "events", format="tensorboard"))
    text = found.Tensors("layers")[0].tensor_proto.string_val[0].decode()
    number = list(frame.layers(sample_recording())["module"]).index(CULPRIT) + 1
    assert f"| {number} | `{CULPRIT}` | `Linear` |" in text


def test_events_written_twice_are_there_once_and_name_no_machine(tmp_path: Path) -> None:
    for _ in range(2):
        export(sample_recording(), tmp_path / "events", format="tensorboard")
    names = [path.name for path in (tmp_path / "events").iterdir()]
    assert len(names) == 1
    assert re.fullmatch(r"events\.out\.tfevents\.\d+\.overflow-lab", names[0])


@pytest.mark.parametrize(
    ("extra", "package", "file", "file_format"),
    [("parquet", "pyarrow", "x.parquet", None), ("tensorboard", "tensorboard", "events", "tensorboard")],
)
def test_a_missing_extra_is_named(
    extra: str, package: str, file: str, file_format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == package else found(name, *a))
    with pytest.raises(UsageError, match=rf"pip install 'overflow-lab\[{extra}\]'"):
        export(sample_recording(), tmp_path / file, format=file_format)


def test_exporting_loads_neither_torch_nor_tensorboard_where_they_are_not_asked_for(tmp_path: Path) -> None:
    program = (
        "import sys, overflow_lab as o; r = o.load(sys.argv[1]); o.export(r, sys.argv[2] + '/x.csv');"
        "print([n for n in ('torch', 'tensorboard', 'pyarrow.parquet') if n in sys.modules]);"
        "o.export(r, sys.argv[2] + '/events', format='tensorboard'); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(OLD), str(tmp_path)], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"], done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["x.txt"], "the ending of x.txt names no format; end it in .csv, .parquet or .json"),
        (["x.csv", "--table", "rows"], "there is no table 'rows'; choose among layers, sites, operations, findings."),
        (["x.csv", "--format", "xls"], "there is no format 'xls'; choose among csv, parquet, json, tensorboard."),
        (["-", "--format", "parquet"], "parquet is no text; give a file or folder to write to."),
        (["taken.csv"], "taken.csv exists; choose another name, or give --overwrite."),
        (["taken.csv/x.csv"], "x.csv cannot be written"),
    ],
)
def test_a_wrong_wish_is_one_line_and_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken.csv").write_text("mine")
    assert run(["export", str(OLD), *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("overflow-lab: ")
    assert message in said.err
    assert said.err.count("\n") == 1
    assert (tmp_path / "taken.csv").read_text() == "mine"


def test_standard_output_gets_the_table_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(OLD), "-"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("order,module,class_name")
    assert len(out.splitlines()) == len(frame.layers(overflow_lab.load(OLD))) + 1


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "new" / "sites.parquet"
    assert run(["export", str(OLD), str(target), "--table", "sites"]) == 0
    assert capsys.readouterr().out == f"sites      {target}\n"
    assert len(pd.read_parquet(target)) == len(frame.sites(overflow_lab.load(OLD)))
