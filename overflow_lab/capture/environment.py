"""The environment block: what a maintainer asks for first, without anything that names the user or the machine."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from overflow_lab import __version__

_PACKAGES = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "accelerate")


def environment(device: str) -> dict[str, Any]:
    """Return versions, processor and device as JSON-ready facts."""
    import torch

    facts: dict[str, Any] = {
        "overflow-lab": __version__,
        "python": platform.python_version(),
        "system": platform.system(),
    }
    facts |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    if device.startswith("cuda"):
        facts |= {"cuda": torch.version.cuda, "triton": _version("triton")}
    facts |= {"device": device, "processor": _processor(device), "threads": torch.get_num_threads()}
    facts["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
    return facts


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor(device: str) -> str:
    """Return the name of the accelerator, or of the processor's architecture."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return torch.cuda.get_device_name(torch.device(device))
    return platform.machine()
