"""The row up to which a recording is whole: from there an interrupted scan goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True)
class ProgressRow:
    """How far a scan has come: all that its first `batches` batches gave, in all precisions, stands before this row.

    `inputs` are the inputs in these batches and `digest` the SHA-256 of their tensors, by which a scan that goes on
    knows that it is given the same ones. `state` holds what else it has to know: clocks, what has been said once, what
    has been looked at from inside. It belongs to no site and is no part of `Recording.rows`.
    """

    kind: ClassVar[str] = "progress"
    batches: int
    inputs: int
    digest: str
    state: Mapping[str, Any] = field(default_factory=dict)
