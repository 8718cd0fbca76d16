"""What a scan says on a terminal: verdicts first, in any width, without acting on what a name contains."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from overflow_lab.analysis.results import Diagnosis
from overflow_lab.recording import Recording
from overflow_lab.report import terminal
from overflow_lab.report.terminal_proofs import remedies
from tests.mended_recording import CODE, clamp, mended_recording, rescale
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


def _remedies(recording: Recording, width: int = 80) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, force_terminal=False).print(remedies(recording))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_remedies_say_what_is_proven_on_what_and_what_is_not(width: int) -> None:
    lines = _remedies(mended_recording(), width)
    assert max(map(len, lines)) <= width
    words = " ".join(" ".join(lines).split())
    assert words.startswith("float16 breaks: overflow → works (2 of 3 remedies are proven) ✓ Rescale 2 weights")
    assert "proof on 12 inputs, and on 5 that the search did not see" in words
    assert "least headroom −3.1 → 3.9 bits; in float32 the same bits" in words
    assert f"✓ Keep {CULPRIT} in float32 least headroom −3.1 → over 24 bits; time of a forward × 1.37" in words
    assert "✕ Clamp what" in words
    assert "not proven. On inputs that were held back the verdict is overflow" in words


def test_code_of_a_few_lines_stands_on_the_terminal_and_longer_code_is_named() -> None:
    short, long = (_remedies(mended_recording(rescale(snippets={"hooks": code}))) for code in (CODE, CODE * 9))
    assert "    paste      with torch.no_grad():" in short
    assert "                   model.wo.weight.mul_(2.0**-7)  # `wo` </script>" in short
    assert "with torch.no_grad()" not in "".join(long)
    assert any(line.endswith("in the report: hooks") for line in long)


def test_where_nothing_is_proven_it_says_so() -> None:
    assert "float16  breaks: overflow  (the one remedy that was tried is not proven)" in _remedies(
        mended_recording(clamp())
    )
    assert _remedies(sample_recording()) == []


def test_the_advice_of_a_verdict_is_the_remedy_that_is_proven() -> None:
    assert "next    Rescale 2 weights by powers of two" in _shown(mended_recording())
    assert "next    Use bfloat16" in _shown(mended_recording(clamp()))
