"""What a scan says on a terminal: verdicts first, in any width, without acting on what a name contains."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import terminal
from tests.sample_recording import CULPRIT, Modules, sample_diagnosis, sample_recording, t5_modules, wide_modules


def _shown(recording: Recording | None = None, diagnosis: Diagnosis | None = None, *, width: int = 80) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True, force_terminal=False)
    console.print(terminal.render(recording or sample_recording(), diagnosis or sample_diagnosis()))
    return out.getvalue()


def _renamed(old: str, new: str) -> Modules:
    return [(new if path == old else path, *rest) for path, *rest in t5_modules()]  # type: ignore[misc]


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(len(line) for line in _shown(width=width).splitlines()) <= width


def test_the_verdict_comes_first_with_where_why_and_what_next() -> None:
    lines = _shown().splitlines()
    assert lines[0].startswith("t5-sample")
    assert lines[2] == "✕ float16  breaks: overflow"
    assert [line.split()[0] for line in lines[3:5]] == ["where", "why"]
    assert CULPRIT in lines[3]
    assert "547,171 does not fit" in lines[4]
    assert any(line.strip().startswith("next") and "bfloat16" in line for line in lines[5:9])


def test_a_healthy_precision_is_told_apart_without_colour() -> None:
    assert "✓ bfloat16  works" in _shown()


def test_ten_sites_are_shown_with_the_non_finite_one_first() -> None:
    table = _shown(width=140).split("the worst first")[1].split("answers")[0].splitlines()
    rows = [line for line in table if line.startswith(("encoder.", "decoder.", "shared", "lm_head"))]
    assert len(rows) == terminal.WORST
    assert rows[0].startswith(CULPRIT)
    assert "−3.1" in rows[0]
    assert " 37 " in rows[0]


def test_answers_are_counted() -> None:
    counts = [line.split() for line in _shown().splitlines() if line.split()[1:2] == ["beam"]]
    assert counts == [["bfloat16", "beam", "4", "0", "0"], ["float16", "beam", "1", "2", "1"]]


def test_markup_in_a_module_name_is_shown_and_not_obeyed() -> None:
    name = "[bold red]x[/][link=file:///etc]y[/link]"
    shown = _shown(sample_recording(modules=_renamed(CULPRIT, name)), width=140)
    assert name in shown


def test_control_characters_of_a_name_reach_no_terminal() -> None:
    recording = sample_recording(modules=_renamed("encoder.block.2", "evil\x1b[2J\u202e\nname"))
    shown = _shown(recording, width=140)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "evil\\x1b[2J\\u202e\\x0aname" in shown


def test_long_names_wrap_and_nothing_else_is_lost() -> None:
    shown = _shown(sample_recording(modules=_renamed(CULPRIT, "layer." * 60)))
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "−3.1" in shown


def test_colour_is_the_consoles_to_give() -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system="standard")
    console.print(terminal.render(sample_recording(), sample_diagnosis()))
    assert "\x1b[1;31m" in out.getvalue()
    assert "\x1b" not in _shown()


def test_a_scan_that_did_not_finish_says_so() -> None:
    assert "did not finish: interrupted" in _shown(sample_recording(complete=False))
    assert "did not finish" not in _shown()


def test_a_recording_without_rows_is_still_shown() -> None:
    recording = dataclasses.replace(sample_recording(), rows=())
    assert "no run finished" in _shown(recording, Diagnosis({}))


def test_a_large_model_shows_ten_of_its_layers() -> None:
    shown = _shown(sample_recording(modules=wide_modules(1000)))
    assert "10 of 1,000 layers" in shown
