"""Every mechanism has a sentence, ways out and a public source, and stands in docs/mechanisms.md.

`python -m tests.test_mechanisms` writes that page again.
"""

from __future__ import annotations

import re
from pathlib import Path

from overflow_lab.analysis.mechanisms import MECHANISMS, Mechanism

PAGE = Path(__file__).resolve().parent.parent / "docs" / "mechanisms.md"
HEAD = """# Mechanisms

By which mechanism a value broke: each finding names one, by rules over what was seen, which stand in
`overflow_lab/analysis/mechanisms.py`. The source is a public report, or a paper, in which it happened.
"""


def entry(mechanism: Mechanism) -> str:
    """Return one mechanism's part of the page."""
    what = mechanism.what[0].upper() + mechanism.what[1:]
    ways = mechanism.ways_out[0].upper() + mechanism.ways_out[1:]
    return f"## {mechanism.name}\n\n{what}.\n\n*Ways out:* {ways}.\n\n*Source:* <{mechanism.source}>\n"


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(entry(mechanism) for mechanism in MECHANISMS.values())])


def test_the_page_says_what_the_rules_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.test_mechanisms writes it again"


def test_each_source_is_a_public_report() -> None:
    report = re.compile(r"https://(github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+|arxiv\.org/abs/\d{4}\.\d{5})")
    assert [m.name for m in MECHANISMS.values() if not report.fullmatch(m.source)] == []


def test_each_mechanism_has_its_own_sentence() -> None:
    assert len({mechanism.what for mechanism in MECHANISMS.values()}) == len(MECHANISMS)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
