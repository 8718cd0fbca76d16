"""Islands as remedies: the smallest sets, proven, within the budget, in words that say what they cost."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from overflow_lab.remedies import islands
from overflow_lab.remedies.islands.apply import mended
from overflow_lab.remedies.islands.members import Member
from overflow_lab.remedies.islands.proposals import Islands, title
from overflow_lab.remedies.islands.searcher import Search
from overflow_lab.remedies.islands.trials import Trials
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.subjects import Subject
from overflow_lab.subjects.demo import PROMPTS, folder
from overflow_lab.subjects.module import from_module
from tests import island_models as models


def scanned(subject: Subject, precision: str = "float16") -> Scan:
    return scan_subject(subject, [precision], level="operation")


def verdict(subject: Subject, precision: str = "float16") -> str:
    return scanned(subject, precision).verdicts[precision].verdict


def searched(model: nn.Module, inputs: Any, precision: str = "float16", runs: int = 60) -> tuple[Subject, Islands]:
    subject = from_module(model, inputs)
    return subject, islands.propose(subject, scanned(subject, precision), precision, runs=runs)


def of_modules(found: Islands) -> Remedy:
    return next(remedy for remedy in found.remedies if all(":" not in member for member in remedy.members))


def of_operations(found: Islands) -> Remedy:
    return next(remedy for remedy in found.remedies if all(":" in member for member in remedy.members))


@pytest.fixture(scope="module")
def loud() -> tuple[Subject, Islands]:
    """Return the search of a model with two norms by hand that overflow, and two that do not."""
    return searched(models.seeded(models.Layers), {"x": models.values(2, 5, 8)})


def test_the_smallest_modules_are_those_that_break_and_no_others(loud: tuple[Subject, Islands]) -> None:
    assert of_modules(loud[1]).members == ("layers.1.norm", "layers.3.norm")


def test_every_remedy_is_proven_by_a_scan(loud: tuple[Subject, Islands]) -> None:
    subject, found = loud
    assert verdict(subject) == "overflow"
    assert [verdict(remedy.mend(subject)) for remedy in found.remedies] == ["ok"] * len(found.remedies)
    assert found.remedies


def test_removing_any_one_member_breaks_it_again(loud: tuple[Subject, Islands]) -> None:
    subject, found = loud
    for remedy in found.remedies:
        members = frozenset(Member(module, op) for module, _, op in (m.partition(": ") for m in remedy.members))
        assert len(members) > 1
        for member in members:
            assert verdict(mended(subject, members - {member}, "float16")) != "ok", f"without {member}"


def test_operations_are_found_where_the_models_own_code_breaks() -> None:
    _, found = searched(models.seeded(models.Scores), {"x": 3 * models.values(2, 5, 16)})
    assert of_operations(found).members == ("the model itself: aten.bmm", "the model itself: aten.div")
    assert of_operations(found).title == "Do aten.bmm, aten.div in float32"


def test_a_residual_stream_that_does_not_fit_is_named_and_the_island_not_called_small() -> None:
    subject, found = searched(models.seeded(models.Streamed), {"x": models.values(2, 5, 8)})
    said = of_modules(found).notes[0]
    assert of_modules(found).members == ("encoder",)
    assert said.startswith("No small set of modules mends this, since the residual stream itself does not fit (")
    assert "`encoder.blocks.3` hands on 80,0" in said or "`encoder.blocks.2` hands on 80,0" in said
    assert "the limit of float16 is 65,504" in said
    assert "`encoder`" in said
    kept = sum(p.numel() for p in subject.load(None).get_submodule("encoder").parameters())
    assert any(f"{4 * kept:,} bytes of float32 weights" in note for note in of_modules(found).notes)
    # the stream alone, without any weights, is the smaller island, and comes first
    assert found.remedies[0] is of_operations(found)
    assert "encoder.blocks.2: aten.add" in of_operations(found).members


def test_where_the_stream_does_not_fit_the_layers_that_write_it_are_enough_with_their_outputs_in_float32() -> None:
    # T5's norms bring a stream that was promoted to float32 back to half precision by themselves.
    model = hf.T5EncoderModel.from_pretrained(folder()).eval()
    tokens = hf.AutoTokenizer.from_pretrained(folder())(list(PROMPTS[-4:]), padding=True, return_tensors="pt")
    subject = from_module(model, dict(tokens))
    before = scanned(subject)
    found = Search(Trials(subject, "float16", before.recording, 30), subject, before).open_modules()
    assert found is not None
    assert found.members == {
        Member("encoder.block.1.layer.1.DenseReluDense.wo", open=True),
        Member("encoder.block.2.layer.0.SelfAttention.o", open=True),
    }
    assert title(found.members).endswith("in float32, their outputs too")
    assert verdict(mended(subject, found.members, "float16")) == "ok"


def test_the_runs_are_counted_and_bounded() -> None:
    model, inputs = models.seeded(models.Layers), {"x": models.values(2, 5, 8)}
    for runs in (1, 4, 9, 25):
        _, found = searched(model, inputs, runs=runs)
        assert found.runs <= runs
        for remedy in found.remedies:
            assert remedy.runs <= runs
            assert f"of at most {runs} runs" in " ".join(remedy.notes)
        assert found.remedies or "all that was allowed" in found.reason


def test_where_only_the_whole_model_would_do_nothing_is_proposed_and_the_reason_given() -> None:
    # What does not fit is the input that the caller casts: no part of the model can mend that.
    _, found = searched(models.seeded(nn.LayerNorm, 8), (1e5 * models.values(2, 8),))
    assert found.remedies == ()
    assert found.reason == "no set of modules or operations mends float16 short of the whole model."


def test_what_does_not_break_has_no_islands() -> None:
    _, found = searched(models.seeded(models.Layers, 1.0), {"x": models.values(2, 5, 8)})
    assert found.remedies == ()
    assert found.reason == "nothing breaks in float16 that an island could mend."


@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_a_missing_kernel_is_mended_by_an_island(precision: str) -> None:
    subject, found = searched(models.seeded(models.Spectral), {"x": models.values(2, 8)}, precision)
    assert verdict(subject, precision) == "unsupported"
    assert of_modules(found).members == ("fourier",)
    assert verdict(of_modules(found).mend(subject), precision) == "ok"


def test_under_autocast_an_island_mends_too_and_costs_no_weights() -> None:
    # Under CPU autocast a linear layer gives float16, and pow stays in it.
    subject, found = searched(models.seeded(models.Layers), {"x": models.values(2, 5, 8)}, "float16-autocast")
    remedy = of_modules(found)
    assert remedy.members == ("layers.1.norm", "layers.3.norm")
    assert verdict(remedy.mend(subject), "float16-autocast") == "ok"
    assert any("Under autocast it costs no memory of weights" in note for note in remedy.notes)


def test_the_users_module_is_as_it_was() -> None:
    model = models.seeded(models.Layers)
    before = copy.deepcopy(model.state_dict())
    subject, found = searched(model, {"x": models.values(2, 5, 8)})
    for remedy in found.remedies:
        verdict(remedy.mend(subject))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_random_state_is_as_it_was() -> None:
    model, inputs = models.seeded(models.Layers), {"x": models.values(2, 5, 8)}
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    searched(model, inputs)
    assert torch.equal(torch.rand(3), expected)


def test_a_set_that_is_too_small_is_seen_to_be_so() -> None:
    # The norm's own border is where the stream of this one would have to fit.
    subject = from_module(models.seeded(models.Streamed), {"x": models.values(2, 5, 8)})
    found = scanned(mended(subject, frozenset({Member("encoder.blocks.2")}), "float16"))
    judged = found.verdicts["float16"]
    assert judged.verdict == "overflow"
    assert judged.origin is not None
    assert (judged.origin.module, judged.origin.op) == ("encoder.blocks.2", "aten._to_copy")


def test_an_island_comes_after_what_another_remedy_did() -> None:
    subject = from_module(models.seeded(models.Layers), {"x": models.values(2, 5, 8)})
    seen: list[str] = []

    def adapt(model: nn.Module, name: str) -> nn.Module:
        seen.append(name)
        return model

    adapted = dataclasses.replace(subject, adapt=adapt)
    members = frozenset({Member("layers.1.norm"), Member("layers.3.norm")})
    assert verdict(mended(adapted, members, "float16")) == "ok"
    assert seen
    assert set(seen) == {"float16"}


def test_other_formats_run_without_the_islands() -> None:
    subject = from_module(models.seeded(models.Layers), {"x": models.values(2, 5, 8)})
    after = mended(subject, frozenset({Member("layers.1.norm")}), "float16")
    assert after.adapt is not None
    low = after.adapt(after.load(torch.bfloat16), "bfloat16")
    assert not any("forward" in vars(module) for module in low.modules())


def test_dtypes_that_clash_are_mended_by_an_island() -> None:
    subject, found = searched(models.seeded(models.Pooled), {"x": models.values(2, 6, 8)})
    assert verdict(subject) == "unsupported"
    assert found.remedies
    assert verdict(found.remedies[0].mend(subject)) == "ok"
