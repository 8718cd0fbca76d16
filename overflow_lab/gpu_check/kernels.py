"""Checks of the statistics kernel on a device, against the reference on the CPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from overflow_lab.capture.devices import has_float64
from overflow_lab.capture.statistics import Tape
from overflow_lab.errors import OverflowLabError
from overflow_lab.ranges import Range

_EXACT = ("count", "nan", "posinf", "neginf", "zero", "min", "max", "smallest", "exponents")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
# Sums are of float64: off by their order at most.
_SUMS = 1e-12
_SIZES = (0, 1, 15, 16, 17, 4095, 4096, 4097, 16384, 16385, 100_000, 3_000_001)


class Failed(OverflowLabError):
    """A check found something that is not as it should be."""


class LeftOut(Exception):
    """A check that cannot be made here; the message says why."""


def first_use(device: torch.device) -> str:
    """The kernel of this device is there, and ready soon."""
    began = time.perf_counter()
    tape = Tape(device)
    tape.measure(torch.ones(4096, device=device))
    tape.drain()
    seconds = time.perf_counter() - began
    if device.type == "cuda" and tape.kernel_name != "triton":
        raise Failed(f"the kernel is {tape.kernel_name}: {tape.fallback}")
    return f"kernel {tape.kernel_name}, ready in {seconds:.2f} s"


def all_codes(device: torch.device) -> str:
    """All codes of the 16-bit and 8-bit formats are measured as the reference does."""
    for dtype in (torch.float16, torch.bfloat16):
        compare(torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype), device, str(dtype))
    for name in _FLOAT8:
        compare(torch.arange(256).to(torch.uint8).view(getattr(torch, name)), device, name)
    return "2 x 65,536 codes of 16 bits and 4 x 256 of 8"


def sizes(device: torch.device) -> str:
    """Tensors of all sizes and strides, empty ones among them, are measured as the reference does."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16, *([torch.float64] if has_float64(device) else [])]
    generator = torch.Generator().manual_seed(0)
    for dtype in dtypes:
        for size in _SIZES:
            compare(torch.randn(size, generator=generator).to(dtype), device, f"{size} x {dtype}")
        for name, view in _views(torch.randn(40, 7, 96, generator=generator).to(dtype)):
            compare(view, device, f"{name} {dtype}")
    return f"{len(_SIZES)} sizes and 6 kinds of strides, {len(dtypes)} formats"


def _views(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield "permuted", values.permute(2, 0, 1)
    yield "strided", values[:, ::2, 1::3]
    yield "offset", values.reshape(-1)[3:]
    yield "expanded", values[:, :1].expand(-1, 9, -1)
    yield "0-d", values[0, 0, 0]
    yield "empty", values[:0]


def bit_patterns(device: torch.device) -> str:
    """Random patterns of 32 bits, NaN and subnormals among them, are measured as the reference does."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).to(torch.int32)
    compare(bits.view(torch.float32), device, "random float32 bits")
    tiny = torch.randint(0, 2**23, (100_000,), generator=generator).to(torch.int32)
    compare(tiny.view(torch.float32), device, "float32 subnormals")
    return "1,000,000 of float32, 100,000 subnormals"


def repeatable(device: torch.device) -> str:
    """The same values have the same row, to the last bit, whatever ran first."""
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(2)).to(device)
    rows = {_measured(values.clone(), Tape(device)).sum for _ in range(5)}
    if len(rows) > 1:
        raise Failed(f"five measurements of the same values gave {len(rows)} sums: {sorted(rows)}")
    return "5 measurements of 1,000,003 values"


def compare(values: torch.Tensor, device: torch.device, name: str) -> None:
    """Raise Failed unless the device's kernel measures `values`, a tensor on the CPU, as the reference does."""
    got = _measured(_moved(values, device), Tape(device))
    wanted = _measured(values, Tape(torch.device("cpu"), kernel="eager"))
    finite = values.to(torch.float64)
    magnitude = float(torch.where(finite.isfinite(), finite, 0).abs().sum())
    check_range(got, wanted, name, magnitude=magnitude)


def check_range(got: Range, wanted: Range, name: str, *, magnitude: float) -> None:
    """Raise Failed unless two ranges are the same, their sums to within rounding of the sum of magnitudes."""
    for field in _EXACT:
        mine, theirs = getattr(got, field), getattr(wanted, field)
        if mine != theirs:
            raise Failed(f"{name}: {field} is {mine}, and should be {theirs}")
    squares = abs(got.sum_of_squares - wanted.sum_of_squares)
    if abs(got.sum - wanted.sum) > _SUMS * magnitude or squares > _SUMS * wanted.sum_of_squares:
        raise Failed(f"{name}: the sums are {got.sum} and {got.sum_of_squares}, and should be {wanted.sum} "
                     f"and {wanted.sum_of_squares}")  # fmt: skip


def _moved(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the values on the device with the strides that they have here."""
    if values.is_contiguous() or not values.numel():
        return values.to(device)
    base = values.as_strided((values.untyped_storage().nbytes() // values.itemsize,), (1,), 0).to(device)
    return base.as_strided(values.shape, values.stride(), values.storage_offset())


def _measured(tensor: torch.Tensor, tape: Tape) -> Range:
    index = tape.measure(tensor)
    return tape.drain().row(index)
