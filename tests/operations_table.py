"""Runs torch's operator samples through the shadow run; `python -m tests.operations_table` writes the page of them."""

from __future__ import annotations

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
STATUSES = (
    "no values",
    "raises",
    "exact",
    "random",
    "unsupported",
    "not mended",
    "blind spot",
    "wrong",
    "changed",
    "crash",
)
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
            status, why = _tried(way, sample, op.name if op.name in _CASTS else None)
            made.counts[status] += 1
            if why:
                made.why[status] = " ".join(why.split())
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


def _tried(way: Callable[..., Any], sample: Any, cast: str | None = None) -> tuple[str, str]:
    """Return the status of one call, and its reason where there is one."""
    plain, refusal = _called(way, tree_map(_copy, sample))
    truth, failure = _called(way, tree_map(_up, sample)) if cast is None else (_up(sample[0]), None)
    mode = ShadowMode()
    with Refusals(mode.refused, lambda: mode.clock), mode:
        result, error = _called(way, tree_map(_copy, sample))
    try:
        if error is not None and refusal is not None and failure is None:
            return "not mended", f"{type(error).__name__}: {error}"[:200]
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
    if any(what == "unsupported" for what, _ in mode.notes.events):
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


def page(outcomes: list[Outcome]) -> str:
    """Return the page about the operations that the shadow run replays, as Markdown."""
    lines = [_HEAD.format(version=torch.__version__.partition("+")[0], count=len({one.name for one in outcomes}))]
    lines += ["| what became of it | float16 | bfloat16 |", "|---|--:|--:|"]
    for status, meaning in _MEANINGS.items():
        counts = [sum(o.status == status and o.dtype == name for o in outcomes) for name in ("float16", "bfloat16")]
        lines.append(f"| {meaning} | {counts[0]} | {counts[1]} |")
    for status, title in _LISTED.items():
        lines += ["", f"## {title}", "", *_listed(outcomes, status)]
    return "\n".join(lines) + "\n"


def _listed(outcomes: list[Outcome], status: str) -> Iterator[str]:
    dtypes: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for one in outcomes:
        if one.status == status:
            dtypes.setdefault(one.name, []).append(one.dtype)
            reasons[one.name] = one.why.get(status, "").replace("|", "/")
    if status in ("blind spot", "not mended", "wrong", "changed", "crash"):
        yield from (f"- `{name}` ({', '.join(dtypes[name])}): {reasons[name]}" for name in dtypes)
    else:
        yield ", ".join(f"`{name}`" + ("" if len(found) == 2 else f" ({found[0]})") for name, found in dtypes.items())
    if not dtypes:
        yield "None."


_HEAD = """# Operations that the shadow run replays

Written by `python -m tests.operations_table`: the CPU samples of the {count} operators in torch {version}'s own test
database (at most 24 of each), as functions and in place, run in half precision with their shadows. A shadow is *equal*
when it is what the same call gives in float32, to within 2e-5 of the largest value. An operator counts as its worst
sample.
"""
_MEANINGS = {
    "exact": "replayed, and the shadow is equal",
    "random": "draws random numbers, which are the shadow's too",
    "unsupported": "no kernel for the dtype: a finding, done in float32, and the shadow is equal",
    "no values": "gives no floating values (or memory that was not written yet)",
    "raises": "raises, as it does without us and in float32",
    "not mended": "raises as it does without us, though float32 would do it",
    "blind spot": "a blind spot: reported, and the shadow begins anew",
    "wrong": "the shadow is not equal",
    "changed": "the result has other bits than without us",
    "crash": "raises where it would not without us",
}
_LISTED = {
    "blind spot": "Blind spots",
    "not mended": "Raising in half precision only",
    "wrong": "Unequal",
    "changed": "Changed",
    "crash": "Crashes",
    "random": "Random",
    "unsupported": "Without a kernel in half precision on this CPU",
}


if __name__ == "__main__":
    PAGE.write_text(page(survey(operators())), encoding="utf-8")
