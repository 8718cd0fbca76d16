"""Numbers, names and messages as people read them."""

from __future__ import annotations

import math
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overflow_lab.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (547171.25, "547,171"),
        (65504.0, "65,504"),
        (0.03125, "0.0312"),
        (1.2e-7, "1.20e-7"),
        (3.4e38, "3.40e38"),
        (-5.5, "−5.5"),
        (999.7, "1,000"),
        (16.0, "16"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "−∞"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_a_magnitude_is_written_as_a_person_would(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


def test_zero_percent_is_said_of_exactly_zero_only() -> None:
    assert [text.share(v) for v in (0.0, 1e-9, 0.0042, 0.5, 0.99999, 1.0)] == [
        "0%",
        "<0.1%",
        "0.4%",
        "50%",
        ">99.9%",
        "100%",
    ]


def test_bits_have_one_decimal_and_words_for_what_is_not_there() -> None:
    assert [text.bits(v) for v in (-3.06, 0.0, math.inf, -math.inf, None)] == ["−3.1", "0.0", "∞", "−∞", "–"]


@given(st.text(max_size=300), st.integers(3, 60))
def test_a_shortened_name_keeps_both_ends(name: str, limit: int) -> None:
    short = text.shorten(name, limit)
    assert len(short) <= limit or short == name
    assert short[:1] == name[:1]
    assert short[-1:] == name[-1:]


@given(st.text(alphabet=st.characters(), max_size=80))
def test_visible_text_cannot_move_a_cursor_or_break_an_encoder(name: str) -> None:
    shown = text.visible(name)
    shown.encode("utf-8")
    assert not {unicodedata.category(c) for c in shown} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("no file '/home/some body/x.bin' here", "no file '…/x.bin' here"),
        ("in /home/a/b/c.py:3", "in …/c.py:3"),
        (r"at C:\Users\me\m.bin now", "at …/m.bin now"),
        ("see ~/models/t5/config.json", "see …/config.json"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("encoder.block.0 and/or a/b", "encoder.block.0 and/or a/b"),
    ],
)
def test_absolute_paths_are_cut_to_their_last_part(message: str, shown: str) -> None:
    assert text.without_paths(message) == shown


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("google-t5/t5-small", "google-t5/t5-small"),
        ("/home/me/models/mine/", "mine"),
        (r"C:\models\mine", "mine"),
        ("demo", "demo"),
    ],
)
def test_a_models_folder_is_not_told(name: str, shown: str) -> None:
    assert text.model_name(name) == shown


def test_a_headline_says_what_a_verdict_means() -> None:
    assert text.headline("overflow", "error") == "breaks: overflow"
    assert text.headline("nan", "warning") == "risky: NaN"
    assert text.headline("ok", "none") == "works"
    assert text.headline("unsupported", "error") == "cannot run"
