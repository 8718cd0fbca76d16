"""Programs run with their shadows, and what the same programs give in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.functions import Refusals
from overflow_lab.capture.shadow.shadows import has_shadow

HALVES = (torch.float16, torch.bfloat16)
Program = Callable[..., Any]


def values(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    """Return float32 tensors of these shapes, none of whose elements a half-precision format can hold exactly."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 1.2345 + 0.01 for shape in shapes]


def run(program: Program, given: list[Any], dtype: torch.dtype) -> tuple[ShadowMode, Any]:
    """Run a program on the values, cast, with the uncast ones as shadows. Return the mode and the result."""
    mode = ShadowMode()
    low = []
    for value in given:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        low.append(value.to(dtype) if floating else value)
        if floating:
            mode.shadows.give(low[-1], value.clone())
    with Refusals(mode.refused, lambda: mode.clock), mode:
        return mode, program(*low)


def shadows(mode: ShadowMode, result: Any) -> list[torch.Tensor]:
    """Return the shadows of all floating tensors in a result."""
    return [mode.shadows.of(t) for t in tree_leaves(result) if isinstance(t, torch.Tensor) and has_shadow(t)]


def check(program: Program, given: list[Any], dtype: torch.dtype, *, tolerance: float = 2e-4) -> ShadowMode:
    """Assert that the shadows after a low-precision program are what the program gives in float64; return the mode."""
    mode, result = run(program, given, dtype)
    wide = [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in given]
    exact = [t for t in tree_leaves(program(*wide)) if isinstance(t, torch.Tensor) and has_shadow(t)]
    found = shadows(mode, result)
    assert mode.unreplayed == set()
    assert len(found) == len(exact) > 0
    for shadow, truth in zip(found, exact, strict=True):
        assert shadow.shape == truth.shape
        kind = torch.complex128 if truth.is_complex() else torch.float64
        torch.testing.assert_close(shadow.to(kind), truth.to(kind), rtol=tolerance, atol=tolerance)
    mode.shadows.close()
    return mode
