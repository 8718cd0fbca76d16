"""Checks of the shadow run on a device: known faults are found where they are, and what is right is not accused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from overflow_lab.capture.devices import has_float64, widest
from overflow_lab.capture.precisions import Prepared, parse_precision, prepare
from overflow_lab.capture.shadow.call import Call
from overflow_lab.capture.shadow.dispatch import ShadowMode
from overflow_lab.capture.shadow.observe import Observer, ShadowRow
from overflow_lab.capture.shadow.run import run
from overflow_lab.gpu_check import patients
from overflow_lab.gpu_check.kernels import Failed, LeftOut
from overflow_lab.gpu_check.patients import Attention, Block, Drawing, Edge, Norm, stack
from overflow_lab.recording import BlindSpotRow, EventRow
from overflow_lab.subjects.module import from_module

_HALVES = ("float16", "bfloat16")
# More than float32 leaves of sums of some hundred terms, and far less than TF32 would (3e-4).
_FLOAT32 = 3e-5


def product_in_float16(device: torch.device) -> str:
    """A product that does not fit float16 is found in its module."""
    model = stack(Block(), Block(gain=400.0), Block())
    return _origin(model, patients.inputs(scale=100.0), device, "float16", "1.up", ("aten.mm", "aten.addmm"))


def square_in_float16(device: torch.device) -> str:
    """A square that does not fit float16, in a norm written by hand, is found though the norm's output is finite."""
    model = stack(Block(), Norm())
    return _origin(model, patients.inputs(scale=400.0), device, "float16", "1", ("aten.mul",))


def sum_in_bfloat16(device: torch.device) -> str:
    """A sum that float32 can hold and bfloat16 cannot is found."""
    return _origin(stack(Block(), Edge()), patients.inputs(), device, "bfloat16", "1", ("aten.add",))


def healthy(device: torch.device) -> str:
    """A healthy Llama has no fault in half precision, and every operation of it is replayed."""
    ids = {"input_ids": patients.tokens(2, 16)}
    for precision in _HALVES:
        rows = _observed(patients.llama(), ids, device, precision)
        _no_blind_spot(rows)
        if events := [f"{e.event} at {e.module} {e.op}" for e in rows if isinstance(e, EventRow)]:
            raise Failed(f"a healthy model is accused in {precision}: {events}")
    return "a Llama in float16 and bfloat16"


def attention(device: torch.device) -> str:
    """The shadow of an attention in one kernel is what float64 gives, in each way of calling it."""
    checked = 0
    for heads, masked in ((4, False), (2, False), (4, True)):
        for precision in _HALVES:
            torch.manual_seed(0)
            _follows(Attention(heads, masked=masked), patients.inputs(), device, precision)
            checked += 1
    return f"{checked} calls: causal, grouped, with a bias"


def products_in_float32(device: torch.device) -> str:
    """Shadows are in float32 and not in TF32: products and convolutions."""
    torch.manual_seed(0)
    convolution = stack(nn.Conv1d(5, 32, 3, padding=1), nn.Conv1d(32, 8, 3))
    for model in (stack(Block(), Block()), convolution):
        for precision in _HALVES:
            _follows(model, patients.inputs(), device, precision)
    return "2 products and 2 convolutions"


def random_numbers(device: torch.device) -> str:
    """What is drawn on the device is the shadow's too."""
    for precision in _HALVES:
        base, low, call = _prepared(Drawing(), patients.inputs(), device, precision)
        mode = ShadowMode()
        made = run(mode, low, base.model, call)
        output = made.output
        error = float((output.float() - mode.shadows.of(output)).norm() / output.float().norm())
        unreplayed = sorted(mode.unreplayed)
        mode.shadows.close()
        if unreplayed or error > 0.05:
            raise Failed(f"the shadow is off by {error:.3g} in {precision}; {unreplayed}")
    return "a dropout, draws like a tensor and out of nothing"


def float32_itself(device: torch.device) -> str:
    """A float32 program has its shadows in float64."""
    if not has_float64(device):
        raise LeftOut(f"{device.type} has no float64")
    base, _, call = _prepared(stack(Block(), Norm()), patients.inputs(), device, "float16")
    _no_blind_spot(Observer(base, base).observe(call, 0))
    return "shadows in float64"


def whole_scan(device: torch.device) -> str:
    """A scan as a user makes it gives the verdict that is known."""
    try:
        import pandas  # noqa: F401
    except ModuleNotFoundError as error:
        raise LeftOut("pandas is not installed") from error
    from overflow_lab.scan import scan

    torch.manual_seed(0)
    model = stack(Block(), Block(gain=400.0), Block())
    found = scan(model, (patients.inputs(scale=100.0),), device=str(device)).to_dict()["verdicts"]
    seen = {name: (row["verdict"], (row["origin"] or {}).get("module")) for name, row in found.items()}
    if seen != {"float16": ("overflow", "1.up"), "bfloat16": ("ok", None)}:
        raise Failed(f"the verdicts are {seen}")
    return "float16 overflow at 1.up, bfloat16 ok"


def _prepared(model: nn.Module, given: Any, device: torch.device, precision: str) -> tuple[Prepared, Prepared, Call]:
    """Return a model in float32 and in a precision on the device, and the call of it."""
    asked = given if isinstance(given, dict) else (given,)
    subject = from_module(model, asked, device=str(device))
    base, low = (prepare(subject, parse_precision(name)) for name in ("float32", precision))
    batch = next(iter(subject.batches))
    return base, low, Call(dict(batch.inputs), batch.positional)


def _observed(model: nn.Module, given: Any, device: torch.device, precision: str) -> Sequence[ShadowRow]:
    base, low, call = _prepared(model, given, device, precision)
    return Observer(base, low).observe(call, 0)


def _origin(
    model: nn.Module, given: Any, device: torch.device, precision: str, module: str, ops: tuple[str, ...]
) -> str:
    """Raise Failed unless the first harmful bad value is made by this module and one of these operations."""
    rows = _observed(model, given, device, precision)
    _no_blind_spot(rows)
    bad = [r for r in rows if isinstance(r, EventRow) and r.event == "bad" and (r.harmed or r.reaches_output)]
    if not bad or (bad[0].module, bad[0].op in ops) != (module, True):
        named = [f"{e.module} {e.op}" for e in bad]
        raise Failed(f"the origin in {precision} should be {module} {ops}, and these are named: {named}")
    return f"{precision}: {bad[0].module} {bad[0].op}, value {bad[0].value:.6g}"


def _no_blind_spot(rows: Sequence[ShadowRow]) -> None:
    if spots := [row.reason for row in rows if isinstance(row, BlindSpotRow)]:
        raise Failed(f"blind spots: {spots}")


def _follows(model: nn.Module, given: torch.Tensor, device: torch.device, precision: str) -> None:
    """Raise Failed unless the shadow of a model's output is what the CPU gives in float64."""
    base, low, call = _prepared(model, given, device, precision)
    mode = ShadowMode()
    made = run(mode, low, base.model, call)
    shadow = mode.shadows.of(made.output).to(widest(device)).cpu().double()
    truth = model.double()(given.double())
    model.float()
    error = float((shadow - truth).norm() / truth.norm())
    unreplayed = sorted(mode.unreplayed)
    mode.shadows.close()
    if unreplayed or error > _FLOAT32:
        raise Failed(f"the shadow of {type(model).__name__} in {precision} is off by {error:.2g}; {unreplayed}")
