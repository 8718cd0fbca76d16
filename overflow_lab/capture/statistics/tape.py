"""The tape: rows of statistics that stay on the device of the tensors until they are drained."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from overflow_lab.capture.devices import has_float64
from overflow_lab.capture.statistics import eager, layout, llvm
from overflow_lab.capture.statistics.rows import Rows
from overflow_lab.errors import UsageError, one_line

KERNELS = ("auto", "triton", "llvm", "eager")

# Rows that are allocated at once, about half a megabyte.
_BLOCK_ROWS = 256
_ROW_BYTES = 8 * layout.WORDS

# Writes the row of a tensor into a block of rows, at an index.
_Launch = Callable[[torch.Tensor, torch.Tensor, int], None]

_Seen = tuple["weakref.ref[torch.Tensor]", int, int, int, int]


class Tape:
    """Statistics of tensors on one device, a row for each; not for use by several threads at once.

    `kernel` is "eager" (torch operations, any device), "llvm" (compiled for this CPU), "triton" (compiled for CUDA) or
    "auto" (the one for this device, eager where there is none); `kernel_name` says which it became, and `fallback` why
    a CUDA device has to do with eager. float16, bfloat16 and float32 have a compiled kernel, on CUDA float64 too; other
    dtypes are measured by torch operations, or widened by them.

    Raises:
        UsageError: there is no such kernel, or not on this device or machine.
    """

    def __init__(self, device: torch.device, *, kernel: str = "auto") -> None:
        if kernel not in KERNELS:
            raise UsageError(f"unknown statistics kernel {kernel!r}; known are {', '.join(KERNELS)}")
        self.device = device
        self.fallback = ""
        self._demanded = kernel != "auto"
        self._launch: _Launch | None = None
        if kernel == "triton" or (kernel == "auto" and device.type == "cuda"):
            self._launch, self.fallback = _triton(device)
        native = kernel in ("auto", "llvm") and device.type == "cpu" and llvm.compiled("float32") is not None
        self.kernel_name = "triton" if self._launch else "llvm" if native else "eager"
        if kernel != "auto" and self.kernel_name != kernel:
            why = f" ({self.fallback})" if self.fallback else ""
            raise UsageError(f"no {kernel} kernel for device {str(device)!r} here{why}; use kernel 'auto' or 'eager'")
        self._calls = _calls() if native else {}
        self._scratch = llvm.Scratch() if native else None
        self._clear()

    def __len__(self) -> int:
        """Return the number of rows since the last drain."""
        return self._count

    def known(self, tensor: torch.Tensor) -> int | None:
        """Return the row that this tensor object has since the last drain, None where it has none or was written to."""
        seen = self._seen.get(id(tensor))
        if seen is not None and seen[0]() is tensor and seen[1:4] == _state(tensor):
            return seen[4]
        return None

    def measure(self, tensor: torch.Tensor) -> int:
        """Measure `tensor` and return the index of its row; the tensor is only read, and the host does not wait.

        Any shape and strides. Integers are measured as numbers, bool as 0 and 1, complex as pairs of numbers. The same
        tensor object, if it is unchanged as far as its version counter knows, gets the row it has. The counter does not
        see writes through numpy or `.data`, and inference tensors have none: they are always measured.

        Raises:
            UsageError: the tensor is on another device, or is sparse, quantized or without memory.
        """
        known = self.known(tensor)
        if known is not None:
            return known
        _check(tensor, self.device)
        place = self._count % _BLOCK_ROWS
        if place == 0:
            self._add_block()
        if not (self._launched(tensor, place) or self._native(tensor, self._address + place * _ROW_BYTES)):
            with torch.no_grad():
                self._blocks[-1][place] = eager.measure(tensor)
        row = self._count
        self._count += 1
        if not tensor.is_inference():
            self._seen[id(tensor)] = (weakref.ref(tensor), *_state(tensor), row)
        return row

    def drain(self) -> Rows:
        """Return all rows, by one transfer to the host, and begin again with row 0."""
        words = torch.cat(self._blocks)[: self._count] if self._blocks else _block(self.device)[:0]
        rows = Rows.from_words(words.cpu().numpy(), wide=has_float64(self.device))
        self._clear()
        return rows

    def _clear(self) -> None:
        self._count = 0
        self._blocks: list[torch.Tensor] = []
        self._seen: dict[int, _Seen] = {}

    def _add_block(self) -> None:
        self._blocks.append(_block(self.device))
        self._address = self._blocks[-1].data_ptr()

    def _launched(self, tensor: torch.Tensor, place: int) -> bool:
        """Fill a row of the last block by Triton's kernel; once that has failed, a tape that may choose is eager."""
        if self._launch is None:
            return False
        try:
            self._launch(tensor, self._blocks[-1], place)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._demanded:
                raise
            # No C compiler, or a GPU or a Triton that is too old: torch operations give the same numbers.
            self._launch, self.kernel_name, self.fallback = None, "eager", one_line(error, limit=120)
        return self._launch is not None

    def _native(self, tensor: torch.Tensor, row: int) -> bool:
        """Fill the row at address `row` by the compiled kernel; return False where there is none for `tensor`."""
        call = self._calls.get(tensor.dtype)
        if call is None or self._scratch is None:
            return False
        # The order of the elements, and a pending sign, matter to nobody but the copy.
        if tensor.is_neg() or not (tensor.is_contiguous() or eager.is_dense(tensor)):
            with torch.no_grad():
                tensor = tensor.resolve_neg().contiguous()
        call(tensor.data_ptr(), tensor.numel(), row, self._scratch.address)
        return True


def _triton(device: torch.device) -> tuple[_Launch | None, str]:
    """Return the kernel for CUDA, or None and why there is none."""
    try:
        from overflow_lab.capture.statistics import triton_kernel
    except ModuleNotFoundError as error:
        return None, f"{error.name} is not installed"
    except Exception as error:  # a Triton that does not go with this torch
        return None, one_line(error, limit=120)
    if not triton_kernel.runs_on(device):
        return None, f"Triton does not run on {device.type}"
    return triton_kernel.measure, ""


def _calls() -> dict[torch.dtype, llvm.NativeFunction]:
    """Return the compiled kernels of this host by dtype."""
    kernels = {name: llvm.compiled(name) for name in ("float32", "float16", "bfloat16")}
    return {getattr(torch, name): kernel.call for name, kernel in kernels.items() if kernel is not None}


def _state(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What changes when a tensor object gets other values."""
    return tensor._version, tensor.data_ptr(), tensor.numel()


def _block(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty((_BLOCK_ROWS, layout.WORDS), dtype=torch.int64, device=device)


def _check(tensor: torch.Tensor, device: torch.device) -> None:
    """Refuse what has no elements in this device's memory."""
    here = tensor.device
    if here != device and (here.type != device.type or device.index is not None):
        raise UsageError(f"cannot measure a tensor on {here} with a tape for {device}; use a tape for its device")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UsageError(f"cannot measure a tensor of layout {tensor.layout} and dtype {tensor.dtype}; make it dense")
    if tensor.numel() and not tensor.data_ptr():
        raise UsageError(f"cannot measure a {type(tensor).__name__} without memory of its own; give its plain tensor")
