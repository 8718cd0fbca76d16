"""One call of one module, kept for a reproduction: its weights and what it was given. Only where the user asks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.precisions import REFERENCE, parse_precision
from overflow_lab.capture.randomness import kept_random_state
from overflow_lab.capture.record import Recorder
from overflow_lab.capture.runs import RunFailed, Watched
from overflow_lab.errors import OverflowLabError
from overflow_lab.recording import Header
from overflow_lab.recording.writer import Writer
from overflow_lab.subjects import Subject
from overflow_lab.subjects.containers import is_cache, map_tensors, tensors

# Names in the file of tensors: weights and buffers, and inputs.
WEIGHT, INPUT = "module.", "input."


@dataclass(frozen=True)
class Captured:
    """One call: `values` are weights and buffers as in float32's model, and inputs as in the precision's run.

    `call` is Python for the arguments, in which `given[...]` are inputs by name; `wide` names the weights that the
    precision leaves in float32; `left_out` what the call was given beside, and is no value. `module` and `model` are
    float32's, for what builds them again.
    """

    module: nn.Module
    model: nn.Module
    values: Mapping[str, torch.Tensor]
    call: str
    wide: tuple[str, ...]
    left_out: tuple[str, ...]
    training: bool


def capture_call(
    subject: Subject, header: Header, path: str, *, precision: str, run: str = "forward", batch: int = 0
) -> Captured:
    """Run one batch again in float32 and in `precision`, and keep the first call of the module at `path` that fails.

    That is the first whose output holds NaN or inf, or that raises; where none does, the first call. `run` is
    "forward", "greedy" or "beam". Raises OverflowLabError where there is no such module, batch or call.
    """
    # A recorder without a file: it makes the inputs that the scan had, decoder inputs among them.
    recorder = Recorder(subject, (), Writer(None, header))
    with kept_random_state(), torch.no_grad():
        base = recorder.watched(parse_precision(REFERENCE))
        wide = _module(base.prepared.model, path)
        weights = {name: tensor.detach().clone().cpu().contiguous() for name, tensor in _state(wide)}
        given = next((b for number, b in enumerate(subject.batches) if number == batch), None)
        if given is None:
            raise OverflowLabError(f"there is no batch {batch} to run again; the inputs were fewer this time.")
        reference = recorder.reference(base, batch, given)
        low = base if precision == REFERENCE else recorder.watched(parse_precision(precision))
        narrow = _module(low.prepared.model, path)
        calls = _Calls()
        with calls.watching(narrow):
            _run(low, recorder, reference, run)
    args, kwargs = calls.chosen(path)
    written = Literals()
    call = written.call(args, kwargs)
    kept = tuple(
        name for name, tensor in _state(narrow) if tensor.dtype == torch.float32 != low.prepared.precision.torch_dtype()
    )
    values = {**{WEIGHT + name: tensor for name, tensor in weights.items()}, **written.values}
    shown = () if low.prepared.precision.cast == "autocast" else kept
    return Captured(wide, base.prepared.model, values, call, shown, tuple(written.left_out), wide.training)


def _run(low: Watched, recorder: Recorder, reference: Any, run: str) -> None:
    """Run the batch; that the model raises may be the failure itself."""
    generation = recorder.subject.generation
    try:
        if generation is not None and run in generation.strategies:
            low.generate(run, reference, generation)
        else:
            low.forward(reference, fill=False)
    except RunFailed:
        pass


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise OverflowLabError(f"the model has no module {path!r} this time; scan again.") from error


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return parameters and buffers by name, those that are not saved with the model, too; shared ones once."""
    return [*module.named_parameters(), *module.named_buffers()]


class _Calls:
    """Keeps copies of what a module is given: of the first call that fails, and of the first of all."""

    def __init__(self) -> None:
        self._pending: list[Any] = []
        self._first: Any = None
        self._failed: Any = None

    def watching(self, module: nn.Module) -> _Hooks:
        """Return a context in which the module's calls are kept."""
        return _Hooks(module, self._enter, self._leave)

    def chosen(self, path: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the call to keep. Raises OverflowLabError where the module was not called."""
        chosen = self._failed or self._first or (self._pending[-1] if self._pending else None)
        if chosen is None:
            raise OverflowLabError(f"{path} was not called when the batch was run again; scan again.")
        args, kwargs = chosen
        return args, kwargs

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Copied now: a module may write into what it is given.
        copied = None if self._failed else map_tensors(lambda t: t.detach().clone(), (args, kwargs))
        self._pending.append(copied)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = self._pending.pop() if self._pending else None
        if given is None or self._failed:
            return
        self._first = self._first or given
        found = () if output is None else tensors(output, "output", caches=False)
        if output is None or any(t.is_floating_point() and not t.isfinite().all() for _, t in found):
            self._failed = given


class _Hooks:
    def __init__(self, module: nn.Module, enter: Any, leave: Any) -> None:
        self._module, self._enter, self._leave = module, enter, leave
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._handles.append(self._module.register_forward_pre_hook(self._enter, with_kwargs=True))
        self._handles.append(self._module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))

    def __exit__(self, *ended: object) -> None:
        for handle in self._handles:
            handle.remove()


@dataclass
class Literals:
    """Writes arguments as Python, and gathers the tensors among them under names."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the arguments of a call, such as `given["input.0"], attention_mask=None`."""
        parts = [self._literal(value, f"{INPUT}{number}") for number, value in enumerate(args)]
        plain = {name: value for name, value in kwargs.items() if name.isidentifier()}
        parts += [f"{name}={self._literal(value, INPUT + name)}" for name, value in plain.items()]
        return ", ".join(parts)

    def _literal(self, value: Any, name: str) -> str:
        if isinstance(value, torch.Tensor):
            self.values[name] = value.cpu().contiguous()
            return f'given["{name}"]' if '"' not in name and "\\" not in name else f"given[{name!r}]"
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        if isinstance(value, torch.dtype):
            return repr(value)
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        return self._nested(value, name)

    def _nested(self, value: Any, name: str) -> str:
        if isinstance(value, Mapping) and not is_cache(value):
            items = (f"{key!r}: {self._literal(item, f'{name}.{key}')}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        if isinstance(value, (list, tuple)) and not is_cache(value):
            items = (self._literal(item, f"{name}.{number}") for number, item in enumerate(value))
            inside = ", ".join(items)
            return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
        self.left_out.append(f"{name.removeprefix(INPUT)} ({type(value).__name__})")
        return "None"
