"""`ActivationPenalty` in trainers: as a callback of transformers' Trainer and of Lightning's."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback

from overflow_lab.errors import UsageError
from overflow_lab.remedies.penalty import ActivationPenalty

if TYPE_CHECKING:
    from overflow_lab.scan import Scan

PENALTY, HEADROOM = "activation_penalty", "least_headroom"


class ActivationPenaltyCallback(TrainerCallback):  # type: ignore[misc]
    """Adds an `ActivationPenalty` to the loss of transformers' `Trainer`, and logs it.

    ::

        penalty = ActivationPenaltyCallback(scan=scan)          # or sites=[...], or neither: see ActivationPenalty
        Trainer(model, args, train_dataset=data, callbacks=[penalty]).train()

    A callback cannot change the loss of a Trainer, but the model's own output can: while training, a forward hook adds
    the penalty to the loss that the model returns. It weighs the same whatever the number of accumulated gradients
    and of processes. Where the Trainer makes the loss itself (`compute_loss_func`, label smoothing) there is none in
    the output: give it `compute_loss_func=penalty.loss(function)`. A loss that the penalty never reached is an error at
    the end of the first step, and not a training without it.

    `activation_penalty` (a mean over forwards) and `least_headroom` (bits) since the last log are added to what the
    Trainer logs: its `log_history`, and callbacks after this one. All hooks are gone when the training ends; after one
    that raised, `close()` removes them. `options` are those of `ActivationPenalty`.
    """

    def __init__(self, *, scan: Scan | None = None, precision: str = "float16", **options: Any) -> None:
        self._build = _builder(scan, precision, options)
        self._penalty: ActivationPenalty | None = None
        self._handle: RemovableHandle | None = None
        self._seen = _Seen()
        self._divisor = 1
        self._added = 0
        self._by_function = False

    @property
    def penalty(self) -> ActivationPenalty | None:
        """The penalty while the training runs, None otherwise."""
        return self._penalty

    def loss(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a `compute_loss_func` that adds the penalty to the one given."""
        self._by_function = True

        @functools.wraps(function)
        def penalised(outputs: Any, labels: Any, num_items_in_batch: Any = None, **more: Any) -> torch.Tensor:
            loss = function(outputs, labels, num_items_in_batch=num_items_in_batch, **more)
            if self._penalty is None or not torch.is_grad_enabled():
                return loss
            # A Trainer takes the loss of such a function for one that is divided already.
            return loss + self._taken(divided=True).to(loss.device, loss.dtype)

        return penalised

    def close(self) -> None:
        """Remove all hooks."""
        if self._handle is not None:
            self._handle.remove()
        if self._penalty is not None:
            self._penalty.detach()
        self._handle = self._penalty = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Add the hooks to the model that the Trainer was given."""
        self.close()
        self._penalty = self._build(model).attach()
        self._seen, self._added = _Seen(), 0
        shared = args.world_size if getattr(args, "average_tokens_across_devices", False) else 1
        self._divisor = max(1, args.gradient_accumulation_steps) * max(1, shared)
        if not self._by_function:
            self._handle = model.register_forward_hook(self._after, with_kwargs=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse a training whose loss the penalty did not reach."""
        if not self._added:
            self.close()
            raise UsageError(
                "the model returns no loss in training, so no penalty was added; with compute_loss_func or label "
                "smoothing give the Trainer compute_loss_func=callback.loss(function)."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the penalty and the least headroom to a log of the training."""
        if logs is None or "loss" not in logs or self._penalty is None:
            return
        found = self._seen.taken()
        logs.update(found)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        self.close()

    def _after(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return None
        place = _loss_in(output, labelled=kwargs.get("labels") is not None)
        if place is None:
            return None
        # With the number of items the model's loss is divided already, by those of all accumulated batches; a plain
        # mean is divided by the Trainer.
        extra = self._taken(divided=kwargs.get("num_items_in_batch") is not None)
        return _with_loss(output, place, extra)

    def _taken(self, *, divided: bool) -> torch.Tensor:
        assert self._penalty is not None
        extra = self._penalty.penalty()
        self._seen.add(extra, self._penalty.headroom())
        self._added += 1
        return extra / self._divisor if divided else extra


class _Seen:
    """The mean penalty and the least headroom since the last log."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._sum, self._count, self._headroom = 0.0, 0, math.inf

    def add(self, penalty: torch.Tensor, headroom: float) -> None:
        """Add a forward."""
        self._sum, self._count = self._sum + float(penalty.detach()), self._count + 1
        self._headroom = min(self._headroom, headroom)

    def taken(self) -> dict[str, float]:
        """Return both by name, and begin anew; nothing where there was no forward."""
        if not self._count:
            return {}
        found = {PENALTY: self._sum / self._count}
        if math.isfinite(self._headroom):
            found[HEADROOM] = self._headroom
        self._begin()
        return found


def lightning_callback(*, scan: Scan | None = None, precision: str = "float16", **options: Any) -> Any:
    """Return a Lightning callback that adds an `ActivationPenalty` to what `training_step` returns, and logs it.

    ::

        lightning.Trainer(callbacks=[lightning_callback(sites=["model.encoder.block.1"])]).fit(module, data)

    Sites are named from the LightningModule: `training_step` may return a loss or a dict with one. `options` are those
    of `ActivationPenalty`; a `scan` of the LightningModule itself names the sites. Manual optimization needs no
    callback: use `ActivationPenalty` in your own step. Raises UsageError where Lightning is not installed.
    """
    name = next((name for name in ("lightning", "pytorch_lightning") if importlib.util.find_spec(name)), None)
    if name is None:
        raise UsageError("Lightning is not installed; pip install 'overflow-lab[lightning]'.")
    base: Any = importlib.import_module(f"{name}.pytorch" if name == "lightning" else name).Callback
    build = _builder(scan, precision, options)

    class LightningActivationPenalty(base):  # type: ignore[misc]
        """Wraps `training_step` of the module while it is trained; the module is afterwards as before."""

        def __init__(self) -> None:
            self.penalty: ActivationPenalty | None = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            """Add the hooks and the wrapper."""
            if not pl_module.automatic_optimization:
                raise UsageError("the module optimizes by itself; add ActivationPenalty.penalty() in its own step.")
            self.penalty = build(pl_module).attach()
            pl_module.training_step = self._wrapped(pl_module, pl_module.training_step)

        def _wrapped(self, pl_module: Any, step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(step)
            def penalised(*args: Any, **kwargs: Any) -> Any:
                result = step(*args, **kwargs)
                penalty = self.penalty
                if result is None or penalty is None:
                    return result
                extra, headroom = penalty.penalty(), penalty.headroom()
                pl_module.log(PENALTY, extra.detach())
                if math.isfinite(headroom):
                    pl_module.log(HEADROOM, headroom, reduce_fx="min")
                return {**result, "loss": result["loss"] + extra} if isinstance(result, dict) else result + extra

            return penalised

        def _close(self, pl_module: Any) -> None:
            pl_module.__dict__.pop("training_step", None)
            if self.penalty is not None:
                self.penalty.detach()
            self.penalty = None

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            """Remove the hooks and the wrapper."""
            self._close(pl_module)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            """Remove the hooks and the wrapper."""
            self._close(pl_module)

    return LightningActivationPenalty()


def _builder(scan: Scan | None, precision: str, options: dict[str, Any]) -> Callable[[nn.Module], ActivationPenalty]:
    """Return what makes the penalty of a model. Raises UsageError for options that contradict each other."""
    if scan is None:
        return functools.partial(ActivationPenalty, **{"limit": _dtype(precision), **options})
    wrong = next((name for name in ("sites", "limit") if name in options), None)
    if wrong is not None:
        raise UsageError(f"a scan names the sites and the limit; leave out {wrong}, or the scan.")
    return functools.partial(ActivationPenalty.from_scan, scan=scan, precision=precision, **options)


def _dtype(precision: str) -> str:
    from overflow_lab.capture.precisions import parse_precision

    return parse_precision(precision).dtype


def _loss_in(output: Any, *, labelled: bool) -> str | int | None:
    """Return the key of the loss in a model's output: a scalar, the first of a tuple where labels were given."""
    if isinstance(output, dict):
        found = output.get("loss")
        return "loss" if isinstance(found, torch.Tensor) and found.requires_grad else None
    if isinstance(output, tuple) and labelled and output and isinstance(output[0], torch.Tensor):
        return 0 if output[0].dim() == 0 else None
    return None


def _with_loss(output: Any, place: str | int, extra: torch.Tensor) -> Any:
    """Return the output with `extra` added to its loss."""
    loss = output[place] + extra.to(output[place].device, output[place].dtype)
    if isinstance(output, tuple):
        return (loss, *output[1:])
    output[place] = loss
    return output
