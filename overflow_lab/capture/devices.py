"""What differs between devices: float64, random numbers, waiting for them, and what float32 means there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


@functools.cache
def has_float64(device: torch.device) -> bool:
    """Return whether `device` can compute in float64: Apple's GPUs cannot, nor some of Intel's."""
    if device.type == "xpu":
        return bool(getattr(torch.xpu.get_device_properties(device), "has_fp64", True))
    return device.type != "mps"


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64."""
    return torch.float64 if has_float64(device) else torch.float32


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor in the widest dtype of its device."""
    return tensor.to(widest(tensor.device))


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator, a tensor on the CPU."""
    if device.type in ("cuda", "xpu"):
        state: torch.Tensor = getattr(torch, device.type).get_rng_state(device)
        return state
    return torch.mps.get_rng_state() if device.type == "mps" else torch.get_rng_state()


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore the states of the default generators of the CPU and of all accelerators on the way out."""
    cpu, others = torch.get_rng_state(), _accelerators()
    states = [get() for get, _ in others]
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        for (_, put), state in zip(others, states, strict=True):
            put(state)


def _accelerators() -> list[tuple[Any, Any]]:
    """Return how to get and to set the states of each kind of accelerator that is there."""
    found: list[tuple[Any, Any]] = []
    for module in (torch.cuda, torch.xpu):
        if module.is_available():
            found.append((module.get_rng_state_all, module.set_rng_state_all))
    if torch.backends.mps.is_available():
        found.append((torch.mps.get_rng_state, torch.mps.set_rng_state))
    return found


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was told, as a clock must; the CPU is never behind."""
    if device.type in ("cuda", "xpu"):
        getattr(torch, device.type).synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@contextlib.contextmanager
def exact_float32(device_type: str) -> Iterator[None]:
    """Keep CUDA from computing float32 products in TF32, whose 11 bits are float16's; convolutions do so by default.

    A reference or a shadow in TF32 would be no better than what is held against it.
    """
    settings = _tf32_settings() if device_type == "cuda" else []
    try:
        for put, _, exact in settings:
            put(exact)
        yield
    finally:
        for put, value, _ in settings:
            put(value)


def _tf32_settings() -> list[tuple[Callable[[Any], None], Any, Any]]:
    """Return where TF32 is on: (what sets it, the value now, the value that means float32).

    torch 2.9 gave the switches other names, and reading the old ones raises once the new ones say something else. So
    the old ones are used, which set both, unless the program itself has used the new.
    """
    networks: Any = torch.backends.cudnn
    try:
        precision, convolutions = torch.get_float32_matmul_precision(), networks.allow_tf32
    except RuntimeError:
        owners: list[Any] = [torch.backends.cuda.matmul, networks.conv, networks.rnn]
        return [(partial(setattr, o, "fp32_precision"), o.fp32_precision, "ieee") for o in owners]
    found: list[tuple[Callable[[Any], None], Any, Any]] = []
    if precision != "highest":
        found.append((torch.set_float32_matmul_precision, precision, "highest"))
    if convolutions:
        # Not by `networks.allow_tf32`: it refuses where torch's own test tools have frozen the flags of the process.
        found.append((torch._C._set_cudnn_allow_tf32, True, False))
    return found
