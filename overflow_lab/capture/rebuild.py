"""How a script may build one module again, in plain Python: by its own class, or out of the model that holds it."""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from overflow_lab.subjects.python_file import MODULE_NAME

CONFIG = "config.json"
# What a constructor may be given beside the module's shape.
_SKIPPED = ("self", "device", "dtype")


@dataclass(frozen=True)
class Rebuild:
    """Imports and the lines of a function that returns the module; `files` are texts to lay beside the script."""

    imports: tuple[str, ...]
    lines: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)


def rebuilds(module: nn.Module, model: nn.Module, path: str, source: Path | None, function: str) -> Iterator[Rebuild]:
    """Yield ways to build the module, the plainest first; whether one works is found out by running it.

    `source` and `function` are the user's file and function, where these build the model.
    """
    if (own := _by_its_class(module, model, path, source)) is not None:
        yield own
    if (inside := _out_of_its_model(model, path)) is not None:
        yield inside
    if source is not None:
        copied = {source.name: source.read_text(encoding="utf-8")}
        line = f"return whole_model()[0].get_submodule({json.dumps(path)})"
        yield Rebuild((f"from {source.stem} import {function} as whole_model",), (line,), copied)


def _by_its_class(module: nn.Module, model: nn.Module, path: str, source: Path | None) -> Rebuild | None:
    """Return the call of the module's class with arguments that its attributes and its config give."""
    place = _place_of(type(module), source)
    config = _config_of(model, path)
    arguments = _arguments(module, config)
    if place is None or arguments is None:
        return None
    name = type(module).__name__
    imports, before = [f"from {place} import {name}"], tuple[str, ...]()
    files: dict[str, str] = {}
    if source is not None and place == source.stem:
        files[source.name] = source.read_text(encoding="utf-8")
    if "config=config" in arguments:
        if (known := _config(config)) is None:
            return None
        imports, files, before = [known.imports[0], *imports], {**files, **known.files}, known.lines
    return Rebuild(tuple(imports), (*before, f"return {name}({', '.join(arguments)})"), files)


def _out_of_its_model(model: nn.Module, path: str) -> Rebuild | None:
    """Return the model of transformers built on no memory, of which one module is taken."""
    place, known = _place_of(type(model), None), _config(getattr(model, "config", None))
    if place is None or known is None:
        return None
    name = type(model).__name__
    made = ('with torch.device("meta"):  # no memory for the rest of the model', f"    model = {name}(config)")
    taken = f'return model.get_submodule({json.dumps(path)}).to_empty(device="cpu")'
    return Rebuild((known.imports[0], f"from {place} import {name}"), (*known.lines, *made, taken), known.files)


def _config(config: Any) -> Rebuild | None:
    """Return how a config of transformers is read from the file beside the script; None for anything else."""
    if not hasattr(config, "to_json_string") or (place := _place_of(type(config), None)) is None:
        return None
    name = type(config).__name__
    lines = [f'config = {name}.from_json_file(HERE / "{CONFIG}")']
    attention = getattr(config, "_attn_implementation", None)
    if isinstance(attention, str):
        lines.append(f"config._attn_implementation = {json.dumps(attention)}")
    return Rebuild((f"from {place} import {name}",), tuple(lines), {CONFIG: _without_places(config)})


def _without_places(config: Any) -> str:
    """Return a config as JSON without the path that it was loaded from, in it and in the configs that it holds."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if key != "_name_or_path"}
        return value

    return json.dumps(cleaned(json.loads(config.to_json_string(use_diff=False))), indent=2) + "\n"


def _config_of(model: nn.Module, path: str) -> Any:
    """Return the config of the module, or of the nearest one that holds it."""
    while True:
        config = getattr(model.get_submodule(path), "config", None)
        if config is not None or not path:
            return config
        path = path.rpartition(".")[0]


def _place_of(cls: type[Any], source: Path | None) -> str | None:
    """Return where a class is imported from, the shortest public way; None where it cannot be."""
    if cls.__module__.startswith("transformers_modules."):  # code that came with the model, in nobody else's cache
        return None
    if cls.__module__ == MODULE_NAME:
        return source.stem if source is not None and cls.__qualname__ == cls.__name__ else None
    for place in ("torch.nn", "transformers", cls.__module__):
        if place.split(".")[0] != cls.__module__.split(".")[0] or place == "__main__":
            continue
        try:
            if getattr(importlib.import_module(place), cls.__name__, None) is cls:
                return place
        except ImportError:  # a module that existed while the model was built, and is gone
            continue
    return None


def _arguments(module: nn.Module, config: Any) -> list[str] | None:
    """Return keyword arguments for the module's class, read off its attributes; None where one is not known."""
    made: list[str] = []
    for name, parameter in inspect.signature(type(module).__init__).parameters.items():
        if name in _SKIPPED or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            return None
        if name == "config":
            made.append("config=config")
        elif name == "bias":
            made.append(f"bias={getattr(module, 'bias', None) is not None}")
        elif hasattr(module, name) and _is_plain(getattr(module, name)):
            made.append(f"{name}={getattr(module, name)!r}")
        elif parameter.default is parameter.empty:
            return None
    return made


def _is_plain(value: Any) -> bool:
    """Return whether a value can be written as a literal."""
    if type(value) is float:
        return math.isfinite(value)
    if type(value) in (tuple, list):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (bool, int, str)
