"""Dispatch modes of others: what we do with a tensor in a hook is no operation of the program, and none may see it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.utils import _python_dispatch


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no TorchDispatchMode is active; a mode of the model's might change what we measure."""
    return _python_dispatch._disable_current_modes() if is_in_mode() else contextlib.nullcontext()


def is_in_mode() -> bool:
    """Return whether a TorchDispatchMode is active that is not known to leave what hooks do as it is."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return not all(getattr(mode, "ours", False) for mode in _python_dispatch._get_current_dispatch_mode_stack())
