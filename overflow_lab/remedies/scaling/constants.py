"""The constants of a model that must follow a scale (an eps, a softmax scaling), and who can change them.

An eps of a norm stands beside a mean square: where a stream is multiplied by 2**e, the eps is by 4**e, and the norm
gives the same bits. transformers builds such an eps from a field of the config, mostly one for all norms; a checkpoint
can carry a new one only there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from overflow_lab.remedies.scaling.equations import Equations
from overflow_lab.remedies.scaling.expressions import Knob

_EPS = "eps"


@dataclass(frozen=True)
class Mode:
    """What may be done to constants: `fixed` ones stay and hold their expression at 0, `tied` ones change together.

    `left` ones stay although their expression moves, which changes the function a little. With `savable`, what is
    changed can be written into the config of a checkpoint.
    """

    savable: bool
    fixed: frozenset[Knob] = frozenset()
    tied: Mapping[Knob, Knob] = field(default_factory=dict)
    left: frozenset[Knob] = frozenset()


def modes(model: nn.Module, equations: Equations, *, checkpoint: bool) -> Iterator[Mode]:
    """Yield the ways to treat the constants of a model, the most desirable first."""
    constants = [knob for knob in equations.knobs if knob.kind == "constant"]
    nameless = frozenset(knob for knob in constants if knob.nameless)
    scales = frozenset(knob for knob in constants if not _is_eps(knob))
    if checkpoint:
        groups: dict[float, list[Knob]] = {}
        for knob in constants:
            if knob not in nameless | scales and fields_of(model, equations.constants[knob.name]):
                groups.setdefault(equations.constants[knob.name], []).append(knob)
        tied = {knob: members[0] for members in groups.values() for knob in members[1:]}
        others = frozenset(constants) - scales - {knob for members in groups.values() for knob in members}
        yield Mode(True, fixed=others | scales, tied=tied)
        if others:
            yield Mode(True, fixed=scales, tied=tied, left=others)
        if tied:
            yield Mode(True, fixed=scales, left=frozenset(constants) - scales)
    yield Mode(False, fixed=nameless)
    if nameless:
        yield Mode(False, left=nameless)


def _is_eps(knob: Knob) -> bool:
    return knob.nameless or _EPS in knob.name.rpartition(":")[2]


def fields_of(model: nn.Module, value: float) -> list[tuple[Any, str]]:
    """Return the (config, field) of a model from transformers that hold an eps of this value."""
    return [
        (config, name)
        for config in _configs(model)
        for name, held in vars(config).items()
        if _EPS in name and isinstance(held, float) and held == value
    ]


def write_config(model: nn.Module, changed: Mapping[float, float]) -> None:
    """Write new values of eps into the configs of a model, by their old ones; all are found before one is written."""
    found = [(config, name, new) for old, new in changed.items() for config, name in fields_of(model, old)]
    for config, name, new in found:
        setattr(config, name, new)


def _configs(model: nn.Module) -> list[Any]:
    """Return the configs of a model and of its parts, and those inside them, each once."""
    found: dict[int, Any] = {}
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        inside = getattr(config, "__dict__", None)
        if inside is None or id(config) in found or not hasattr(config, "to_dict"):
            continue
        found[id(config)] = config
        waiting += [value for value in inside.values() if hasattr(value, "to_dict")]
    return list(found.values())


def shifted_clashes(equations: Equations) -> frozenset[Knob]:
    """Return the knobs of weights that are used both as they are and shifted, or by two shifts: they must stay."""
    shifted = [knob for knob in equations.knobs if knob.kind == "shifted"]
    plain = {knob.name for knob in equations.knobs if knob.kind in ("weight", "part")}
    shifts: dict[str, set[float]] = {}
    for knob in shifted:
        shifts.setdefault(knob.name, set()).add(knob.shift)
    wrong = {name for name, values in shifts.items() if len(values) > 1 or name in plain}
    return frozenset(k for k in equations.knobs if k.name in wrong and k.kind in ("weight", "part", "shifted"))


def merged(mode: Mode, fixed: frozenset[Knob]) -> Mode:
    """Return a mode with further knobs fixed."""
    return dataclasses.replace(mode, fixed=mode.fixed | fixed)
