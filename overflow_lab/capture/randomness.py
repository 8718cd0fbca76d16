"""Random state: every run draws the same numbers, and the caller's state is as it was."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

from overflow_lab.capture.devices import kept_generators


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Restore the states of torch's (all devices), numpy's and Python's generators on the way out."""
    python, legacy = random.getstate(), np.random.get_state()
    with kept_generators():
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)


def reseed(seed: int = 0) -> None:
    """Seed torch's, numpy's and Python's generators, so that two runs of one batch draw alike."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
