"""Fine-tuning with the penalty: activations shrink, the function stays, and it resumes with the same bits."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import T5ForConditionalGeneration

from overflow_lab.errors import UsageError
from overflow_lab.recording import ProofRow
from overflow_lab.remedies.finetune import Finetuned, finetune
from overflow_lab.remedies.finetune.examples import Example, Maker, divided
from overflow_lab.remedies.finetune.losses import distance, task_loss
from overflow_lab.remedies.finetune.optimizer import RelativeAdam
from overflow_lab.subjects.files import Rows
from overflow_lab.subjects.find import SubjectOptions, find
from overflow_lab.subjects.subject import Batch
from tests import finetune_models as models
from tests.tiny_models import build, save

LIGHT: dict[str, Any] = {"level": "module", "num_beams": 1}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finetuned]:
    folder = models.save(tmp_path_factory.mktemp("finetune") / "t5")
    return folder, finetune(folder, models.pairs(1600), steps=200, batch_size=16, save_every=1000, **LIGHT)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return T5ForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()


def test_a_t5_whose_wo_peaks_beyond_float16_is_trained_below_half_of_it_and_spells_as_well(
    trained: tuple[Path, Finetuned], tmp_path: Path
) -> None:
    source, done = trained
    original = loaded(source, torch.float32)
    assert models.largest_wo(original) == pytest.approx(models.PEAK, rel=1e-4)
    done.save(tmp_path / "mended")
    mended = loaded(tmp_path / "mended", torch.float32)
    assert models.largest_wo(mended) < 32_768.0
    assert models.accuracy(mended) >= models.accuracy(original) - 0.01
    assert models.accuracy(loaded(tmp_path / "mended", torch.float16)) >= models.accuracy(original) - 0.01
    assert done.reached


def test_it_is_proven_by_a_second_scan_on_held_back_inputs_too(trained: tuple[Path, Finetuned]) -> None:
    proof = trained[1].proof
    assert proof is not None
    assert proof.proven, proof.reason
    assert proof.remedy == "penalty"
    assert proof.held_inputs > 0
    assert trained[1].scan.recording.of(ProofRow) == [proof]
    assert trained[1].good
    assert proof.figures["function_kl"] < 0.02
    assert "encoder.block.1.layer.1.DenseReluDense.wo" in proof.members


def test_the_result_is_json_and_says_what_was_before_and_after(trained: tuple[Path, Finetuned]) -> None:
    done = trained[1]
    made = json.loads(json.dumps(done.to_dict(), allow_nan=False))["finetune"]
    assert made["before"]["headroom"] < 0.0 < 1.0 <= made["after"]["headroom"]
    assert made["before"]["kl"] == 0.0
    assert made["after"]["kl"] < 0.01
    assert made["proven"] is True
    assert [row["step"] for row in made["history"]][:2] == [0, 25]


def large_gpt2() -> Any:
    model = build("gpt2").eval()
    with torch.no_grad():
        model.transformer.h[0].mlp.c_proj.weight.mul_(1e8)
    return model


def ids(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, 100, (4, 9), generator=generator)} for _ in range(count)]


def weights(done: Finetuned) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in done.model().parameters()]


class Stop:
    """Sends SIGINT in the middle of a step of the training."""

    def __init__(self, at: int) -> None:
        self.left: int | None = None
        self.at = at

    def stage(self, name: str, total: int | None = None) -> None:
        self.left = self.at if name == "fine-tuning" else None

    def advance(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)


def test_ctrl_c_saves_and_resuming_gives_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 30, "evaluate_every": 10, "save_every": 7, "prove": False, **LIGHT}
    model, data = large_gpt2(), ids(10)
    before = [parameter.clone() for parameter in model.parameters()]
    whole = finetune(model, data, **settings)
    with pytest.raises(KeyboardInterrupt):
        finetune(model, data, checkpoints=tmp_path / "kept", progress=Stop(13), **settings)
    assert json.loads((tmp_path / "kept" / "finetune.json").read_text())["step"] == 13
    resumed = finetune(model, data, checkpoints=tmp_path / "kept", resume=True, **settings)
    assert resumed.history == whole.history
    assert all(torch.equal(a, b) for a, b in zip(weights(resumed), weights(whole), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))  # the user's
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    names = sorted(path.name for path in (tmp_path / "kept").iterdir())
    assert names == ["best.safetensors", "finetune.json", "optimizer.pt", "weights.safetensors"]
    assert torch.load(tmp_path / "kept" / "optimizer.pt", weights_only=True)["optimizer"]["state"]


def test_a_checkpoint_of_another_training_is_not_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 2, "prove": False, "checkpoints": tmp_path / "kept", **LIGHT}
    finetune(large_gpt2(), ids(4), **settings)
    with pytest.raises(UsageError, match=r"made with learning_rate 0\.01, now it is 0\.02"):
        finetune(large_gpt2(), ids(4), resume=True, learning_rate=0.02, **settings)
    with pytest.raises(UsageError, match="no checkpoint"):
        finetune(large_gpt2(), ids(4), resume=True, **{**settings, "checkpoints": tmp_path / "other"})
    (tmp_path / "kept" / "weights.safetensors").write_bytes(b"no weights")
    with pytest.raises(UsageError, match="cannot be resumed"):
        finetune(large_gpt2(), ids(4), resume=True, **settings)


def test_a_random_t5_by_name_is_trained_on_its_own_greedy_answers(tmp_path: Path) -> None:
    folder = save("t5", tmp_path, tokenizer=True)
    model = loaded(folder, torch.float32)
    with torch.no_grad():
        model.encoder.block[0].layer[1].DenseReluDense.wo.weight.mul_(1e6)
    model.save_pretrained(folder)
    texts = [f"w{i} w{i + 1} w{i + 2}" for i in range(3, 67)]
    done = finetune(folder, texts, steps=60, batch_size=8, max_new_tokens=4, prove=False, **LIGHT)
    assert done.after["headroom"] > done.before["headroom"] + 0.5
    assert done.scan.recording.header.subject["class"] == "T5ForConditionalGeneration"


def test_a_module_without_logits_keeps_its_outputs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
    with torch.no_grad():
        large = model[2]
        assert isinstance(large, nn.Linear)
        large.weight.mul_(1e5)
    data = [(torch.randn(16, 8),) for _ in range(16)]
    done = finetune(model, data, steps=300, prove=False, **LIGHT)
    assert done.before["headroom"] < 0.0
    assert done.after["headroom"] >= 1.0
    error = (done.model()(data[0][0]) - model(data[0][0])).square().mean().sqrt().item()
    assert error < 0.2  # of outputs whose root mean square is 1


def test_a_model_that_fits_has_nothing_to_shrink() -> None:
    with pytest.raises(UsageError, match="nothing to shrink"):
        finetune(build("gpt2"), ids(2), **LIGHT)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"steps": 0}, "steps is 0"),
        ({"learning_rate": 2.0}, "learning_rate is 2.0"),
        ({"labels": "x"}, "labels= names a column"),
        ({"nonsense": 1}, "no option 'nonsense'"),
        ({"resume": True}, "nothing to resume from"),
    ],
)
def test_wrong_options_are_told_in_one_line(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        finetune(build("gpt2"), ids(1), **options)


def test_the_labels_beside_the_texts_are_those_of_the_same_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one", "y": 1}\n{"text": " ", "y": 2}\n{"text": "three", "y": null}\n')
    assert list(Rows(str(path))) == ["one", "three"]
    assert list(Rows(str(path)).beside("y")) == ["1", ""]
    with pytest.raises(UsageError, match="line 1: there is no column 'z'"):
        list(Rows(str(path)).beside("z"))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 40, 125])
def test_batches_are_trained_on_or_held_back_and_never_both(count: int) -> None:
    mine, apart = divided([Batch()] * count)
    assert sorted(mine + apart) == list(range(count))
    assert mine
    assert len(apart) == (0 if count == 1 else min(4, max(1, count // 8)))


def test_the_distance_is_torchs_own_kl_over_the_rows_that_count() -> None:
    torch.manual_seed(0)
    mine, theirs, mask = torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    found = distance({"logits": mine}, {"logits": theirs}, Example(mask=mask))
    expected = nn.functional.kl_div(
        mine[mask].log_softmax(-1), theirs[mask].log_softmax(-1), log_target=True, reduction="batchmean"
    )
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert (found.rows, found.same) == (3, int((mine[mask].argmax(-1) == theirs[mask].argmax(-1)).sum()))


def test_the_optimizer_takes_the_same_steps_on_rescaled_weights() -> None:
    found = []
    for scale in (1.0, 2.0**20):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 4) * scale)
        optimizer = RelativeAdam([weight], lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            ((weight / scale - 1.0) ** 2).sum().backward()
            optimizer.step()
        found.append(weight.detach() / scale)
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=0.0)
    assert math.isfinite(float(found[0].sum()))


def test_the_labels_of_a_decoder_are_its_targets_after_the_prompt(tmp_path: Path) -> None:
    folder = save("gpt2", tmp_path, tokenizer=True)
    subject = find(str(folder), SubjectOptions(texts=("w5 w6 w7", "w8"), num_beams=1, max_new_tokens=4))
    batch = next(iter(subject.batches))
    (example,) = Maker(subject, subject.load(None), ["w9", "w10 w11"]).all([batch])
    assert example.targets is not None
    assert example.inputs["input_ids"][:, 3:].tolist() == [[9, 1, example.inputs["input_ids"][0, -1]], [10, 11, 1]]
    assert example.targets.tolist() == [[-100, -100, 9, 1, -100, -100], [-100, -100, 10, 11, 1, -100]]
    assert example.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1]]
    model = subject.load(None)
    output = model(**example.inputs)
    chosen = torch.stack([output.logits[0, 2, 9], output.logits[0, 3, 1]])
    known = torch.stack([output.logits[0, 2].logsumexp(-1), output.logits[0, 3].logsumexp(-1)])
    first = task_loss({"logits": output.logits[:1]}, dataclasses.replace(example, targets=example.targets[:1]))
    assert first is not None
    assert first.item() == pytest.approx((known - chosen).mean().item(), rel=1e-5)


def test_labels_that_are_no_classes_are_told(tmp_path: Path) -> None:
    folder = save("bert", tmp_path, tokenizer=True)
    subject = find(str(folder), SubjectOptions(texts=("w5",)))
    with pytest.raises(UsageError, match="'cat' is no class of the model"):
        list(Maker(subject, subject.load(None), ["cat"]).all(list(subject.batches)))
