"""Helpers of the tests of rescaling: what an operation imposes, all exponents that satisfy it, and mended modules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from overflow_lab.capture.shadow import operations
from overflow_lab.remedies.scaling.edits import Edits
from overflow_lab.remedies.scaling.equations import Equations
from overflow_lab.remedies.scaling.expressions import Expression, Knob
from overflow_lab.remedies.scaling.solve import solve
from overflow_lab.remedies.scaling.trace import ScaleTrace
from overflow_lab.subjects.containers import tensors

LIMIT = 65504.0


# ---- one operation ----


@dataclass(frozen=True)
class Imposed:
    """What one call imposes: its equations, and the exponent of each floating result."""

    equations: Equations
    operands: list[Knob]
    results: list[Expression]
    names: frozenset[str]

    @property
    def knobs(self) -> list[Knob]:
        """All knobs that stand anywhere."""
        found = {knob for expression in self.results for knob in expression}
        return sorted(found | set(self.operands) | {knob for key in self.equations.zeros for knob, _ in key})

    def solutions(self) -> list[dict[Knob, int]]:
        """Return integer solutions that span all others in which constants, and weights that are shifted, stay."""
        knobs = self.knobs
        shifted = {knob.name for knob in knobs if knob.kind == "shifted"}
        still = [knob for knob in knobs if knob.kind == "constant" or knob.name in shifted]
        rows = [[Fraction(dict(key).get(knob, 0.0)) for knob in knobs] for key in self.equations.zeros]
        rows += [[Fraction(int(knob == k)) for knob in knobs] for k in still]
        return [dict(zip(knobs, vector, strict=True)) for vector in null_space(rows, len(knobs))]


class _Names(TorchDispatchMode):
    """Keeps the names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = operations.name_of(op) if isinstance(op, torch._ops.OpOverload) else str(op)
        self.names.add(name.removeprefix("aten.").removesuffix("_"))
        return op(*args, **(kwargs or {}))


def imposed(function: Callable[..., Any], operands: Sequence[Any]) -> Imposed:
    """Run a function whose floating float32 operands are weights "0", "1", ..., and return what that imposes."""
    kept = {str(i): nn.Parameter(t, requires_grad=False) for i, t in enumerate(operands) if is_weight(t)}
    model = nn.Module()
    for name, parameter in kept.items():
        model.register_parameter(name, parameter)
    trace, names = ScaleTrace(model, Equations(), {}), _Names()
    with torch.no_grad(), trace, names:
        result = function(*(kept.get(str(i), operand) for i, operand in enumerate(operands)))
    results = [trace.of(t) for t in floats(result)]
    return Imposed(trace.equations, [trace.whole(name) for name in kept], results, frozenset(names.names))


def is_weight(value: Any) -> bool:
    """Return whether an operand is one that may be scaled."""
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32 and value.numel() > 0


def floats(result: Any) -> list[torch.Tensor]:
    """Return the floating tensors of a nested result."""
    return [t for t in operations.tensors_in(result) if t.is_floating_point() or t.is_complex()]


def others(result: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested result that are truths, indices or counts."""
    return [t for t in operations.tensors_in(result) if not (t.is_floating_point() or t.is_complex())]


def same_values(mine: torch.Tensor, theirs: torch.Tensor, exponent: float = 0.0) -> bool:
    """Return whether `theirs` is `mine` times 2**exponent, bit for bit; subnormal numbers are taken as zero."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    if mine.is_complex():
        mine, theirs = (torch.view_as_real(t.to(torch.complex64).resolve_conj()) for t in (mine, theirs))
    wanted = mine.resolve_neg().double() * 2.0**exponent
    got = theirs.resolve_neg().double()
    tiny = torch.finfo(torch.float32).tiny
    same = (wanted == got) | (wanted.isnan() & got.isnan()) | ((wanted.abs() < tiny) & (got.abs() < tiny))
    return bool(same.all())


def rescaled(operands: Sequence[Any], exponents: Mapping[Knob, int]) -> list[Any]:
    """Return copies of the operands, each times its power of two."""
    by_name = {knob.name: exponent for knob, exponent in exponents.items() if knob.kind == "weight"}
    copies = [t.clone() if isinstance(t, torch.Tensor) else t for t in operands]
    return [t * 2.0 ** by_name.get(str(i), 0) if is_weight(t) else t for i, t in enumerate(copies)]


def null_space(rows: Iterable[Sequence[Fraction]], width: int) -> list[list[int]]:
    """Return whole vectors that span what all the rows are orthogonal to, each doubled, so that square roots are whole.

    By Gauss's elimination in fractions, which knows nothing of the solver under test.
    """
    reduced: list[list[Fraction]] = []
    for row in rows:
        left = list(row)
        for one in reduced:
            pivot = next(i for i, value in enumerate(one) if value)
            left = [a - left[pivot] * b for a, b in zip(left, one, strict=True)]
        pivot = next((i for i, value in enumerate(left) if value), -1)
        if pivot >= 0:
            left = [value / left[pivot] for value in left]
            reduced = [[a - one[pivot] * b for a, b in zip(one, left, strict=True)] for one in reduced] + [left]
    pivots = {next(i for i, value in enumerate(one) if value): one for one in reduced}
    found = []
    for free in sorted(set(range(width)) - set(pivots)):
        vector = [Fraction(int(i == free)) if i not in pivots else -pivots[i][free] for i in range(width)]
        whole = 2 * math.lcm(*(value.denominator for value in vector))
        found.append([int(value * whole) for value in vector])
    return found


# ---- whole modules ----


@dataclass(frozen=True)
class Mended:
    """A module before and after a rescale, and what the solver said."""

    before: nn.Module
    after: nn.Module
    missing: float
    exponents: Mapping[Knob, int]
    constants: Mapping[str, float]


def mended(model: nn.Module, *inputs: Any, left: bool = False) -> Mended:
    """Return a module with the rescale that its float32 run allows; constants move where an attribute holds them.

    With `left`, an eps that no attribute holds stays as it is although what it is added to moves.
    """
    equations = Equations()
    with torch.no_grad():
        ScaleTrace(model, equations, {}).run({}, inputs)
    nameless = {k for k in equations.knobs if k.nameless}
    solution = solve(equations, least=2.0, ample=3.0, fixed=set() if left else nameless, tied={})
    assert solution is not None
    moved = {k: e for k, e in solution.exponents.items() if k.kind == "constant" and k not in nameless}
    constants = {knob.name: equations.constants[knob.name] * 2.0**exponent for knob, exponent in moved.items()}
    edits = Edits({k: e for k, e in solution.exponents.items() if k.kind != "constant"}, constants)
    after = edits.apply(copy.deepcopy(model))
    return Mended(model, after, solution.missing, solution.exponents, constants)


class _Largest(TorchDispatchMode):
    """Keeps the largest magnitude of any floating value that is no mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.value = 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if "empty" not in str(op):
            for tensor in floats(result):
                seen = tensor.detach().abs()
                self.value = max([self.value, *(float(t.max()) for t in [seen[seen < 1e30]] if t.numel())])
        return result


def largest(model: nn.Module, *inputs: Any) -> float:
    """Return the largest magnitude of any value in a run, of the weights, and of the saved buffers."""
    mode = _Largest()
    with torch.no_grad(), mode:
        model(*inputs)
    saved = [t for t in model.state_dict().values() if t.is_floating_point()]
    return max([mode.value, *(float(t.abs().max()) for t in saved)])


def output(model: nn.Module, *inputs: Any) -> torch.Tensor:
    """Return the only (or first) floating tensor that a module returns."""
    with torch.no_grad():
        made = model(*inputs)
    return next(tensor for _, tensor in tensors(made, "output", caches=False) if tensor.is_floating_point())


def in_half(model: nn.Module, *inputs: Any) -> torch.Tensor:
    """Return the output of a copy that was cast to float16, as float32."""
    cast = [t.half() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for t in inputs]
    return output(copy.deepcopy(model).half(), *cast).float()


def error(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the relative error of `theirs`; infinity where it is not finite."""
    if not bool(theirs.isfinite().all()):
        return math.inf
    return float((mine - theirs).norm() / mine.norm())
