"""Watches a float32 run and writes down how each value scales with the weights."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from overflow_lab.capture.buffers import kept_buffers
from overflow_lab.capture.module_path import ModulePath
from overflow_lab.capture.shadow import operations
from overflow_lab.capture.shadow.sites import Ordinals, SiteKey
from overflow_lab.remedies.scaling import products, rules
from overflow_lab.remedies.scaling.calls import Call, scales
from overflow_lab.remedies.scaling.equations import Equations
from overflow_lab.remedies.scaling.expressions import ZERO, Expression, Knob
from overflow_lab.remedies.scaling.products import MASK, Leaf, Product, size_of, slice_of
from overflow_lab.subjects.containers import tensors


@dataclass
class Weights:
    """The parameters and saved buffers of a model, each under one name; `find` knows a tensor by its memory."""

    names: dict[int, str] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Return those of a model."""
        saved = set(model.state_dict(keep_vars=True))
        made = cls()
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name in saved and tensor.dtype == torch.float32 and tensor.numel():
                made.names[tensor.data_ptr()] = name
                made.tensors[name] = tensor
        return made

    def find(self, tensor: torch.Tensor) -> str | None:
        """Return the name of the weight that a tensor is, as a whole; None for anything else."""
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            return None
        name = self.names.get(tensor.data_ptr())
        return name if name is not None and self.tensors[name].shape == tensor.shape else None


class ScaleTrace(TorchDispatchMode):
    """Collects into `equations` what one run imposes; `dtypes` are those of the low-precision program, by site."""

    def __init__(
        self, model: nn.Module, equations: Equations, dtypes: Mapping[SiteKey, str], *, low: str = "float16"
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.equations, self.dtypes, self.low = model, equations, dtypes, low
        self.modules = dict(model.named_modules())
        self.weights = Weights.of(model)
        self.ordinals = Ordinals()
        self.path = ModulePath(model, lambda *_: self.ordinals.enter(), lambda *_: self.ordinals.leave())
        self._known: Any = WeakTensorKeyDictionary()
        self._frees = 0

    def run(self, inputs: Mapping[str, Any], positional: tuple[Any, ...]) -> None:
        """Run the model once; what it returns must keep its values."""
        for _, tensor in tensors([dict(inputs), positional], "input"):
            if scales(tensor):
                self._known[tensor] = ZERO
        with kept_buffers(self.model), self.path, self:
            output = self.model(*positional, **inputs)
        for _, tensor in tensors(output, "output", caches=False):
            if scales(tensor):
                self.equations.zero(self.of(tensor))
        self._link_parts()
        self._sizes_of_weights()

    # ---- what is known of a tensor ----

    def of(self, tensor: torch.Tensor) -> Expression:
        """Return the exponent of a tensor as a whole."""
        known = self._known.get(tensor)
        if known is None:
            known = self._first_seen(tensor)
        if isinstance(known, Product):
            return known.whole(self)
        if isinstance(known, Leaf):
            return {self.whole(known.name): 1.0}
        return known  # type: ignore[no-any-return]

    def peek(self, tensor: torch.Tensor) -> Leaf | Product | None:
        """Return the weight that a tensor is, or the product that it may be taken apart into."""
        known = self._known.get(tensor)
        if known is None:
            known = self._first_seen(tensor)
        return known if isinstance(known, (Leaf, Product)) else None

    def give(self, tensor: torch.Tensor, known: Expression | Leaf | Product) -> None:
        """Say what is known of a tensor."""
        self._known[tensor] = known

    def whole(self, name: str) -> Knob:
        """Return the knob of a whole weight."""
        return Knob("weight", name)

    def free(self) -> Expression:
        """Return the exponent of something that any factor leaves as it is."""
        self._frees += 1
        return {Knob("free", f"{id(self):x}.{self._frees}"): 1.0}

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor came neither from the inputs nor from the weights."""
        return tensor not in self._known and self.weights.find(tensor) is None

    def _first_seen(self, tensor: torch.Tensor) -> Any:
        name = self.weights.find(tensor)
        known: Any = ZERO
        if name is not None:
            known = Leaf(name)
        elif scales(tensor) and not bool(((tensor != 0) & (tensor.abs() < MASK)).any()):
            known = self.free()  # zeros, infinities and masks
        if name is not None or known is not ZERO:
            self._known[tensor] = known
        return known

    # ---- one operation ----

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        facts = operations.facts_of(op)
        for tensor in operations.written(facts, args, kwargs):
            self.peek(tensor)  # whether it is nothing but zeros shows only before
        result = op(*args, **kwargs)
        if facts.views:
            products.follow(self, op, args, kwargs, result)
            return result
        key = (self.path.current, facts.name, self.ordinals.next(facts.name))
        made = [t for t in operations.tensors_in(result) if scales(t)]
        if facts.unset:
            for tensor in made:
                self._known[tensor] = self.free()
            return result
        given = operations.arguments(op, args, kwargs) if isinstance(op, torch._ops.OpOverload) else {"args": args}
        if not any(not self.is_constant(t) for t in operations.tensors_in((args, kwargs)) if scales(t)):
            return result  # a constant is made, or whole numbers are
        self._learn(Call(self, facts.name, given, self.path.current, made), key)
        return result

    def _learn(self, call: Call, key: SiteKey) -> None:
        """Write down what an operation imposes, and the exponents and sizes of its results."""
        found = rules.apply(call)
        for tensor, known in zip(call.results, found, strict=False):
            if call.name.endswith("_") and tensor in self._known:
                self.equations.equal(self.of(tensor), self._settled(known))
            else:
                self._known[tensor] = known
            self._measure(tensor, known, key)

    def _settled(self, known: Expression | Product) -> Expression:
        return known.whole(self) if isinstance(known, Product) else known

    def _measure(self, tensor: torch.Tensor, known: Expression | Product, key: SiteKey) -> None:
        """Take in a result's size; that of a product waits until it is known whether it is taken apart."""
        size = size_of(tensor)
        dtype = self.dtypes.get(key, self.low)
        if isinstance(known, Product):
            known.dtype, known.size = dtype, size
        else:
            self.equations.saw(known, dtype, *size)

    # ---- weights ----

    def _link_parts(self) -> None:
        """Make the parts of a weight one where it is also used as a whole, or where they overlap."""
        used = {knob for key in self.equations.zeros for knob, _ in key}
        used |= {knob for key, _ in self.equations.sizes for knob, _ in key}
        for name, parts in self.equations.parts.items():
            ordered = sorted(parts)
            whole = self.whole(name)
            apart = all(a.dim == b.dim and a.last <= b.first for a, b in itertools.pairwise(ordered))
            if whole in used or not apart:
                for part in ordered:
                    self.equations.equal({whole: 1.0}, {part: 1.0})

    def _sizes_of_weights(self) -> None:
        for knob in self.equations.knobs:
            if knob.kind in ("weight", "part"):
                self.equations.saw({knob: 1.0}, self.low, *size_of(slice_of(self.weights.tensors[knob.name], knob)))
