"""The rows of generated answers: one by one as long as they are few, counted beyond that."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True)
class AnswerRow:
    """What `generate` answered for one input, beside float32's answer.

    `strategy` is "greedy" or "beam"; `status` "same", "changed" or "failed"; `first_difference` the index of the
    first generated token that differs; `tokens` and `reference_tokens` the lengths without padding. `margin` says by
    how much float32 prefers its own answer, in units of the root mean square of its scores: at that token in a greedy
    answer, over the whole in a beam search; None where it is unknown. Texts are stored on request only.
    """

    kind: ClassVar[str] = "answer"
    precision: str
    strategy: str
    batch: int
    sample: int
    status: str
    tokens: int
    reference_tokens: int
    first_difference: int | None = None
    error: str | None = None
    prompt: str | None = None
    text: str | None = None
    reference_text: str | None = None
    margin: float | None = None


@dataclass(frozen=True)
class AnswerCountRow:
    """The answers of one precision and search that have no row of their own, so that the file does not grow with them.

    `same`, `changed` and `failed` count them; `margins` counts floor(log2(margin)) of those that changed with a known
    margin, as in `OutputRow`.
    """

    kind: ClassVar[str] = "answers"
    precision: str
    strategy: str
    same: int = 0
    changed: int = 0
    failed: int = 0
    margins: Mapping[int, int] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str]:
        """Rows with the same key are of the same answers and add up."""
        return (self.precision, self.strategy)

    @property
    def total(self) -> int:
        """How many answers it counts."""
        return self.same + self.changed + self.failed

    def __add__(self, other: AnswerCountRow) -> AnswerCountRow:
        """Return the row of both, as if recorded at once."""
        return dataclasses.replace(
            self,
            same=self.same + other.same,
            changed=self.changed + other.changed,
            failed=self.failed + other.failed,
            margins=dict(sorted((Counter(self.margins) + Counter(other.margins)).items())),
        )
