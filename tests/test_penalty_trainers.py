"""The penalty in transformers' Trainer and in Lightning's: added to the loss, logged, and gone afterwards."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import overflow_lab
from overflow_lab.errors import UsageError
from overflow_lab.remedies.callbacks import ActivationPenaltyCallback, lightning_callback
from overflow_lab.remedies.penalty import ActivationPenalty
from tests.test_penalty import hooks_of
from tests.tiny_models import build

# Far below the activations, so that there is a penalty.
SMALL: dict[str, Any] = {"limit": 0.01, "headroom_bits": 0.0}


def examples(name: str, count: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.arange(count * 5).reshape(count, 5) % 90 + 5
    return [{"input_ids": row, "labels": row if name == "gpt2" else row[:3]} for row in ids]


class Losses(TrainerCallback):  # type: ignore[misc]
    """Keeps the gradient of each weight before the optimizer's first step."""

    def __init__(self) -> None:
        self.grads: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.grads:
            self.grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def trained(
    tmp_path: Path, name: str, *, callback: Any = None, function: Any = None, same: bool = False, **options: Any
) -> Any:
    """Train a tiny model for two steps, on one repeated row if asked; return model, first gradients and log."""
    model = build(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0  # of T5's attention
    seen = Losses()
    args = TrainingArguments(
        tmp_path / "run", max_steps=2, use_cpu=True, report_to=[], logging_steps=1, save_strategy="no",
        disable_tqdm=True, seed=3, learning_rate=1e-3, max_grad_norm=0.0,
        **{"per_device_train_batch_size": 2, **options},
    )  # fmt: skip
    data = examples(name)[:1] * 8 if same else examples(name)
    trainer = Trainer(
        model, args, train_dataset=data, callbacks=[seen, *([callback] if callback else [])],
        compute_loss_func=function,
    )  # fmt: skip
    trainer.train()
    return model, seen.grads, trainer.state.log_history


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_the_trainer_trains_on_the_sum_of_loss_and_penalty_logs_it_and_no_hook_stays(tmp_path: Path, name: str) -> None:
    _, plain, before = trained(tmp_path, name)
    model, grads, log = trained(tmp_path, name, callback=ActivationPenaltyCallback(**SMALL))
    first, added = before[0]["loss"], log[0]
    assert added["activation_penalty"] > 0.0
    assert added["loss"] == pytest.approx(first + added["activation_penalty"], rel=1e-4)
    assert added["least_headroom"] < 0.0
    assert any(not torch.allclose(grads[key], plain[key]) for key in plain)
    assert hooks_of(model) == 0


def test_the_gradients_are_those_of_the_sum_by_hand(tmp_path: Path) -> None:
    _, grads, _ = trained(tmp_path, "gpt2", callback=ActivationPenaltyCallback(**SMALL), per_device_train_batch_size=8)
    model = build("gpt2").eval()  # no dropout
    rows = examples("gpt2")
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    with ActivationPenalty(model, **SMALL) as penalty:
        # A Trainer counts the labels before they are shifted.
        (model(**batch, num_items_in_batch=batch["labels"].numel()).loss + penalty.penalty()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(grads[key], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "gpt2"])
def test_the_penalty_weighs_the_same_however_many_gradients_are_accumulated(tmp_path: Path, name: str) -> None:
    found = []
    for size, steps in ((8, 1), (2, 4)):
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps}
        # T5 ignores the number of items, so that its own loss does grow: the penalty's part is looked at.
        _, plain, _ = trained(tmp_path, name, same=True, **options)
        _, grads, log = trained(tmp_path, name, callback=ActivationPenaltyCallback(**SMALL), same=True, **options)
        assert log[0]["activation_penalty"] > 0.0
        found.append({key: grads[key] - plain[key] for key in plain})
    for key, value in found[0].items():  # of batches of one repeated row, whose sizes say nothing
        torch.testing.assert_close(found[1][key], value, rtol=1e-3, atol=1e-3)


def test_gradient_checkpointing_gives_the_same_gradients(tmp_path: Path) -> None:
    _, plain, _ = trained(tmp_path, "gpt2", callback=ActivationPenaltyCallback(**SMALL))
    again = ActivationPenaltyCallback(**SMALL)
    _, grads, _ = trained(tmp_path, "gpt2", callback=again, gradient_checkpointing=True)
    for key, value in plain.items():
        torch.testing.assert_close(grads[key], value, rtol=1e-4, atol=1e-6)


def cross_entropy(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.logits[:, : labels.shape[1]].flatten(0, 1), labels.flatten())


def test_a_loss_function_of_ones_own_is_wrapped(tmp_path: Path) -> None:
    callback = ActivationPenaltyCallback(**SMALL)
    _, _, before = trained(tmp_path, "gpt2", function=cross_entropy)
    model, _, log = trained(tmp_path, "gpt2", callback=callback, function=callback.loss(cross_entropy))
    assert log[0]["loss"] == pytest.approx(before[0]["loss"] + log[0]["activation_penalty"], rel=1e-4)
    assert hooks_of(model) == 0


def test_a_loss_that_the_penalty_does_not_reach_is_an_error_and_no_hook_stays(tmp_path: Path) -> None:
    callback = ActivationPenaltyCallback(**SMALL)
    with pytest.raises(UsageError, match=r"compute_loss_func=callback\.loss"):
        trained(tmp_path, "gpt2", callback=callback, function=cross_entropy)
    assert callback.penalty is None


def test_a_scan_names_the_sites_of_the_callback(tmp_path: Path) -> None:
    model = build("gpt2")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight.mul_(1e6)
    scan = overflow_lab.scan(model, {"input_ids": torch.tensor([[5, 6, 7]])}, precisions=["float16"], level="module")
    callback = ActivationPenaltyCallback(scan=scan)
    callback.on_train_begin(TrainingArguments(tmp_path, use_cpu=True), None, None, model=model)
    penalty = callback.penalty
    assert penalty is not None
    assert "transformer.h.1.mlp.c_proj" in {module for module, _ in penalty.sites}
    callback.close()
    assert hooks_of(model) == 0
    with pytest.raises(UsageError, match="leave out sites"):
        ActivationPenaltyCallback(scan=scan, sites=["lm_head"])


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", missing)
    with pytest.raises(UsageError, match=r"overflow-lab\[lightning\]"):
        lightning_callback()


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
@pytest.mark.parametrize("as_dict", [False, True])
def test_lightning_trains_on_the_sum_logs_it_and_is_left_as_it_was(tmp_path: Path, as_dict: bool) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, batch: list[torch.Tensor], index: int) -> Any:
            loss = self.net(batch[0]).square().mean()
            return {"loss": loss, "more": 1} if as_dict else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), batch_size=4)
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, default_root_dir=tmp_path, callbacks=[lightning_callback(**SMALL)],
    )  # fmt: skip
    trainer.fit(module, data)
    with ActivationPenalty(module, **SMALL) as penalty:
        module.net(torch.ones(4, 4))
        assert float(trainer.callback_metrics["activation_penalty"]) == pytest.approx(penalty.penalty().item())
    assert "training_step" not in vars(module)
    assert hooks_of(module) == 0
