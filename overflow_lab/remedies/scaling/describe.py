"""A rescale in words, and as code to paste."""

from __future__ import annotations

import re
from collections.abc import Mapping

from overflow_lab.remedies.scaling.edits import Edits
from overflow_lab.remedies.scaling.expressions import Knob

_MOST = 12


def title(edits: Edits) -> str:
    """Return an imperative sentence, without its full stop."""
    exponents = sorted(set(edits.exponents.values()))
    count = len(edits.weights)
    powers = f"2^{exponents[0]}" if len(exponents) == 1 else f"powers of two (2^{exponents[0]} to 2^{exponents[-1]})"
    return f"Rescale {count} {'weight' if count == 1 else 'weights'} by {powers}"


def members(edits: Edits) -> tuple[str, ...]:
    """Return what is multiplied by what, layers of the same kind together: "layers.*.mlp.down_proj.weight x 2^-3"."""
    groups: dict[tuple[str, int], int] = {}
    for knob, exponent in edits.exponents.items():
        key = (_pattern(knob), exponent)
        groups[key] = groups.get(key, 0) + 1
    lines = [
        f"{pattern} \N{MULTIPLICATION SIGN} 2^{exponent}" + (f" ({count} of them)" if count > 1 else "")
        for (pattern, exponent), count in groups.items()
    ]
    more = len(lines) - _MOST
    return (*lines[:_MOST], *((f"and {more} more",) if more > 0 else ()))


def _pattern(knob: Knob) -> str:
    name = re.sub(r"(?<=\.)\d+(?=\.)", "*", knob.name)
    if knob.kind == "part":
        return f"{name} [{knob.first}:{knob.last}]"
    return f"{name} (with its +{knob.shift:g})" if knob.kind == "shifted" else name


def snippet(edits: Edits) -> str:
    """Return Python that does the same to `model`, a module in float32."""
    lines = [
        "# On the model in float32, before the cast.",
        "import torch",
        "",
        "weights = dict(model.named_parameters())",
    ]
    lines += ["weights.update(model.named_buffers())", "with torch.no_grad():"]
    whole = {knob.name: e for knob, e in edits.exponents.items() if knob.kind == "weight"}
    if whole:
        lines += ["    for name, exponent in {"]
        lines += [f"        {name!r}: {exponent}," for name, exponent in whole.items()]
        lines += ["    }.items():", "        weights[name].mul_(2.0**exponent)"]
    for knob, exponent in edits.exponents.items():
        if knob.kind == "part":
            lines.append(
                f"    weights[{knob.name!r}].narrow({knob.dim}, {knob.first}, {knob.last - knob.first})"
                f".mul_(2.0**{exponent})"
            )
        if knob.kind == "shifted":
            weight = f"weights[{knob.name!r}]"
            shift = f"{knob.shift:g}"
            lines.append(f"    {weight}.copy_(({weight}.double() + {shift}) * 2.0**{exponent} - {shift})")
    return "\n".join([*lines, *_attributes(edits.constants)]) + "\n"


def _attributes(constants: Mapping[str, float]) -> list[str]:
    lines: list[str] = []
    for name, value in constants.items():
        path, _, attribute = name.rpartition(":")
        owner = f"model.get_submodule({path!r})" if path else "model"
        lines.append(f"{owner}.{attribute} = {value!r}")
    return lines
