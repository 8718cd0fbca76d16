"""A clamp is proposed where it leaves the output right: where the infinity is only large, and a norm follows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from overflow_lab.analysis.results import Effect
from overflow_lab.formats import FORMATS
from overflow_lab.recording import Recording
from overflow_lab.remedies import clamp
from overflow_lab.remedies.clamp.search import MOST_RUNS, Search, is_within, representable
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.subjects import Subject
from overflow_lab.subjects.module import from_module
from tests.cases import overflow

FLOAT16 = FORMATS["float16"]


class Post(nn.Module):
    """A layer, a sum and a norm behind it, as in a post-norm transformer."""

    def __init__(self, peak: float, width: int = 64) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.layer.bias.data[3] = peak

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(x + self.layer(x))


class Plain(nn.Module):
    """A layer whose own output is asked for: a clamped one is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.bias.data[3] = 2e5

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class PreNorm(nn.Module):
    """One block of a pre-norm stream: what it adds to its stream is large in one channel."""

    def __init__(self, peak: float, width: int = 64) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)
        self.mlp.bias.data[3] = peak

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(self.norm(x))


class Stream(nn.Module):
    """Blocks that add up beyond the limit, and a final norm."""

    def __init__(self, *peaks: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PreNorm(peak) for peak in peaks)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def scanned(model: nn.Module, *shape: int, precision: str = "float16") -> tuple[Subject, Scan]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    subject = from_module(model.eval(), torch.randn(*shape))
    return subject, scan_subject(subject, [precision])


def proposed(model: nn.Module, *shape: int) -> tuple[Subject, Scan, Remedy]:
    subject, found = scanned(model, *shape)
    assert found.verdicts["float16"].severity == "error"
    (remedy,) = clamp.propose(subject, found, "float16").remedies
    return subject, found, remedy


def test_a_large_channel_in_front_of_a_norm_is_clamped_and_a_second_scan_says_so() -> None:
    subject, _, remedy = proposed(Post(2e5), 4, 64)
    assert remedy.members == ("layer: output",)
    assert remedy.title == "Clamp what `layer` returns to ±64,480"
    after = scan_subject(remedy.mend(subject), ["float16"]).verdicts["float16"]
    assert after.severity == "warning", "the overflow is still there, and no longer wrong"
    assert after.effect.nonfinite == 0
    assert after.effect.relative_error is not None
    assert after.effect.relative_error < 0.002


def test_the_error_that_it_leaves_is_said_with_how_many_values_it_changes_and_how_large_they_are() -> None:
    subject, _, remedy = proposed(Post(2e5), 4, 64)
    after = scan_subject(remedy.mend(subject), ["float16"]).verdicts["float16"]
    (x,) = next(iter(subject.batches)).positional
    largest = float(subject.load(None).get_submodule("layer")(x).detach().abs().max())
    said = remedy.notes[0]
    assert "changes 4 values" in said
    assert f"up to {largest:,.0f} in float32" in said
    assert after.effect.relative_error is not None
    assert f"off by {100 * after.effect.relative_error:.2g}%" in said
    assert any("NaN" in note for note in remedy.notes)


def test_an_output_that_is_itself_too_large_is_not_clamped() -> None:
    subject, found = scanned(Plain(), 4, 8)
    assert found.verdicts["float16"].severity == "error"
    assert clamp.propose(subject, found, "float16").remedies == ()


def test_scores_that_turn_into_nan_inside_a_module_are_out_of_reach() -> None:
    torch.manual_seed(0)
    subject = from_module(overflow.Scores(300.0), torch.randn(2, 5, 16))
    found = scan_subject(subject, ["float16"])
    assert found.verdicts["float16"].severity == "error"
    assert clamp.propose(subject, found, "float16").remedies == ()


def test_a_sum_between_two_modules_is_clamped_at_what_the_next_one_takes() -> None:
    class Sum(Post):
        def forward(self, x: torch.Tensor) -> Any:
            return self.norm(x * 50 + self.layer(x) + self.layer(x))

    model = Sum(4e4)
    _, _, remedy = proposed(model, 4, 64)
    assert remedy.members == ("norm: input[0]",)
    assert remedy.title.startswith("Clamp what `norm` takes to ±")


def test_a_stream_is_clamped_at_every_block_that_passes_it_on_and_at_no_other() -> None:
    _, _, remedy = proposed(Stream(10.0, 4e4, 4e4, 0.0, 3e4, 0.0), 4, 64)
    assert remedy.members == ("layers.2: output", "layers.4: output")


def test_no_member_can_be_left_out() -> None:
    subject, found = scanned(Stream(10.0, 4e4, 4e4, 0.0, 3e4), 4, 64)
    search = Search(subject, found.recording, "float16", clamp_progress(), 60)
    best = search.best()
    assert best is not None
    for site in best.sites:
        fewer = [other for other in best.sites if other != site]
        trial = search.run(fewer, best.limit) if fewer else None
        assert trial is None or not search.is_right(trial.verdict), site


def clamp_progress() -> Any:
    from overflow_lab.progress import Silent

    return Silent()


def test_the_limit_with_the_smallest_error_is_chosen() -> None:
    subject, found = scanned(Post(2e5), 4, 64)
    search = Search(subject, found.recording, "float16", clamp_progress(), 60)
    best = search.best()
    assert best is not None
    for share in (0.5, 0.25):
        other = search.run(best.sites, representable(share * FLOAT16.max, "float16"))
        assert other is not None
        assert other.error >= best.error


def test_two_clamped_values_that_are_added_ask_for_half_the_limit() -> None:
    class Both(nn.Module):
        """The sum of two branches that both overflow: at the full limit each, the sum is infinite again."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)
            self.a.bias.data[3] = self.b.bias.data[3] = 2e5

        def forward(self, x: torch.Tensor) -> Any:
            mixed = self.a(x) + self.b(x)
            return self.norm(mixed - mixed.mean(-1, keepdim=True))

    _, _, remedy = proposed(Both(), 4, 64)
    assert remedy.members == ("a: output", "b: output")
    assert remedy.title == "Clamp values at 2 places, from what `a` returns on, to ±32,752"


def test_the_model_of_the_user_and_its_subject_are_left_alone() -> None:
    model = Post(2e5)
    subject, _, remedy = proposed(model, 4, 64)
    mended = remedy.mend(subject)
    assert subject.adapt is None
    assert mended.adapt is not None
    scan_subject(mended, ["float16"])
    assert not model.layer._forward_hooks
    assert not subject.load(None).get_submodule("layer")._forward_hooks


def test_what_another_remedy_does_is_done_first() -> None:
    subject, _, remedy = proposed(Post(2e5), 4, 64)
    order = []

    def adapt(model: nn.Module, precision: str) -> nn.Module:
        order.append((precision, len(model.get_submodule("layer")._forward_hooks)))
        return model

    mended = remedy.mend(dataclasses.replace(subject, adapt=adapt))
    assert mended.adapt is not None
    model = mended.adapt(subject.load(torch.float16), "float16")
    assert order == [("float16", 0)]
    assert len(model.get_submodule("layer")._forward_hooks) == 1


def test_a_clamp_of_float16_does_nothing_to_bfloat16() -> None:
    subject, _, remedy = proposed(Post(2e5), 4, 64)
    plain = scan_subject(subject, ["bfloat16"]).verdicts["bfloat16"]
    after = scan_subject(remedy.mend(subject), ["bfloat16"]).verdicts["bfloat16"]
    assert after == plain


@pytest.mark.parametrize("severity", ["none", "warning"])
def test_what_is_right_already_is_not_clamped(severity: str) -> None:
    subject, found = scanned(Post(2e5), 4, 64)
    verdict = dataclasses.replace(found.verdicts["float16"], severity=severity)
    diagnosis = dataclasses.replace(found.diagnosis, verdicts={"float16": verdict})
    assert clamp.propose(subject, dataclasses.replace(found, diagnosis=diagnosis), "float16").remedies == ()
    assert clamp.propose(subject, found, "bfloat16").remedies == ()


def test_the_number_of_runs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    subject, found = scanned(Stream(4e4, 4e4, 4e4, 4e4), 4, 64)
    runs: list[Any] = []

    def counted(*args: Any, **more: Any) -> Scan:
        runs.append(args)
        return scan_subject(*args, **more)

    monkeypatch.setattr("overflow_lab.remedies.clamp.search.scan_subject", counted)
    clamp.propose(subject, found, "float16", runs=2)
    assert len(runs) <= 2
    runs.clear()
    made = clamp.propose(subject, found, "float16").remedies
    assert 0 < len(runs) <= MOST_RUNS
    assert [remedy.runs for remedy in made] == [len(runs)]


def test_within_asks_for_finite_values_a_small_error_and_no_overruled_decision() -> None:
    fine = Effect(nonfinite=0.0, relative_error=0.001, changed_decisions=0.1, tied_decisions=0.1)
    assert is_within(fine, FLOAT16)
    assert not is_within(Effect(), FLOAT16), "nothing was compared"
    for worse in (
        {"nonfinite": 0.1},
        {"relative_error": 0.02},
        {"tied_decisions": 0.0},
        {"answers": 4, "changed_answers": 1},
        {"answers": 4, "failed_answers": 1},
    ):
        assert not is_within(dataclasses.replace(fine, **worse), FLOAT16), worse


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_limits_are_values_of_the_format(dtype: str) -> None:
    for share in (1.0, 63 / 64, 0.5):
        limit = representable(share * FORMATS[dtype].max, dtype)
        assert float(torch.tensor(limit).to(getattr(torch, dtype))) == limit
        assert limit <= torch.finfo(getattr(torch, dtype)).max


def test_a_decoder_of_bart_that_has_no_clamp_of_its_own_gets_one() -> None:
    torch.manual_seed(5)
    size = {"d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 128, "decoder_attention_heads": 4}
    config = hf.BartConfig(vocab_size=64, activation_function="relu", max_position_embeddings=64, **size)
    model = hf.models.bart.modeling_bart.BartDecoder(config).eval()
    with torch.no_grad():
        model.layers[0].fc1.bias[0] = 90.0
        model.layers[0].fc2.weight[7, 0] = 1000.0
    subject = from_module(model, {"input_ids": torch.randint(2, 64, (2, 9))})
    found = scan_subject(subject, ["float16"])
    assert found.verdicts["float16"].effect.nonfinite
    (remedy,) = clamp.propose(subject, found, "float16").remedies
    assert remedy.members == ("layers.0.fc2: output",)
    after = scan_subject(remedy.mend(subject), ["float16"]).verdicts["float16"]
    assert after.severity == "warning"


def test_a_scan_that_ended_early_gives_nothing() -> None:
    subject, found = scanned(Post(2e5), 4, 64)
    empty = Recording(found.recording.header)
    assert clamp.propose(subject, dataclasses.replace(found, recording=empty), "float16").remedies == ()
