"""Precisions: their names, and how a subject's model and inputs are brought into one, as a user would do it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS, get_format
from overflow_lab.recording import PrecisionRow

if TYPE_CHECKING:
    import torch
    from torch import nn

    from overflow_lab.subjects import Subject

REFERENCE = "float32"
LOW = ("float16", "bfloat16")
FORECAST = "forecast"
_EMULATED = "products of many rows in float32, rounded once, as a GPU does (--kernels native: the CPU's own)"
_WAYS = {"": "loader", "-to": "to", "-autocast": "autocast"}


@dataclass(frozen=True)
class Precision:
    """How a run is executed: `dtype` names the format, `cast` is "none", "loader", "to" or "autocast"."""

    name: str
    dtype: str
    cast: str

    def torch_dtype(self) -> torch.dtype:
        """Return the dtype as torch has it."""
        import torch

        return getattr(torch, self.dtype)  # type: ignore[no-any-return]


def parse_precision(name: str) -> Precision:
    """Return the precision of a name such as "fp16", "bfloat16", "float16-to" or "bf16-autocast".

    Raises UsageError for anything else.
    """
    short, dash, way = name.strip().lower().partition("-")
    try:
        dtype = get_format(short).name
    except UsageError:
        dtype = ""
    cast = _WAYS.get(dash + way)
    if dtype == REFERENCE and not dash:
        return Precision(REFERENCE, REFERENCE, "none")
    if dtype in LOW and cast is not None:
        return Precision(dtype + dash + way, dtype, cast)
    runnable = ", ".join([REFERENCE, *(low + way for way in _WAYS for low in LOW), FORECAST])
    more = f" ({dtype} is shown as a forecast in every report)" if dtype in FORMATS and not dash else ""
    raise UsageError(f"unknown precision {name!r}{more}; choose among {runnable}.")


def parse_precisions(names: Iterable[str]) -> tuple[Precision, ...]:
    """Return the distinct precisions in the order asked for.

    float32 always runs; where it is asked for, it is judged too, against shadows in float64. "forecast" stands for no
    precision: what float32's run tells of all formats is in every recording.
    """
    wanted = [name for name in names if name.strip().lower() != FORECAST]
    return tuple({precision.name: precision for precision in map(parse_precision, wanted)}.values())


@dataclass
class Prepared:
    """A model brought into a precision: call it inside `context()` with the inputs from `inputs(...)`.

    `emulated` says that the float16 products of its plain forward are done in float32 and rounded (see `emulated`).
    """

    precision: Precision
    model: nn.Module
    row: PrecisionRow
    cast_inputs: torch.dtype | None
    device_type: str
    emulated: bool = False

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """Return the autocast of an autocast precision, otherwise a context without it, whatever is around.

        In float32 no TF32 takes its place.
        """
        import torch

        from overflow_lab.capture.devices import exact_float32

        contexts = contextlib.ExitStack()
        if self.precision.cast == "autocast":
            contexts.enter_context(torch.autocast(self.device_type, dtype=self.precision.torch_dtype()))
        elif torch.is_autocast_enabled(self.device_type):
            contexts.enter_context(torch.autocast(self.device_type, enabled=False))
        if self.precision.name == REFERENCE:
            contexts.enter_context(exact_float32(self.device_type))
        return contexts

    def inputs(self, value: Any) -> Any:
        """Return the nested inputs with floating tensors cast as the weights are, all tensors detached copies.

        Where the weights are float32, inputs narrower than that are widened and wider ones left as they are.
        """
        import torch

        from overflow_lab.subjects.containers import map_tensors

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            dtype = self.cast_inputs or (torch.float32 if tensor.itemsize < 4 else tensor.dtype)
            return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

        return map_tensors(cast, value)


def prepare(subject: Subject, precision: Precision) -> Prepared:
    """Load the model in a precision, as `from_pretrained(dtype=...)`, `.to(dtype)` or autocast would have it.

    Raises UsageError where a model that is partly on disk is to be cast by `.to`.
    """
    from overflow_lab.capture.emulated import is_emulated
    from overflow_lab.subjects.offload import is_offloaded

    dtype = None if precision.cast in ("none", "autocast") else precision.torch_dtype()
    model = subject.load(dtype if precision.cast == "loader" else None)
    if precision.cast == "to":
        if is_offloaded(model):
            raise UsageError(f"{precision.name} casts a model in memory, and this one is partly on disk; leave it out.")
        model = model.to(dtype)
    if subject.adapt is not None and precision.name != REFERENCE:
        model = subject.adapt(model, precision.name)
    kept = kept_in_float32(model) if dtype is not None else ()
    wide = wide_buffers(model) if precision.cast == "loader" and subject.loader_casts else ()
    device = device_of(model).type
    emulated = is_emulated(subject.kernels, precision.dtype, device)
    detail = _detail(precision, kept, wide) + (f"; {_EMULATED}" if emulated else "")
    row = PrecisionRow(precision.name, precision.dtype, precision.cast, kept, detail)
    return Prepared(precision, model, row, dtype, device, emulated)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter or buffer, the CPU where it has none.

    Of an offloaded model it is the device on which it is run.
    """
    import torch

    from overflow_lab.subjects.offload import execution_device

    tensors = itertools.chain(model.parameters(), model.buffers())
    found = next((tensor.device for tensor in tensors), torch.device("cpu"))
    return found if found.type != "meta" else execution_device(model) or found


def kept_in_float32(model: nn.Module) -> tuple[str, ...]:
    """Return the modules whose own floating parameters are still float32, as the loader's keep-lists leave them."""
    import torch

    return tuple(
        path
        for path, module in model.named_modules()
        if any(p.dtype == torch.float32 for p in module.parameters(recurse=False))
    )


def wide_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the float32 buffers that `.to(dtype)` would cast, such as rotary frequencies made anew by a loader."""
    import torch

    return tuple(name for name, buffer in model.named_buffers() if buffer.dtype == torch.float32)


def _detail(precision: Precision, kept: tuple[str, ...], wide: tuple[str, ...] = ()) -> str:
    """Return one sentence on how the precision was executed."""
    if precision.cast == "autocast":
        return f"float32 weights under torch.autocast(dtype={precision.dtype})"
    if precision.cast == "none":
        return "float32 throughout: the reference"
    how = "cast by the model's loader" if precision.cast == "loader" else f"cast by .to({precision.dtype})"
    parts = [how, f"{len(kept)} modules stayed in float32"] if kept else [how]
    if wide:
        names = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in wide))
        count = "1 buffer" if len(wide) == 1 else f"{len(wide)} buffers"
        parts.append(f"{count} ({names}) stayed in float32, which -p {precision.dtype}-to casts")
    return "; ".join(parts)
