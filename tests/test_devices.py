"""What other devices lack or do otherwise, played on the CPU: float64, TF32, attention, generators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from overflow_lab.capture import devices, record, runs
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.shadow import operations, step
from overflow_lab.capture.statistics import Tape, tape
from overflow_lab.recording import BlindSpotRow, FailureRow, OperationRow, OutputRow
from overflow_lab.subjects.module import from_module
from tests import test_record, tiny_models
from tests.shadowed import run, values

attention: Any = nn.functional.scaled_dot_product_attention  # whose types know no *tensors
FLASH = "_scaled_dot_product_flash_attention"
EFFICIENT = "_scaled_dot_product_efficient_attention"


class NoFloat64(TorchFunctionMode):
    """Refuses what MPS refuses: a function that makes a float64 tensor."""

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if any(isinstance(t, torch.Tensor) and t.dtype == torch.float64 for t in tree_leaves(result)):
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )
        return result


@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (devices, record, tape):
        monkeypatch.setattr(module, "has_float64", lambda device: False)
    monkeypatch.setattr(runs, "Tape", lambda device: Tape(device, kernel="eager"))
    monkeypatch.setattr(record, "Tape", lambda device: Tape(device, kernel="eager"))
    with NoFloat64():
        yield


class Deep(nn.Module):
    """A product that does not fit float16, a choice, and scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.out = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.up(x) * 400
        best = (wide * wide).argmax(-1)
        return {"logits": self.out(torch.tanh(wide * wide)), "best": best, "floor": torch.floor(wide).long()}


@pytest.mark.usefixtures("no_float64")
def test_a_scan_makes_no_float64_where_there_is_none() -> None:
    subject = from_module(Deep(), (torch.randn(40, 16),))
    found = test_record.record(subject, "fp16", "bf16", level="operation")
    assert found.of(FailureRow) == []
    assert {row.precision for row in found.of(OperationRow)} == {"float16", "bfloat16"}
    assert found.of(BlindSpotRow) == []
    assert any(row.port == "output['logits']" and row.kl_rows for row in found.of(OutputRow))


@pytest.mark.usefixtures("no_float64")
def test_float32_itself_is_not_judged_without_float64_and_that_is_said() -> None:
    found = test_record.record(from_module(Deep(), (torch.randn(4, 16),)), "fp32", level="operation")
    (spot,) = found.of(BlindSpotRow)
    assert spot.reason == "float32 is judged by shadows in float64, which cpu does not have"


def test_a_tape_that_had_to_do_without_its_kernel_is_a_blind_spot(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Tape):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device, kernel="eager")
            self.fallback = "triton is not installed"

    monkeypatch.setattr(runs, "Tape", Slow)
    found = test_record.record(from_module(Deep(), (torch.randn(4, 16),)), "fp16", "bf16")
    (spot,) = found.of(BlindSpotRow)
    assert (spot.module, spot.precision) == ("", None)
    assert spot.reason.endswith("which takes several times as long: triton is not installed")


# ---- TF32 ----


def switches() -> list[Any]:
    backends: Any = torch.backends
    found = [torch.get_float32_matmul_precision(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32]
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        found += [o.fp32_precision for o in (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)]
    return found


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("precision")
def test_there_is_no_tf32_in_a_float32_run_on_cuda_and_all_switches_are_as_before() -> None:
    before = switches()
    assert torch.backends.cudnn.allow_tf32

    def fails() -> None:
        with devices.exact_float32("cuda"):
            assert switches()[:3] == ["highest", False, False]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert switches() == before


@pytest.mark.usefixtures("precision")
def test_the_switches_are_not_touched_for_another_device() -> None:
    before = switches()
    with devices.exact_float32("cpu"):
        assert switches() == before


def test_flags_that_are_frozen_stop_no_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends, "flags_frozen", lambda: True)
    before = switches()
    with devices.exact_float32("cuda"):
        assert not torch.backends.cudnn.allow_tf32
    assert switches() == before


def test_shadows_are_computed_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, torch.dtype]] = []
    whole = operations.replay

    def noting(op: Any, name: str, args: Any, kwargs: Any, result: Any) -> Any:
        seen.append((torch.backends.cudnn.allow_tf32, result.dtype))
        return whole(op, name, args, kwargs, result)

    monkeypatch.setattr(operations, "replay", noting)
    monkeypatch.setattr("overflow_lab.capture.precisions.device_of", lambda model: torch.device("cuda"))
    test_record.record(from_module(nn.Linear(4, 4), (torch.ones(2, 4),)), "fp16", level="operation")
    assert {allowed for allowed, _ in seen} == {False}
    assert torch.backends.cudnn.allow_tf32


# ---- attention ----


@pytest.fixture
def gpu_attention() -> Iterator[None]:
    """Give the CPU the two kernels of CUDA, which refuse float32 as there, and return more than the output."""

    def flash(query: Any, key: Any, value: Any, *args: Any, is_causal: bool = False, scale: Any = None) -> Any:
        causal = args[1] if len(args) > 1 else is_causal
        return (*_output(query, key, value, None, causal, scale), *[torch.empty(0)] * 2, 1, 1, *[torch.empty(0)] * 3)

    def efficient(query: Any, key: Any, value: Any, bias: Any, lse: bool, *args: Any, scale: Any = None) -> Any:
        return (*_output(query, key, value, bias, args[1:2] == (True,), scale), torch.empty(0), torch.empty(0))

    library = torch.library.Library("aten", "IMPL")
    library.impl(FLASH, flash, "CPU")
    library.impl(EFFICIENT, efficient, "CPU")
    yield
    library._destroy()


def _output(query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: Any) -> tuple[Any, Any]:
    if query.dtype == torch.float32:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    grouped = query.shape[1] != key.shape[1]
    wide = [t.float() for t in (query, key, value)]
    mask = None if bias is None else bias.float()
    made = attention(*wide, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    return made.to(query.dtype), torch.zeros(made.shape[:3])


@pytest.mark.usefixtures("gpu_attention")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_that_a_gpu_has_for_halves_only_is_replayed_by_the_formula(dtype: torch.dtype, heads: int) -> None:
    given = values((2, 4, 6, 8), (2, heads, 6, 8), (2, heads, 6, 8))

    def program(query: Any, key: Any, value: Any) -> Any:
        return getattr(torch.ops.aten, FLASH)(query, key, value, 0.0, True, False, scale=0.3)[0] * 2

    mode, got = run(program, given, dtype)
    wide = [t.double() for t in given]
    truth = attention(*wide, is_causal=True, scale=0.3, enable_gqa=heads != 4) * 2
    assert mode.unreplayed == set()
    torch.testing.assert_close(mode.shadows.of(got).double(), truth, rtol=1e-5, atol=1e-5)
    assert mode.notes.sites["", f"aten.{FLASH}", 0].local_error is not None


@pytest.mark.usefixtures("gpu_attention")
def test_the_bias_of_an_attention_is_its_shadows_too() -> None:
    given = values((2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 8), (2, 4, 6, 6))

    def program(query: Any, key: Any, value: Any, bias: Any) -> Any:
        return getattr(torch.ops.aten, EFFICIENT)(query, key, value, bias, False)[0]

    mode, got = run(program, given, torch.float16)
    wide = [t.double() for t in given]
    truth = attention(*wide[:3], attn_mask=wide[3])
    assert mode.unreplayed == set()
    torch.testing.assert_close(mode.shadows.of(got).double(), truth, rtol=1e-5, atol=1e-5)


# ---- generators and clocks ----


def test_a_draw_out_of_nothing_is_looked_for_on_the_device_that_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def state(device: torch.device) -> torch.Tensor:
        asked.append(device)
        return torch.get_rng_state()

    monkeypatch.setattr(devices, "random_state", state)
    facts = operations.facts_of(torch.ops.aten.rand.default)
    for kwargs in ({"device": torch.device("cuda", 1)}, {"device": "cuda:1"}):
        made = step.Step(None, facts, ([3],), kwargs, [], [], ("", "", 0), set(), set(), 0.0, (), [])
        step.random_state(made)
    made = step.Step(None, facts, ([3],), {}, [], [], ("", "", 0), set(), set(), 0.0, (), [])
    step.random_state(made)
    assert asked == [torch.device("cuda", 1), torch.device("cuda", 1), torch.device("cpu")]


def test_the_states_of_all_accelerators_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda": [1, 2]}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states["cuda"]))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda value: states.update(cuda=value))
    before = torch.get_rng_state()

    def fails() -> None:
        with kept_random_state():
            torch.rand(3)
            states["cuda"] = [5, 6]
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert states["cuda"] == [1, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_is_timed_until_its_device_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(runs, "wait_for", waited.append)
    test_record.record(from_module(tiny_models.build("vit"), {"pixel_values": torch.rand(1, 3, 32, 32)}), "bf16")
    assert waited == [torch.device("cpu")] * 2
