"""`generate` seen from inside: the shadow follows beam search, changes nothing, and dates what it sees by the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overflow_lab.capture.inside import Inside
from overflow_lab.capture.precisions import Prepared, parse_precision, prepare
from overflow_lab.capture.runs import Reference, watched
from overflow_lab.capture.shadow import judge
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.observe import Observer
from overflow_lab.capture.shadow.run import run
from overflow_lab.recording import EventRow, LookRow
from overflow_lab.subjects.find import SubjectOptions, find

SUBJECT = find("demo", SubjectOptions(max_new_tokens=6, texts=("four hundred and seven", "nine")))
BEAM = {"num_beams": 3, "do_sample": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def base() -> Prepared:
    return prepare(SUBJECT, parse_precision("float32"))


def call() -> Call:
    batch = next(iter(SUBJECT.batches))
    return Call(dict(batch.inputs), settings=BEAM, run="beam")


@pytest.mark.parametrize("precision", ["bfloat16", "float16-to", "bfloat16-autocast"])
@torch.no_grad()
def test_beam_search_answers_the_same_with_its_shadow(precision: str, base: Prepared) -> None:
    low = prepare(SUBJECT, parse_precision(precision))
    with low.context():
        plain: Any = call().cast(low).make(low.model)
    mode = ShadowMode()
    seen = run(mode, low, base.model, call())
    mode.shadows.close()
    assert torch.equal(seen.output, plain)
    assert 1 <= mode.notes.call < BEAM["max_new_tokens"]  # steps of the decoder were counted from 0


@torch.no_grad()
def test_the_origin_inside_generate_is_the_one_of_the_plain_forward(base: Prepared) -> None:
    low = prepare(SUBJECT, parse_precision("float16-to"))
    events = [row for row in Observer(base, low).observe(call(), 4, off=True) if isinstance(row, EventRow)]
    first = next(row for row in events if row.event == "bad" and (row.harmed or row.reaches_output))
    assert (first.module, first.op) == ("encoder.block.1.layer.1.DenseReluDense.wo", "aten.mm")
    assert (first.run, first.batch) == ("beam", 4)
    assert first.value is not None
    assert first.value > torch.finfo(torch.float16).max


@torch.no_grad()
def test_answers_are_looked_at_once_and_not_where_a_forward_has_explained_them(base: Prepared) -> None:
    low = watched(prepare(SUBJECT, parse_precision("float16-to")))
    batch = next(iter(SUBJECT.batches))
    reference = Reference(0, batch, inputs=dict(batch.inputs))
    assert SUBJECT.generation is not None
    said: list[str] = []
    inside = Inside(lambda reason, precision: said.append(reason))
    assert inside.answer(low, base, reference, "beam", SUBJECT.generation)
    assert not inside.answer(low, base, reference, "greedy", SUBJECT.generation)
    assert not said


@torch.no_grad()
def test_a_shadow_run_that_fails_is_a_blind_spot_and_ends_nothing(
    base: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no replay\ntoday")

    monkeypatch.setattr(Observer, "observe", fail)
    low = watched(prepare(SUBJECT, parse_precision("bfloat16")))
    batch = next(iter(SUBJECT.batches))
    said: list[tuple[str, str]] = []
    inside = Inside(lambda reason, precision: said.append((reason, precision)))
    rows = inside.forward(low, base, Reference(0, batch, inputs=dict(batch.inputs)), off=True)
    assert list(rows) == [LookRow("bfloat16", "forward", 0, off=True)]
    assert said == [("the shadow run of forward ended early: RuntimeError: no replay today", "bfloat16")]


@torch.no_grad()
def test_an_event_in_generate_is_dated_by_step_and_beam(base: Prepared) -> None:
    low = prepare(SUBJECT, parse_precision("float16-to"))
    events = [row for row in Observer(base, low).observe(call(), 0, off=True) if isinstance(row, EventRow)]
    bad = [row for row in events if row.event == "bad"]
    samples = next(iter(SUBJECT.batches)).samples
    assert bad
    assert all(0 <= row.row < row.rows and row.rows % samples == 0 for row in bad)
    assert bad[0].call == -1  # the encoder, which generate calls before the first step


@torch.no_grad()
def test_a_beam_search_that_ranks_otherwise_tells_step_input_and_margin(base: Prepared) -> None:
    low = prepare(SUBJECT, parse_precision("bfloat16"))
    events = [row for row in Observer(base, low).observe(call(), 0, off=True) if isinstance(row, EventRow)]
    ranked = [row for row in events if (row.event, row.module, row.op) == ("decision", "", "aten.topk")]
    assert ranked
    assert all(0 <= row.call < BEAM["max_new_tokens"] and (row.rows, row.beams) == (2, 1) for row in ranked)
    # Beams that have not begun have scores of -1e9, in whose units every margin would be nothing.
    assert all(row.margin is not None and 1e-5 < row.margin < 0.1 for row in ranked)


def test_the_row_of_a_bad_value_is_its_index_along_the_first_dimension() -> None:
    mask = torch.zeros(4, 3, 2, dtype=torch.bool)
    mask[2, 1, 1] = mask[3] = True
    assert judge.first_row(mask) == (2, 4)
    assert judge.first_row(torch.tensor(True)) == (0, 1)
