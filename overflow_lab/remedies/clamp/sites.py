"""Where values are clamped: at what a module takes or returns, by hooks; and the same hooks as code to paste."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Clamp = Callable[[torch.Tensor], torch.Tensor]
# "output", "output[0]" or "output['logits']", "input[0]" or "input['hidden_states']".
_PORT = re.compile(r"(input|output)(?:\[(\d+)\]|\['(\w+)'\])?")


@dataclass(frozen=True)
class Site:
    """One tensor that a module takes or returns: `port` is its name in a recording ("output[0]", "input['x']")."""

    module: str
    port: str

    @property
    def side(self) -> str:
        """Return "input" or "output"."""
        return self.port[: 5 + self.port.startswith("output")]

    @property
    def key(self) -> int | str | None:
        """The place in the arguments or in the output; None where the output is one tensor."""
        found = _PORT.fullmatch(self.port)
        assert found is not None
        index, name = found.group(2), found.group(3)
        return name or (None if index is None else int(index))

    @property
    def can_be_clamped(self) -> bool:
        """Whether a hook reaches it: deeper inside containers it does not."""
        found = _PORT.fullmatch(self.port)
        return found is not None and not (self.side == "input" and self.key is None)

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.port}"


@dataclass
class Tally:
    """How many values clamps have changed, by site; counted on the device, one number a call."""

    counts: dict[Site, list[torch.Tensor]] = field(default_factory=dict)

    def note(self, site: Site, values: torch.Tensor, limit: float) -> None:
        """Count the values beyond the limit, infinities among them."""
        self.counts.setdefault(site, []).append((values.detach().abs() > limit).sum())

    def of(self, site: Site) -> int:
        """Return how many values were changed at a site."""
        return sum(int(count) for count in self.counts.get(site, ()))


def clamp_model(model: nn.Module, sites: Sequence[Site], limit: float, tally: Tally | None = None) -> nn.Module:
    """Hook the modules of `model` so that values beyond `limit` become it, infinities too; return the same model.

    NaN stays NaN. What is not beyond the limit stays as it is, bit by bit. With `tally` the changed values are counted.
    """
    for site in sites:
        module = model.get_submodule(site.module)
        clamp = _clamp(site, limit, tally)
        if site.side == "output":
            module.register_forward_hook(_output_hook(site.key, clamp))
        else:
            module.register_forward_pre_hook(_input_hook(site.key, clamp), with_kwargs=True)
    return model


def _clamp(site: Site, limit: float, tally: Tally | None) -> Clamp:
    def clamp(values: torch.Tensor) -> torch.Tensor:
        if tally is not None:
            tally.note(site, values, limit)
        return values.clamp(-limit, limit)

    return clamp


def _output_hook(key: int | str | None, clamp: Clamp) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return clamp(output) if key is None else _replaced(output, key, clamp)

    return hook


def _input_hook(key: int | str | None, clamp: Clamp) -> Callable[[nn.Module, Any, dict[str, Any]], Any]:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(key, int):
            return _replaced(args, key, clamp), kwargs
        assert key is not None
        return args, _replaced(dict(kwargs), key, clamp)

    return hook


def _replaced(value: Any, key: int | str, clamp: Clamp) -> Any:
    """Return a container with one tensor clamped, the others the same objects; as it was where that one is missing.

    A module may be called in several ways: with an argument or without, with a cache or without.
    """
    if isinstance(value, (tuple, list)) and isinstance(key, int):
        items = list(value)
        if key < len(items) and isinstance(items[key], torch.Tensor):
            items[key] = clamp(items[key])
        return type(value)(items)
    if isinstance(value, MutableMapping) and isinstance(value.get(key), torch.Tensor):
        value[key] = clamp(value[key])  # an output of transformers keeps its attributes in step only this way
    return value


def snippet(sites: Sequence[Site], limit: float, dtype: str) -> str:
    """Return Python code that hooks `model` as `clamp_model` does; it needs torch alone, and no overflow-lab."""
    groups: dict[str, list[str]] = {}
    for site in sites:
        groups.setdefault(site.port, []).append(site.module)
    share = limit / torch.finfo(getattr(torch, dtype)).max
    parts = [f"LIMIT = {limit!r}  # {_of_largest(share)} of {dtype}"]
    for number, (port, modules) in enumerate(groups.items(), 1):
        name = f"clamp_{Site('', port).side}" + (f"_{number}" if len(groups) > 1 else "")
        parts.append(_hook_code(name, Site("", port)))
        parts.append(_register_code(name, Site("", port).side, modules))
    return "\n\n".join(parts) + "\n"


def _of_largest(share: float) -> str:
    return "the largest value" if share == 1 else f"{share:.3g} times the largest value"


def _hook_code(name: str, site: Site) -> str:
    """Return the hook of a site as code: what `_replaced` does, without its guards."""
    key = site.key
    clamp = f"[{_quoted(key)}].clamp(-LIMIT, LIMIT)"
    if site.side == "output" and key is None:
        body = ["return output.clamp(-LIMIT, LIMIT)"]
    elif site.side == "output" and isinstance(key, int):
        body = ["items = list(output)", f"items[{key}] = items{clamp}", "return type(output)(items)"]
    elif site.side == "output":
        body = [f"output[{_quoted(key)}] = output{clamp}", "return output"]
    elif isinstance(key, int):
        body = ["items = list(args)", f"items[{key}] = items{clamp}", "return tuple(items), kwargs"]
    else:
        body = [f"return args, {{**kwargs, {_quoted(key)}: kwargs{clamp}}}"]
    given = "output" if site.side == "output" else "kwargs"
    return "\n".join([f"def {name}(module, args, {given}):", *(f"    {line}" for line in body)])


def _register_code(name: str, side: str, modules: Sequence[str]) -> str:
    call = (
        f"register_forward_hook({name})" if side == "output" else f"register_forward_pre_hook({name}, with_kwargs=True)"
    )
    if len(modules) == 1:
        where = f"model.get_submodule({_quoted(modules[0])})" if modules[0] else "model"
        return f"{where}.{call}"
    lines = "".join(f"    {_quoted(module)},\n" for module in modules)
    return f"for path in [\n{lines}]:\n    model.get_submodule(path).{call}"


def _quoted(value: int | str | None) -> str:
    return json.dumps(value, ensure_ascii=False)
