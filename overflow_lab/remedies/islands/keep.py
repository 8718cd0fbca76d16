"""Module islands: modules of a low-precision model that run in float32, on their uncast weights."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.precisions import device_of
from overflow_lab.remedies.islands.members import lies_in
from overflow_lab.subjects.containers import map_tensors

HALVES = (torch.float16, torch.bfloat16)
Undo = list[Callable[[], None]]


class Island:
    """The forward of a module in float32: half-precision inputs widened, autocast off, outputs narrowed to `low`.

    With `low` None the outputs stay as they are, as under autocast, which widens and narrows by itself. Caches of keys
    and values cross the border as they are: the module writes into them, and they must stay the caller's own.
    """

    def __init__(self, module: nn.Module, low: torch.dtype | None) -> None:
        functools.update_wrapper(self, module.forward)  # `generate` reads the signature of a forward
        self._inner, self._low = module.forward, low
        self._device = device_of(module).type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        with no_autocast(self._device):
            args, kwargs = map_tensors(_widened, (args, kwargs), caches=False)
            output = self._inner(*args, **kwargs)
        return output if self._low is None else map_tensors(self._narrowed, output, caches=False)

    def _narrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._low) if tensor.dtype == torch.float32 else tensor


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALVES else tensor


def no_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context without autocast on a kind of device."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def keep(
    model: nn.Module,
    original: nn.Module,
    paths: Iterable[str],
    low: torch.dtype | None,
    *,
    open_paths: Collection[str] = (),
) -> Undo:
    """Let the modules at `paths` run in float32 within `model`, in place; return what undoes it, the last step first.

    `original` is the model in float32, whose values the islands' parameters and buffers take (with `low` None, under
    autocast, they have them already). What is tied to a parameter of an island from outside keeps the low dtype, since
    the island takes another tensor; a module that is used both inside and outside is taken twice. The outputs of
    those in `open_paths` stay in float32.
    """
    chosen = tuple(paths)
    before = keep_weights(model, original, chosen) if low is not None else []
    undo: Undo = []
    for path in chosen:
        narrow = None if path in open_paths else low
        wrap_forward(model.get_submodule(path), functools.partial(Island, low=narrow), undo)
    return undo[::-1] + before


def keep_weights(model: nn.Module, original: nn.Module, paths: Iterable[str]) -> Undo:
    """Give the modules at `paths` their uncast weights, with no cast at their borders; return what undoes it."""
    undo: Undo = []
    chosen = tuple(paths)
    _part_shared(model, chosen, undo)
    for path in chosen:
        _take_weights(model.get_submodule(path), original, path, undo)
    return undo[::-1]


def wrap_forward(module: nn.Module, wrapper: Callable[[nn.Module], Callable[..., Any]], undo: Undo) -> None:
    """Replace a module's forward, as an attribute of that one module."""
    before = vars(module).get("forward")
    module.forward = wrapper(module)

    def back() -> None:
        if before is None:
            del module.forward
        else:
            module.forward = before

    undo.append(back)


def _part_shared(model: nn.Module, paths: tuple[str, ...], undo: Undo) -> None:
    """Put twins in the place of modules below an island that are used outside as well (shared embeddings)."""
    everywhere: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        everywhere.setdefault(module, []).append(path)
    for module, places in everywhere.items():
        inside = [p for p in places if any(lies_in(p, island) for island in paths)]
        if len(inside) == len(places) or any(p in paths for p in inside):
            continue
        twin: nn.Module | None = None
        for place in inside:
            twin = twin or _twin(module)
            parent, _, name = place.rpartition(".")
            _put(model.get_submodule(parent)._modules, name, twin, undo)


def _twin(module: nn.Module) -> nn.Module:
    """Return another module with the same parts; to give it other parts or hooks leaves the first as it is."""
    made = copy.copy(module)
    vars(made).update({name: copy.copy(value) for name, value in vars(module).items() if isinstance(value, dict)})
    return made


def _put(place: dict[str, Any], name: str, value: Any, undo: Undo) -> None:
    before = place[name]
    place[name] = value
    undo.append(lambda: place.update({name: before}))


def _take_weights(module: nn.Module, original: nn.Module, path: str, undo: Undo) -> None:
    """Give a module and all below it the uncast parameters and buffers."""
    values: dict[str, torch.Tensor] = {
        **dict(original.named_parameters(remove_duplicate=False)),
        **dict(original.named_buffers(remove_duplicate=False)),
    }
    for below, part in module.named_modules(prefix=path):
        for name, tensor in _own(part):
            value = values.get(f"{below}.{name}" if below else name)
            if value is None or value.shape != tensor.shape or not value.is_floating_point():
                value = tensor
            if isinstance(tensor, nn.Parameter):
                _set(part, name, _parameter(value, tensor), undo)
            else:
                # What a module writes (a running mean) is its own, and never the original's.
                _put(part._buffers, name, value.detach().to(torch.float32, copy=True), undo)


def _own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own parameters and buffers that are in half precision."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.dtype in HALVES:
            yield name, tensor


def _parameter(value: torch.Tensor, before: nn.Parameter) -> nn.Parameter:
    """Return the parameter to be taken: the original's own where it is one, so that ties inside an island hold."""
    if isinstance(value, nn.Parameter) and value.dtype == torch.float32:
        return value
    return nn.Parameter(value.detach().float(), requires_grad=before.requires_grad)


def _set(module: nn.Module, name: str, value: nn.Parameter, undo: Undo) -> None:
    before = getattr(module, name)
    setattr(module, name, value)  # an LSTM's own __setattr__ keeps its flat list of weights
    undo.append(lambda: setattr(module, name, before))
