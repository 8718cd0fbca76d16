"""Dispatch modes of others: what we do with a tensor in a hook is no operation of the program, and none may see it."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils import _python_dispatch


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which no TorchDispatchMode is active; a mode of the model's might change what we measure."""
    if not _python_dispatch._get_current_dispatch_mode_stack():
        return contextlib.nullcontext()
    return _python_dispatch._disable_current_modes()
