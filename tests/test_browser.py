"""The tests' own browser: it shows pages, and it does notice what it is there to notice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import OpenPage


def _page(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><title>t</title>{body}", encoding="utf-8")
    return path


def test_a_closed_page_is_shown_in_the_asked_size_and_colours(browser_page: OpenPage, tmp_path: Path) -> None:
    page = _page(tmp_path, "<p id=p>text</p><img src='data:image/gif;base64,R0lGODlhAQABAAAAACw='>")
    with browser_page(page, width=480, height=320, color_scheme="dark") as shown:
        assert shown.locator("#p").inner_text() == "text"
        assert shown.evaluate("[innerWidth, innerHeight]") == [480, 320]
        assert shown.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert shown.screenshot()[:4] == b"\x89PNG"


def test_scripts_do_not_run_without_javascript(browser_page: OpenPage, tmp_path: Path) -> None:
    page = _page(tmp_path, "<p id=p>before</p><script>document.getElementById('p').textContent = 'after'</script>")
    with browser_page(page, javascript=False) as shown:
        assert shown.locator("#p").inner_text() == "before"
    with browser_page(page) as shown:
        assert shown.locator("#p").inner_text() == "after"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("<img src='https://example.invalid/x.png'>", "asked for"),
        ("<link rel=stylesheet href='beside.css'>", "asked for"),
        ("<script>fetch('http://127.0.0.1:9/').catch(() => 0)</script>", "asked for"),
        ("<script>console.error('wrong')</script>", "logged wrong"),
        ("<script>nothing.at.all</script>", "raised"),
        (
            "<meta http-equiv='Content-Security-Policy' content=\"default-src 'none'\"><script>1</script>",
            "logged",
        ),
    ],
)
def test_a_page_that_is_open_or_faulty_fails_the_test(
    browser_page: OpenPage, tmp_path: Path, body: str, fault: str
) -> None:
    page = _page(tmp_path, body)
    with pytest.raises(AssertionError, match=fault), browser_page(page):
        pass
