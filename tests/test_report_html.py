"""The page: what it says, that it is closed, small, and deaf to what a name contains, and how a browser shows it."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import hashlib
import json
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from overflow_lab.analysis import frame
from overflow_lab.analysis.results import Diagnosis, Verdict
from overflow_lab.errors import UsageError
from overflow_lab.recording import ErrorRow, RangeRow, Recording
from overflow_lab.report import html, notebook, plots, report, summary, tables, write_report
from tests.mended_recording import CODE, clamp, mended_recording, rescale
from tests.rich_recording import large_recording, rich_recording
from tests.sample_recording import CULPRIT, HOSTILE, sample_diagnosis, sample_recording, t5_modules, wide_modules

VOID = {"meta", "link", "br", "wbr", "input", "img", "hr"}


class Outline(HTMLParser):
    """Collects tags, ids and text, and fails on a tag that closes what is not open."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()

    @property
    def balanced(self) -> bool:
        return self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["style"], ["script"]):
            self.text.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


@pytest.fixture(scope="module")
def page() -> str:
    return html.render(sample_recording(), sample_diagnosis())


def _words(page: str) -> str:
    return " ".join("".join(Outline(page).text).split())


def _hostile() -> Recording:
    names = {CULPRIT: HOSTILE, "encoder.block.0": "x" * 100_000, "encoder.block.1": "שלום\u202e\nevil\x00"}
    return sample_recording(modules=[(names.get(path, path), *rest) for path, *rest in t5_modules()])  # type: ignore[misc]


def test_the_first_screen_says_whether_where_why_and_what_next(page: str) -> None:
    words = _words(page.split("<nav")[0])
    for said in ("t5-sample", "12 inputs, 384 tokens (forward, beam)", "breaks: overflow", CULPRIT, "aten.mm", "works"):
        assert said in words
    assert "breaks in float16" in words
    assert "547,171 does not fit: the largest float16 is 65,504." in words
    assert "Use bfloat16, or keep wo in float32" in words
    assert "12% of decisions changed" in words


def test_the_page_is_well_formed_with_unique_ids_and_anchors_that_exist(page: str) -> None:
    outline = Outline(page)
    assert outline.balanced
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [unquote(str(a["href"])[1:]) for tag, a in outline.tags if tag == "a"]
    assert targets
    assert set(targets) <= set(ids)
    assert outline.count("h1") == 1


def test_a_model_of_7b_with_its_operations_is_below_1_mb_and_holds_every_site() -> None:
    recording = large_recording()
    made = html.page(recording, sample_diagnosis())
    assert len(frame.sites(recording)) + len(frame.operations(recording)) > 10_000
    assert len(html.render(recording, sample_diagnosis()).encode()) < 1_000_000
    for table in (made.layers, made.operations):
        packed = json.loads(gzip.decompress(base64.b64decode(table.rest)))
        assert len(packed) == table.held
        keys = {line.key for line in table.lines} | {row[0] for row in packed}
        assert len(keys) == len(table.lines) + table.held == table.total


def _remedies(recording: Recording) -> tuple[str, str]:
    """Return the section of remedies as HTML, and the words that it shows."""
    section = html.render(recording, sample_diagnosis()).split('<section id="remedies"')[1].split("</section>")[0]
    return section, _words(f'<section id="remedies"{section}</section>')


def test_remedies_come_before_and_after_and_those_that_are_not_proven_last(page: str) -> None:
    assert 'id="remedies"' not in page
    section, words = _remedies(mended_recording())
    assert "float16 breaks: overflow → works 2 of 3 remedies are proven" in words
    for said in ("proven on 12 inputs, and on 5 that the search did not see", "−3.1 → 3.9 bits", "the same bits"):
        assert said in words
    assert words.index("Rescale 2 weights") < words.index(f"Keep {CULPRIT}") < words.index("Clamp what")
    assert "1 tried and not proven" in words
    assert f"On inputs that were held back the verdict is overflow: {CULPRIT} makes infinities." in words
    assert Outline(f"<x>{section.partition('>')[2]}</x>").balanced


def test_the_remedy_on_the_first_screen_is_one_that_is_proven() -> None:
    said = "Rescale 2 weights by powers of two (2^-7 to 2^7): proven on 12 inputs, and on 5 that"
    top = html.render(mended_recording(), sample_diagnosis()).split("<nav")[0]
    assert said in _words(top)
    assert 'href="#remedies"' in top
    top = html.render(mended_recording(clamp()), sample_diagnosis()).split("<nav")[0]
    assert "Use bfloat16, or keep wo in float32" in _words(top)
    assert 'href="#remedies"' not in top


def test_where_nothing_is_proven_the_page_says_so_and_shows_what_was_tried() -> None:
    section, words = _remedies(mended_recording(clamp(), clamp(title="Clamp more")))
    assert "none of the 2 remedies that were tried is proven" in words
    assert '<details class="tried" open>' in section
    assert "<svg" not in section.split("<h3>")[1].split("</h3>")[1].replace('<svg class="mark', "")


def test_code_to_paste_is_there_to_the_letter_with_a_button() -> None:
    section, _ = _remedies(mended_recording(rescale(title=HOSTILE, snippets={HOSTILE: f"{CODE}\x1b[2J{HOSTILE}"})))
    code = section.split('<pre tabindex="0">')[1].split("</pre>")[0]
    assert unescape(code) == f"{CODE}\\x1b[2J{HOSTILE}"
    assert section.count('<div class="copy"><button type="button" hidden>Copy</button><pre') == 1
    assert "<img" not in section


def test_the_page_stays_small_whatever_there_is_to_paste() -> None:
    code = "\n".join(f"model.layers[{n}].mlp.down_proj.weight.mul_(2.0**-7)" for n in range(400))
    rows = [rescale(precision=f"float16-{n}", snippets={"a": code, "b": code * 9}) for n in range(12)]
    made = html.render(mended_recording(*rows), sample_diagnosis())
    assert len(made.encode()) < 1_000_000
    assert "too long for this page" in made


def test_the_picture_of_headroom_names_remedies_and_the_tightest_modules_once() -> None:
    gain = html.page(mended_recording(), sample_diagnosis()).mended[0][1]
    assert gain is not None
    assert gain.numbers is not None
    assert gain.numbers.rows == ((f"{CULPRIT} +1", "−3.1", "3.9"), ("(the model itself)", "10.4", "10.4"))
    for said in ("Rescale 2 weights by powers", "Keep encoder.block.2.", "−3.1 → 108.9"):
        assert said in gain.svg


def test_first_sentences_end_at_a_full_stop_before_a_capital() -> None:
    assert summary.first_sentence("It is 0.4% off, e.g. here. Then more. And more.") == "It is 0.4% off, e.g. here."
    assert summary.first_sentence("no end") == "no end"


def test_what_rests_on_operations_and_steps_is_drawn_and_told_in_numbers() -> None:
    made = html.render(rich_recording(), sample_diagnosis())
    assert {"ranges", "growth", "generation"} <= {str(a.get("id")) for _, a in Outline(made).tags}
    words = _words(made)
    assert "the 5 largest falls of each precision" in words
    assert re.search(rf"float16{re.escape(CULPRIT)}aten\.mm10\.\d1\.711\.0", words)
    assert "noise floor 10.7" in words
    assert "2 of 3 answers differ, from token 2 on" in words
    picture = made.split('id="growth"')[1].split("</figure>")[0]
    assert "<title" in picture
    assert "<desc" in picture


def test_equal_recordings_give_equal_pages(page: str) -> None:
    assert html.render(sample_recording(), sample_diagnosis()) == page


def test_nothing_is_fetched_and_only_the_pages_own_script_may_run(page: str) -> None:
    outline = Outline(page)
    policy = next(str(a["content"]) for t, a in outline.tags if t == "meta" and a.get("http-equiv"))
    script = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}'" in policy
    links = [str(a.get(key)) for _, a in outline.tags for key in ("src", "href", "action", "srcset") if key in a]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert not re.search(r"@import|url\((?!#)|https?://", page)


def test_paths_and_prompts_are_not_told_unless_asked_for(page: str) -> None:
    assert "somebody" not in page
    assert "secret" not in page
    assert "forty two" not in page
    asked = html.render(sample_recording(texts=True), sample_diagnosis())
    assert "forty two" in asked
    assert "<q>4 <mark>4 4 4</mark></q>" in asked


def test_a_hostile_name_does_nothing() -> None:
    clean, made = Outline(html.render(sample_recording(), sample_diagnosis())), html.render(_hostile(), _accused())
    outline = Outline(made)
    assert outline.count("script") == clean.count("script") == 1
    assert outline.count("img") == 0
    assert not any(key.startswith("on") for _, attributes in outline.tags for key in attributes)
    assert HOSTILE in "".join(outline.text)
    assert "\u202e" not in made
    assert "\x00" not in made


def _accused() -> Diagnosis:
    """Return the sample's diagnosis with every sentence hostile."""
    diagnosis = sample_diagnosis()
    bad = dataclasses.replace(diagnosis.verdicts["float16"], reason=f"`{HOSTILE}` {HOSTILE}", advice=HOSTILE * 30)
    return dataclasses.replace(diagnosis, verdicts={"float16": bad})


def test_a_small_model_is_below_300_kb_and_a_hostile_one_too(page: str) -> None:
    assert len(page.encode()) < 300_000
    assert len(html.render(_hostile(), sample_diagnosis()).encode()) < 300_000


def test_a_model_of_ten_thousand_layers_is_below_1_mb_and_says_what_it_shows() -> None:
    recording = sample_recording(modules=wide_modules(10_000))
    extra = [
        dataclasses.replace(row, precision=f"{row.precision}-autocast")
        for row in recording.rows
        if isinstance(row, (RangeRow, ErrorRow)) and row.precision != "float32"
    ]
    names = (*recording.header.precisions, "float16-autocast", "bfloat16-autocast")
    header = dataclasses.replace(recording.header, precisions=names)
    made = html.render(
        dataclasses.replace(recording, header=header, rows=(*recording.rows, *extra)), sample_diagnosis()
    )
    assert len(made.encode()) < 1_000_000
    words = _words(made)
    assert "Showing 150 of 10,000 layers" in words
    assert "all can be searched" in words
    assert "Showing 400 of 10,000 layers" in words


def test_the_table_holds_every_layer_with_its_numbers(page: str) -> None:
    body = page.split('id="table"')[1].split("</table>")[0]
    assert body.count("<tr") - 2 == len(t5_modules())
    row = next(r for r in body.split("<tr") if CULPRIT in re.sub(r"<[^>]*>", "", r))
    cells = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<td.*?</td>", row)]
    assert cells[3:6] == ["547,171", "−3.1", "108.9"]
    assert '<td class="bad">37</td>' in row


def test_a_capped_table_keeps_the_worst_in_order_of_execution() -> None:
    from overflow_lab.analysis.frame import layers

    table = tables.layer_table(layers(sample_recording()), cap=5)
    assert CULPRIT in [line.module for line in table.lines]
    assert [line.number for line in table.lines] == sorted(line.number for line in table.lines)
    assert table.caption.startswith("showing 5 of 115")


def test_a_scan_that_did_not_finish_has_a_banner(page: str) -> None:
    assert 'class="banner"' not in page
    made = html.render(sample_recording(complete=False), sample_diagnosis())
    assert "did not finish: interrupted (KeyboardInterrupt)" in _words(made)


def test_blind_spots_are_told_on_the_first_screen_and_below(page: str) -> None:
    assert "2 kinds of blind spot" in _words(page.split("<main>")[0])
    assert "never called: encoder.block.0.layer.0.SelfAttention.relative_attention_bias" in _words(page)


def test_answers_stand_side_by_side(page: str) -> None:
    words = _words(page)
    assert "changed from token 2" in words
    assert "failed: RuntimeError: probability tensor contains either `inf`, `nan` or element < 0" in words


def test_the_environment_block_is_fit_for_a_bug_report(page: str) -> None:
    block = page.split('<pre id="environment-text"')[1].split("</pre>")[0]
    for said in (
        "overflow-lab 0.1.0",
        "torch",
        "2.13.0",
        "t5-sample (T5ForConditionalGeneration)",
        "overflow, severity error",
    ):
        assert said in block


@pytest.mark.parametrize("diagnosis", [Diagnosis({}), Diagnosis({"float16": Verdict("float16", "nan", "error", "x")})])
def test_recordings_with_little_in_them_are_shown(diagnosis: Diagnosis) -> None:
    empty = dataclasses.replace(sample_recording(), rows=(), footer=None)
    words = _words(html.render(empty, diagnosis))
    assert "No layer was recorded." in words
    assert "did not finish: unfinished" in words


def test_the_report_is_written_to_a_file_and_a_wrong_place_is_named(tmp_path: Path, page: str) -> None:
    target = write_report(sample_recording(), sample_diagnosis(), tmp_path / "new" / "r.html")
    assert target.read_text(encoding="utf-8") == page == report(sample_recording(), sample_diagnosis())
    with pytest.raises(UsageError, match="cannot be written"):
        write_report(sample_recording(), sample_diagnosis(), tmp_path)


def test_a_notebook_shows_the_verdicts_escaped() -> None:
    made = notebook.summary(sample_recording(), _accused())
    assert "breaks: overflow" in made
    assert "<img" not in made


# ---- style and script ----


def _asset(name: str) -> str:
    return (Path(html.__file__).parent / "template" / name).read_text(encoding="utf-8")


def _themes() -> dict[str, dict[str, str]]:
    light, dark, _print = re.findall(r":root \{(.*?)\}", _asset("style.css"), flags=re.DOTALL)
    return {
        name: dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))
        for name, block in (("light", light), ("dark", dark))
    }


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _contrast(a: str, b: str) -> float:
    """WCAG 2.1: (L1 + 0.05) / (L2 + 0.05)."""
    high, low = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa_on_every_ground(theme: str) -> None:
    colours = _themes()[theme]
    for ground in ("page", "surface", "soft", "bad-soft", "near-soft", "good-soft", "plot-band"):
        for ink in ("ink", "muted", "link", "bad", "near", "good", "plot-ink", "plot-muted", "plot-bad"):
            assert _contrast(colours[ink], colours[ground]) >= 4.5, (theme, ink, ground)
    for number in range(1, 5):
        assert _contrast(colours[f"plot-line{number}"], colours["surface"]) >= 4.5


def test_each_colour_of_the_plots_is_given_in_both_themes() -> None:
    for colours in _themes().values():
        assert {f"plot-{name}" for name in plots.PALETTE} <= set(colours)
    light = _themes()["light"]
    assert {name: light[f"plot-{name}"] for name in plots.PALETTE} == dict(plots.PALETTE)


@pytest.mark.parametrize("name", html.SCRIPTS)
def test_each_script_is_short(name: str) -> None:
    assert _asset(name).count("\n") < 150
