"""Where the program is: the stack of modules that are running, by their names in the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import nn

Enter = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[str, Any], None]


class ModulePath:
    """Keeps the stack of running modules of a model, while entered, and tells others when one is entered or left.

    `on_enter(path, args, kwargs)` and `on_leave(path, output)` are called for each call of a module; `on_leave` only
    for calls that returned. A stack and not a set, since modules recurse and repeat. The hooks change nothing and are
    removed on the way out. After an exception `failed_at` names the innermost module that was running when it was
    raised.
    """

    def __init__(self, model: nn.Module, on_enter: Enter, on_leave: Leave) -> None:
        self._names = {module: path for path, module in model.named_modules()}
        self._on_enter, self._on_leave = on_enter, on_leave
        self._handles: list[Any] = []
        self._outside: BaseException | None = None
        self._raised: BaseException | None = None
        self.stack: list[str] = []
        self.failed_at: str | None = None
        self.refused: list[str] = []
        self.called: set[str] = set()

    def __enter__(self) -> ModulePath:
        if self._handles:
            raise RuntimeError("this ModulePath is entered already")
        self._outside = sys.exc_info()[1]
        try:
            for module, path in self._names.items():
                self._watch(module, path)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()
        self.stack.clear()
        self._raised = self._outside = None  # their tracebacks hold frames, and those hold activations

    @property
    def current(self) -> str:
        """The innermost running module's path, "" (the root) where none runs."""
        return self.stack[-1] if self.stack else ""

    def _watch(self, module: nn.Module, path: str) -> None:
        """Hook one module; a TorchScript module refuses, which is a blind spot."""
        if isinstance(module, torch.jit.ScriptModule):
            self.refused.append(path)
            return

        # At each call of each module: what can be looked up once is not looked up then.
        stack, called, on_enter, on_leave = self.stack, self.called, self._on_enter, self._on_leave

        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            stack.append(path)
            called.add(path)
            on_enter(path, args, kwargs)

        def leave(_module: nn.Module, _args: Any, output: Any) -> None:
            # Called after an exception too, with None: that is how the stack stays true. The innermost comes first.
            if output is None:
                self._note_exception(path)
            if (stack and stack[-1] is path) or self._unwind(path):
                if output is not None:
                    on_leave(path, output)
                stack.pop()

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _note_exception(self, path: str) -> None:
        """Remember where the exception under way was raised, unless it comes from the one that is remembered."""
        error = sys.exc_info()[1]
        if error is not None and error is not self._outside and not _comes_from(error, self._raised):
            self.failed_at, self._raised = path, error

    def _unwind(self, path: str) -> bool:
        """Drop what is above `path`, and return whether it is on the stack; it is not when a hook of the user's raised.

        Above it are modules left by an exception that is no Exception (Ctrl-C): torch calls no hooks for those.
        """
        if path not in self.stack:
            return False
        del self.stack[len(self.stack) - self.stack[::-1].index(path) :]
        return True

    def _remove(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()


def _comes_from(error: BaseException, cause: BaseException | None) -> bool:
    """Return whether `error` is `cause` or was raised from it; not if it merely happened while that was handled."""
    seen: BaseException | None = error
    while seen is not None and cause is not None:
        if seen is cause:
            return True
        seen = seen.__cause__
    return False
