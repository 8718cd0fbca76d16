"""What analysis finds, as frozen values: findings, verdicts and the diagnosis that holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEVERITIES = ("none", "warning", "error")
VERDICTS = ("ok", "overflow", "nan", "underflow", "precision", "unsupported")


@dataclass(frozen=True)
class Origin:
    """Where a bad value was made: the innermost module whose own code made it, and the operation where it is known."""

    module: str
    op: str | None = None


@dataclass(frozen=True)
class Link:
    """One link of an explanation: at `module` in `op` (None where it is of no module) happens what `text` says.

    `role` is "effect" (what reaches the output), "carrier" (passed it on), "harm" (made a wrong finite value of it),
    "absorbed" (made the right one), "amplifier", "origin" or "cause" (what the origin was given). `source` is the line
    of code, where it is known.
    """

    role: str
    text: str
    module: str | None = None
    op: str | None = None
    source: str = ""


@dataclass(frozen=True)
class Effect:
    """What reaches the output of one precision, against float32.

    `nonfinite` and `changed_decisions` are shares from 0 to 1; `relative_error` is of the root mean squares; `kl` in
    nats for each decision; `answers` and `changed_answers` count generated answers. None where nothing was compared.
    `tied_decisions` and `tied_answers` are those among the changed ones that float32 itself decides by less than the
    tolerated rounding of its scores: near ties, which any rounding may flip. `evened_choices` is the share of rows of
    scores whose choice changed since the low precision gives both choices the very same score, 0 where there are too
    few rows to tell. `noise_floor` is the relative error that one random rounding of the weights alone makes, and
    `conditioned` says that it changes about as many of the model's decisions as the precision does, all of whose error
    comes of those.
    """

    nonfinite: float | None = None
    relative_error: float | None = None
    changed_decisions: float | None = None
    kl: float | None = None
    answers: int = 0
    changed_answers: int = 0
    failed_answers: int = 0
    tied_decisions: float | None = None
    tied_answers: int = 0
    evened_choices: float = 0.0
    noise_floor: float | None = None
    conditioned: bool = False

    @property
    def compared(self) -> bool:
        """Whether anything of the output was compared: without it nothing is proven."""
        return self.nonfinite is not None or bool(self.answers)

    @property
    def overruled_decisions(self) -> float:
        """The share of decisions that changed although float32 was clear about them."""
        return (self.changed_decisions or 0.0) - (self.tied_decisions or 0.0)

    @property
    def overruled_answers(self) -> int:
        """The answers that changed although float32 was clear about them; those that failed are counted apart."""
        return self.changed_answers - self.tied_answers

    def to_dict(self) -> dict[str, Any]:
        """Return the effect as the verdict's "output" in JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Finding:
    """One diagnosed fault: what kind, by which mechanism, where, how bad, and the numbers it rests on.

    `chain` explains it, from what reaches the output back to the origin.
    """

    precision: str
    kind: str
    mechanism: str
    origin: Origin | None
    severity: str
    message: str
    value: float | None = None
    limit: float | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    chain: tuple[Link, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as in JSON."""
        return {
            **vars(self),
            "origin": None if self.origin is None else dict(vars(self.origin)),
            "evidence": dict(self.evidence),
            "chain": [dict(vars(link)) for link in self.chain],
        }


@dataclass(frozen=True)
class Verdict:
    """The judgement on one precision. `reason` is one sentence with the number, `advice` what to do next.

    `chain` is that of the finding which the verdict names.
    """

    precision: str
    verdict: str
    severity: str
    reason: str
    advice: str = ""
    origin: Origin | None = None
    mechanism: str | None = None
    value: float | None = None
    limit: float | None = None
    effect: Effect = field(default_factory=Effect)
    chain: tuple[Link, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as in the JSON contract."""
        return {
            "verdict": self.verdict,
            "severity": self.severity,
            "origin": None if self.origin is None else dict(vars(self.origin)),
            "mechanism": self.mechanism,
            "value": self.value,
            "limit": self.limit,
            "output": self.effect.to_dict(),
            "reason": self.reason,
            "advice": self.advice,
            "chain": [dict(vars(link)) for link in self.chain],
        }


@dataclass(frozen=True)
class Diagnosis:
    """All verdicts, by precision in the order scanned, and all findings, the most severe first."""

    verdicts: Mapping[str, Verdict]
    findings: tuple[Finding, ...] = ()

    @property
    def worst(self) -> str:
        """The highest severity of any verdict."""
        return max((v.severity for v in self.verdicts.values()), key=SEVERITIES.index, default="none")
