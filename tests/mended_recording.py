"""The sample recording with proofs of remedies: a rescale and an island that are proven, and a clamp that is not."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from overflow_lab.analysis.results import Effect, Verdict
from overflow_lab.recording import ProofRow, Recording
from tests.sample_recording import CULPRIT, sample_diagnosis, sample_recording

BEFORE = sample_diagnosis().verdicts["float16"].to_dict()
AFTER = Verdict(
    "float16",
    "ok",
    "none",
    "Everything is finite on 12 inputs.",
    effect=Effect(0.0, 0.0004, 0.0, 1e-9, answers=4, noise_floor=0.0005),
).to_dict()
HELD = Verdict("float16", "ok", "none", "Everything is finite.", effect=Effect(0.0, 0.02, 0.0, 1e-9)).to_dict()
CODE = "with torch.no_grad():\n    model.wo.weight.mul_(2.0**-7)  # `wo` </script>\n"


def rescale(**changes: Any) -> ProofRow:
    """Return the proof of a rescale of two weights, changed as asked."""
    row = ProofRow(
        "rescale",
        "Rescale 2 weights by powers of two (2^-7 to 2^7)",
        "float16",
        "float16",
        True,
        BEFORE,
        AFTER,
        HELD,
        inputs=12,
        held_inputs=5,
        figures={
            "function_error": 0.0,
            "function_ulp": 0.0,
            "same_tokens": 1.0,
            "same_answers": 1.0,
            "headroom_before": -3.06,
            "headroom_after": 3.94,
            "seconds": 1.04,
            "bytes": 1.0,
        },
        members=(f"{CULPRIT}.weight x 2^-7", "decoder.final_layer_norm.weight x 2^7"),
        snippets={"Python, on the model in float32": CODE},
        notes=("In float32 the outputs are the same bits.",),
        tightest=((CULPRIT, -3.06, 3.94), (CULPRIT.removesuffix(".wo"), -3.06, 3.94), ("", 10.4, 10.4)),
    )
    return dataclasses.replace(row, **changes)


def island(**changes: Any) -> ProofRow:
    """Return the proof of an island of one module, which costs time and memory."""
    costs: Mapping[str, float] = {"headroom_before": -3.06, "headroom_after": 108.9, "seconds": 1.37, "bytes": 1.02}
    title = f"Keep `{CULPRIT}` in float32"
    given = {"remedy": "island", "title": title, "figures": costs, "held_back": None, "held_inputs": 0}
    return rescale(**{**given, "members": (CULPRIT,), "tightest": (), "notes": (), **changes})


def clamp(**changes: Any) -> ProofRow:
    """Return a clamp that is not proven."""
    reason = f"on inputs that were held back the verdict is overflow: `{CULPRIT}` makes infinities."
    title = f"Clamp what {CULPRIT} returns to ±60,000"
    given = {"remedy": "clamp", "title": title, "proven": False, "reason": reason, "held_back": BEFORE}
    return rescale(**{**given, "figures": {"function_error": math.inf}, "snippets": {}, "tightest": (), **changes})


def mended_recording(*proofs: ProofRow) -> Recording:
    """Return the sample with these proofs; without any, with a clamp, a rescale and an island, in this order."""
    recording = sample_recording()
    return dataclasses.replace(recording, rows=(*recording.rows, *(proofs or (clamp(), rescale(), island()))))
