"""The observer changes nothing: not what a model gives, not the model, not the process; whatever ends the scan."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import overflow_lab
from overflow_lab.capture.module_ranges import ModuleRanges
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.samples import Differences, Samples
from overflow_lab.capture.statistics import Tape
from overflow_lab.errors import ScanInterrupted
from overflow_lab.recording import RangeRow, load
from tests import tiny_models
from tests.modules import Calling, Step, chain

X = torch.linspace(-3, 3, 8).reshape(2, 4)
IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def watch(model: nn.Module, *, compare: bool = False) -> ModuleRanges:
    ports = Ports("float32", Tape(torch.device("cpu")))
    return ModuleRanges(model, ports, samples=Samples(), differences=Differences("float16") if compare else None)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, NaN included."""
    bits = (tensor.numpy(force=True).tobytes() for tensor in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and next(bits) == next(bits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["t5", "gpt2", "bart", "llama"])
@pytest.mark.parametrize("compare", [False, True])
def test_the_output_of_a_forward_is_the_same_bits_with_and_without_us(
    name: str, dtype: torch.dtype, compare: bool
) -> None:
    model = tiny_models.build(name).to(dtype).eval()
    inputs = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name in ("t5", "bart") else {})
    with torch.no_grad():
        before = model(**inputs).logits.float()
        with watch(model, compare=compare):
            during = model(**inputs).logits.float()
        after = model(**inputs).logits.float()
    assert same(before, during)
    assert same(before, after)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["t5", "gpt2", "bart"])
def test_generated_tokens_are_the_same_with_and_without_us(name: str, dtype: torch.dtype) -> None:
    model = tiny_models.build(name).to(dtype).eval()
    settings = {"max_new_tokens": 6, "num_beams": 2, "do_sample": True, "output_scores": True}
    found = []
    for watched in (False, True):
        torch.manual_seed(3)
        if watched:
            with watch(model):
                made = model.generate(IDS, return_dict_in_generate=True, **settings)
        else:
            made = model.generate(IDS, return_dict_in_generate=True, **settings)
        found.append((made.sequences, torch.stack(made.scores)))
    assert torch.equal(found[0][0], found[1][0])
    assert same(found[0][1].float(), found[1][1].float())


def test_gradients_are_the_same_with_and_without_us() -> None:
    gradients = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        if watched:
            with watch(model):
                loss = model(X).sum()
        else:
            loss = model(X).sum()
        loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None)


class State:
    """Everything of a process and a module that a scan could disturb."""

    def __init__(self, model: nn.Module) -> None:
        self.hooks = {
            (path, name): list(value or ())
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if "hook" in name
        }
        self.attributes = {path: sorted(vars(module)) for path, module in model.named_modules()}
        self.training = {path: module.training for path, module in model.named_modules()}
        self.grads = {name: (p.requires_grad, p.grad is None, id(p)) for name, p in model.named_parameters()}
        self.values = {name: value.clone() for name, value in model.state_dict().items()}
        self.random = (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate())  # type: ignore[index]
        self.process = (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch._C._len_torch_dispatch_stack(),
            np.geterr(),
            list(warnings.filters),
            torch.nn.modules.module._global_forward_hooks.copy(),
        )

    def assert_unchanged(self, model: nn.Module) -> None:
        now = State(model)
        for name in ("hooks", "attributes", "training", "grads", "random", "process"):
            assert getattr(now, name) == getattr(self, name), name
        assert self.values.keys() == now.values.keys()
        assert all(same(value, now.values[name]) for name, value in self.values.items())


def busy_model() -> nn.Module:
    """A model with a hook of its own, frozen weights, batch statistics, dropout, and modules in both modes."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    model[0].weight.requires_grad_(False)
    model[3].eval()
    model[3].bias.grad = torch.ones(2)
    return model


PRECISIONS = ("float16", "bfloat16", "float16-to", "bfloat16-autocast")


def test_a_scan_leaves_the_users_module_inputs_and_process_as_they_were() -> None:
    model, inputs = busy_model(), {"input": X.clone().requires_grad_()}
    torch.manual_seed(11), np.random.seed(12), random.seed(13)
    state = State(model)
    overflow_lab.scan(model, inputs, precisions=PRECISIONS)
    state.assert_unchanged(model)
    assert same(inputs["input"].detach(), X)
    assert inputs["input"].requires_grad


@pytest.mark.parametrize("mode", ["inference", "autocast", "float64", "no_grad"])
def test_modes_around_a_scan_are_as_before_and_do_not_change_what_it_finds(mode: str) -> None:
    model = busy_model().eval()
    plain = overflow_lab.scan(model, {"input": X})
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode,
        "no_grad": torch.no_grad,
        "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        "float64": torch.no_grad,
    }
    with contexts[mode]():
        try:
            torch.set_default_dtype(torch.float64 if mode == "float64" else torch.float32)
            state = State(model)
            found = overflow_lab.scan(model, {"input": X})
            state.assert_unchanged(model)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.recording.of(RangeRow) == plain.recording.of(RangeRow)


def explode(error: BaseException, when: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    def step(x: torch.Tensor) -> torch.Tensor:
        if when(x):
            raise error
        return x * 2

    return step


ENDS: list[tuple[BaseException, type[BaseException], str]] = [
    (ValueError("on purpose"), ScanInterrupted, "failed"),
    (MemoryError("no more"), ScanInterrupted, "failed"),
    (torch.OutOfMemoryError("no more"), ScanInterrupted, "failed"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ScanInterrupted, "failed"),
    (KeyboardInterrupt(), KeyboardInterrupt, "interrupted"),
    (SystemExit(3), SystemExit, "failed"),
]


@pytest.mark.parametrize(("error", "raised", "status"), ENDS, ids=lambda value: type(value).__name__)
def test_whatever_ends_a_scan_leaves_all_as_it_was_and_what_was_seen_in_the_file(
    error: BaseException, raised: type[BaseException], status: str, tmp_path: Path
) -> None:
    model = nn.Sequential(busy_model(), Step(explode(error, lambda x: True)))
    state = State(model)
    path = tmp_path / "r.jsonl.gz"
    with pytest.raises(raised):
        overflow_lab.scan(model, {"input": X}, recording=path)
    state.assert_unchanged(model)
    found = load(path)
    assert found.status == status
    assert ("0.3", "output") in {(row.module, row.port) for row in found.of(RangeRow)}
    assert ("1", "output") not in {(row.module, row.port) for row in found.of(RangeRow)}


def test_ctrl_c_in_the_second_batch_of_the_second_precision_keeps_all_that_was_before(tmp_path: Path) -> None:
    seen = []

    def count(x: torch.Tensor) -> bool:
        seen.append(x.dtype)
        return seen.count(torch.bfloat16) == 2

    # A module that cannot be told from its copies by the counter, since functions are not copied.
    model = chain(torch.tanh, explode(KeyboardInterrupt(), count))
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        overflow_lab.scan(model, [(X,), (X,), (X,)], recording=path, level="module")
    found = overflow_lab.Scan.from_recording(path)
    rows = {(row.precision, row.module, row.port): row.calls for row in found.recording.of(RangeRow)}
    assert rows["float32", "1", "output"] == rows["float16", "1", "output"] == 3
    assert (rows["bfloat16", "0", "output"], rows["bfloat16", "1", "output"]) == (2, 1)
    assert found.recording.status == "interrupted"
    assert found.verdicts["float16"].verdict == "ok"


def test_a_precision_that_an_interrupted_scan_did_not_come_to_has_no_verdict(tmp_path: Path) -> None:
    model = chain(explode(KeyboardInterrupt(), lambda x: x.dtype is torch.bfloat16))
    path = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        overflow_lab.scan(model, (X,), recording=path)
    assert list(overflow_lab.Scan.from_recording(path).verdicts) == ["float16"]


def test_inputs_that_a_model_writes_into_are_the_same_for_each_precision() -> None:
    model, inputs = Calling(lambda m, x: m.lin(x.relu_().mul_(3))), {"x": X.clone()}
    found = overflow_lab.scan(model, inputs)
    assert same(inputs["x"], X)
    assert {row.range.min for row in found.recording.of(RangeRow) if row.port == "input['x']"} == {-3.0}


def test_a_copied_module_is_what_is_watched_so_that_the_users_can_run_meanwhile() -> None:
    model = busy_model().eval()
    expected = model(X)
    copied = copy.deepcopy(model)
    with watch(copied):
        assert same(model(X).detach(), expected.detach())


def test_hooks_of_the_users_still_run_and_what_they_return_is_what_is_seen() -> None:
    model = nn.Sequential(nn.Identity())
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, output: output * 10)
    found = overflow_lab.scan(model, (torch.ones(1),))
    seen = {(row.module, row.port): row.range.max for row in found.recording.of(RangeRow) if row.precision == "float32"}
    assert seen["0", "input[0]"] == 2.0
    assert seen["0", "output"] == seen["", "output"] == 20.0
