"""A reproduction from a recording alone: a short script of plain torch and transformers that shows where values break.

What the recording does not hold (inputs that were not stored, a model that was in memory) is a place to fill in, and
the script says so. Every value of the recording enters the script as a Python literal, as a checked name, or in a
comment of one line: recordings come from others.
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2

from overflow_lab import __version__
from overflow_lab.analysis.numbers import against
from overflow_lab.analysis.results import SEVERITIES, Diagnosis, Verdict
from overflow_lab.errors import UsageError
from overflow_lab.formats import FORMATS
from overflow_lab.recording import AnswerRow, PrecisionRow, Recording
from overflow_lab.report import summary, text
from overflow_lab.report.assets import asset
from overflow_lab.tolerances import tolerance

_SEARCHED = ("greedy", "beam")
# The tasks whose inputs are texts alone; what else a model takes is a place to fill in.
_TEXT_TASKS = frozenset(
    {"seq2seq-lm", "causal-lm", "masked-lm", "sequence-classification", "token-classification", "question-answering"}
    | {"base", "other"}
)
# What a scan does where nobody says otherwise: a recording holds what was said.
_BATCH_SIZE, _TOKENS, _BEAMS = 4, 32, 4


@dataclass(frozen=True)
class Failure:
    """What a script is to show: the verdict, how its precision is made, and the run in which it was seen first."""

    verdict: Verdict
    dtype: str
    cast: str
    run: str
    batch: int

    @property
    def origin(self) -> str:
        """The origin's path, "" for the root or where there is none."""
        return self.verdict.origin.module if self.verdict.origin else ""

    @property
    def reference(self) -> str:
        """What the precision is compared with: float32 itself is judged against float64."""
        return against(self.dtype)

    @property
    def tolerance(self) -> float:
        """The relative error above which the output is said to be wrong."""
        return round(tolerance(FORMATS[self.dtype]), 4)


def failure_of(recording: Recording, diagnosis: Diagnosis, precision: str | None = None) -> Failure:
    """Return the worst verdict (the first of equals), or the one on `precision`, with how it was run.

    Raises UsageError where nothing breaks, and where `precision` was not scanned.
    """
    if precision is not None and precision not in diagnosis.verdicts:
        known = ", ".join(diagnosis.verdicts) or "none"
        raise UsageError(f"the recording has no verdict on {precision!r}; choose among {known}.")
    verdicts = list(diagnosis.verdicts.values()) if precision is None else [diagnosis.verdicts[precision]]
    worst = max(verdicts, key=lambda v: SEVERITIES.index(v.severity), default=None)
    if worst is None or worst.severity == "none":
        raise UsageError(f"nothing breaks in {precision or 'this recording'}: there is nothing to reproduce.")
    row = next((r for r in recording.of(PrecisionRow) if r.precision == worst.precision), None)
    dtype = row.dtype if row and row.dtype in FORMATS else worst.precision.partition("-")[0]
    finding = next((f for f in diagnosis.findings if f.precision == worst.precision and f.origin == worst.origin), None)
    evidence: Mapping[str, Any] = {} if finding is None else finding.evidence
    run, batch = str(evidence.get("run", "forward")), int(evidence.get("batch", 0))
    return Failure(worst, dtype, row.cast if row else "loader", run, batch)


def script(
    recording: Recording, diagnosis: Diagnosis, *, precision: str | None = None, built_in: Sequence[str] = ()
) -> str:
    """Return the script, which exits with 1 where the failure shows and with 0 where it does not.

    `built_in` are the texts that a scan uses where none are given: a recording names them and does not hold them.
    Raises UsageError where nothing breaks.
    """
    failure = failure_of(recording, diagnosis, precision)
    return fill("repro.py.j2", **_values(recording, failure, built_in))


def module_script(recording: Recording, failure: Failure, **parts: Any) -> str:
    """Return the script of one module alone, which lies beside a file of its tensors and exits as `script` does.

    `parts` say how it is built and called: `imports`, `beside` (the user's file, if it is one of them), `build`
    (lines of a function), `call` (Python for its arguments), `wide` (weights that stay in float32), `left_out`,
    `training`.
    """
    return fill("repro_module.py.j2", **_shared(recording, failure), **parts)


def fill(template: str, **values: Any) -> str:
    """Return a template of a script filled in; `literal` writes a value as Python does."""
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["literal"] = _literal
    return made.get_template(template).render(**values)


def _literal(value: object) -> str:
    """Return a value as Python writes it, plain strings in double quotes."""
    written = repr(value)
    return f'"{value}"' if isinstance(value, str) and written == f"'{value}'" and '"' not in value else written


def is_name(name: object) -> bool:
    """Return whether `name` may stand in Python code as a name."""
    return isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)


def heading(recording: Recording, failure: Failure) -> list[str]:
    """Return the comment that says what a script shows, and with which versions it did."""
    card = summary.cards(Diagnosis({failure.verdict.precision: failure.verdict}))[0]
    where = f" in {card.where}{', ' + card.operation if card.operation else ''}" if card.where else ""
    known = recording.header.environment
    versions = [f"{name} {text.visible(known[name], 40)}" for name in ("torch", "transformers") if known.get(name)]
    said = [
        f"{summary.model(recording)}, {card.precision}, {card.headline}{where}.",
        card.reason,
        f"Written by overflow-lab {__version__} from a scan with {', '.join(versions) or 'unknown versions'}.",
        "It exits with 1 where the failure shows and with 0 where it does not, as `git bisect run` wants it.",
    ]
    return [line for paragraph in said for line in textwrap.wrap(paragraph, 112)]


def _values(recording: Recording, failure: Failure, built_in: Sequence[str]) -> dict[str, Any]:
    """Return what the template needs."""
    facts, options = recording.header.subject, recording.header.options
    checkpoint = facts.get("kind") in ("hub", "folder", "demo") and is_name(facts.get("class"))
    tokenized = checkpoint and bool(facts.get("tokenizer")) and facts.get("task") in _TEXT_TASKS
    texts, remark = _texts(recording, failure, built_in) if tokenized else ([], "")
    file, _, function = str(facts.get("name", "")).partition(".py:")
    named = not checkpoint and is_name(file) and is_name(function)
    loading = _loading(facts, options)
    tokens = _integer(options.get("max_new_tokens"), _TOKENS)
    answers = facts.get("task") == "seq2seq-lm" and options.get("generate", True)
    return {
        **_shared(recording, failure),
        "built": not checkpoint,
        "build_file": file if named else "",
        "build_function": function if named else "",
        "demo": facts.get("kind") == "demo",
        "folder": facts.get("kind") == "folder",
        "model": text.model_name(facts.get("name", "")),
        "model_class": text.visible(facts.get("class", "module"), 80),
        "loader": facts.get("class"),
        "loading": _arguments(loading),
        "tokenizer_loading": _arguments({k: v for k, v in loading.items() if k != "attn_implementation"}),
        "texts": texts,
        "texts_remark": remark,
        "max_length": _integer(options.get("max_length"), 0),
        "pads_left": facts.get("task") == "causal-lm",
        "answer_room": tokens if facts.get("task") == "causal-lm" and options.get("generate", True) else 0,
        "generate": failure.run in _SEARCHED,
        "beams": _integer(options.get("num_beams"), _BEAMS) if failure.run == "beam" else 1,
        "tokens": tokens,
        "decoder_tokens": tokens if answers else 0,
    }


def _shared(recording: Recording, failure: Failure) -> dict[str, Any]:
    """Return what both templates need."""
    named = failure.verdict.precision.replace("-", "").isalnum()
    device = str(recording.header.options.get("device", "cpu")).partition(":")[0]
    return {
        "heading": heading(recording, failure),
        "device": device if device.isalpha() and device.isascii() else "cpu",
        "precision": failure.verdict.precision if named else "it",
        **{name: getattr(failure, name) for name in ("dtype", "cast", "batch", "origin", "reference", "tolerance")},
    }


def _loading(facts: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that the scan was given."""
    given = {
        "revision": facts.get("commit") or facts.get("revision"),
        "attn_implementation": options.get("attn_implementation"),
        "trust_remote_code": options.get("trust_remote_code") or None,
    }
    return {name: value for name, value in given.items() if isinstance(value, (str, bool))}


def _arguments(given: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value!r}" for name, value in given.items())


def _integer(value: object, otherwise: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else otherwise


def _texts(recording: Recording, failure: Failure, built_in: Sequence[str]) -> tuple[list[str], str]:
    """Return the texts of the batch that failed, with a remark on where they come from."""
    rows = [row for row in recording.of(AnswerRow) if row.batch == failure.batch and row.prompt is not None]
    if prompts := {row.sample: str(row.prompt) for row in rows}:
        return [prompts[sample] for sample in sorted(prompts)], "The inputs of the batch that failed first."
    if str(recording.header.subject.get("inputs_source", "")).startswith("built-in texts") and built_in:
        size = max(1, _integer(recording.header.options.get("batch_size"), _BATCH_SIZE))
        chosen = list(built_in[failure.batch * size : (failure.batch + 1) * size])
        return chosen or list(built_in), "The built-in texts of overflow-lab, the batch that failed first."
    return ["Hello, how are you today?"], "The texts that failed are not in the recording: put them here."
