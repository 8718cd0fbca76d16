"""Draws the stages of a scan on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Bars:
    """A progress bar for the stage at work; nothing where standard error is no terminal, and nothing is left of it."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)
        self._task: TaskID | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def stage(self, name: str, total: int | None = None) -> None:
        """Begin a stage: the bar of the one before goes."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=total)

    def advance(self) -> None:
        """One step is done."""
        if self._task is not None:
            self._progress.advance(self._task)


@contextlib.contextmanager
def watched(*, quiet: bool) -> Iterator[Bars]:
    """Yield bars for a run on standard error, where also goes what the model itself may print.

    The first stage is the import of torch, which takes seconds: import it inside.
    """
    with Bars(Console(stderr=True), quiet=quiet) as bars, contextlib.redirect_stdout(sys.stderr):
        bars.stage("importing torch")
        yield bars
