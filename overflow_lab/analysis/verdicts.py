"""One verdict for each precision: what its first finding says, and how severe it is by what reaches the output."""

from __future__ import annotations

import dataclasses

from overflow_lab.analysis.chain import chain
from overflow_lab.analysis.effects import effect, is_wrong
from overflow_lab.analysis.findings import findings
from overflow_lab.analysis.index import REFERENCE, Index, index
from overflow_lab.analysis.mechanisms import MECHANISMS
from overflow_lab.analysis.numbers import against, module_name, percent
from overflow_lab.analysis.results import SEVERITIES, Diagnosis, Effect, Finding, Verdict
from overflow_lab.recording import FailureRow, Recording, RunRow
from overflow_lab.tolerances import tolerance


def analyze(recording: Recording) -> Diagnosis:
    """Return the diagnosis of a recording: a verdict for each precision that was judged, and all findings.

    A precision that an interrupted scan did not come to has no verdict.
    """
    found = index(recording)
    judged = [name for name in found.precisions if name != REFERENCE or name in found.operations]
    verdicts, everything = {}, []
    for name in judged:
        reached = effect(recording, name, found.format_of(name))
        severity = "error" if is_wrong(reached, found.format_of(name)) or _failed(found, name) else "warning"
        made = findings(found, name, reached, severity)
        if not made and not found.was_run(name):
            continue  # a scan that ended early has nothing to say about it
        made = [dataclasses.replace(finding, chain=chain(found, finding, reached)) for finding in made]
        verdicts[name] = _verdict(found, name, reached, made)
        everything += made
    everything.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Diagnosis({name: _advised(verdict, verdicts) for name, verdict in verdicts.items()}, tuple(everything))


def _failed(found: Index, precision: str) -> bool:
    """Return whether the model raised in this precision."""
    return any(row.precision == precision for row in found.recording.of(FailureRow))


def _verdict(found: Index, precision: str, reached: Effect, made: list[Finding]) -> Verdict:
    """Return the verdict of the first fault; a flushed weight alone, with a right output, is none."""
    faults = [
        f
        for f in made
        if f.kind != "underflow" or f.mechanism == "flushed-to-zero" or is_wrong(reached, found.format_of(precision))
    ]
    if not faults:
        return Verdict(precision, "ok", "none", _fine(found, precision, reached), effect=reached)
    first = faults[0]
    severity = "error" if any(f.severity == "error" for f in faults) else "warning"
    return Verdict(
        precision,
        first.kind,
        severity,
        first.message,
        origin=first.origin,
        mechanism=first.mechanism,
        value=first.value,
        limit=first.limit,
        effect=reached,
        chain=first.chain,
    )


def _fine(found: Index, precision: str, reached: Effect) -> str:
    """Return the sentence of a precision that is right."""
    ran = [row for row in found.recording.of(RunRow) if row.precision == precision]
    inputs = max((row.inputs for row in ran), default=0)
    parts = []
    nan = sum(row.range.nan for row in found.outputs(precision))
    if nan and precision != REFERENCE:
        parts.append(f"its output holds NaN ({nan:,} values), as float32's own does: see the verdict on float32")
    if reached.relative_error is not None:
        parts.append(f"the output is within {percent(reached.relative_error)} of {against(precision)}'s")
        if reached.conditioned and reached.relative_error > tolerance(found.format_of(precision)):
            moved = f"one random rounding of its weights moves it by {percent(reached.noise_floor or 0.0)}"
            parts.append(f"which is the model's own conditioning: {moved}, by as many decisions")
    if reached.answers:
        same = reached.answers - reached.changed_answers - reached.failed_answers
        ties = f" ({reached.tied_answers} others part at near ties)" if reached.tied_answers else ""
        parts.append(f"{same} of {reached.answers} answers are the same{ties}")
    if not reached.compared:
        parts.append("but nothing of its output could be compared: see the blind spots")
    first = f"nothing breaks on {inputs} inputs" if nan else f"everything is finite on {inputs} inputs"
    return ", ".join([first, *parts]) + "."


def _advised(verdict: Verdict, all_verdicts: dict[str, Verdict]) -> Verdict:
    """Return the verdict with what to do next; another precision is named only where this scan found it ok."""
    if verdict.verdict == "ok":
        return verdict
    good = [name for name, other in all_verdicts.items() if other.verdict == "ok"]
    instead = f"run in {good[0]}, which is ok on the same inputs" if good else ""
    where = module_name(verdict.origin.module) if verdict.origin else "the model"
    own = {
        "overflow": f"keep {where} in float32 and scan again",
        "nan": f"look at {where}, or keep it in float32 and scan again",
        "underflow": f"scale the values at {where} up, or keep it in float32 and scan again",
        "precision": f"keep {where} in float32 and scan again",
        "unsupported": f"cast to float32 around {where}",
    }[verdict.verdict]
    if verdict.mechanism in MECHANISMS:
        own = f"for {where}: {MECHANISMS[verdict.mechanism].ways_out}"
    advice = "; or ".join(part for part in (instead, own) if part) + "."
    return Verdict(**{**vars(verdict), "advice": advice[0].upper() + advice[1:]})
