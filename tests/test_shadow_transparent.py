"""The shadow changes nothing: outputs, random numbers, the model and its modes are as without it, whatever happens."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from overflow_lab.capture.shadow.dispatch import ShadowMode
from tests.shadowed import HALVES
from tests.tiny_models import build

IDS = {"input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])}
PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)}
FEATURES = {"input_features": torch.linspace(-1, 1, 16 * 100).view(1, 16, 100)}
INPUTS: dict[str, dict[str, Any]] = {
    "t5": {**IDS, "decoder_input_ids": IDS["input_ids"]},
    "whisper": {**FEATURES, "decoder_input_ids": IDS["input_ids"][:1]},
    "vit": PIXELS,
    **dict.fromkeys(("gpt2", "llama", "gemma3", "bert", "mamba", "mixtral"), IDS),
}


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def _bits(result: Any) -> list[torch.Tensor]:
    return [t.detach().contiguous().view(-1).view(torch.uint8) for t in tree_leaves(tuple(result.values()))]


@pytest.mark.parametrize("autocast", [False, True], ids=["cast", "autocast"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", INPUTS)
def test_outputs_have_the_same_bits_and_nothing_is_drawn(name: str, dtype: torch.dtype, autocast: bool) -> None:
    model = build(name).eval()
    inputs = INPUTS[name] if autocast else _cast(INPUTS[name], dtype)
    model = model if autocast else model.to(dtype)
    context = torch.autocast("cpu", dtype) if autocast else nullcontext()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad(), context:
        wanted = model(**inputs, use_cache=False) if name not in ("vit", "bert") else model(**inputs)
        before, mode = torch.get_rng_state(), ShadowMode()
        with mode:
            got = model(**inputs, use_cache=False) if name not in ("vit", "bert") else model(**inputs)
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, _bits(got), _bits(wanted)))
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert mode.unreplayed == set()
    mode.shadows.close()


class Raises(nn.Module):
    """Raises after its first operation."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.weight, self.error = nn.Parameter(torch.ones(3)), error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        if y.numel():
            raise self.error
        return y


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()])
def test_an_exception_of_the_model_passes_and_leaves_no_mode_behind(error: BaseException) -> None:
    model, mode = Raises(error).half(), ShadowMode()
    with pytest.raises(type(error)) as raised, mode:
        model(torch.ones(3).half())
    assert raised.value is error
    clock = mode.clock
    torch.ones(2) + 1
    assert mode.clock == clock
    assert model.training
    mode.shadows.close()


def test_shadows_of_freed_tensors_are_let_go() -> None:
    mode = ShadowMode()
    with mode:
        x = torch.ones(100, dtype=torch.bfloat16)
        for _ in range(2000):
            x = x * 1.01
    assert len(mode.shadows._memory) < 400
    held = weakref.ref(mode.shadows.memory(x).flat.untyped_storage())
    mode.shadows.close()
    assert held() is None
    assert not mode.shadows._memory


def test_twenty_runs_leave_no_storage_behind() -> None:
    model = nn.Linear(4, 4).bfloat16()
    refs = []
    for _ in range(20):
        mode = ShadowMode()
        with torch.no_grad(), mode:
            y = model(torch.ones(2, 4, dtype=torch.bfloat16))
        refs.append(weakref.ref(mode.shadows.memory(y).flat))
        mode.shadows.close()
    assert sum(ref() is not None for ref in refs) == 0


class Counts(TorchDispatchMode):
    """A mode of the user's own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [True, False])
def test_a_dispatch_mode_of_the_user_s_own_sees_the_same_program(inside: bool) -> None:
    x, alone, user, mode = torch.ones(3, dtype=torch.float16), Counts(), Counts(), ShadowMode()
    with alone:
        wanted = (x * 0.1).softmax(-1)
    outer, inner = (mode, user) if inside else (user, mode)
    with outer, inner:
        got = (x * 0.1).softmax(-1)
    assert torch.equal(got, wanted)
    assert not inside or user.seen == alone.seen
    assert mode.unreplayed == set()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_gradient_mode_is_the_program_s(context: Any) -> None:
    model, mode = nn.Linear(3, 3).half(), ShadowMode()
    with mode, context():
        y = model(torch.ones(2, 3).half())
        y.mul_(2) if not y.requires_grad else None
    assert y.requires_grad == (context is torch.enable_grad)
    assert y.is_inference() == (context is torch.inference_mode)
    assert mode.unreplayed == set()
    assert mode.shadows.of(y).shape == y.shape


def test_memory_that_was_made_for_inference_is_written_to_later() -> None:
    weight, mode = torch.ones(3).half(), ShadowMode()
    with mode:
        with torch.inference_mode():
            weight.mul_(0.5)
        weight.add_(0.1)
    torch.testing.assert_close(mode.shadows.of(weight), torch.full((3,), 0.6))


def test_gradients_are_those_of_the_program() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).bfloat16()
    twin, x = copy.deepcopy(model), torch.ones(2, 3).bfloat16()
    twin(x).sum().backward()
    mode = ShadowMode()
    with mode:
        model(x).sum().backward()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs)
