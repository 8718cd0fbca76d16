"""The steps of `generate` as a table: a row for each precision, search, input, beam and step."""

from __future__ import annotations

from typing import Any

import pandas as pd

from overflow_lab.analysis.index import bits
from overflow_lab.recording import AnswerRow, Recording, StepRow

_COLUMNS = ["precision", "run", "batch", "input", "beam", "step", "absmax", "nonfinite", "error", "bits", "parts_at"]


def steps(recording: Recording) -> pd.DataFrame:
    """Return one row for each precision, search, batch, input, beam and step whose logits were seen.

    `absmax` is the largest finite logit by magnitude, `nonfinite` the number of NaN and inf among them, `error` their
    relative error against float32's at the same step and `bits` what it leaves (NaN from where float32 was given other
    tokens). `input` counts within its batch; `parts_at` is the first token of its answer that is not float32's, NaN
    where all are.
    """
    parts = {(a.precision, a.strategy, a.batch, a.sample): a.first_difference for a in recording.of(AnswerRow)}
    rows: list[dict[str, Any]] = []
    for row in recording.of(StepRow):
        for number, (peak, bad) in enumerate(zip(row.peaks, row.bad, strict=False)):
            sample, beam = divmod(number, max(row.beams, 1))
            error = row.errors[number] if number < len(row.errors) else None
            rows.append(
                {
                    **{"precision": row.precision, "run": row.run, "batch": row.batch, "input": sample, "beam": beam},
                    **{"step": row.call, "absmax": peak, "nonfinite": bad, "error": error, "bits": bits(error)},
                    "parts_at": parts.get((row.precision, row.run, row.batch, sample)),
                }
            )
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    return frame.astype({"error": float, "bits": float, "parts_at": float})
