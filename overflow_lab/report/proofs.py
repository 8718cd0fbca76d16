"""What a remedy did, before and after: shown in the report where there is something to show."""

from __future__ import annotations

from dataclasses import dataclass

from overflow_lab.analysis.results import Verdict
from overflow_lab.report import text
from overflow_lab.report.summary import effects, first_sentence


@dataclass(frozen=True)
class Proof:
    """A remedy that was applied to a copy and scanned again: what it changed, and the verdicts before and after."""

    remedy: str
    before: Verdict
    after: Verdict


@dataclass(frozen=True)
class ProofSide:
    """One side of a proof, written for reading."""

    severity: str
    headline: str
    reason: str
    effects: tuple[str, ...]


@dataclass(frozen=True)
class ProofLine:
    """One proof, written for reading."""

    precision: str
    remedy: str
    before: ProofSide
    after: ProofSide


def proof_line(proof: Proof) -> ProofLine:
    """Return a proof as the page shows it."""
    return ProofLine(
        text.visible(proof.before.precision, 60),
        text.sentence(proof.remedy),
        _side(proof.before),
        _side(proof.after),
    )


def _side(verdict: Verdict) -> ProofSide:
    return ProofSide(
        verdict.severity,
        text.headline(verdict.verdict, verdict.severity),
        first_sentence(text.sentence(verdict.reason)),
        tuple(effects(verdict.effect)),
    )
