"""The templates, scripts and styles that pages and scripts are made of."""

from __future__ import annotations

from importlib import resources


def asset(name: str) -> str:
    """Return the text of a file in `template/`."""
    return (resources.files("overflow_lab.report") / "template" / name).read_text(encoding="utf-8")
