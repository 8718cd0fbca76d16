"""Runs a prepared low-precision model with its shadow: weights, buffers and inputs begin with their uncast values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from overflow_lab.capture.buffers import kept_buffers
from overflow_lab.capture.devices import exact_float32
from overflow_lab.capture.module_path import ModulePath
from overflow_lab.capture.outputs import is_ranked
from overflow_lab.capture.positions import RealPositions
from overflow_lab.capture.precisions import Prepared
from overflow_lab.capture.randomness import reseed
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.functions import Refusals
from overflow_lab.capture.shadow.operations import Facts
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.shadows import has_shadow
from overflow_lab.capture.shadow.step import Step
from overflow_lab.subjects.containers import tensors

CAST = "aten._to_copy"
Seed = tuple[str, str, str, torch.Tensor, torch.Tensor]  # role, name, module, the program's tensor, its uncast value


@dataclass
class ShadowRun:
    """What a shadow run gave: the mode with its sites and events, the program's output, the shadows of its tensors."""

    mode: ShadowMode
    output: Any
    shadows: dict[str, torch.Tensor] = field(default_factory=dict)
    real: RealPositions = field(default_factory=RealPositions)


def seeds(low: nn.Module, original: nn.Module) -> Iterator[Seed]:
    """Yield each parameter and buffer of the low-precision model with its uncast value."""
    for role, mine, theirs in (
        ("parameter", low.named_parameters(), dict(original.named_parameters())),
        ("buffer", low.named_buffers(), dict(original.named_buffers())),
    ):
        for name, tensor in mine:
            value = theirs.get(name)
            if value is not None and value.shape == tensor.shape and has_shadow(tensor) and has_shadow(value):
                yield role, name, name.rpartition(".")[0], tensor.detach(), value.detach()


def input_seeds(low: Mapping[str, Any], original: Mapping[str, Any]) -> Iterator[Seed]:
    """Yield each floating input with its uncast value."""
    values = dict(tensors(dict(original), "input"))
    for name, tensor in tensors(dict(low), "input"):
        value = values.get(name)
        if value is not None and value.shape == tensor.shape and has_shadow(tensor) and value.is_floating_point():
            yield "input", name, "", tensor, value


def run(
    mode: ShadowMode, prepared: Prepared, original: nn.Module, call: Call, *, synced: frozenset[str] = frozenset()
) -> ShadowRun:
    """Call the prepared model under `mode` on a call's uncast inputs.

    The names in `synced` (of parameters, buffers, inputs) begin with the program's own value as shadow, which makes
    what the cast lost a part of the shadow.
    """
    low = call.cast(prepared)
    path = ModulePath(prepared.model, lambda *_: mode.enter(path.stack), lambda *_: mode.ordinals.leave())
    mode.path = lambda: path.current
    mode.emulated = prepared.emulated and call.settings is None
    mode.exact = partial(exact_float32, prepared.device_type)
    for number, seed in enumerate([*seeds(prepared.model, original), *input_seeds(low.named(), call.named())]):
        plant(mode, number, seed, synced=seed[1] in synced or mode.sync_until >= 0)
    reseed()
    try:
        with kept_buffers(prepared.model), path, prepared.context(), Refusals(mode.refused, lambda: mode.clock), mode:
            output = low.make(prepared.model)
    except BaseException:
        mode.shadows.close()  # nobody else will: the storages' weak references are no ordinary ones
        raise
    found = tensors(output, "output", caches=False)
    mode.notes.reached([tensor for _, tensor in found])
    for name, tensor in found:
        if has_shadow(tensor) and is_ranked(name, tensor):
            mode.decide(tensor)
    real = RealPositions.in_inputs(call.inputs)  # what the model makes of padding is no error of its output
    wanted = {name: real.select(mode.shadows.of(t)).clone() for name, t in found if has_shadow(t)}
    return ShadowRun(mode, output, wanted, real)


def plant(mode: ShadowMode, number: int, seed: Seed, *, synced: bool) -> None:
    """Give one tensor its uncast value as shadow, and look at what the cast did to it as at an operation."""
    role, name, module, low, value = seed
    if role != "parameter":  # the model may write into it, and the shadow may not be the original itself
        value = value.clone()
    if synced or low.dtype == value.dtype:
        mode.shadows.sync(low) if synced else mode.shadows.give(low, value.to(mode.shadows.wide(low.dtype)))
        return
    mode.shadows.give(low, value.to(mode.shadows.wide(low.dtype)))
    step = Step(None, Facts(CAST), (), {}, [], [], (module, CAST, -1 - number), set(), set(), 0.0, (), [])
    mode.notes.look(step, low, detail=name)


def log_program(prepared: Prepared, call: Call, weights: dict[str, torch.Tensor] | None = None) -> ProgramLog:
    """Run float32's own program and return what it does; with other `weights` by name, a plain forward only."""

    def with_weights(*args: Any, **kwargs: Any) -> Any:
        return functional_call(prepared.model, weights or {}, args, kwargs)

    log = ProgramLog()
    path = ModulePath(prepared.model, lambda *_: log.ordinals.enter(), lambda *_: log.ordinals.leave())
    log.path = lambda: path.current
    reseed()
    with kept_buffers(prepared.model), path, prepared.context(), log:
        output = call.cast(prepared).make(prepared.model if weights is None else with_weights)
    for name, tensor in tensors(output, "output", caches=False):
        if has_shadow(tensor) and is_ranked(name, tensor):
            log.decisions.keep([tensor.argmax(-1)])
    return log
