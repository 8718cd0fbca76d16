"""Where among the inputs and beams, and at which step, something happened first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.numbers import place
from overflow_lab.capture.shadow.call import Call
from overflow_lab.recording import EventRow


@pytest.mark.parametrize(
    ("settings", "row", "rows", "expected"),
    [
        (None, 1, 2, (1, 2, 1)),
        (None, 7, 10, (1, 2, 1)),  # five tokens of each input, flattened
        (None, 2, 3, (2, 3, 0)),
        (None, 0, 0, (0, 0, 0)),
        ({"num_beams": 3}, 4, 6, (4, 6, 3)),
        ({"num_beams": 3}, 1, 2, (1, 2, 1)),  # the encoder runs before the beams
        ({"num_beams": 3}, 7, 12, (1, 2, 1)),  # beams, tokens, or both: an input's follow each other
        ({"num_beams": 3}, 4, 10, (0, 2, 1)),  # five tokens of each input, in the encoder
        (None, 3, 4, (3, 4, 0)),  # as long as the inputs: it may be their length
        ({"num_beams": 1}, 7, 12, (1, 2, 1)),
    ],
)
def test_a_row_is_told_as_an_input_or_a_beam_where_that_is_known(
    settings: dict[str, int] | None, row: int, rows: int, expected: tuple[int, int, int]
) -> None:
    length = 4 if rows == 4 else 5
    call = Call({"input_ids": torch.zeros(2, length, dtype=torch.long)}, settings=settings)
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


class Heavy(nn.Module):
    """Has one row of weights that float16 cannot hold; eight rows, which two inputs divide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))
        self.weight.data[5] = 1e6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [batch, 8]."""
        return x @ self.weight.T


def test_a_row_of_a_weight_is_no_input() -> None:
    found = overflow_lab.scan(Heavy().eval(), {"x": torch.ones(2, 4)}, precisions=("float16",))
    event = next(row for row in found.recording.of(EventRow) if row.event == "bad")
    assert (event.detail, event.row, event.rows, event.beams) == ("weight", 5, 8, 0)
    assert place(event) == "row 5 of 8"


def test_a_row_of_an_input_that_the_cast_loses_is_that_input() -> None:
    given = torch.ones(2, 4)
    given[1, 2] = 1e6
    found = overflow_lab.scan(nn.Linear(4, 4).eval(), (given,), precisions=("float16",))
    event = next(row for row in found.recording.of(EventRow) if row.event == "bad")
    assert event.op == "aten._to_copy"
    assert place(event) == "input 1 of 2"
