"""The proof of a remedy: a second scan of the mended model, on the inputs of the search and on others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overflow_lab.analysis import Verdict, rooms
from overflow_lab.analysis.effects import is_wrong
from overflow_lab.capture.precisions import parse_precision
from overflow_lab.errors import OverflowLabError, one_line
from overflow_lab.formats import FORMATS
from overflow_lab.progress import Progress
from overflow_lab.recording import ProofRow
from overflow_lab.remedies import measure
from overflow_lab.remedies.holdout import Split, samples
from overflow_lab.remedies.remedy import Remedy
from overflow_lab.scan import Scan, scan_subject
from overflow_lab.tolerances import tolerance

# Kinds that change the weights: what they do in float32 must be shown, too.
_CHANGES_WEIGHTS = frozenset({"rescale", "penalty"})
# A rescale keeps the function; trained weights are other ones, and may move the decisions by so many nats.
SAME_FUNCTION, NEAR_FUNCTION = 1e-5, 0.02
# Modules whose headroom is shown one by one.
_TIGHTEST = 24


@dataclass(frozen=True)
class _Proof:
    remedy: Remedy
    split: Split
    found: Scan
    options: Mapping[str, Any]
    progress: Progress | None


def prove(
    remedy: Remedy,
    split: Split,
    found: Scan,
    *,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> ProofRow:
    """Apply a remedy to copies, scan again, and return what that showed; `found` is the scan before.

    Proven is what makes the verdict of its precision ok on both sets of inputs, keeps the float32 function where it
    changes weights, and, for a clamp, which leaves an error by design, an output within the format's own rounding and
    no clear decision changed. Whatever the mended model raises makes the remedy unproven, with the reason.
    """
    before = found.verdicts[remedy.precision]
    try:
        return _proven(_Proof(remedy, split, found, options or {}, progress), before)
    except MemoryError:
        raise
    except Exception as error:  # the user's model may raise anything
        reason = str(error) if isinstance(error, OverflowLabError) else one_line(error)
        return _row(remedy, before, None, None, reason=f"its second scan ended early: {reason}")


def _proven(proof: _Proof, before: Verdict) -> ProofRow:
    remedy = proof.remedy
    mended = remedy.mend(proof.split.search)
    after = _scan(proof, mended)
    held = None if proof.split.held is None else _scan(proof, remedy.mend(proof.split.held))
    figures = _figures(proof, mended, after)
    verdict = after.verdicts[remedy.runs_in]
    beside = None if held is None else held.verdicts[remedy.runs_in]
    row = _row(remedy, before, verdict, beside, reason=_objection(remedy, verdict, beside, figures))
    return dataclasses.replace(
        row,
        inputs=samples(proof.split.search),
        held_inputs=samples(proof.split.held),
        figures={**figures, **({"runs": float(remedy.runs)} if remedy.runs else {})},
        tightest=_tightest(proof, after),
    )


def _row(
    remedy: Remedy, before: Verdict, after: Verdict | None, held: Verdict | None, *, reason: str | None
) -> ProofRow:
    return ProofRow(
        remedy=remedy.kind,
        title=remedy.title,
        precision=remedy.precision,
        runs_in=remedy.runs_in,
        proven=reason is None,
        before=before.to_dict(),
        after={} if after is None else after.to_dict(),
        held_back=None if held is None else held.to_dict(),
        reason=reason or "",
        members=remedy.members,
        snippets=dict(remedy.snippets),
        notes=remedy.notes,
    )


def _scan(proof: _Proof, subject: Any) -> Scan:
    return scan_subject(subject, [proof.remedy.runs_in], progress=proof.progress, **proof.options)


def _objection(remedy: Remedy, after: Verdict, held: Verdict | None, figures: Mapping[str, float]) -> str | None:
    """Return why a remedy is not proven, None where it is."""
    for verdict, where in ((after, "on the same inputs"), (held, "on inputs that were held back")):
        if verdict is not None and not _holds(remedy, verdict):
            return f"{where} the verdict is {verdict.verdict}: {verdict.reason}"
    error = figures.get("function_error")
    if remedy.kind == "rescale" and error is not None and not error <= SAME_FUNCTION:
        return f"it changes the function: the float32 output differs by {error:.2g}"
    drift = figures.get("function_kl", error)
    if remedy.kind == "penalty" and drift is not None and not drift <= NEAR_FUNCTION:
        return (
            f"the trained model is another one: its float32 output differs by {drift:.2g} (at most {NEAR_FUNCTION:g})"
        )
    return None


def _holds(remedy: Remedy, verdict: Verdict) -> bool:
    effect, fmt = verdict.effect, FORMATS[parse_precision(remedy.runs_in).dtype]
    if not effect.compared:
        return False
    if verdict.verdict == "ok":
        return not is_wrong(effect, fmt)
    near = not effect.nonfinite and (effect.relative_error or 0.0) <= tolerance(fmt)
    steady = effect.overruled_decisions <= 0 and effect.overruled_answers <= 0 and not effect.failed_answers
    return remedy.kind == "clamp" and verdict.severity != "error" and near and steady


def _figures(proof: _Proof, mended: Any, after: Scan) -> dict[str, float]:
    """Return all figures that can be had; one that cannot be is left out."""
    remedy, subject = proof.remedy, proof.split.search
    found: dict[str, float] = {}
    if remedy.kind in _CHANGES_WEIGHTS:
        for inputs in (proof.split.search, proof.split.held):
            if inputs is not None:
                new = measure.function_figures(inputs, remedy.mend(inputs), proof.found.recording.header)
                found.update({name: max(value, found.get(name, value)) for name, value in new.items()})
    found.update(measure.answer_figures(after.recording, remedy.runs_in))
    if found.get("function_error"):
        header = proof.found.recording.header
        found.update(measure.answers_of_the_original(subject, mended, remedy.runs_in, header))
    found.update(_headroom(proof, after))
    with contextlib.suppress(Exception):  # the plain model may have no kernel, or raise where the mended one does not
        plain, better = measure.prepared(subject, remedy.precision), measure.prepared(mended, remedy.runs_in)
        if any("labels" in batch.inputs for batch in subject.batches):
            models = {"loss_before": measure.prepared(subject, "float32"), "loss_low": plain, "loss_after": better}
            found.update(measure.loss_figures(models, subject))
        found.update(measure.cost_figures(plain, better, *measure.first_inputs(subject, proof.found.recording.header)))
    return found


def _headroom(proof: _Proof, after: Scan) -> dict[str, float]:
    sides = {
        "headroom_before": rooms.outputs(proof.found.recording, proof.remedy.precision, expected=True),
        "headroom_after": rooms.outputs(after.recording, proof.remedy.runs_in, expected=True),
    }
    return {name: float(table["room"].min()) for name, table in sides.items() if len(table)}


def _tightest(proof: _Proof, after: Scan) -> tuple[tuple[str, float, float], ...]:
    """Return the modules with the least headroom before: (module, bits before, bits after)."""
    before = rooms.outputs(proof.found.recording, proof.remedy.precision, expected=True)
    later = rooms.outputs(after.recording, proof.remedy.runs_in, expected=True)
    if before.empty or later.empty:
        return ()
    least = before.groupby("module", sort=False)["room"].min().nsmallest(_TIGHTEST)
    then = later.groupby("module", sort=False)["room"].min().to_dict()
    return tuple(
        (str(module), round(float(bits), 2), round(float(then[module]), 2))
        for module, bits in least.items()
        if module in then
    )
