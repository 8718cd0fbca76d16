"""Records the range of everything that modules take and return, while a model runs."""

from __future__ import annotations

from functools import cache
from types import TracebackType
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.modes import is_in_mode, outside_modes
from overflow_lab.capture.module_path import ModulePath
from overflow_lab.capture.ports import Ports
from overflow_lab.capture.samples import Differences, Samples
from overflow_lab.subjects.containers import tensors

# Types of arguments that hold no tensor, and are many.
_EMPTY = frozenset((type(None), bool, int, float, str))


@cache
def _input(key: int | str) -> str:
    return f"input[{key!r}]"


class ModuleRanges:
    """Watches a model while entered: ranges of all ports into `ports`, samples kept or compared where given.

    With `samples` alone they are filled (the float32 run); with `differences` too they are compared against.
    Attributes after the run: `path` (a ModulePath), `unknown` (names of types that were not understood).
    """

    def __init__(
        self, model: nn.Module, ports: Ports, *, samples: Samples | None = None, differences: Differences | None = None
    ) -> None:
        self.ports = ports
        self.unknown: set[str] = set()
        self.path = ModulePath(model, self._enter, self._leave)
        self._samples, self._differences = samples, differences
        self._calls: dict[str, int] = {}

    def __enter__(self) -> ModuleRanges:
        self.path.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.path.__exit__(kind, error, trace)

    def _enter(self, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = self._calls[path] = self._calls.get(path, -1) + 1
        for index, value in enumerate(args):
            if type(value) not in _EMPTY:
                self._see(path, _input(index), value, call, caches=False)
        for name, value in kwargs.items():
            if type(value) not in _EMPTY:
                self._see(path, _input(name), value, call, caches=False)

    def _leave(self, path: str, output: Any) -> None:
        self._see(path, "output", output, self._calls[path], caches=True)

    def _see(self, path: str, name: str, value: Any, call: int, *, caches: bool) -> None:
        """Measure each floating tensor in one argument or output."""
        # Most of what a module takes is what another one has just returned.
        if type(value) is torch.Tensor and (row := self.ports.tape.known(value)) is not None:
            self._note(path, name, value, call, row)
        elif is_in_mode():
            with outside_modes():
                self._measure(path, name, value, call, caches)
        else:
            self._measure(path, name, value, call, caches)

    def _measure(self, path: str, name: str, value: Any, call: int, caches: bool) -> None:
        for port, tensor in tensors(value, name, unknown=self.unknown, caches=caches):
            if tensor.is_floating_point() or tensor.is_complex():
                self._note(path, port, tensor, call)

    def _note(self, path: str, port: str, tensor: torch.Tensor, call: int, row: int | None = None) -> None:
        order = self.ports.clock
        number = self.ports.see(path, port, tensor, call, row)
        if self._samples is not None and tensor.is_floating_point():
            with outside_modes():
                self._compare((path, port, call), tensor, number, order)

    def _compare(self, key: tuple[str, str, int], tensor: torch.Tensor, number: int, order: int) -> None:
        assert self._samples is not None
        if self._differences is None:
            self._samples.keep(key, tensor, number)
        else:
            self._differences.compare(self._samples, key, tensor, number=number, order=order)
