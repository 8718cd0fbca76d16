"""Runs torch's own operator samples through the shadow run; `python -m tests.operations_table` writes docs/operations.md."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.functions import Refusals
from overflow_lab.capture.shadow.shadows import has_shadow, wide

HALVES = (torch.float16, torch.bfloat16)
# From best to worst; an operator is called what its worst sample is.
STATUSES = ("no values", "raises", "exact", "random", "unsupported", "blind spot", "wrong", "changed", "crash")
PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
# Float32's rounding, in units of the largest value: an operator may go another way to the same result.
_NEAR = 2e-5
_MOST_SAMPLES = 24
# Named after the dtype that they cast to: in float32 they would still round.
_CASTS = frozenset({"bfloat16", "half", "chalf"})


@dataclass
class Outcome:
    """What became of the samples of one operator in one dtype: how many of each status, and why of the last bad one."""

    name: str
    dtype: str
    counts: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """The worst status of any sample."""
        return max(self.counts, key=STATUSES.index, default="no values")


def operators() -> list[Any]:
    """Return torch's operator database, in the order of names and variants."""
    from torch.testing._internal.common_methods_invocations import op_db

    return sorted(op_db, key=lambda op: (op.name, op.variant_test_name))


def outcome(op: Any, dtype: torch.dtype) -> Outcome:
    """Run an operator's samples, as a function and in place, with their shadows."""
    name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
    made = Outcome(name, str(dtype).removeprefix("torch."))
    for number, sample in enumerate(_samples(op, dtype)):
        if op.name.startswith(("empty", "new_empty")):
            made.counts["no values"] += 1  # memory that nobody wrote: whatever lies there
            _tried(op.op, sample)
            continue
        ways = [op.op] if number or op.get_inplace() is None else [op.op, op.get_inplace()]
        for way in ways:
            status, why = _tried(way, sample)
            made.counts[status] += 1
            if why:
                made.why[status] = why
    return made


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    torch.manual_seed(0)
    try:
        for number, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=False)):
            if number == _MOST_SAMPLES:
                return
            yield (sample.input, sample.args, sample.kwargs)
    except Exception:
        return  # the sampler itself has no kernel for this dtype


def _tried(way: Callable[..., Any], sample: Any) -> tuple[str, str]:
    """Return the status of one call, and its reason where there is one."""
    plain, refusal = _called(way, tree_map(_copy, sample))
    truth, _ = _called(way, tree_map(_up, sample))
    if getattr(way, "__name__", "") in _CASTS:
        truth = _up(sample[0])
    mode = ShadowMode()
    with Refusals(mode.refused, lambda: mode.clock), mode:
        result, error = _called(way, tree_map(_copy, sample))
    try:
        return _status(mode, (result, error), (plain, refusal), truth)
    finally:
        mode.shadows.close()


def _status(mode: ShadowMode, got: Any, plain: Any, truth: Any) -> tuple[str, str]:
    (result, error), (wanted, refusal) = got, plain
    if error is not None:
        return ("raises", "") if refusal is not None else ("crash", f"{type(error).__name__}: {error}"[:200])
    if refusal is None and not all(map(_same_bits, tree_leaves(result), tree_leaves(wanted))):
        return "changed", "the result has other bits"
    if mode.unreplayed:
        return "blind spot", sorted(mode.unreplayed)[0]
    pairs = list(zip(tree_leaves(result), tree_leaves(truth), strict=False))
    pairs = [(a, b) for a, b in pairs if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and has_shadow(a)]
    if mode.random:
        return "random", ""
    for tensor, exact in pairs:
        difference = _difference(mode.shadows.of(tensor), exact)
        if difference:
            return "wrong", difference
    if any(what == "unsupported" for what, _ in mode.events):
        return "unsupported", ""
    return ("exact" if pairs else "no values"), ""


def _called(way: Callable[..., Any], sample: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(1)
    first, args, kwargs = sample
    try:
        return way(first, *args, **kwargs), None
    except Exception as error:
        return None, error


def _copy(item: Any) -> Any:
    return item.detach().clone() if isinstance(item, torch.Tensor) else item


def _up(item: Any) -> Any:
    if isinstance(item, torch.dtype):
        return wide(item) if item in HALVES else item
    if not isinstance(item, torch.Tensor):
        return item
    return item.detach().to(wide(item.dtype), copy=True) if has_shadow(item) else item.detach().clone()


def _same_bits(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.layout != torch.strided:
        return True
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # dense, where a view of one element may have any stride
    return flat.copy_(tensor.resolve_neg().resolve_conj().reshape(-1)).view(torch.uint8)


def _difference(shadow: torch.Tensor, exact: torch.Tensor) -> str:
    """Return how a shadow differs from what float32 gives; "" where it does not."""
    if shadow.shape != exact.shape:
        return f"shape {tuple(shadow.shape)} for {tuple(exact.shape)}"
    a, b = shadow.to(torch.complex128), exact.to(torch.complex128)
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return "other elements are finite"
    a, b = a[finite], b[finite]
    scale = float(b.abs().max()) if b.numel() else 0.0
    off = float((a - b).abs().max()) if b.numel() else 0.0
    return f"off by {off:.3g} of {scale:.3g}" if off > _NEAR * scale + 1e-30 else ""


def survey(ops: Iterable[Any]) -> list[Outcome]:
    """Return the outcome of each operator in float16 and bfloat16."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [outcome(op, dtype) for op in ops for dtype in HALVES]


if __name__ == "__main__":
    import json, time

    start = time.time()
    names = sys.argv[2:]
    with open(sys.argv[1], "w") as file:
        for op in operators():
            if names and op.name not in names:
                continue
            t = time.time()
            for one in survey([op]):
                file.write(json.dumps([one.name, one.dtype, one.status, dict(one.counts), one.why, round(time.time() - t, 1)]) + "\n")
                file.flush()
    print(time.time() - start)
