"""How a run of somebody's model may end early, and what is said then."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from overflow_lab.errors import ScanInterrupted


@contextlib.contextmanager
def named_end(kept: Path | None = None) -> Iterator[None]:
    """Turn Ctrl-C, the SIGTERM of a job that runs out of time, and a model's exit into an end that names `kept`."""
    before = (
        signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
    )
    try:
        yield
    except KeyboardInterrupt:
        raise ScanInterrupted("interrupted.", _written(kept)) from None
    except SystemExit as error:  # not our exit, and not our exit code
        message = f"the model ended the process (sys.exit({error.code!r})); take that out and try again."
        raise ScanInterrupted(message, _written(kept)) from error
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _written(kept: Path | None) -> str | None:
    return str(kept) if kept is not None and kept.exists() else None
