"""Compiling the CPU kernel for the host and calling it through ctypes, which lets go of the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# (address of the elements, number of elements, address of a row, address of the scratch buffer)
NativeFunction = Callable[[int, int, int, int], None]

# float16 needs instructions without which LLVM calls a library function that may not be there.
_HALF_FEATURES = ("f16c", "neon")


# (address of the elements, address of their shadows, number of elements, address of the result)
Comparing = Callable[[int, int, int, int], None]


@dataclass(frozen=True)
class Kernel:
    """A compiled function for one dtype, and the engine that owns its code."""

    call: NativeFunction
    engine: Any


@functools.cache
def compiled(dtype: str) -> Kernel | None:
    """Return the kernel for float32, float16 or bfloat16, or None where this host cannot have one.

    The first call for a dtype compiles (about a tenth of a second); later ones return the same kernel.
    """
    return _compile(dtype, "measure")


@functools.cache
def comparing(dtype: str) -> Kernel | None:
    """Return the kernel that compares a dtype with float32 shadows (see `llvm_compare`), as `compiled` does."""
    return _compile(dtype, "compare")


def _compile(dtype: str, function: str) -> Kernel | None:
    try:
        return _compiled(dtype, function)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError):
        # No llvmlite, one that is too old, or a host that it does not know. The eager kernel gives the same numbers.
        return None


def _compiled(dtype: str, function: str) -> Kernel | None:
    import llvmlite.binding as llvm

    from overflow_lab.capture.statistics.llvm_compare import comparison_ir
    from overflow_lab.capture.statistics.llvm_ir import SOURCES, kernel_ir

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if dtype == "float16" and not any(features.get(name) for name in _HALF_FEATURES):
        return None
    module = llvm.parse_assembly(kernel_ir(SOURCES[dtype]) if function == "measure" else comparison_ir(dtype))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t)
    return Kernel(prototype(engine.get_function_address(function)), engine)


class Scratch:
    """Memory that the kernel works in, aligned to a cache line; for one call at a time."""

    def __init__(self) -> None:
        from overflow_lab.capture.statistics.llvm_ir import SCRATCH_BYTES

        self._buffer = ctypes.create_string_buffer(SCRATCH_BYTES + 63)
        self.address = (ctypes.addressof(self._buffer) + 63) & ~63
