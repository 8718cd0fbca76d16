"""The machine-readable verdict: the keys of the contract, strict JSON, nothing lost."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from overflow_lab import __version__
from overflow_lab.analysis.results import Diagnosis, Effect, Finding, Verdict
from overflow_lab.report.exports import to_json
from tests.mended_recording import CODE, mended_recording
from tests.sample_recording import BAD_VALUE, CULPRIT, sample_diagnosis, sample_recording


def _export(diagnosis: Diagnosis) -> dict[str, Any]:
    return to_json(sample_recording(), diagnosis, recording_path="t5.jsonl", report_path="t5.html")


def test_the_object_has_the_keys_of_the_contract() -> None:
    made = _export(sample_diagnosis())
    assert {"overflow_lab", "schema", "model", "recording", "report", "verdicts", "findings"} <= set(made)
    assert (made["overflow_lab"], made["schema"], made["model"]) == (__version__, 1, "t5-sample")
    assert (made["recording"], made["report"]) == ("t5.jsonl", "t5.html")


def test_a_verdict_has_the_keys_and_values_of_the_contract() -> None:
    verdict = _export(sample_diagnosis())["verdicts"]["float16"]
    assert verdict["verdict"] == "overflow"
    assert verdict["severity"] == "error"
    assert verdict["origin"] == {"module": CULPRIT, "op": "aten.mm"}
    assert verdict["mechanism"] == "matmul-overflow"
    assert (verdict["value"], verdict["limit"]) == (BAD_VALUE, 65504.0)
    assert {"nonfinite", "relative_error", "changed_decisions"} <= set(verdict["output"])


def test_a_healthy_precision_has_a_null_origin() -> None:
    verdict = _export(sample_diagnosis())["verdicts"]["bfloat16"]
    assert (verdict["verdict"], verdict["severity"], verdict["origin"]) == ("ok", "none", None)


def test_findings_name_their_precision_and_evidence() -> None:
    first, second = _export(sample_diagnosis())["findings"]
    assert (first["precision"], first["evidence"]) == ("float16", {"elements": 37})
    assert second["origin"] == {"module": "encoder", "op": None}


def test_non_finite_numbers_are_strings_that_every_parser_reads() -> None:
    effect = Effect(nonfinite=1.0, relative_error=math.inf)
    verdict = Verdict("float16", "nan", "error", "all NaN", value=math.nan, effect=effect)
    made = _export(Diagnosis({"float16": verdict}))
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again["verdicts"]["float16"]["value"] == "nan"
    assert again["verdicts"]["float16"]["output"]["relative_error"] == "inf"


def test_evidence_taken_from_tables_becomes_plain_json() -> None:
    evidence = {"absmax": np.float32(2.5), "layers": (np.int64(3), [np.float64("inf")]), "name": "wo"}
    finding = Finding("float16", "overflow", "m", None, "error", "x", evidence=evidence)
    made = _export(dataclasses.replace(sample_diagnosis(), findings=(finding,)))
    again = json.loads(json.dumps(made, allow_nan=False))
    assert again["findings"][0]["evidence"] == {"absmax": 2.5, "layers": [3, ["inf"]], "name": "wo"}


def test_the_recordings_own_path_is_told_where_no_other_is_given() -> None:
    recording = sample_recording()
    assert to_json(recording, sample_diagnosis())["recording"] == recording.path
    assert to_json(recording, sample_diagnosis())["report"] is None


def test_what_was_tried_is_in_the_json_with_its_proof() -> None:
    made = to_json(mended_recording(), sample_diagnosis())
    json.dumps(made, allow_nan=False)
    assert [(row["remedy"], row["proven"]) for row in made["remedies"]] == [
        ("clamp", False),
        ("rescale", True),
        ("island", True),
    ]
    assert made["remedies"][0]["figures"] == {"function_error": "inf"}
    assert made["remedies"][1]["snippets"] == {"Python, on the model in float32": CODE}
    assert to_json(sample_recording(), sample_diagnosis())["remedies"] == []
