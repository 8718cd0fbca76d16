"""Decisions inside a model that another precision makes otherwise, with the margin that was lost and the place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.numbers import place
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.sites import Event
from overflow_lab.recording import EventRow
from tests.shadowed import run

Program = Callable[[torch.Tensor], object]
# Scores so near each other that bfloat16, which has 8 bits, cannot tell some of them apart.
SCORES = 1.0 + torch.from_numpy(np.random.default_rng(3).uniform(0.0, 0.02, (6, 12))).float()


def decision(program: Program, scores: torch.Tensor = SCORES) -> Event:
    mode, _ = run(program, [scores], torch.bfloat16)
    mode.shadows.close()
    (event,) = [event for (what, _), event in mode.notes.events.items() if what == "decision"]
    return event


def rms(scores: torch.Tensor) -> float:
    return float(np.sqrt(np.mean(scores.double().numpy() ** 2)))


def lost(chosen: np.ndarray, best: np.ndarray, scores: np.ndarray) -> float:
    """Return the largest loss of a choice, along the last dimension, in units of the scores' rms."""
    took, had = np.take_along_axis(scores, chosen, -1), np.take_along_axis(scores, best, -1)
    return float(np.abs(had - took)[chosen != best].max())


def test_the_margin_of_an_argmax_is_what_float32_prefers_its_own_choice_by() -> None:
    event = decision(lambda x: x.argmax(-1))
    exact = SCORES.double().numpy()
    chosen = SCORES.bfloat16().float().numpy().argmax(-1)[:, None]
    best = exact.argmax(-1)[:, None]
    assert event.changed == int((chosen != best).sum()) > 0
    assert event.margin == pytest.approx(lost(chosen, best, exact) / rms(SCORES), rel=1e-6)
    assert (event.row, event.rows) == (int((chosen != best).argmax()), 6)


@pytest.mark.parametrize("name", ["topk", "sort", "max"])
def test_the_margin_of_an_ordering_is_its_largest_loss_at_one_rank(name: str) -> None:
    programs: dict[str, Program] = {
        "topk": lambda x: x.topk(3, -1),
        "sort": lambda x: x.sort(-1, descending=True),
        "max": lambda x: x.max(-1),
    }
    event = decision(programs[name])
    mine = programs[name](SCORES.bfloat16())
    theirs = programs[name](SCORES)
    chosen, best = (np.asarray(r[1]).reshape(6, -1) for r in (mine, theirs))  # type: ignore[index]
    assert event.changed == int((chosen != best).sum()) > 0
    assert event.margin == pytest.approx(lost(chosen, best, SCORES.double().numpy()) / rms(SCORES), rel=1e-6)


def test_the_margin_of_a_choice_over_all_elements_is_found_in_the_flat_scores() -> None:
    event = decision(torch.argmax)
    exact, low = SCORES.double().numpy().ravel(), SCORES.bfloat16().float().numpy().ravel()
    assert event.margin == pytest.approx((exact.max() - exact[low.argmax()]) / rms(SCORES), rel=1e-6)


def test_the_margin_of_a_comparison_is_the_distance_of_its_sides() -> None:
    event = decision(lambda x: x > 1.01)
    exact, low = SCORES.double().numpy(), SCORES.bfloat16().double().numpy()
    changed = (exact > 1.01) != (low > 1.01)
    assert event.changed == int(changed.sum()) > 0
    assert event.margin == pytest.approx(np.abs(exact - 1.01)[changed].max() / rms(SCORES), rel=1e-5)


def test_the_margin_of_a_whole_number_is_the_distance_to_the_other_one() -> None:
    positions = torch.tensor([[257.98, 300.4, -258.97, 12.5]])
    event = decision(lambda x: x.to(torch.int32), positions)
    exact, low = positions.double().numpy(), positions.bfloat16().double().numpy()
    whole = np.trunc(low)
    away = np.where(np.abs(whole) > np.abs(exact), np.abs(whole - exact), np.abs(exact) - np.abs(whole) - 1)
    changed = np.trunc(exact) != whole
    assert event.changed == int(changed.sum()) > 0
    assert event.margin == pytest.approx(away[changed].max() / rms(positions), rel=1e-5)


def test_a_router_says_by_how_much_its_choice_was_lost() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(12, 12, bias=False)
            self.router.weight = nn.Parameter(torch.eye(12))
            self.experts = nn.Parameter(torch.randn(12, 12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights, chosen = self.router(x).topk(2, -1)
            made: torch.Tensor = (weights[..., None] * self.experts[chosen]).sum(-2)
            return made

    torch.manual_seed(0)
    found = overflow_lab.scan(Routed().eval(), {"x": SCORES}, precisions=("bfloat16",))
    (event,) = [row for row in found.recording.of(EventRow) if row.event == "decision"]
    assert (event.module, event.op) == ("", "aten.topk")
    assert event.margin is not None
    assert 0 < event.margin < 0.02
    assert event.beams == 1
    assert place(event).startswith("input ")


@pytest.mark.parametrize(
    ("settings", "row", "rows", "expected"),
    [
        (None, 1, 2, (1, 2, 1)),
        (None, 7, 10, (1, 2, 1)),  # five tokens of each input, flattened
        (None, 2, 3, (2, 3, 0)),
        (None, 0, 0, (0, 0, 0)),
        ({"num_beams": 3}, 4, 6, (4, 6, 3)),
        ({"num_beams": 3}, 1, 2, (1, 2, 1)),  # the encoder runs before the beams
        ({"num_beams": 3}, 7, 12, (7, 12, 0)),  # beams or tokens: not guessed
        ({"num_beams": 1}, 7, 12, (1, 2, 1)),
    ],
)
def test_a_row_is_told_as_an_input_or_a_beam_where_that_is_known(
    settings: dict[str, int] | None, row: int, rows: int, expected: tuple[int, int, int]
) -> None:
    call = Call({"input_ids": torch.zeros(2, 5, dtype=torch.long)}, settings=settings)
    assert call.place(row, rows) == expected


@pytest.mark.parametrize(
    ("row", "rows", "beams", "said"),
    [
        (4, 6, 3, "input 1 of 2, beam 1"),
        (2, 3, 3, "beam 2"),
        (1, 2, 1, "input 1 of 2"),
        (0, 1, 1, ""),
        (7, 12, 0, "row 7 of 12"),
        (0, 0, 0, ""),
    ],
)
def test_a_place_is_said_with_its_beam(row: int, rows: int, beams: int, said: str) -> None:
    event = EventRow("float16", "bad", "", "aten.mm", 0, 1, "beam", 0, 3, row=row, rows=rows, beams=beams)
    assert place(event) == said
