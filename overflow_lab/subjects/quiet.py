"""Load with transformers, and leave its settings, the warnings and the seed as they were."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SEED = 20
# transformers asks a public service to convert a repository that has pickles only, unless this is set.
NO_CONVERSION = "DISABLE_SAFETENSORS_CONVERSION"


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Be `quiet`, and give weights that are drawn at random a fixed seed; torch's generator is afterwards as before."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # torch.manual_seed would reach the accelerators, too
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log, progress bars and warnings, in loading and in `generate`, and say nothing about users.

    Telemetry is off: the hub is told versions, as with every request, and not what is loaded, by what and where.
    Verbosity, bars, warning filters, environment and the choice about telemetry are afterwards as before.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging as settings

    verbosity, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    no_hub_bars = are_progress_bars_disabled()
    hub_verbosity = huggingface_hub.logging.get_verbosity()
    conversion = os.environ.get(NO_CONVERSION)
    telemetry_off = constants.HF_HUB_DISABLE_TELEMETRY  # read from the environment once, at import: too late to set it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ[NO_CONVERSION] = "1"
        constants.HF_HUB_DISABLE_TELEMETRY = True
        settings.set_verbosity(logging.CRITICAL + 1)
        settings.disable_progress_bar()
        huggingface_hub.logging.set_verbosity(logging.CRITICAL + 1)
        try:
            yield
        finally:
            constants.HF_HUB_DISABLE_TELEMETRY = telemetry_off
            settings.set_verbosity(verbosity)
            if bars:
                settings.enable_progress_bar()
            if no_hub_bars:
                huggingface_hub.utils.disable_progress_bars()
            else:
                huggingface_hub.utils.enable_progress_bars()
            huggingface_hub.logging.set_verbosity(hub_verbosity)
            if conversion is None:
                del os.environ[NO_CONVERSION]
            else:
                os.environ[NO_CONVERSION] = conversion
