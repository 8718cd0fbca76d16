"""How long work tells what it is doing; the command line draws it, the library by itself prints nothing."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Receives the stages of a scan."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Say that a stage of `total` steps begins; None where their number is not known."""

    def advance(self) -> None:
        """Say that one step of the stage is done."""


class Silent:
    """Says nothing."""

    def stage(self, name: str, total: int | None = None) -> None:
        """Do nothing."""

    def advance(self) -> None:
        """Do nothing."""
