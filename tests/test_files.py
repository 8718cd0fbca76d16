from __future__ import annotations

import builtins
import json
import tracemalloc
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from overflow_lab.errors import UsageError
from overflow_lab.subjects.files import SUFFIXES, Rows
from overflow_lab.subjects.find import SubjectOptions, find
from tests.tiny_models import save

RECORDS = [
    {"question": "How late?", "context": "forty, minutes"},
    {"question": 'He said "no".', "context": "two\nlines"},
    {"question": "Größe? 大きい", "context": "🙂"},
]


def write(folder: Path, suffix: str) -> str:
    """Write RECORDS in the format of `suffix`, by tools other than those that read them."""
    path = folder / f"inputs{suffix}"
    if suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(record) for record in RECORDS) + "\n\n", encoding="utf-8")
    elif suffix == ".csv":
        pd.DataFrame(RECORDS).to_csv(path, index=False)
    else:
        pd.DataFrame(RECORDS).to_parquet(path)
    return str(path)


def complaint(rows: Rows) -> str:
    """Return the message of the UsageError, which is one line and names the file."""
    with pytest.raises(UsageError) as caught:
        list(rows)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_column_and_a_template_are_read_alike_from_every_format(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix)
    assert list(Rows(path, column="context")) == [record["context"] for record in RECORDS]
    both = Rows(path, template="Q: {question} C: {context} {{}}")
    assert list(both) == [f"Q: {r['question']} C: {r['context']} {{}}" for r in RECORDS]
    assert list(both) == list(both)


def test_the_usual_column_is_taken_when_none_is_named(tmp_path: Path) -> None:
    assert list(Rows(write(tmp_path, ".csv"))) == [record["question"] for record in RECORDS]


def test_lines_of_a_text_file_are_texts_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufefffirst\r\n\r\n  \nsecond {x}".encode())
    assert list(Rows(str(path))) == ["first", "second {x}"]


def test_a_line_of_jsonl_may_be_a_string(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n{"text": "two"}\n{"text": null}\n{"text": 3}\n')
    assert list(Rows(str(path))) == ["one", "two", "3"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.txt", b"", "holds no input"),
        ("a.txt", b"\n \n", "holds no input"),
        ("a.csv", b"", "holds no input"),
        ("a.csv", b"text\n", "holds no input"),
        ("a.jsonl", b"", "holds no input"),
        ("a.txt", b"ok\n\xff\xfe", "not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2: no JSON"),
        ("a.jsonl", b'{"text": "a"}\n[1]\n', "line 2: a list"),
        ("a.csv", b"text,b\nx,1\ny\n", "line 3: 1 fields"),
        ("a.csv", b'text\n"open', "line 2: no CSV"),
        ("a.parquet", b"not parquet at all", "no parquet"),
        ("a.parquet", b"", "no parquet"),
        ("a.pkl", b"x", "'.pkl'"),
        ("inputs", b"x", "'nothing'"),
    ],
)
def test_a_broken_file_is_one_line_with_its_name(name: str, content: bytes, part: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    message = complaint(Rows(str(tmp_path / name)))
    assert part in message
    assert name in message


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert "there is no file" in complaint(Rows(str(tmp_path / "a.txt")))
    assert "there is no file" in complaint(Rows(str(tmp_path)))


def test_missing_columns_are_named_with_the_line_and_those_there_are(tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl")
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"question": "no context here"}\n')
    assert "line 5: there is no column 'context'; it has 'question'" in complaint(Rows(path, column="context"))
    message = complaint(Rows(path, template="{question} {answer}"))
    assert "line 1" in message
    assert "'answer'" in message
    assert "'question', 'context'" in message


def test_columns_without_a_usual_name_must_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    assert "--column" in complaint(Rows(str(tmp_path / "a.csv")))


@pytest.mark.parametrize(("template", "part"), [("{question", "malformed"), ("plain", "no column"), ("{}", "''")])
def test_a_bad_template_is_told(template: str, part: str, tmp_path: Path) -> None:
    assert part in complaint(Rows(write(tmp_path, ".csv"), template=template))


def test_a_template_does_not_reach_into_objects(tmp_path: Path) -> None:
    assert "question.__class__" in complaint(Rows(write(tmp_path, ".csv"), template="{question.__class__}"))


def test_column_and_template_exclude_each_other(tmp_path: Path) -> None:
    assert "choose one" in complaint(Rows(write(tmp_path, ".csv"), column="question", template="{context}"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, ".parquet")
    real = builtins.__import__

    def fake(module: str, *rest: Any, **more: Any) -> Any:
        if module.split(".")[0] == "pyarrow":
            raise ImportError(module)
        return real(module, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", fake)
    assert "overflow-lab[parquet]" in complaint(Rows(path))


def test_a_file_is_read_as_a_stream_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("".join(f"w{3 + i % 90}\n" for i in range(25)))
    subject = find(str(save("bert", tmp_path, tokenizer=True)), SubjectOptions(inputs_file=str(path), batch_size=10))
    for _ in range(2):
        assert [batch.samples for batch in subject.batches] == [10, 10, 5]
    assert subject.facts["inputs_source"] == "file: long.txt"
    assert not hasattr(subject.batches, "__len__")


def test_an_empty_file_is_told_before_the_scan_begins(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UsageError, match="holds no input"):
        find(str(save("bert", tmp_path, tokenizer=True)), SubjectOptions(inputs_file=str(tmp_path / "a.txt")))


def test_pictures_are_opened_by_their_paths_beside_the_file(tmp_path: Path) -> None:
    folder = save("vit", tmp_path)
    Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "red.png")
    (tmp_path / "list.jsonl").write_text('{"image": "red.png"}\n')
    options = SubjectOptions(inputs_file=str(tmp_path / "list.jsonl"))
    pixels = next(iter(find(str(folder), options).batches)).inputs["pixel_values"]
    assert pixels[0, :, 0, 0].tolist() == [1.0, -1.0, -1.0]
    (tmp_path / "red.png").write_bytes(b"no picture")
    with pytest.raises(UsageError, match="no picture"):
        find(str(folder), options)
    (tmp_path / "red.png").unlink()
    with pytest.raises(UsageError, match="no file"):
        find(str(folder), options)


def test_sounds_are_opened_by_their_paths(tmp_path: Path) -> None:
    folder = save("wav2vec2", tmp_path)
    samples = (np.sin(np.arange(4000)) * 20_000).astype("<i2")
    for rate, name in ((16_000, "a.wav"), (8_000, "slow.wav")):
        with wave.open(str(tmp_path / name), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(rate)
            file.writeframes(samples.tobytes())
    (tmp_path / "list.txt").write_text("a.wav\n")
    options = SubjectOptions(inputs_file=str(tmp_path / "list.txt"))
    values = next(iter(find(str(folder), options).batches)).inputs["input_values"]
    assert values.shape == (1, 4000)
    assert np.corrcoef(values[0].numpy(), samples)[0, 1] == pytest.approx(1.0)
    (tmp_path / "list.txt").write_text("slow.wav\n")
    with pytest.raises(UsageError, match="8000 Hz"):
        find(str(folder), options)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_hundred_thousand_lines_are_walked_in_the_memory_of_a_few(tmp_path: Path, suffix: str) -> None:
    path, count = tmp_path / f"in{suffix}", 100_000
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": [f"text number {n}" for n in range(count)]})
        parquet.write_table(table, path, row_group_size=10_000)
    else:
        quoted = {".txt": "{}", ".csv": '"{}"', ".jsonl": '{{"text": "{}"}}'}
        line = quoted[suffix].replace("{}", "text number {}") + "\n"
        with path.open("w", encoding="utf-8") as file:
            file.write("text\n" if suffix == ".csv" else "")
            file.writelines(line.format(n) for n in range(count))
    next(iter(Rows(str(path))))  # what is imported once is no cost of a line
    tracemalloc.start()
    try:
        walked = sum(1 for _ in Rows(str(path)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert walked == count
    assert peak < 2 * 2**20
