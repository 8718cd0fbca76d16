"""Remedies as a user meets them: proposed, proven on the same inputs and on others, kept in the recording."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.errors import UsageError
from overflow_lab.recording import ProofRow
from overflow_lab.remedies import treatment
from overflow_lab.remedies.holdout import samples, split
from overflow_lab.remedies.mending import remedy
from overflow_lab.remedies.remedy import Found, Remedy
from overflow_lab.remedies.treatment import Remedies
from overflow_lab.subjects.module import from_module

INPUTS = torch.linspace(-2.0, 2.0, 64).reshape(8, 8)


def loud_pair(peak: float = 60_000.0) -> nn.Sequential:
    """Return two linear layers round a ReLU; what is between them leaves float16, what comes out does not."""
    torch.manual_seed(3)
    first, last = nn.Linear(8, 16), nn.Linear(16, 4)
    with torch.no_grad():
        first.weight.mul_(peak)
        last.weight.div_(peak)
    return nn.Sequential(first, nn.ReLU(), last).eval()


class Tilted(nn.Linear):
    """A linear layer for which `weight` holds nothing that a scale could move: the output itself does not fit."""


def too_large() -> nn.Module:
    torch.manual_seed(3)
    model = Tilted(8, 4).eval()
    with torch.no_grad():
        model.weight.mul_(1e6)
    return model


@pytest.fixture(scope="module")
def mended() -> Remedies:
    return remedy(loud_pair(), INPUTS, precision="float16", kinds=("rescale", "island", "precision"))


def test_what_breaks_is_mended_and_every_offer_is_proven(mended: Remedies) -> None:
    assert mended.before.verdicts["float16"].verdict == "overflow"
    assert mended.broken == ("float16",)
    assert mended.mended
    assert {each.remedy.kind for each in mended.offered} == {"rescale", "island", "precision"}
    for each in mended.offered:
        assert each.proof.after["verdict"] == "ok"
        assert each.proof.held_back is not None
        assert each.proof.held_back["verdict"] == "ok"
        assert (each.proof.inputs, each.proof.held_inputs) == (6, 2)


def test_the_best_is_the_rescale_which_keeps_the_bits_and_gains_headroom(mended: Remedies) -> None:
    best = mended.best
    assert best is not None
    assert best.remedy.kind == "rescale"
    figures = best.proof.figures
    assert figures["function_error"] == figures["function_ulp"] == 0.0
    assert figures["headroom_before"] < 0 < figures["headroom_after"]
    assert figures["bytes"] == 1.0
    assert figures["seconds"] > 0


def test_the_headroom_is_that_of_the_largest_output_of_any_module(mended: Remedies) -> None:
    best = mended.best
    assert best is not None
    model = loud_pair()
    with torch.no_grad():
        largest = model[0](INPUTS[:6]).abs().max()
    expected = torch.log2(torch.finfo(torch.float16).max / largest)
    assert best.proof.figures["headroom_before"] == pytest.approx(float(expected), abs=1e-4)
    module, before, _ = best.proof.tightest[0]
    assert module == "0"
    assert before == pytest.approx(float(expected), abs=0.01)


def test_a_mended_copy_runs_in_half_precision_and_is_right(mended: Remedies) -> None:
    for each in mended.offered:
        model = each.model()
        dtype = next(model.parameters()).dtype
        with torch.no_grad():
            found = model(INPUTS.to(dtype)).float()
            assert torch.allclose(found, loud_pair()(INPUTS), atol=0.05)


def test_the_users_model_is_not_touched() -> None:
    model = loud_pair()
    before = copy.deepcopy(model.state_dict())
    remedy(model, INPUTS, precision="float16", kinds=("rescale", "island"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not model._forward_hooks
    assert "forward" not in vars(model[0])


def test_what_works_needs_no_remedy() -> None:
    found = remedy(loud_pair(1.0), INPUTS, precision="float16")
    assert found.tried == ()
    assert found.mended
    assert found.best is None


def test_where_nothing_is_proven_that_is_said() -> None:
    found = remedy(too_large(), INPUTS, precision="float16", kinds=("rescale", "clamp"))
    assert not found.mended
    assert found.offered == ()
    assert len(found.notes) == 2
    assert all(note.startswith("float16: no ") for note in found.notes)


def test_proofs_are_in_the_recording_its_file_the_json_and_the_report(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl.gz"
    found = remedy(loud_pair(), INPUTS, precision="float16", kinds=("rescale",), recording=path)
    proofs = [each.proof for each in found.tried]
    assert overflow_lab.load(path).of(ProofRow) == proofs
    assert [row["title"] for row in found.to_dict()["remedies"]] == [proof.title for proof in proofs]
    page = found.save_report(tmp_path / "r.html").read_text(encoding="utf-8")
    assert "What mends it" in page


def fake(monkeypatch: pytest.MonkeyPatch, propose: Callable[..., Any]) -> None:
    module = types.ModuleType("fake_proposer")
    module.__dict__["propose"] = propose
    monkeypatch.setitem(__import__("sys").modules, "fake_proposer", module)
    monkeypatch.setattr(treatment, "PROPOSERS", {"fake": "fake_proposer", "rescale": "overflow_lab.remedies.scaling"})


def test_a_remedy_that_does_not_mend_is_kept_as_tried_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = Remedy("island", "Do nothing", "float16", mend=lambda subject: subject)
    fake(monkeypatch, lambda *_, **__: Found((nothing,)))
    found = remedy(loud_pair(), INPUTS, precision="float16", kinds=("fake",))
    (tried,) = found.tried
    assert not tried.proven
    assert tried.proof.reason.startswith("on the same inputs the verdict is overflow")


def test_a_rescale_that_changes_the_function_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    def smaller(dtype: torch.dtype | None) -> nn.Module:
        model = loud_pair(1.0)
        with torch.no_grad():
            model.get_parameter("2.bias").add_(1.0)
        return model if dtype is None else model.to(dtype)

    def propose(*_: Any, **__: Any) -> Found:
        return Found(
            (Remedy("rescale", "Cheat", "float16", mend=lambda subject: dataclasses.replace(subject, load=smaller)),)
        )

    fake(monkeypatch, propose)
    (tried,) = remedy(loud_pair(), INPUTS, precision="float16", kinds=("fake",)).tried
    assert not tried.proven
    assert "changes the function" in tried.proof.reason


def test_a_remedy_that_holds_on_the_searched_inputs_alone_is_not_proven() -> None:
    found = remedy(loud_pair(), INPUTS, precision="float16", kinds=("rescale",), held_back=INPUTS * 1e4)
    assert found.broken
    rescaled = [each for each in found.tried if each.remedy.kind == "rescale"]
    assert rescaled
    assert not any(each.proven for each in rescaled)
    assert all("held back" in each.proof.reason for each in rescaled)


def test_a_search_that_raises_is_a_note_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(*_: Any, **__: Any) -> Found:
        raise RuntimeError("no\nidea")

    fake(monkeypatch, propose)
    found = remedy(loud_pair(), INPUTS, precision="float16")
    assert found.mended
    assert any("ended early" in note and "no idea" in note for note in found.notes)


def test_a_mended_model_that_raises_makes_the_remedy_unproven(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(dtype: torch.dtype | None) -> nn.Module:
        raise RuntimeError("cannot load")

    def propose(*_: Any, **__: Any) -> Found:
        return Found(
            (Remedy("island", "Break it", "float16", mend=lambda subject: dataclasses.replace(subject, load=broken)),)
        )

    fake(monkeypatch, propose)
    (tried,) = remedy(loud_pair(), INPUTS, precision="float16", kinds=("fake",)).tried
    assert not tried.proven
    assert "cannot load" in tried.proof.reason


def test_a_kind_that_does_not_exist_is_refused_before_any_work() -> None:
    with pytest.raises(UsageError, match="no remedy of the kind 'magic'"):
        remedy(loud_pair(), INPUTS, kinds=("magic",))


def test_what_is_no_change_of_weights_is_not_saved(mended: Remedies, tmp_path: Path) -> None:
    island = next(each for each in mended.offered if each.remedy.kind == "island")
    with pytest.raises(UsageError, match="paste its snippet"):
        island.save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_the_representations_say_what_is_proven(mended: Remedies) -> None:
    assert "✓ float16: Rescale" in repr(mended)
    assert "proven" in mended._repr_html_()


@pytest.mark.parametrize(
    ("inputs", "search", "held"),
    [
        ([INPUTS, INPUTS], 8, 8),
        ([INPUTS] * 9, 56, 16),
        (INPUTS, 6, 2),
        (INPUTS[:3], 3, 0),  # too few to take apart
        ({"input": INPUTS, "other": torch.ones(3)}, 8, 0),  # no rows that belong together
    ],
)
def test_a_quarter_of_the_inputs_is_held_back_where_there_are_enough(inputs: Any, search: int, held: int) -> None:
    made = split(from_module(loud_pair(), inputs))
    assert (samples(made.search), samples(made.held)) == (search, held)


def test_the_search_never_sees_what_is_held_back() -> None:
    made = split(from_module(loud_pair(), INPUTS))
    assert made.held is not None
    seen = torch.cat([batch.positional[0] for batch in made.search.batches])
    kept = torch.cat([batch.positional[0] for batch in made.held.batches])
    assert torch.equal(torch.cat([seen, kept]), INPUTS)


def test_inputs_to_hold_back_are_taken_as_given() -> None:
    made = split(from_module(loud_pair(), INPUTS), INPUTS[:1])
    assert (samples(made.search), samples(made.held)) == (8, 1)


def test_of_a_single_text_nothing_can_be_held_back_so_built_in_ones_are_taken() -> None:
    found = remedy("demo", precision="float16", kinds=("rescale",), texts=("seven",), generate=False, level="module")
    assert found.best is not None
    assert found.best.proof.inputs == 1
    assert found.best.proof.held_inputs > 1
