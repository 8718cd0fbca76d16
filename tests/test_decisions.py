"""Decisions inside a model that another precision makes otherwise, with the margin that was lost and the place."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.analysis.numbers import place
from overflow_lab.capture.shadow.sites import Event
from overflow_lab.recording import EventRow
from tests.shadowed import run
from tests.tiny_models import build

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
    """Return the largest loss of a choice, along the last dimension, in units of the rms of the scores chosen among."""
    losses = []
    for took, had, row in zip(chosen, best, scores, strict=True):
        scale = np.sqrt(np.mean(row[np.abs(row) < 1e6] ** 2))
        losses += [abs(row[b] - row[a]) / scale for a, b in zip(took, had, strict=True) if a != b]
    return float(max(losses))


def test_the_margin_of_an_argmax_is_what_float32_prefers_its_own_choice_by() -> None:
    event = decision(lambda x: x.argmax(-1))
    exact = SCORES.double().numpy()
    chosen = SCORES.bfloat16().float().numpy().argmax(-1)[:, None]
    best = exact.argmax(-1)[:, None]
    assert event.changed == int((chosen != best).sum()) > 0
    assert event.margin == pytest.approx(lost(chosen, best, exact), rel=1e-6)
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
    assert event.margin == pytest.approx(lost(chosen, best, SCORES.double().numpy()), rel=1e-6)


def test_a_choice_is_measured_by_its_own_scores_whatever_the_others_are() -> None:
    scores = torch.cat([SCORES[:1] * 1e-3, 100.0 * torch.arange(1.0, 13.0)[None], SCORES[1:]])
    scores[:, -1] = torch.tensor([-1e9, 100.0, -torch.inf, *[torch.finfo(torch.float32).min] * 4])  # masked choices
    event = decision(lambda x: x.topk(2, -1), scores)
    chosen, best = (np.asarray(s.topk(2, -1)[1]) for s in (scores.bfloat16(), scores))
    assert event.changed == int((chosen != best).sum()) > 0
    assert event.margin == pytest.approx(lost(chosen, best, scores.double().numpy()), rel=1e-6)
    assert event.margin is not None
    assert event.margin > 1e-4


@pytest.mark.parametrize("largest", [True, False])
def test_a_choice_along_another_dimension_is_measured_there(largest: bool) -> None:
    event = decision(lambda x: x.topk(3, 0, largest)[1], SCORES.T.contiguous())
    chosen, best = (np.asarray(s.topk(3, -1, largest)[1]) for s in (SCORES.bfloat16(), SCORES))
    assert event.margin == pytest.approx(lost(chosen, best, SCORES.double().numpy()), rel=1e-6)


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


@pytest.mark.parametrize(
    ("name", "cut"), [("round", np.rint), ("floor", np.floor), ("ceil", np.ceil), ("trunc", np.trunc)]
)
def test_a_code_that_is_rounded_before_it_is_cast_has_the_margin_of_the_rounding(
    name: str, cut: Callable[[np.ndarray], np.ndarray]
) -> None:
    values = torch.from_numpy(np.random.default_rng(5).uniform(-400.0, 400.0, (4, 9))).float()
    event = decision(lambda x: getattr(x, name)().long(), values)
    exact, codes = values.double().numpy(), cut(values.bfloat16().double().numpy())
    changed = codes != cut(exact)
    assert (event.op, event.changed) == ("aten._to_copy", int(changed.sum()))
    # The nearest value that becomes the program's code, found by trying.
    tries = np.linspace(-1.0, 1.0, 4001)
    near = [
        min(abs(value - (code + t)) for t in tries if cut(np.float64(code + t)) == code)  # type: ignore[arg-type]
        for value, code in zip(exact[changed], codes[changed], strict=True)
    ]
    assert event.margin == pytest.approx(max(near) / rms(values), abs=1e-3 / rms(values))


def test_whole_numbers_that_a_format_cannot_hold_are_no_near_tie() -> None:
    event = decision(lambda x: x.long(), torch.tensor([[257.0, 301.0, 2.0]]))
    assert (event.changed, event.margin) == (2, None)


def test_an_infinity_made_a_whole_number_has_no_margin() -> None:
    mode, _ = run(lambda x: (x * 1e5).int(), [torch.tensor([[1.0, 0.1]])], torch.float16)
    mode.shadows.close()
    (event,) = [event for (what, _), event in mode.notes.events.items() if what == "decision"]
    assert (event.changed, event.margin) == (1, None)


def test_a_whole_number_without_a_sign_is_cut_as_any_other() -> None:
    event = decision(lambda x: (x - 1).to(torch.uint8), torch.tensor([[1.9999, 0.5, 2.0]]))
    assert event.margin == pytest.approx(1e-4 / rms(torch.tensor([0.9999, -0.5, 1.0])), rel=1e-2)


def test_a_truth_made_of_a_value_is_as_near_as_the_value_is_to_zero() -> None:
    mode, _ = run(lambda x: x.bool(), [torch.tensor([[1e-9, 1.0, 0.0]])], torch.float16)
    mode.shadows.close()
    (event,) = [event for (what, _), event in mode.notes.events.items() if what == "decision"]
    assert event.margin == pytest.approx(1e-9 / rms(torch.tensor([1e-9, 1.0, 0.0])), rel=1e-6)


@pytest.mark.parametrize("right", [False, True])
@pytest.mark.parametrize("search", [False, True])
def test_the_margin_of_a_bucket_is_the_distance_to_its_border(search: bool, right: bool) -> None:
    borders = torch.linspace(1.0, 1.015, 40)

    def bucket(x: torch.Tensor) -> torch.Tensor:
        return torch.searchsorted(borders, x, right=right) if search else torch.bucketize(x, borders, right=right)

    event = decision(lambda x: bucket(x.float()), SCORES)
    exact, low = SCORES.double().numpy(), SCORES.bfloat16().double().numpy()
    side = "right" if right else "left"
    ends = np.concatenate([[-np.inf], borders.double().numpy(), [np.inf]])
    mine, theirs = (np.searchsorted(borders.double().numpy(), values, side) for values in (low, exact))  # type: ignore[call-overload]
    away = np.maximum(ends[mine] - exact, exact - ends[mine + 1])
    assert event.changed == int((mine != theirs).sum()) > 0
    assert event.margin == pytest.approx(away[mine != theirs].max() / rms(SCORES), rel=1e-5)


def test_a_code_of_a_codebook_is_told_with_what_its_distances_lost() -> None:
    torch.manual_seed(0)
    codes, values = torch.randn(64, 8) * 0.02 + 4, torch.randn(3, 20, 8) * 0.02 + 4

    def encode(x: torch.Tensor) -> torch.Tensor:
        return (x[:, :, None] - codes.to(x.dtype)).square().sum(-1).argmin(-1)

    event = decision(encode, values)
    # The shadow of the codes is their rounded value: the program casts a float32 constant by itself.
    apart = ((values.double()[:, :, None] - codes.double()) ** 2).sum(-1).numpy().reshape(60, 64)
    chosen = encode(values.bfloat16()).numpy().reshape(60, 1)
    assert (event.op, event.elements) == ("aten.argmin", 60)
    assert event.margin == pytest.approx(lost(chosen, apart.argmin(-1)[:, None], apart), rel=0.05)


def scanned(model: nn.Module, inputs: dict[str, torch.Tensor]) -> overflow_lab.Scan:
    return overflow_lab.scan(model.eval(), inputs, precisions=("bfloat16",))


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
    found = scanned(Routed(), {"x": SCORES})
    (event,) = [row for row in found.recording.of(EventRow) if row.event == "decision"]
    assert (event.module, event.op) == ("", "aten.topk")
    assert event.margin is not None
    assert 0 < event.margin < 0.02
    assert event.beams == 1
    assert place(event).startswith("input ")


def test_each_router_of_a_mixture_of_experts_says_what_its_choices_lost() -> None:
    model = build("mixtral")
    torch.manual_seed(1)
    with torch.no_grad():  # experts that are nearly alike
        for layer in model.model.layers:
            weight = layer.mlp.gate.weight.normal_(0.0, 0.3)
            weight[1], weight[3] = weight[0] * 1.002, weight[2] * 1.001
    ids = torch.randint(3, 100, (4, 16), generator=torch.Generator().manual_seed(2))
    found = scanned(model, {"input_ids": ids})
    events = [row for row in found.recording.of(EventRow) if row.event == "decision"]
    assert [(row.module, row.op) for row in events] == [(f"model.layers.{i}.mlp.gate", "aten.topk") for i in range(2)]
    first = events[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        kept: list[torch.Tensor] = []
        handle = layer.mlp.gate.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
        model(input_ids=ids)
        handle.remove()
    logits = kept[0].reshape(64, -1).double() @ layer.mlp.gate.weight.double().T
    scores = logits.softmax(-1).detach().numpy()
    ranks = np.sort(scores, -1)[:, ::-1]
    nearest = ((ranks[:, :2] - ranks[:, 1:3]) / np.sqrt((scores**2).mean(-1, keepdims=True))).min()
    # What is lost is more than the nearest tie, and no more than a few roundings.
    assert first.margin is not None
    assert nearest < first.margin < 8 * 2.0**-8
    assert (first.beams, first.rows) == (1, 4)


class Coded(nn.Module):
    """Gives the codes of rounded values, which bfloat16 cannot tell apart around 1000."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return whole numbers, the shape of `x`."""
        codes: torch.Tensor = (self.encoder(x) * 20 + 1000).round().long()
        return codes


def test_the_chain_tells_the_decision_that_changed_with_its_margin_and_its_first_place() -> None:
    found = scanned(Coded(), {"x": torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(0))})
    verdict = found.verdicts["bfloat16"]
    effect, decided, origin = verdict.chain
    assert (effect.role, decided.role, origin.role) == ("effect", "harm", "origin")
    assert (decided.module, decided.op, origin.op) == ("", "aten._to_copy", "aten.add")
    assert decided.text.startswith("makes ")
    assert " of 960 decisions otherwise, which float32 makes by at most 0." in decided.text
    assert decided.text.endswith("% of its scores' size; first at input 0 of 3")
    (event,) = [row for row in found.recording.of(EventRow) if row.event == "decision"]
    (finding,) = [f for f in found.diagnosis.findings if f.precision == "bfloat16"]
    assert finding.evidence["margin"] == event.margin
    assert finding.evidence["decision"] == "the model itself, aten._to_copy"
    assert finding.evidence["place"] == "input 0 of 3"
