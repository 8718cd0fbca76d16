"""Checks of the capture on a device: it changes nothing, leaves nothing behind, and measures what the CPU measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.devices import random_state
from overflow_lab.capture.module_ranges import ModuleRanges
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.statistics import Tape
from overflow_lab.capture.steps import Steps
from overflow_lab.gpu_check import patients
from overflow_lab.gpu_check.kernels import Failed, check_range
from overflow_lab.recording import RangeRow

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Ask = Callable[[Any], torch.Tensor]


def _asks(device: torch.device) -> dict[str, Ask]:
    """Return what is asked of a Llama: a forward, an answer by greedy and by beam search."""
    ids = patients.tokens(2, 12).to(device)
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    return {
        "forward": lambda model: model(input_ids=ids).logits,
        "greedy": lambda model: model.generate(input_ids=ids, **settings),
        "beam": lambda model: model.generate(input_ids=ids, num_beams=3, **settings),
    }


def same_outputs(device: torch.device) -> str:
    """Outputs are bit for bit those of the model that nobody watches."""
    for dtype in _DTYPES:
        model = patients.llama().to(device, dtype)
        for name, ask in _asks(device).items():
            bare = ask(model)
            with ModuleRanges(model, Ports("float32", Tape(device))), Steps(model):
                watched = ask(model)
            with ProgramLog():
                logged = ask(model)
            if not (torch.equal(bare, watched) and torch.equal(bare, logged)):
                raise Failed(f"{name} in {dtype} is another when it is watched")
    return "forward, greedy and beam search in 3 formats"


def nothing_left(device: torch.device) -> str:
    """No hook is left, after an exception in the model neither."""
    model = nn.Sequential(nn.Linear(8, 8), _Raising()).to(device)
    before = random_state(device)
    try:
        with kept_random_state(), ModuleRanges(model, Ports("float32", Tape(device))):
            model(torch.rand(2, 8, device=device))
    except ArithmeticError:
        pass
    left = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    if left:
        raise Failed(f"hooks are left on {left}")
    if not torch.equal(before, random_state(device)):
        raise Failed("the generator of the device is in another state than before")
    return "hooks and generators, after an exception"


class _Raising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError


def same_ranges(device: torch.device) -> str:
    """The ranges of all modules are those that the CPU's reference has of the same tensors."""
    ports = 0
    for dtype in _DTYPES:
        model = patients.llama().to(device, dtype)
        ask = _asks(device)["forward"]
        tapes = Tape(device), Tape(torch.device("cpu"), kernel="eager")
        mine, theirs = (_ranges(model, ask, tape) for tape in tapes)
        if mine.keys() != theirs.keys():
            raise Failed(f"the ports in {dtype} are others: {sorted(mine.keys() ^ theirs.keys())}")
        for key, row in theirs.items():
            magnitude = (row.range.count * row.range.sum_of_squares) ** 0.5  # no smaller than the sum of magnitudes
            check_range(mine[key].range, row.range, f"{key} in {dtype}", magnitude=magnitude)
        ports += len(mine)
    return f"{ports} ports in 3 formats"


def _ranges(model: Any, ask: Ask, tape: Tape) -> dict[tuple[str, str], RangeRow]:
    ports = Ports("float32", tape)
    with ModuleRanges(model, ports):
        ask(model)
    ports.settle()
    return {(row.module, row.port): row for row in ports.rows()}
