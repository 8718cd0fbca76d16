"""Products of float16 matrices on a CPU without float16 arithmetic: done in float32, and rounded once.

That is what a GPU does (fp32 accumulation, one rounding), and what this CPU's own kernels do too, in another order and
some five times slower: torch 2.13's `mm` of 1024 x 512 by 512 x 2048 takes 99 ms in float16, and 17 ms so. What does
not fit becomes infinite in the rounding, as there. Short products, a step of `generate` among them, stay native:
widening a weight takes longer than to multiply a few rows by it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from overflow_lab.capture.precisions import Prepared

# Rows of the left matrix from which on it pays: measured, see docs/speed.md.
_ROWS = 40
# Which argument holds these rows in its last dimension but one.
_PRODUCTS = {
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.baddbmm.default: 1,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: 0,
}
_CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default})


def is_emulated(kernels: str, dtype: str, device_type: str) -> bool:
    """Return whether a run's products are emulated: on request, or by "auto" where the CPU has no float16."""
    if kernels == "native" or dtype != "float16" or device_type != "cpu":
        return False
    return kernels == "emulated" or not _has_float16()


def products(prepared: Prepared) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which a prepared model's products are done as `Prepared.emulated` says."""
    return Emulated() if prepared.emulated else contextlib.nullcontext()


def is_product(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operation is a product of float16 matrices that is worth to be emulated."""
    place = _PRODUCTS.get(op)
    if place is None:
        return op in _CONVOLUTIONS and args[0].dtype == torch.float16
    rows = args[place]
    return bool(rows.dtype == torch.float16 and rows.dim() > 1 and rows.shape[-2] >= _ROWS)


def product(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do such an operation in float32, and return its result, the first of several, rounded to float16."""
    made = op(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})
    if isinstance(made, torch.Tensor):
        return made.to(torch.float16)
    return (made[0].to(torch.float16), *made[1:])


class Emulated(TorchDispatchMode):
    """Does the products of a program as this module says; every other operation is left alone.

    `ours` tells hooks that what they do is not changed by it.
    """

    ours = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return product(op, args, kwargs or {}) if is_product(op, args) else op(*args, **(kwargs or {}))


def _wide(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype == torch.float16
    return value.to(torch.float32) if half else value


def _has_float16() -> bool:
    """Return whether oneDNN multiplies float16 on this CPU (AVX512-FP16, AMX-FP16); False where torch cannot say."""
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return bool(asked()) if asked is not None else False
