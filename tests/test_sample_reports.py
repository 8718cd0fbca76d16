"""The sample reports below reports/samples/ are of this version: `make samples` writes them again."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path

import pytest

import overflow_lab
from overflow_lab.recording import FORMAT
from tests import samples
from tests.samples import FOLDER, SAMPLES, Sample

MOST_BYTES = 300_000
STALE = "make samples writes the sample reports anew"
NAMES = [sample.name for sample in SAMPLES]
every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
# The demo's scan takes half a minute, and has tests of its own.
every_small_sample = pytest.mark.parametrize("sample", SAMPLES[1:], ids=NAMES[1:])


def without_charts(page: str) -> str:
    """Return a report without what depends on the version of matplotlib: the drawings."""
    return re.sub(r"<svg.*?</svg>", "<svg></svg>", page, flags=re.DOTALL)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).decode("utf-8").splitlines()]


def keys_of_each_kind(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    for line in lines(path):
        found[str(line["kind"])] |= set(line)
    return dict(found)


def test_the_folder_holds_the_samples_and_nothing_else() -> None:
    wanted = {path.name for sample in SAMPLES for path in (sample.recording, sample.report)} | {"README.md"}
    assert {path.name for path in FOLDER.iterdir()} == wanted, STALE


def test_the_page_beside_them_is_true() -> None:
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == samples.page(), STALE


@every_sample
def test_the_recording_is_complete_and_of_this_version(sample: Sample) -> None:
    header, *_, footer = lines(sample.recording)
    assert (header["format"], header["overflow_lab"]) == (FORMAT, overflow_lab.__version__), STALE
    assert footer == {"kind": "footer", "status": "complete"}


@every_sample
def test_the_recording_says_what_the_sample_is_for(sample: Sample) -> None:
    verdicts = overflow_lab.analyze(overflow_lab.load(sample.recording)).verdicts
    assert {name: (v.verdict, v.mechanism) for name, v in verdicts.items()} == dict(sample.expected)


@every_sample
def test_the_report_is_what_the_recording_renders_to_today(sample: Sample) -> None:
    kept, made = (
        sample.report.read_text(encoding="utf-8"),
        overflow_lab.report(overflow_lab.load(sample.recording)),
    )
    assert without_charts(kept) == without_charts(made), STALE
    assert kept.count("<svg") == made.count("<svg") > 0


@every_sample
def test_both_files_are_small_and_tell_no_place(sample: Sample) -> None:
    for path in (sample.recording, sample.report):
        assert path.stat().st_size < MOST_BYTES
    text = gzip.decompress(sample.recording.read_bytes()).decode("utf-8") + sample.report.read_text(encoding="utf-8")
    assert not re.search(r"(?:/home/|/root/|/Users/|/tmp/|[A-Z]:\\\\)", text)


@every_small_sample
def test_a_scan_of_today_comes_to_the_same_verdicts_and_records_the_same_rows(sample: Sample, tmp_path: Path) -> None:
    again = samples.scan(sample, tmp_path / "again.jsonl.gz")
    kept = overflow_lab.analyze(overflow_lab.load(sample.recording)).verdicts
    told = {name: (v.verdict, v.severity, v.mechanism, v.origin) for name, v in again.verdicts.items()}
    assert told == {name: (v.verdict, v.severity, v.mechanism, v.origin) for name, v in kept.items()}, STALE
    assert keys_of_each_kind(tmp_path / "again.jsonl.gz") == keys_of_each_kind(sample.recording), STALE
