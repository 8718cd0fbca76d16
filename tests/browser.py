"""A headless browser for tests of pages that must be closed: no request leaves them, nothing is logged as an error.

`python -m tests.browser` prints the browser that the tests would use, or fails; the Makefile asks it.
Only the standard library is imported until a browser is launched.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Request

ColorScheme = Literal["light", "dark"]

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
APPLICATIONS = (
    Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"),
    Path("/Applications/Chromium.app/Contents/MacOS/Chromium"),
)
# Without a sandbox since CI is often root, where Chromium refuses one; the rest keeps it from calling home.
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# What a closed page may "load": itself (asked apart) and what it carries inside.
INLINE = ("data:", "blob:", "about:")


def find_browser() -> str | None:
    """Return the path of a Chromium or Chrome: the system's, else the one that playwright installed, else None."""
    for command in COMMANDS:
        if found := shutil.which(command):
            return found
    for application in APPLICATIONS:
        if application.exists():
            return str(application)
    return _bundled_browser()


def _bundled_browser() -> str | None:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as playwright:
        path = playwright.chromium.executable_path
    return path if Path(path).exists() else None


@contextmanager
def launched(executable: str) -> Iterator[Browser]:
    """Yield a running headless browser. Keep it short: while it lives, `asyncio.run` fails in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    browser: Browser,
    html_path: Path,
    *,
    width: int = 1280,
    height: int = 900,
    color_scheme: ColorScheme = "light",
    javascript: bool = True,
    fragment: str = "",
) -> Iterator[Page]:
    """Yield `html_path` as `browser` shows it; on leaving, fail on any request, console error or exception in it.

    `fragment` is what a link to a place on the page has behind its #.

    It is playwright's own: `page.screenshot(path=..., full_page=True)`, `page.locator(...)`, `page.evaluate(...)`.
    """
    url = html_path.resolve().as_uri()
    faults: list[str] = []
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=color_scheme,
        java_script_enabled=javascript,
        offline=True,
    )
    try:
        page = context.new_page()
        _watch(page, url, faults)
        page.goto(f"{url}#{fragment}" if fragment else url)
        yield page
        # One turn of the page's own loop, so that what the test's last click started is heard of.
        page.wait_for_timeout(20)
    finally:
        context.close()
    assert not faults, f"{html_path.name} is not a closed page without errors: " + "; ".join(faults)


def _watch(page: Page, url: str, faults: list[str]) -> None:
    def on_request(request: Request) -> None:
        if request.url.split("#")[0] != url and not request.url.startswith(INLINE):
            faults.append(f"asked for {request.url[:200]}")

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            faults.append(f"logged {message.text[:200]}")

    page.on("request", on_request)
    page.on("console", on_console)
    page.on("websocket", lambda socket: faults.append(f"opened a socket to {socket.url[:200]}"))
    page.on("pageerror", lambda error: faults.append(f"raised {error}"))


if __name__ == "__main__":
    browser_path = find_browser()
    if browser_path is None:
        sys.exit("no Chromium or Chrome was found")
    print(browser_path)
