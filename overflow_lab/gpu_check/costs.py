"""What watching costs on a device: a Llama at random weights, as large as fits, bare and watched, as ratios."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.capture.devices import wait_for
from overflow_lab.capture.module_ranges import ModuleRanges
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.precisions import Prepared, parse_precision
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.program import ProgramLog
from overflow_lab.capture.shadow.run import run
from overflow_lab.capture.statistics import Tape
from overflow_lab.gpu_check import patients
from overflow_lab.recording import PrecisionRow

_ROW = PrecisionRow("bfloat16", "bfloat16", "to")
ROUNDS = 3


@dataclass(frozen=True)
class Size:
    """The size of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """How many parameters it has, norms left out."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.hidden // self.heads * self.kv_heads
        return self.layers * (attention + 3 * self.hidden * self.inner) + 2 * self.vocabulary * self.hidden

    @property
    def bytes(self) -> int:
        """What the shadow run needs: bfloat16 weights, float32 ones, and 3 GB and a tenth for all else."""
        return int(self.parameters * 6 * 1.1) + 3 * 10**9

    def build(self, device: torch.device) -> Any:
        """Return the model in bfloat16 on the device, made there."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                return patients.llama(
                    self.hidden,
                    layers=self.layers,
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                    inner=self.inner,
                    vocabulary=self.vocabulary,
                )
        finally:
            torch.set_default_dtype(before)


# Llama 3.1 8B, 3.2 3B and 1B (there with tied embeddings), and two for small devices.
SIZES = (
    Size(4096, 32, 32, 8, 14336, 128256),
    Size(3072, 28, 24, 8, 8192, 128256),
    Size(2048, 16, 32, 8, 8192, 128256),
    Size(1024, 12, 16, 4, 4096, 32000),
    Size(256, 4, 4, 2, 512, 2000),
)


def chosen(free: int) -> Size:
    """Return the largest size whose shadow run fits into so many bytes, the smallest where none does."""
    return next((size for size in SIZES if size.bytes <= free), SIZES[-1])


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device; 0 for another, where the smallest size will do."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0


@dataclass(frozen=True)
class Work:
    """One call to time, a forward or an answer."""

    name: str
    call: Call

    def ways(self, model: Any, original: Any, device: torch.device) -> dict[str, Callable[[], object]]:
        """Return how the call is made, bare and watched."""
        return {
            "bare": lambda: self.call.make(model),
            "modules": lambda: self._modules(model, device),
            "operations": lambda: self._operations(model),
            "shadow": lambda: self._shadow(model, original, device),
        }

    def _modules(self, model: Any, device: torch.device) -> None:
        ports = Ports("bfloat16", Tape(device))
        with ModuleRanges(model, ports):
            self.call.make(model)
        ports.settle()

    def _operations(self, model: Any) -> None:
        with ProgramLog():
            self.call.make(model)

    def _shadow(self, model: Any, original: Any, device: torch.device) -> None:
        prepared = Prepared(parse_precision("bfloat16"), model, _ROW, torch.bfloat16, device.type)
        mode = ShadowMode()
        run(mode, prepared, original, self.call)
        mode.shadows.close()


def works(size: Size, device: torch.device, *, length: int = 1024, new: int = 16) -> tuple[Work, Work]:
    """Return a prefill of `length` tokens, and a decode of `new` tokens behind 16."""
    ids = patients.tokens(1, length, size.vocabulary).to(device)
    settings = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    return (
        Work(f"prefill 1x{length}", Call({"input_ids": ids})),
        Work(f"decode {new}", Call({"input_ids": ids[:, :16]}, settings=settings, run="greedy")),
    )


def measure(work: Work, model: Any, original: Any, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """Return the median seconds of the bare call, and of each other way its ratio to it; None where memory ended.

    Rounds are interleaved, so that a slow moment meets all ways; the first warms up. No round begins after `seconds`.
    """
    ways = work.ways(model, original, device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    began = time.perf_counter()
    for number in range(ROUNDS + 1):
        for name in list(ways):
            try:
                times[name].append(_timed(ways[name], device))
            except torch.OutOfMemoryError:
                del ways[name]
                times[name].clear()
        if number and time.perf_counter() - began > seconds:
            break
    medians = {name: statistics.median(found[1:]) if found[1:] else None for name, found in times.items()}
    bare = medians.pop("bare")
    ratios = {name: round(m / bare, 3) if m and bare else None for name, m in medians.items()}
    return {"bare_seconds": bare, **ratios}


def _timed(call: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    call()
    wait_for(device)
    return time.perf_counter() - began


def costs(device: torch.device, *, seconds: float, length: int = 1024, new: int = 16) -> dict[str, Any]:
    """Return what is measured on the largest Llama that fits, within about so many seconds after it is built."""
    size = chosen(free_bytes(device))
    model = size.build(device)
    original = copy.deepcopy(model).float()
    with torch.no_grad():
        found = {
            work.name: measure(work, model, original, device, seconds=seconds / 2)
            for work in works(size, device, length=length, new=new)
        }
    return {"parameters": size.parameters, "ratios": found}
