"""What a proof measures, each figure against one computed another way; and what is kept when a search ends early."""

from __future__ import annotations

import copy
import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import overflow_lab
from overflow_lab.analysis.results import Effect, Verdict
from overflow_lab.recording import ProofRow
from overflow_lab.remedies import proof, treatment
from overflow_lab.remedies.holdout import split
from overflow_lab.remedies.measure import answers_of_the_original
from overflow_lab.remedies.mending import remedy
from overflow_lab.remedies.remedy import Found, Remedy
from overflow_lab.scan import scan_subject, subject_of
from overflow_lab.subjects import Subject
from overflow_lab.subjects.module import from_module
from tests.tiny_models import build

IDS = torch.arange(3, 35).reshape(4, 8)


def loading(model: nn.Module) -> Callable[[torch.dtype | None], nn.Module]:
    return lambda dtype: copy.deepcopy(model).to(dtype or torch.float32)


def shifted(model: nn.Module, by: float) -> nn.Module:
    """Return another model: each weight matrix moved at random, as training would."""
    torch.manual_seed(11)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return other


def proven(subject: Subject, kind: str, mend: Callable[[Subject], Subject]) -> ProofRow:
    found = scan_subject(subject, ["float16"], level="module")
    given = Remedy(kind, "Try it", "float16", mend=mend)
    return proof.prove(given, split(subject), found, options={"level": "module"})


def test_answers_of_trained_weights_are_compared_with_the_originals_and_not_with_their_own() -> None:
    model = build("gpt2").eval()
    other = shifted(model, 0.05)
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    subject = subject_of(model, inputs, {"generate": True, "max_new_tokens": 6, "num_beams": 2}, None)
    mended = dataclasses.replace(subject, load=loading(other))
    header = scan_subject(subject, ["float16"], level="module").recording.header
    found = answers_of_the_original(subject, mended, "float16", header)

    def answers(asked: nn.Module, beams: int) -> list[list[int]]:
        settings = {"num_beams": beams, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 1}
        rows = asked.generate(**inputs, **settings)[:, 8:].tolist()  # type: ignore[operator]
        return [row[: row.index(1) + 1] if 1 in row else row for row in rows]

    total = same = right = count = 0
    for beams in (1, 2):
        for wanted, got in zip(answers(model, beams), answers(other.half(), beams), strict=True):
            alike = [a == b for a, b in zip(wanted, got, strict=False)]
            count, same, total = count + 1, same + (wanted == got), total + len(wanted)
            right += len(wanted) if wanted == got else alike.index(False) if False in alike else len(alike)
    assert 0 < right < total
    assert found == {"same_tokens": right / total, "same_answers": same / count}


def test_the_loss_is_that_of_the_labels_in_float32_plain_and_mended() -> None:
    model = build("gpt2").eval()
    other = shifted(model, 0.02)
    subject = from_module(model, [{"input_ids": IDS[:3], "labels": IDS[:3]}, {"input_ids": IDS[3:], "labels": IDS[3:]}])
    row = proven(subject, "penalty", lambda given: dataclasses.replace(given, load=loading(other)))

    def loss(asked: nn.Module) -> float:
        with torch.no_grad():
            logits = asked(input_ids=IDS[:3]).logits[:, :-1].float()
        return float(F.cross_entropy(logits.flatten(0, 1), IDS[:3, 1:].flatten()))

    assert row.figures["loss_before"] == pytest.approx(loss(model), rel=1e-5)
    assert row.figures["loss_low"] == pytest.approx(loss(copy.deepcopy(model).half()), rel=1e-3)
    assert row.figures["loss_after"] == pytest.approx(loss(other.half()), rel=1e-3)


def test_the_function_is_measured_in_error_ulp_and_divergence() -> None:
    model = build("gpt2").eval()
    other = shifted(model, 1e-3)
    subject = from_module(model, {"input_ids": IDS})
    figures = proven(subject, "penalty", lambda given: dataclasses.replace(given, load=loading(other))).figures
    with torch.no_grad():
        a, b = model(input_ids=IDS).logits.double(), other(input_ids=IDS).logits.double()
    logs = [x.log_softmax(-1) for x in (a, b)]
    kl = [(x.exp() * (x - y)).sum(-1).mean() for x, y in (logs, logs[::-1])]
    # On three of the four inputs and on the one that is held back; the worse of the two counts.
    assert figures["function_error"] == pytest.approx(float((a - b).norm() / a.norm()), rel=0.3)
    assert figures["function_kl"] == pytest.approx(float(kl[0]), rel=0.5)
    one_ulp = float(torch.finfo(torch.float32).eps) * 2.0 ** torch.floor(torch.log2(a.abs().max())).item()
    assert figures["function_ulp"] == pytest.approx(float((a - b).abs().max()) / one_ulp, rel=0.3)


def test_memory_and_time_are_ratios_to_the_plain_precision() -> None:
    subject = from_module(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).eval(), torch.randn(8, 8))

    def wide(model: nn.Module, precision: str) -> nn.Module:
        inner = model.float()
        inner.register_forward_pre_hook(lambda _, given: tuple(x.float() for x in given))
        return inner

    figures = proven(subject, "island", lambda given: dataclasses.replace(given, adapt=wide)).figures
    assert figures["bytes"] == 2.0
    assert figures["seconds"] > 0


def verdict(name: str, severity: str, **effect: Any) -> Verdict:
    return Verdict("float16", name, severity, "why", effect=Effect(nonfinite=0.0, **effect))


@pytest.mark.parametrize(
    ("kind", "found", "holds"),
    [
        ("island", verdict("ok", "none", relative_error=1e-4), True),
        ("island", verdict("overflow", "warning", relative_error=1e-4), False),
        ("clamp", verdict("overflow", "warning", relative_error=1e-4), True),
        ("clamp", verdict("overflow", "error", relative_error=1e-4), False),
        ("clamp", verdict("overflow", "warning", relative_error=0.3), False),
        ("clamp", verdict("overflow", "warning", relative_error=1e-4, changed_decisions=0.01), False),
        ("clamp", verdict("overflow", "warning", changed_decisions=0.01, tied_decisions=0.01), True),
        ("clamp", verdict("overflow", "warning", answers=2, changed_answers=1), False),
        ("rescale", Verdict("float16", "ok", "none", "nothing compared"), False),
    ],
)  # fmt: skip
def test_what_holds_is_ok_and_for_a_clamp_an_output_that_is_right(kind: str, found: Verdict, *, holds: bool) -> None:
    given = Remedy(kind, "Try it", "float16", mend=lambda subject: subject)
    assert (proof._objection(given, found, None, {}) is None) is holds


def loud() -> nn.Module:
    torch.manual_seed(3)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    with torch.no_grad():
        first.weight.mul_(60_000.0)
        last.weight.div_(60_000.0)
    return nn.Sequential(first, nn.ReLU(), last).eval()


def proposers(monkeypatch: pytest.MonkeyPatch, **named: Callable[..., Any]) -> None:
    for name, propose in named.items():
        module = types.ModuleType(f"proposer_{name}")
        module.__dict__["propose"] = propose
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(treatment, "PROPOSERS", {name: f"proposer_{name}" for name in named})


def test_a_proof_is_in_the_file_before_the_next_search_which_may_be_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: Any, **__: Any) -> Found:
        raise KeyboardInterrupt

    nothing = Remedy("island", "Do nothing", "float16", mend=lambda subject: subject)
    proposers(monkeypatch, first=lambda *_, **__: Found((nothing,)), second=interrupted)
    path = tmp_path / "r.jsonl.gz"
    with pytest.raises(KeyboardInterrupt):
        remedy(loud(), torch.randn(8, 8), precision="float16", recording=path)
    kept = overflow_lab.load(path)
    assert kept.complete
    assert [row.title for row in kept.of(ProofRow)] == ["Do nothing"]


class Unforeseen(Exception):
    """What no library raises."""


def test_whatever_a_search_or_a_mended_model_raises_ends_that_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: Any, **__: Any) -> Found:
        raise Unforeseen("in the search")

    def mend(subject: Subject) -> Subject:
        raise Unforeseen("in the copy")

    failing = Remedy("island", "Break it", "float16", mend=mend)
    nothing = Remedy("island", "Do nothing", "float16", mend=lambda subject: subject)
    proposers(monkeypatch, one=search, two=lambda *_, **__: Found((failing, nothing)))
    found = remedy(loud(), torch.randn(8, 8), precision="float16")
    assert "Unforeseen: in the search" in found.notes[0]
    assert "Unforeseen: in the copy" in found.tried[0].proof.reason
    assert found.tried[1].proof.reason.startswith("on the same inputs the verdict is overflow")


def test_inputs_to_hold_back_are_on_the_device_of_the_others() -> None:
    made = split(from_module(nn.Linear(8, 4), torch.randn(8, 8), device="meta"), torch.randn(2, 8))
    assert made.held is not None
    (batch,) = made.held.batches
    assert batch.positional[0].device.type == "meta"
