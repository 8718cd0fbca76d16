"""What every test gets: no network, few threads; and on request a browser."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.browser import find_browser, launched, open_page

if TYPE_CHECKING:
    from playwright.sync_api import Page

# Before torch or transformers is imported by a test module, since both read these once, at import.
# Threads: a tiny model is slower on many, and pytest-xdist runs several workers beside each other.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Where Triton is installed, its kernel is tested on the CPU, GPU or not; `make gpu` tests the compiled one.
os.environ["TRITON_INTERPRET"] = "1"

OpenPage = Callable[..., AbstractContextManager["Page"]]


@pytest.fixture(scope="module")
def browser_page() -> Iterator[OpenPage]:
    """`with browser_page(html_path, width=..., height=..., color_scheme=..., javascript=...) as page:`, see open_page.

    One browser for a test module and no longer: a session's would break every later test that uses asyncio.
    """
    executable = find_browser()
    if executable is None:
        reason = "no Chromium or Chrome was found; `make browser` installs one"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    with launched(executable) as browser:
        yield partial(open_page, browser)
