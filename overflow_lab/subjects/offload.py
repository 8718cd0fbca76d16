"""Models whose weights lie partly on disk (accelerate's offloading): loaded when a module's forward begins, then freed.

transformers and accelerate do it: `from_pretrained(device_map="auto", max_memory=...)` reads what does not fit straight
from the checkpoint's safetensors files. Until its module is called, such a parameter is on the meta device, and a hook
of accelerate's on the module knows where its values are.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from overflow_lab.errors import UsageError

# Of the memory that is free when a model is loaded, its weights may take so much; another precision is loaded later.
SHARE = 0.4
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", re.IGNORECASE)

Resolve = Callable[[str, torch.Tensor], torch.Tensor]


def is_offloaded(model: torch.nn.Module) -> bool:
    """Return whether some weights of a model are not in memory and a hook of accelerate's brings them."""
    return any(True for _ in _offloading(model))


def resolver(model: torch.nn.Module) -> Resolve:
    """Return what gives a parameter or buffer, by its name, with its values: read now, if they lie on disk."""
    places = [(f"{path}." if path else "", hook) for path, hook in _offloading(model)]

    def values(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        found = [(prefix, hook) for prefix, hook in places if name.startswith(prefix)]
        for prefix, hook in sorted(found, key=lambda pair: -len(pair[0])):  # the innermost knows it
            try:
                return hook.weights_map[name.removeprefix(prefix)]  # type: ignore[no-any-return]
            except KeyError:
                continue
        return tensor

    return values


def cast_offloaded(model: torch.nn.Module, dtype: torch.dtype | None) -> None:
    """Cast a copy of an offloaded model: what is in memory now, what is on disk as it is read; None is to float32."""
    wide_or_narrow = (torch.float16, torch.bfloat16, torch.float64)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None:
            return tensor.float() if tensor.dtype in wide_or_narrow else tensor
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    model._apply(cast)
    for _, hook in _offloading(model):
        hook.weights_map = _Cast(hook.weights_map, cast)


class _Cast(Mapping[str, torch.Tensor]):
    """Weights that are cast as they are read."""

    def __init__(self, weights: Mapping[str, torch.Tensor], cast: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._weights, self._cast = weights, cast

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._cast(self._weights[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def execution_device(model: torch.nn.Module) -> torch.device | None:
    """Return where the first offloaded module of a model is run; None where nothing is offloaded."""
    for _, hook in _offloading(model):
        device = hook.execution_device
        return torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cpu")
    return None


def _offloading(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path, hook) of each module whose weights accelerate brings and takes away."""
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            if getattr(one, "offload", False) and getattr(one, "weights_map", None) is not None:
                yield path, one


# ---- loading ----


def loading_options(device_map: str | None, max_memory: str | None, device: torch.device) -> dict[str, Any]:
    """Return what `from_pretrained` is given for weights beyond `max_memory` of the CPU's to stay on disk.

    None for `max_memory` is a share of what is free now. Raises UsageError for a map or a size that is none, and
    where accelerate is not installed.
    """
    if device_map is None:
        if max_memory is not None:
            raise UsageError("--max-memory is about what stays on disk; add --device-map auto.")
        return {}
    if device_map != "auto":
        raise UsageError(f"the device map is {device_map!r}; choose auto, or leave it out.")
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError(
            "--device-map needs accelerate, which is not installed; pip install 'overflow-lab[accelerate]'"
        )
    from accelerate.utils import get_max_memory

    found = get_max_memory()
    kept = {key: size for key, size in found.items() if key != "cpu" and device.type != "cpu"}
    room = int(SHARE * found["cpu"]) if max_memory is None else size_of(max_memory)
    return {"device_map": "auto", "max_memory": {**kept, "cpu": max(room, 1)}}


def size_of(text: str) -> int:
    """Return the bytes of a size such as "500MB", "1.5GiB" or "0". Raises UsageError for anything else."""
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UsageError(f"{text!r} is no size; write it like 4GB, 500MB or 0.")
    return int(float(found[1]) * _UNITS[(found[2] or "").upper()])


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for weights that have to be written again to be read one by one (pickles, renamed weights)."""
    return tempfile.TemporaryDirectory(prefix="overflow-lab-weights-")


def keep_while(model: torch.nn.Module, folder: tempfile.TemporaryDirectory[str]) -> None:
    """Remove a folder when a model is gone, and not before."""
    weakref.finalize(model, folder.cleanup)
