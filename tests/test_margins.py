"""Near ties: by how much float32 prefers its own choice, and what that means for a verdict."""

from __future__ import annotations

import math

import pytest
import torch

import overflow_lab
from overflow_lab.analysis.effects import effect, is_imprecise, is_wrong
from overflow_lab.capture.margins import LOWEST, Forced, Step, margin_exponents, search_margin, step_margin
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AnswerRow, Header, OutputRow, Recording, build
from tests import tiny_models

BF16 = FORMATS["bfloat16"]


def recording(*rows: OutputRow | AnswerRow) -> Recording:
    header = Header(1, "0", "2020-01-01T00:00:00+00:00", {"name": "m"}, ("float32", "bfloat16"))
    return build(header, list(rows))


def test_margins_are_in_units_of_the_root_mean_square_of_the_scores() -> None:
    scores = torch.randn(50, 20) * 3
    chosen = torch.randint(20, (50,))
    expected: dict[int, int] = {}
    for row, pick in zip(scores.double().tolist(), chosen.tolist(), strict=True):
        margin = (max(row) - row[pick]) / math.sqrt(sum(x * x for x in row) / 20)
        exponent = math.floor(math.log2(margin)) if margin else LOWEST
        expected[exponent] = expected.get(exponent, 0) + 1
    assert margin_exponents(scores, chosen) == expected


def test_exact_ties_impossible_choices_and_no_decisions() -> None:
    scores = torch.tensor([[1.0, 1.0, 0.0], [2.0, -torch.inf, 0.0], [0.0, 0.0, 0.0]])
    assert margin_exponents(scores, torch.tensor([1, 1, 2])) == {LOWEST: 2}
    assert margin_exponents(scores[:0], torch.tensor([], dtype=torch.long)) == {}


def output(margins: dict[int, int], changed: int = 60) -> OutputRow:
    return OutputRow("bfloat16", "output['logits']", 1000, 0, 1e-4, 1.0, 100, changed, margins=margins)


def test_changed_decisions_that_are_near_ties_are_no_fault() -> None:
    ties = effect(recording(output({-5: 40, LOWEST: 20})), "bfloat16", BF16)
    assert (ties.changed_decisions, ties.tied_decisions, ties.overruled_decisions) == (0.6, 0.6, 0.0)
    assert not is_wrong(ties, BF16)
    assert not is_imprecise(ties, BF16)


@pytest.mark.parametrize("margins", [{-4: 60}, {0: 60}, {}], ids=["at the limit", "clear", "unknown"])
def test_changed_decisions_that_float32_is_clear_about_are_one(margins: dict[int, int]) -> None:
    found = effect(recording(output(margins)), "bfloat16", BF16)
    assert found.overruled_decisions == 0.6
    assert is_wrong(found, BF16)
    assert is_imprecise(found, BF16)


@pytest.mark.parametrize(("margin", "tied"), [(0.0, True), (0.06, True), (0.0625, False), (2.0, False), (None, False)])
def test_answers_that_part_at_a_near_tie_are_no_fault(margin: float | None, tied: bool) -> None:
    answers = [
        AnswerRow("bfloat16", "greedy", 0, i, "changed", 3, 3, first_difference=1, margin=margin) for i in (0, 1)
    ]
    found = effect(recording(*answers), "bfloat16", BF16)
    assert (found.changed_answers, found.tied_answers) == (2, 2 if tied else 0)
    assert is_imprecise(found, BF16) is not tied


def test_margins_of_batches_add_up() -> None:
    assert (output({-5: 1, 2: 3}) + output({-5: 2})).margins == {-5: 3, 2: 3}


@pytest.mark.parametrize("name", ["t5", "bart", "gpt2", "llama", "mamba"])
def test_a_model_led_along_its_own_greedy_answer_has_no_margin_and_gives_it_again(name: str) -> None:
    model = tiny_models.build(name).eval()
    ids = torch.randint(3, 100, (3, 6), generator=torch.Generator().manual_seed(3))
    settings = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    own = model.generate(input_ids=ids, **settings)
    before = 1 if model.config.is_encoder_decoder else 6
    forced = Forced(own[:, before:].tolist())
    again = model.generate(input_ids=ids, **settings, logits_processor=[forced])
    assert torch.equal(own, again)
    assert all(step.margin == 0.0 for steps in forced.steps for step in steps)


def test_the_scores_of_a_foreign_answer_are_those_of_a_plain_forward() -> None:
    model = tiny_models.build("llama").eval()
    ids = torch.randint(3, 100, (1, 6), generator=torch.Generator().manual_seed(4))
    answer = [17, 40, 9]
    forced = Forced([answer])
    model.generate(input_ids=ids, do_sample=False, max_new_tokens=3, pad_token_id=0, logits_processor=[forced])
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([answer])], dim=1)).logits[0, 5:8].double()
    picked = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
    expected = (logits.amax(-1) - picked) / logits.square().mean(-1).sqrt()
    assert [step.margin for step in forced.steps[0]] == pytest.approx(expected.tolist(), rel=1e-4)
    logprobs = (picked - logits.logsumexp(-1)).tolist()
    assert [step.logprob for step in forced.steps[0]] == pytest.approx(logprobs, rel=1e-4)


def test_the_margin_of_a_search_is_of_mean_log_probabilities_and_never_negative() -> None:
    own = [Step(0.0, -1.0, 2.0)] * 4
    other = [Step(0.0, -1.5, 2.0)] * 4
    assert search_margin(own, other) == pytest.approx(0.5 * 2.0 / 2.0)
    assert search_margin(other, own) == 0.0
    assert search_margin(own, []) is None
    assert search_margin(own, [Step(math.inf, -math.inf, 2.0)]) is None


def test_the_margin_of_a_greedy_answer_is_that_of_the_first_token_that_differs() -> None:
    steps = [Step(0.0, -1.0, 1.0), Step(0.25, -1.0, 1.0), Step(math.inf, -math.inf, 1.0)]
    assert [step_margin(steps, i) for i in (None, 1, 2, 9)] == [None, 0.25, None, None]


def test_a_healthy_model_at_random_weights_is_ok_though_answers_part() -> None:
    torch.manual_seed(0)
    model = tiny_models.build("gpt2").eval()
    ids = torch.randint(3, 100, (16, 12), generator=torch.Generator().manual_seed(5))
    found = overflow_lab.scan(model, {"input_ids": ids}, precisions=["bfloat16"], generate=True, max_new_tokens=24)
    verdict = found.verdicts["bfloat16"]
    assert verdict.effect.answers == 32
    assert verdict.verdict == "ok"
    changed = [row for row in found.recording.of(AnswerRow) if row.status == "changed"]
    assert all(row.margin is not None for row in changed)
