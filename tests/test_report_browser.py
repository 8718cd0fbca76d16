"""The report in a real browser: with a mouse, a keyboard, without JavaScript, and for those who cannot see it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

import overflow_lab
from overflow_lab.analysis.results import Diagnosis
from overflow_lab.report import html, write_report
from tests.conftest import OpenPage
from tests.mended_recording import mended_recording
from tests.rich_recording import large_recording, rich_recording
from tests.sample_recording import CULPRIT, HOSTILE, sample_diagnosis, sample_recording, t5_modules

ROW = f"float16/{CULPRIT}/aten.mm"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(rich_recording(), sample_diagnosis(), tmp_path_factory.mktemp("page") / "r.html")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(large_recording(), sample_diagnosis(), tmp_path_factory.mktemp("large") / "r.html")


def _open_at(browser_page: OpenPage, path: Path, key: str, **options: Any) -> Any:
    """Open a page at a site, as a link from elsewhere does."""
    return browser_page(path, fragment=f"site={quote(key)}", **options)


# ---- the table ----


def test_a_click_sorts_and_a_second_one_turns_round(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        button = shown.locator("#table thead button", has_text="float16").first
        first = shown.locator("#table tbody th").first
        button.click()
        assert first.inner_text() == CULPRIT
        button.press("Enter")
        assert first.inner_text() != CULPRIT
        assert shown.locator("#table th[aria-sort=descending]").count() == 1


def test_the_filter_hides_rows_and_counts_them(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        shown.locator("#filter").fill("wo linear")
        assert shown.locator("#table tbody tr:visible").count() == 5
        assert shown.locator("#shown").inner_text() == "5 of 115 rows"
        shown.locator("#trouble").check()
        assert shown.locator("#table tbody tr:visible").count() == 1


def test_every_site_of_a_large_model_is_found_sorted_and_counted(browser_page: OpenPage, large: Path) -> None:
    with browser_page(large) as shown:
        output = shown.locator("#operations output")
        output.get_by_text("300 shown of 10400 rows").wait_for()
        shown.locator("#operations input[type=search]").fill("bfloat16 layers.17.mlp.act_fn aten._softmax")
        assert output.inner_text() == "2 of 10400 rows"
        assert "layers.17.mlp.act_fn" in shown.locator("#operations tbody th").first.inner_text()
        shown.locator("#operations input[type=search]").fill("")
        shown.locator("#operations .more").click()
        assert output.inner_text() == "600 shown of 10400 rows"
        shown.locator("#layers thead button", has_text="#").click()
        numbers = shown.locator("#table tbody td:first-child").all_inner_texts()
        assert numbers == [str(n) for n in range(1, 301)]


def test_a_row_that_the_script_makes_is_like_one_of_the_page(browser_page: OpenPage, large: Path) -> None:
    with browser_page(large) as shown:
        shown.locator("#layers output").get_by_text("300 shown of 416 rows").wait_for()
        made = shown.locator("#table tbody tr").nth(299)
        given = shown.locator("#table tbody tr").nth(0)
        script = "tr => [...tr.cells].map(c => [c.tagName, !!c.querySelector('.bar'), !!c.querySelector('a.site')])"
        assert made.evaluate(script) == given.evaluate(script)
        assert str(made.get_attribute("id")).startswith("site=model.language_model.layers.")


# ---- links ----


def test_a_link_to_a_site_leads_to_its_row(browser_page: OpenPage, written: Path) -> None:
    with _open_at(browser_page, written, ROW) as shown:
        target = shown.locator("tr.target")
        assert target.get_attribute("id") == f"site={ROW}"
        assert target.evaluate("tr => document.activeElement === tr")
        box = target.bounding_box()
        assert box is not None
        assert 0 < box["y"] < 900


def test_a_module_alone_is_a_link_too_and_clears_a_filter(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        shown.locator("#filter").fill("decoder")
        shown.evaluate(f"location.hash = '#site={CULPRIT}'")
        assert shown.locator("tr.target").get_attribute("id") == f"site={CULPRIT}/output"
        assert shown.locator("#filter").input_value() == ""


def test_a_link_leads_to_a_row_that_only_the_script_has(browser_page: OpenPage, large: Path) -> None:
    key = "bfloat16-autocast/model.language_model.layers.30.mlp.up_proj/aten.add"
    with _open_at(browser_page, large, key) as shown:
        shown.locator("tr.target").wait_for()
        assert shown.locator("tr.target").get_attribute("id") == f"site={key}"


def test_without_javascript_a_link_still_leads_to_the_row(browser_page: OpenPage, written: Path) -> None:
    with _open_at(browser_page, written, ROW, javascript=False) as shown:
        assert shown.locator("tr:target").count() == 1
        assert shown.evaluate("scrollY") > 500


def test_the_culprit_on_the_first_screen_is_a_link_to_its_row(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written, height=800) as shown:
        shown.locator(".verdict.error .where a").click()
        assert shown.locator("tr.target").get_attribute("id") == f"site={ROW}"


def test_each_row_links_to_itself(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        script = "rows => rows.every(r => decodeURIComponent(r.querySelector('a.site').hash) === '#' + r.id)"
        assert shown.locator(".sortable tbody tr").evaluate_all(script)


# ---- the charts ----


def test_a_column_tells_its_site_lights_up_elsewhere_and_leads_to_the_row(
    browser_page: OpenPage, written: Path
) -> None:
    with browser_page(written) as shown:
        column = shown.locator(f'#ranges rect[data-site="{CULPRIT}/output"]')
        column.hover(force=True)
        assert shown.locator("#ranges .readout").inner_text().startswith(f"{CULPRIT}: absmax 547,171, headroom")
        assert shown.locator("#growth rect.on").count() == 2  # one for each precision
        assert shown.locator("tr.on").get_attribute("id") == f"site={CULPRIT}/output"
        column.click(force=True)
        assert shown.locator("tr.target").get_attribute("id") == f"site={CULPRIT}/output"


def test_a_row_lights_up_its_column(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        shown.locator("#ranges .hits rect").first.wait_for(state="attached")
        shown.locator(f'tr[id="site={CULPRIT}/output"] th').hover()
        assert shown.locator(f'#ranges rect.on[data-site="{CULPRIT}/output"]').count() == 1


def test_the_arrow_keys_walk_through_a_chart_and_enter_leads_to_the_row(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        shown.locator("#ranges .hits rect").first.wait_for(state="attached")
        plot = shown.locator("#ranges .plot")
        plot.focus()
        for key in ("End", "ArrowLeft", "ArrowLeft", "ArrowRight", "Home", "ArrowRight"):
            plot.press(key)
        second = shown.locator("#ranges .hits rect").nth(1)
        assert second.evaluate("e => e.classList.contains('on')")
        assert str(second.get_attribute("data-site")).partition("/")[0] in shown.locator(".readout").first.inner_text()
        plot.press("Enter")
        assert shown.locator("tr.target").count() == 1


# ---- the first screen, looks, and those who cannot see ----


@pytest.mark.parametrize("precisions", [1, 3, 6])
def test_the_first_screen_holds_all_verdicts_without_scrolling(
    browser_page: OpenPage, tmp_path: Path, precisions: int
) -> None:
    good, bad = sample_diagnosis().verdicts["bfloat16"], sample_diagnosis().verdicts["float16"]
    names = ("float16", "bfloat16", "float16-to", "float16-autocast", "bfloat16-autocast", "float32")[:precisions]
    verdicts = {n: dataclasses.replace(bad if "float16" in n and n[0] == "f" else good, precision=n) for n in names}
    path = write_report(rich_recording(), Diagnosis(verdicts), tmp_path / "r.html")
    with browser_page(path, width=1280, height=800) as shown:
        assert shown.locator(".verdict").count() == precisions
        bottoms = shown.locator(".verdict, .verdict p").evaluate_all(
            "all => all.map(e => e.getBoundingClientRect().bottom)"
        )
        assert max(bottoms) <= 800


def test_the_demos_report_is_below_300_kb_and_its_first_screen_holds_the_culprits(
    browser_page: OpenPage, tmp_path: Path
) -> None:
    path = overflow_lab.scan("demo", store_texts=True).save_report(tmp_path / "demo.html")
    assert path.stat().st_size < 300_000
    with browser_page(path, width=1280, height=800) as shown:
        bottoms = shown.locator(".verdict").evaluate_all("all => all.map(e => e.getBoundingClientRect().bottom)")
        assert max(bottoms) <= 800
        broken = shown.locator(".verdict.error").first
        assert "encoder.block.2.layer.0.SelfAttention.o" in broken.inner_text()
        assert "452,107" in broken.inner_text()
        assert "bfloat16" in broken.locator(".advice").inner_text()


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_the_page_never_scrolls_sideways(browser_page: OpenPage, written: Path, width: int) -> None:
    with browser_page(written, width=width) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth") <= width


def test_dark_mode_turns_page_and_pictures(browser_page: OpenPage, written: Path) -> None:
    script = "e => getComputedStyle(e).fill"
    with browser_page(written, color_scheme="dark") as shown:
        dark = shown.locator("#ranges svg text").first.evaluate(script)
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    with browser_page(written) as shown:
        assert shown.locator("#ranges svg text").first.evaluate(script) != dark


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (390, "light")])
def test_axe_finds_no_violation(browser_page: OpenPage, written: Path, scheme: str, width: int) -> None:
    with browser_page(written, width=width, color_scheme=scheme) as shown:
        shown.locator("#ranges .hits rect").first.wait_for(state="attached")
        for details in shown.locator("details").all():
            details.locator("summary").click()
        shown.locator("#table thead button").first.click()
        found = Axe().run(shown).response["violations"]
        assert [(v["id"], [node["html"][:120] for node in v["nodes"][:3]]) for v in found] == []


def test_a_keyboard_reaches_the_verdicts_first(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written) as shown:
        shown.keyboard.press("Tab")
        assert shown.evaluate("document.activeElement.textContent") == "Skip to the verdicts"
        box = shown.locator(".skip").bounding_box()
        assert box is not None
        assert box["y"] >= 0
        shown.keyboard.press("Enter")
        assert shown.evaluate("document.activeElement.id") == "verdicts"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        shown.keyboard.press("Tab")
        assert shown.evaluate(outline) == "solid"


def test_on_paper_nothing_is_cut_and_no_control_is_left(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written, width=1000) as shown:
        shown.emulate_media(media="print")
        assert shown.locator(".tools:visible, .more:visible, #copy:visible, nav:visible").count() == 0
        script = "all => all.every(e => e.scrollHeight <= e.clientHeight + 1)"
        assert shown.locator(".scroll.tall").evaluate_all(script)
        assert shown.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(28, 32, 36)"


def test_without_javascript_all_is_there_and_no_dead_control(browser_page: OpenPage, written: Path) -> None:
    with browser_page(written, javascript=False) as shown:
        assert shown.locator("#table tbody tr:visible").count() == 115
        assert shown.locator(".tools:visible, button:visible, .readout:visible").count() == 0
        assert shown.locator("#ranges svg:visible, #growth svg:visible, #generation svg:visible").count() >= 3


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (1400, "dark"), (390, "light")])
def test_what_mends_it_opens_is_copied_and_passes_axe(
    browser_page: OpenPage, tmp_path: Path, width: int, scheme: str
) -> None:
    path = write_report(mended_recording(), sample_diagnosis(), tmp_path / "r.html")
    with browser_page(path, width=width, color_scheme=scheme) as shown:
        assert shown.locator("#remedies pre:visible").count() == 0
        shown.locator(".verdict a[href='#remedies']").click()
        shown.locator("#remedies .proof summary").first.press("Enter")
        shown.locator("#remedies .copy button").first.click()
        expect(shown.locator("#remedies .copy button").first).to_have_text(
            re.compile(r"Copied|Selected: press Ctrl\+C")
        )
        shown.locator("#remedies details").evaluate_all("all => all.forEach(one => { one.open = true; })")
        assert shown.evaluate("document.documentElement.scrollWidth") <= width
        found = Axe().run(shown).response["violations"]
        assert [(v["id"], [node["html"][:120] for node in v["nodes"][:3]]) for v in found] == []


def _hostile(tmp_path: Path) -> Path:
    names = {CULPRIT: HOSTILE, "encoder.block.0": "x" * 100_000, "encoder.block.1": "a/b c#%41\u202e\nevil\x00"}
    modules = [(names.get(path, path), *rest) for path, *rest in t5_modules()]
    recording = sample_recording(modules=modules)  # type: ignore[arg-type]
    bad = dataclasses.replace(
        sample_diagnosis().verdicts["float16"], reason=f"`{HOSTILE}` {HOSTILE}", advice=HOSTILE * 30
    )
    return write_report(recording, Diagnosis({"float16": bad}), tmp_path / "hostile.html")


def test_a_hostile_page_runs_nothing_in_a_browser(browser_page: OpenPage, tmp_path: Path) -> None:
    with browser_page(_hostile(tmp_path), width=360) as shown:
        assert shown.locator("img").count() == 0
        assert shown.evaluate("document.documentElement.scrollWidth") <= 360


def test_every_row_of_a_hostile_page_can_be_linked_to(browser_page: OpenPage, tmp_path: Path) -> None:
    with browser_page(_hostile(tmp_path)) as shown:
        rows = shown.locator("#table tbody tr")
        for number in range(0, rows.count(), 9):
            rows.nth(number).locator("a.site").click()
            assert rows.nth(number).evaluate("tr => tr.classList.contains('target')")


def test_the_policy_forbids_what_a_script_from_elsewhere_would_do(browser_page: OpenPage, tmp_path: Path) -> None:
    page = html.render(sample_recording(), sample_diagnosis())
    path = tmp_path / "r.html"
    path.write_text(page.replace("</body>", "<script>document.title = 'taken'</script></body>"), encoding="utf-8")
    with pytest.raises(AssertionError, match="Content Security Policy"), browser_page(path) as shown:
        assert shown.title() != "taken"
