"""The issue body: what a GitHub-flavoured renderer makes of it, whatever the names are, and that it fits."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from markdown_it import MarkdownIt

from overflow_lab.analysis.results import Diagnosis, Finding, Origin, Verdict
from overflow_lab.recording import BlindSpotRow, Recording
from overflow_lab.report import markdown
from tests.mended_recording import CODE, clamp, mended_recording, rescale
from tests.sample_recording import CULPRIT, HOSTILE, sample_diagnosis, sample_recording, t5_modules

NASTY = (
    HOSTILE,
    "a|b",
    "a\\|b",
    "`a`|``b``",
    "line\nbreak | cell",
    "@torvalds and #123 and org/repo#4 and !5",
    "# heading",
    "- list",
    "1. list",
    "[link](http://x.invalid) ![i](http://x.invalid/a.png)",
    "</details>",
    "~~~\n```",
    "_a_ *b* **c** ~~d~~",
    "\u202eevil",
)


class Seen(HTMLParser):
    """Collects the tags, the text outside of code, and the cells of each table's rows."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.prose: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "code" not in self.open:
            self.prose.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


def seen(body: str) -> Seen:
    return Seen(MarkdownIt("gfm-like").render(body))


def named(name: str) -> tuple[Recording, Diagnosis]:
    """Return a recording and a diagnosis in which everything bears one name."""
    modules = [(f"{name}.{i}", name, True, 3.0) for i in range(6)]
    recording = sample_recording(modules=modules)
    header = dataclasses.replace(recording.header, subject={"name": name}, environment={"torch": name, name: name})
    rows = (*recording.rows, BlindSpotRow(name, name))
    origin = Origin(name, name)
    finding = Finding("float16", "nan", name, origin, "error", name)
    verdict = Verdict("float16", "nan", "error", name, name, origin, name)
    return dataclasses.replace(recording, header=header, rows=rows), Diagnosis({"float16": verdict}, (finding,) * 3)


def test_the_body_begins_with_a_table_of_verdicts() -> None:
    body = markdown.render(sample_recording(), sample_diagnosis())
    assert body.splitlines()[2].startswith("| precision | verdict |")
    first = seen(body).tables[0]
    assert first[1] == ["float16", "✕ breaks: overflow", CULPRIT, "aten.mm"]
    assert first[2][:2] == ["bfloat16", "✓ works"]


def test_the_reason_comes_with_its_number_before_anything_is_folded() -> None:
    body = markdown.render(sample_recording(), sample_diagnosis())
    before = body.partition("<details>")[0]
    assert "547,171" in before
    assert "What mends it:" in before


def test_the_long_parts_are_folded_and_tables_come_out_inside() -> None:
    made = seen(markdown.render(sample_recording(), sample_diagnosis()))
    titles = re.findall(r"<summary>(.*?)</summary>", markdown.render(sample_recording(), sample_diagnosis()))
    assert made.tags.count("details") == made.tags.count("summary") == len(titles)
    assert any(title.startswith("40 of ") and "layers" in title for title in titles)
    layers = next(table for table in made.tables if table[0][0] == "module")
    assert len(layers) == 41
    assert {len(row) for row in layers} == {len(layers[0])}


def test_nothing_of_html_is_used_but_details() -> None:
    body = markdown.render(sample_recording(), sample_diagnosis())
    assert set(re.findall(r"</?[a-zA-Z][^>]*>", re.sub(r"`[^`]*`", "", body))) <= {
        "<details>",
        "</details>",
        "<summary>",
        "</summary>",
    }


@pytest.mark.parametrize("name", NASTY)
def test_a_hostile_name_changes_nothing_of_the_structure(name: str) -> None:
    plain, nasty = (seen(markdown.render(*named(given))) for given in ("plain", name))
    # An address is linked as it stands, which is what trackers do and readers want.
    assert [tag for tag in nasty.tags if tag not in ("code", "a")] == [tag for tag in plain.tags if tag != "code"]
    assert [[len(row) for row in table] for table in nasty.tables] == [
        [len(row) for row in table] for table in plain.tables
    ]


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_read_as_it_is(name: str) -> None:
    shown = seen(markdown.render(*named(name))).tables[0][1][2].replace("\u200b", "")
    expected = name.replace("\n", "\\x0a").replace("\u202e", "\\u202e")
    assert shown == expected


def test_no_mention_and_no_issue_is_linked() -> None:
    made = seen(markdown.render(*named("@torvalds and #123 and org/repo#4 and !5")))
    assert not re.search(r"[@#!]\w", "".join(made.prose))


@pytest.mark.parametrize("length", [20, 3000])
def test_a_large_model_with_long_names_fits_an_issue(length: int) -> None:
    modules = [(f"{'m' * length}.{path}", kind, leaf, 17.0) for path, kind, leaf, _ in t5_modules(60, 60)]
    recording = sample_recording(modules=modules)
    finding = sample_diagnosis().findings[0]
    long = dataclasses.replace(finding, message="x`y|" * 500, origin=Origin("w" * 5000, "op"))
    body = markdown.render(recording, dataclasses.replace(sample_diagnosis(), findings=(long,) * 500))
    assert len(body) < markdown.LIMIT
    made = seen(body)
    assert made.tags.count("details") == made.tags.count("summary") == body.count("</details>")


def test_the_environment_is_laid_out_as_maintainers_ask_for_it() -> None:
    recording = sample_recording()
    facts = {"overflow-lab": "0.1.0", "python": "3.11.7", "system": "Linux", "torch": "2.13.0", "device": "cuda:0"}
    recording = dataclasses.replace(recording, header=dataclasses.replace(recording.header, environment=facts))
    body = markdown.render(recording, sample_diagnosis())
    assert "- Python version: 3.11.7\n- PyTorch version: 2.13.0\n- Device: cuda:0\n" in body


def test_no_absolute_path_is_told() -> None:
    recording = sample_recording()
    header = dataclasses.replace(recording.header, subject={"name": "/home/alice/secret/model"})
    rows = (*recording.rows, BlindSpotRow("m", "cannot read /home/alice/secret/model/x.bin"))
    body = markdown.render(dataclasses.replace(recording, header=header, rows=rows), sample_diagnosis())
    assert "alice" not in body
    assert "x.bin" in body


def test_an_unfinished_scan_says_so_first() -> None:
    body = markdown.render(sample_recording(complete=False), sample_diagnosis())
    assert body.splitlines()[2].startswith("> The scan did not finish")


def test_remedies_are_a_table_and_the_code_of_the_best_is_folded() -> None:
    body = markdown.render(mended_recording(), sample_diagnosis())
    table = next(table for table in seen(body).tables if table[0][0] == "remedy")
    assert [row[0] for row in table[1:]] == [
        "Rescale 2 weights by powers of two (2^-7 to 2^7)",
        f"Keep {CULPRIT} in float32",
    ]
    assert table[0][1:4] == ["second scan", "least headroom", "in float32"]
    assert table[1][1:4] == ["✓ works, held back too", "−3.1 → 3.9 bits", "the same bits"]
    assert table[2][1:4] == ["✓ works", "−3.1 → over 24 bits", "–"]
    assert f"```python\n{CODE.rstrip()}\n```" in body
    assert "<details><summary>1 tried and not proven</summary>" in body
    assert "What mends float16" not in markdown.render(sample_recording(), sample_diagnosis())


@pytest.mark.parametrize("name", NASTY)
def test_a_remedy_cannot_leave_its_cell_or_its_fence(name: str) -> None:
    rows = (rescale(title=name, snippets={name: f"````\n{name}\n```"}), clamp(title=name, reason=name))
    plain, nasty = (
        seen(markdown.render(mended_recording(*given), sample_diagnosis()))
        for given in ((rescale(title="a", snippets={"b": "c"}), clamp(title="d", reason="e")), rows)
    )
    skipped = ("code", "a", "br")
    assert [tag for tag in nasty.tags if tag not in skipped] == [tag for tag in plain.tags if tag not in skipped]


def test_much_code_gives_way_so_that_the_body_fits() -> None:
    rows = [rescale(precision=f"float16-{n}", snippets={"a": CODE * 100}) for n in range(40)]
    body = markdown.render(mended_recording(*rows), sample_diagnosis())
    assert len(body) < markdown.LIMIT
    made = seen(body)
    assert made.tags.count("details") == made.tags.count("summary") == body.count("</details>")
