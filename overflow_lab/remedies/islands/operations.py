"""Operation islands: some operations of a module's own code in float32, their results kept wide until others use them.

The program is run under a dispatch mode. A chosen operation is done in float32 on widened operands, and its result
stays a float32 tensor in the place of the half-precision one; the mode remembers which tensors are such. An operation
that was not chosen is given them narrowed, as it expects. So a product of 547,171 may be scaled, summed or normalised
before anything has to fit into float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from overflow_lab.capture.shadow import operations
from overflow_lab.remedies.islands.keep import HALVES, Undo, wrap_forward
from overflow_lab.remedies.islands.members import Member, Members, is_called
from overflow_lab.subjects.containers import map_tensors

# These move values or copy them; what was wide stays wide.
MOVES = frozenset({"aten._unsafe_view", "aten.clone", "aten.cat", "aten.stack", "aten.index", "aten.index_select",
                   "aten.gather", "aten.neg", "aten.roll", "aten.flip", "aten.constant_pad_nd", "aten.repeat",
                   "aten.slice_scatter", "aten.select_scatter", "aten._reshape_copy"})  # fmt: skip
_SOFTMAXES = ("aten._softmax", "aten._log_softmax")


class WideMode(TorchDispatchMode):
    """Does the operations in `chosen` in float32; `path` is the stack of running modules.

    It holds two kinds of float32 tensors: wide ones, in the place of a tensor that the program has in the low dtype,
    and those that the program itself asked for in float32 (`asked`), by `wide.float()`, which torch does not do to what
    is float32 already. The latter are calculated with as the program does, in float32, and are low again as soon as
    they meet what is. Members in `chosen` that are whole modules are islands of their own (`keep`): inside them nothing
    is changed.
    """

    def __init__(self, low: torch.dtype, chosen: Members = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.low, self.chosen = low, chosen
        self.path: list[str] = []
        self._aside = 0
        self._held = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> WideMode:
        return type(self)(self.low, self.chosen)

    def is_held(self, item: Any) -> bool:
        """Return whether this is a float32 tensor that the mode holds, wide or asked for."""
        return isinstance(item, torch.Tensor) and item in self._held

    def is_wide(self, item: Any) -> bool:
        """Return whether this is a float32 tensor in the place of one that the program has in the low dtype."""
        return self.is_held(item) and not self._held[item]

    def is_asked(self, item: Any) -> bool:
        """Return whether this is what the program asked for in float32 of a wide tensor, or made of such."""
        return self.is_held(item) and bool(self._held[item])

    def narrow(self, value: Any) -> Any:
        """Return nested arguments with the tensors that are held in the low dtype."""
        return operations.mapped(value, lambda item: cast(item, self.low) if self.is_held(item) else item)

    def hold(self, value: Any, *, asked: bool = False) -> Any:
        """Remember the float32 tensors of a result, and return it."""
        for tensor in operations.tensors_in(value):
            if tensor.dtype == torch.float32:
                self._held[tensor] = asked
        return value

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a wide tensor as what the program asked for in float32."""
        with self.aside():
            made = cast(tensor, torch.float32)
        self._held[made] = True
        return made

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside:
            return op(*args, **kwargs)
        facts = operations.facts_of(op)
        held = [item for item in operations.leaves((args, kwargs)) if self.is_held(item)]
        if facts.whole:
            return op(*self.narrow(args), **self.narrow(kwargs))
        if facts.views:
            return self._view(op, args, kwargs, held)
        written = operations.written(facts, args, kwargs)
        if written:
            return self._write(op, args, kwargs, any(self.is_held(t) for t in written))
        if held and facts.name in MOVES:
            args, kwargs = up((args, kwargs))
            return self.hold(op(*args, **kwargs), asked=all(self.is_asked(item) for item in held))
        return self.calculate(op, facts.name, args, kwargs, held)

    def calculate(self, op: Any, name: str, args: Any, kwargs: Any, held: list[torch.Tensor]) -> Any:
        """Do an operation that makes new values: in float32 if it was chosen, or all that it is given is."""
        if Member(self.path[-1] if self.path else "", name) in self.chosen:
            return self.wide_result(op, name, args, kwargs)
        if not held:
            return op(*args, **kwargs)
        if self.as_asked(args, kwargs):
            return self.hold(op(*args, **kwargs), asked=True)
        return op(*self.narrow(args), **self.narrow(kwargs))

    def as_asked(self, args: Any, kwargs: Any) -> bool:
        """Return whether the program has all operands of an operation in float32."""
        deciding = _deciding(args, kwargs)
        return bool(deciding) and all(t.dtype == torch.float32 and not self.is_wide(t) for t in deciding)

    def wide_result(self, op: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Return an operation's result in float32, remembered as what the program has it in."""
        low = self._gives_low(name, args, kwargs)
        asked = any(self.is_asked(item) for item in operations.leaves((args, kwargs)))
        args, kwargs = up((args, kwargs))
        if name in _SOFTMAXES:  # its third argument asks for float32 of half-precision operands, which these are not
            args = (*args[:2], False)
        result = op(*args, **kwargs)
        return self.hold(result, asked=not low) if low or asked else result

    def _gives_low(self, name: str, args: Any, kwargs: Any) -> bool:
        """Return whether the program has the result of an operation in the low dtype."""
        asked = [item for item in operations.leaves((args, kwargs)) if isinstance(item, torch.dtype)]
        if asked:
            return asked[0] in HALVES
        if name in _SOFTMAXES and len(args) > 2 and args[2]:
            return False
        deciding = _deciding(args, kwargs)
        return bool(deciding) and all(self.is_wide(t) or t.dtype in HALVES for t in deciding)

    def _view(self, op: Any, args: Any, kwargs: Any, held: list[torch.Tensor]) -> Any:
        if not held:
            return op(*args, **kwargs)
        if any(isinstance(item, torch.dtype) for item in operations.leaves((args, kwargs))):  # the bits as another type
            return op(*self.narrow(args), **self.narrow(kwargs))
        return self.hold(op(*args, **kwargs), asked=self.is_asked(held[0]))

    def _write(self, op: Any, args: Any, kwargs: Any, wide: bool) -> Any:
        """Do an operation that writes: into a tensor that is held float32 values, into any other what it expects."""
        if not wide:
            return op(*self.narrow(args), **self.narrow(kwargs))
        made, named = up((args, kwargs))
        return op(*made, **named)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Change nothing for a while."""
        self._aside += 1
        try:
            yield
        finally:
            self._aside -= 1

    # ---- where the program is ----

    @contextmanager
    def inside(self, path: str) -> Iterator[None]:
        """Be in a module; the outermost one enters the mode."""
        outermost, island = not self.path, Member(path) in self.chosen
        self.path.append(path)
        self._aside += island
        try:
            if outermost:
                with Upcasts(self), self:
                    yield
            else:
                yield
        finally:
            self._aside -= island
            self.path.pop()


class Upcasts(TorchFunctionMode):
    """Makes `.float()`, `.to(float32)` and `dtype=float32` of a wide tensor what they are in the program.

    To torch the tensor is float32 already, so it would give the tensor itself back, and no operation would be seen.
    """

    def __init__(self, mode: WideMode) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._mode._aside or not (args and self._mode.is_wide(args[0]) and _asks(function, args, kwargs)):
            return function(*args, **kwargs)
        return function(self._mode.exact(args[0]), *args[1:], **kwargs)


def _asks(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a function is asked for float32."""
    return function is torch.Tensor.float or any(item is torch.float32 for item in (*args[1:], *kwargs.values()))


def _deciding(args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the floating operands whose dtypes decide that of the result: 0-d ones do only among themselves."""
    floats = [t for t in operations.tensors_in((args, kwargs)) if t.is_floating_point()]
    most = any(tensor.ndim for tensor in floats)
    return [tensor for tensor in floats if bool(tensor.ndim) == most]


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor in another dtype, by the operation that a mode around this one sees as a cast.

    `Tensor.to` would reach it whole, since it is not taken apart within a mode, and looks like a view.
    """
    made: torch.Tensor = torch.ops.aten._to_copy.default(tensor, dtype=dtype)
    return made


def up(value: Any) -> Any:
    """Return nested arguments with half-precision tensors and dtypes as float32."""

    def one(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return cast(item, torch.float32) if item.dtype in HALVES else item
        return torch.float32 if item in HALVES else item

    return operations.mapped(value, one)


class Counted:
    """The forward of a module that says where the program is.

    The model's own output may stay wide: nothing consumes it. A part that is called from outside the model (the
    encoder, by `generate`) gives its output narrowed, since what is done with it there is not seen.
    """

    def __init__(self, module: nn.Module, mode: WideMode, path: str) -> None:
        functools.update_wrapper(self, module.forward)
        self._inner, self._mode, self._path = module.forward, mode, path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        alone = bool(self._path) and not self._mode.path
        with self._mode.inside(self._path):
            output = self._inner(*args, **kwargs)
        return map_tensors(self._mode.narrow, output, caches=False) if alone else output


def run_under(model: nn.Module, mode: WideMode) -> Undo:
    """Let a model run under a mode, in place; return what undoes it."""
    undo: Undo = []
    for path, module in model.named_modules():
        if is_called(module):
            wrap_forward(module, _counted(mode, path), undo)
    return undo[::-1]


def _counted(mode: WideMode, path: str) -> Callable[[nn.Module], Counted]:
    return lambda module: Counted(module, mode, path)
