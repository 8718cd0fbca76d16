"""Applies exponents to a model, and to what a subject loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from overflow_lab.remedies.scaling.expressions import Knob
from overflow_lab.remedies.scaling.products import slice_of

Load = Callable[[torch.dtype | None], nn.Module]


@dataclass(frozen=True)
class Edits:
    """What a rescale changes: weights by powers of two, and `constants`, the new values of "path:attribute"."""

    exponents: Mapping[Knob, int] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that change."""
        return tuple(dict.fromkeys(knob.name for knob in self.exponents if knob.kind != "constant"))

    def apply(self, model: nn.Module) -> nn.Module:
        """Change a float32 model in place, and return it.

        A product with a power of two is exact unless it becomes subnormal. `weight + shift` is scaled through
        `weight`, which rounds once.
        """
        weights = named(model)
        with torch.no_grad():
            for knob, exponent in self.exponents.items():
                if knob.kind == "constant":
                    continue
                part = slice_of(weights[knob.name], knob)
                if knob.kind == "shifted":
                    wide = (part.double() + knob.shift) * 2.0**exponent - knob.shift
                    part.copy_(wide)
                else:
                    part.mul_(2.0**exponent)
        return self._constants(model)

    def loading(self, load: Load) -> Load:
        """Return a load that gives rescaled models: in float32, or as the given one casts them."""

        def mended(dtype: torch.dtype | None) -> nn.Module:
            if dtype is None:
                return self.apply(load(None))
            model, source = load(dtype), named(self.apply(load(None)))
            with torch.no_grad():
                for name, weight in named(model).items():
                    if name in self.weights:
                        weight.copy_(source[name])
            return self._constants(model)

        return mended

    def _constants(self, model: nn.Module) -> nn.Module:
        for name, value in self.constants.items():
            path, _, attribute = name.rpartition(":")
            setattr(model.get_submodule(path), attribute, value)
        return model


def named(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each once, under its first name."""
    return {**dict(model.named_buffers()), **dict(model.named_parameters())}
