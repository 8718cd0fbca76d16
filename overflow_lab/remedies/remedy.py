"""What every remedy is: a change that may mend a finding, and how it is applied, pasted and saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from overflow_lab.subjects import Subject

KINDS = ("rescale", "island", "clamp", "precision", "penalty")


@dataclass(frozen=True)
class Remedy:
    """A change that may mend what breaks in `precision`; whether it does, only a second scan tells (see `proof`).

    `title` is an imperative sentence without its full stop. `mend(subject)` returns the subject whose loads give mended
    copies; the given one, and whatever belongs to the user, is not touched. `runs_in` is the precision in which the
    mended subject runs: another one only for the kind "precision". `members` are the modules (or "module: operation")
    that are changed; `snippets` are texts to paste, by what they are for; `notes` say what it costs and what it cannot
    do. `save(folder)` writes a checkpoint that transformers loads without overflow-lab, where there can be one. `runs`
    counts what its search took.
    """

    kind: str
    title: str
    precision: str
    mend: Callable[[Subject], Subject]
    runs_in: str = ""
    members: tuple[str, ...] = ()
    snippets: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    save: Callable[[Path], None] | None = None
    runs: int = 0

    def __post_init__(self) -> None:
        if not self.runs_in:
            object.__setattr__(self, "runs_in", self.precision)


@dataclass(frozen=True)
class Found:
    """What a search gave: remedies, the best first, and where there are none the reason, a sentence or nothing."""

    remedies: tuple[Remedy, ...] = ()
    reason: str = ""
