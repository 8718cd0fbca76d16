"""Comparing a tensor with its float32 shadow by the compiled kernel, where it can."""

from __future__ import annotations

import ctypes

import torch

from overflow_lab.capture.statistics import layout, llvm
from overflow_lab.capture.statistics.eager import is_dense

_NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def compared(low: torch.Tensor, shadow: torch.Tensor) -> list[float] | None:
    """Return what `llvm_compare` says of two tensors of one shape; None where they are not of its kind.

    That is: on a CPU, in float16, bfloat16 or float32 beside float32, and in the same order in memory without gaps.
    """
    name = _NAMES.get(low.dtype)
    if name is None or shadow.dtype != torch.float32 or low.device.type != "cpu" or shadow.device.type != "cpu":
        return None
    if low.stride() != shadow.stride() or not (low.is_contiguous() or is_dense(low)) or low.is_neg() or shadow.is_neg():
        return None
    kernel = llvm.comparing(name)
    if kernel is None:
        return None
    out = (ctypes.c_double * layout.COMPARED)()
    kernel.call(low.data_ptr(), shadow.data_ptr(), low.numel(), ctypes.addressof(out))
    return list(out)
