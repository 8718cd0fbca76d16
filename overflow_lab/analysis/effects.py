"""What reaches the output: the effect of a precision, and how severe it is."""

from __future__ import annotations

import math

from overflow_lab.analysis.results import Effect
from overflow_lab.formats import FloatFormat
from overflow_lab.recording import AnswerCountRow, AnswerRow, AttributionRow, NoiseRow, OutputRow, Recording
from overflow_lab.tolerances import EVENED, EVENED_ROWS, MOST_NOISE, TIES, TOLERATED_NOISE, tolerance

# Decisions that float32 makes clearly hardly ever change in a healthy model; near ties are not counted (see `effect`).
TOLERATED_CHANGES = 0.05


def effect(recording: Recording, precision: str, fmt: FloatFormat) -> Effect:
    """Return what reached the output: its scores decide where it has them, otherwise its worst tensor.

    A changed decision is a near tie where float32 prefers its own choice by less than the tolerated rounding of the
    scores, relative to their root mean square: among scores with such errors the order of the two is not known.
    """
    rows = [row for row in recording.of(OutputRow) if row.precision == precision]
    answers = [row for row in recording.of(AnswerRow) if row.precision == precision]
    counted = [row for row in recording.of(AnswerCountRow) if row.precision == precision]
    scored = any(row.decisions and not _whole_numbers(row) for row in rows)
    judged = [row for row in rows if row.decisions] if scored else rows
    limit = tolerance(fmt)
    elements = sum(row.elements for row in rows)
    decisions = sum(row.decisions for row in judged)
    divergences = sum(row.kl_rows for row in judged)
    errors = [
        row.relative_error
        for row in judged
        if row.relative_error is not None and row.reference_squares + row.error_squares > 0
    ]
    return Effect(
        nonfinite=sum(row.nonfinite for row in rows) / elements if elements else None,
        relative_error=max(errors, default=None),
        changed_decisions=sum(row.changed for row in judged) / decisions if decisions else None,
        kl=sum(row.kl_sum for row in judged) / divergences if divergences else None,
        answers=len(answers) + sum(row.total for row in counted),
        changed_answers=sum(row.status == "changed" for row in answers) + sum(row.changed for row in counted),
        failed_answers=sum(row.status == "failed" for row in answers) + sum(row.failed for row in counted),
        tied_decisions=sum(_near_ties(row, limit) for row in judged) / decisions if decisions else None,
        tied_answers=sum(row.status == "changed" and row.margin is not None and row.margin < limit for row in answers)
        + sum(_near_ties(row, limit) for row in counted),
        evened_choices=max((row.evened / row.ranked for row in rows if row.ranked >= EVENED_ROWS), default=0.0),
        noise_floor=next((row.relative_error for row in recording.of(NoiseRow) if row.precision == precision), None),
        conditioned=_conditioned(recording, precision),
    )


def _conditioned(recording: Recording, precision: str) -> bool:
    """Return whether the error comes of the model's decisions, and these are no firmer against any other rounding.

    An error is attributed to decisions only where, these being given, the values are right to within rounding.
    """
    rows = [row for row in recording.of(AttributionRow) if row.precision == precision]
    return bool(rows) and all(
        row.metric == "decisions" and row.total <= TOLERATED_NOISE * (row.noise or 0) for row in rows
    )


def _near_ties(row: OutputRow | AnswerCountRow, limit: float) -> int:
    """Return how many changes have a margin below `limit`, which is a power of two as all tolerances are."""
    return sum(count for exponent, count in row.margins.items() if math.ldexp(1.0, exponent) < limit)


def _whole_numbers(row: OutputRow) -> bool:
    """Return whether an output holds integers: each of them is a decision, and none has an error."""
    return row.decisions == row.elements and row.reference_squares == row.error_squares == row.nonfinite == 0


def _is_off(found: Effect, fmt: FloatFormat) -> bool:
    """Return whether the error is more than the format's rounding and the model's own conditioning explain."""
    # A decision that flips moves the output as far as its choices are apart, however small the noise.
    most = math.inf if found.conditioned else MOST_NOISE
    conditioning = min(TOLERATED_NOISE * (found.noise_floor or 0.0), most)
    return (found.relative_error or 0.0) > max(tolerance(fmt), conditioning)


def is_wrong(found: Effect, fmt: FloatFormat) -> bool:
    """Return whether the output is wrong beyond the format's own rounding."""
    return bool(
        (found.nonfinite or 0.0) > 0.0
        or _is_off(found, fmt)
        or (found.overruled_decisions > TOLERATED_CHANGES and not found.conditioned)
        or found.evened_choices > EVENED
        or found.failed_answers
        or (found.answers and found.overruled_answers / found.answers > TIES)
    )


def is_imprecise(found: Effect, fmt: FloatFormat) -> bool:
    """Return whether an output without non-finite values differs by more than the format's rounding explains."""
    return bool(
        _is_off(found, fmt)
        or (found.overruled_decisions >= TIES and not found.conditioned)
        or found.evened_choices > EVENED
        or (found.answers and (found.overruled_answers + found.failed_answers) / found.answers > TIES)
    )
