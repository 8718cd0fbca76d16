"""`path/to/file.py:function`: a function of the user's that returns `(module, inputs)`."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from overflow_lab.errors import UsageError, one_line
from overflow_lab.subjects.module import from_module
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.subject import Subject
from overflow_lab.subjects.tensors import usable_device

MODULE_NAME = "_overflow_lab_subject"


def is_python_file(model: str) -> bool:
    """Say whether `model` is meant as `FILE.py:function` (or as FILE.py with the function forgotten)."""
    return model.endswith(".py") or ".py:" in model


def from_python_file(model: str, options: SubjectOptions) -> Subject:
    """Return the subject that `FILE.py:function` builds; the function takes no arguments and is called once.

    It returns `(module, inputs)`, inputs as in `from_module`. The file is imported with its folder on `sys.path`, and
    `sys.path` and `sys.modules` are left as found. Raises UsageError, in one line with the file and line of the fault.
    """
    path, function = _split(model)
    usable_device(options.device)
    title = f"{path.name}:{function}"
    build = _Builder(path, function)
    module, inputs = build()
    try:
        subject = from_module(module, inputs, name=title, device=options.device, build=lambda: build()[0])
    except UsageError as error:
        raise UsageError(f"{title} returned what cannot be scanned: {error}") from error
    facts = {**subject.facts, "inputs_source": f"file: {title}"}
    return dataclasses.replace(subject, kind="python-file", facts=facts)


def _split(model: str) -> tuple[Path, str]:
    name, _, function = model.rpartition(".py:")
    path = Path(f"{name}.py" if name else model)
    if not path.is_file():
        raise UsageError(f"there is no file {str(path)!r}; give path/to/file.py:function")
    if not name:
        raise UsageError(f"{model!r} names no function; say which one builds the model: {path.name}:build")
    if not function.isidentifier():
        raise UsageError(f"{function!r} is not the name of a function; give path/to/{path.name}:function")
    return path, function


@dataclasses.dataclass(frozen=True)
class _Builder:
    """Imports the file and calls its function, anew each time."""

    path: Path
    function: str

    def __call__(self) -> tuple[torch.nn.Module, Any]:
        with _on_path(self.path):
            with self._blame("importing"):
                module = _imported(self.path)
            function = self._function_of(module)
            with self._blame("calling"):
                returned = function()
        if not isinstance(returned, tuple) or len(returned) != 2:
            what = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__
            raise UsageError(f"{self.path.name}:{self.function} returned {what}; return (module, inputs)")
        return returned

    def _function_of(self, module: ModuleType) -> Callable[[], Any]:
        found = getattr(module, self.function, None)
        if found is None:
            own = [n for n, f in vars(module).items() if getattr(f, "__module__", "") == MODULE_NAME and callable(f)]
            has = f"it has {', '.join(own[:8])}" if own else "it has none"
            raise UsageError(f"{self.path.name} has no function {self.function!r}; {has}")
        if not callable(found):
            kind = type(found).__name__
            raise UsageError(f"{self.path.name}:{self.function} is of type {kind}; name a function of no arguments")
        return found  # type: ignore[no-any-return]

    @contextmanager
    def _blame(self, doing: str) -> Iterator[None]:
        """Turn whatever the user's code raises (an exit, too) into one line that names where."""
        try:
            yield
        except (Exception, SystemExit) as error:
            what = self.path.name if doing == "importing" else f"{self.path.name}:{self.function}"
            message = f"{doing} {what} raised {one_line(error, limit=200)} ({_where(error, self.path)})"
            raise UsageError(f"{message}; mend it there") from error


def _where(error: BaseException, path: Path) -> str:
    """Return "file.py:line" of the innermost frame in the user's folder, or of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno}"
    folder = path.resolve().parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if folder in Path(f.filename).parents]
    # An environment may lie inside the user's folder; its frames are not the user's.
    own = [f for f in frames if "site-packages" not in f.filename]
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" if own else path.name


def _imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path.resolve())
    assert spec is not None  # a path that ends in .py always has a loader
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module  # dataclasses and pickle look their module up there
    spec.loader.exec_module(module)
    return module


@contextmanager
def _on_path(path: Path) -> Iterator[None]:
    """Put the file's folder first on `sys.path`; afterwards forget it, and the modules that came from that folder.

    Modules of installed packages stay: removing those would load C extensions twice.
    """
    folder = path.resolve().parent
    paths, modules = list(sys.path), dict(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path[:] = paths
        for name, module in list(sys.modules.items()):
            if modules.get(name) is not module and (name == MODULE_NAME or _is_from(module, folder)):
                del sys.modules[name]


def _is_from(module: ModuleType, folder: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and folder in Path(file).parents and "site-packages" not in file
