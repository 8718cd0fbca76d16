"""`remedy(model)`: from a model as a user gives it to remedies that are proven."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overflow_lab.errors import UsageError

if TYPE_CHECKING:
    from overflow_lab.progress import Progress
    from overflow_lab.remedies.treatment import Remedies
    from overflow_lab.subjects import Subject

PRECISIONS = ("float16", "bfloat16")


def remedy(
    model: Any,
    inputs: Any = None,
    *,
    precision: str | Iterable[str] = PRECISIONS,
    held_back: Any = None,
    kinds: Iterable[str] | None = None,
    runs: int = 60,
    recording: str | Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Remedies:
    """Find what mends a model, and prove it by a second scan.

    `model`, `inputs` and `options` are those of `overflow_lab.scan`; `precision` names what is to work. Each precision
    that breaks gets remedies of all `kinds` ("rescale", "island", "clamp", "precision"), as far as they are found
    within `runs` runs each. All of them work on copies. `held_back` are inputs that the search does not see and the
    proof does: of the kinds of `inputs`, or the path of a file, or texts for a model by name; without them some of the
    given ones are held back, or built-in ones are taken where there are too few. `recording` is a
    file to write, proofs included.

    Raises UsageError for what cannot be scanned as asked, ScanInterrupted when the first scan ends early.
    """
    from overflow_lab.remedies.holdout import Split, split
    from overflow_lab.remedies.treatment import treat
    from overflow_lab.scan import default_device, subject_of

    store_texts, tokenizer = bool(options.pop("store_texts", False)), options.pop("tokenizer", None)
    level = options.pop("level", "auto")
    options = default_device(model, options)
    subject = subject_of(model, inputs, options, tokenizer)
    given, others = _held_back(model, held_back, options)
    made = split(subject, given, built_in=lambda: others or _built_in(model, subject, options))
    if made.held is None and (options.get("texts") or options.get("inputs_file")):  # too few to take some apart
        made = Split(subject, _second_texts(model, subject, options))
    return treat(
        made,
        [precision] if isinstance(precision, str) else tuple(precision),
        kinds=kinds,
        progress=progress,
        runs=runs,
        scan_options={"recording": recording, "store_texts": store_texts, "level": level, "options": options},
    )


def _held_back(model: Any, held_back: Any, options: dict[str, Any]) -> tuple[Any, Subject | None]:
    """Return held-back inputs as they are, or the subject that has them: of a file, or texts for a model by name."""
    from overflow_lab.subjects.python_file import is_python_file

    if held_back is None or not isinstance(model, (str, Path)):
        return held_back, None
    texts = [held_back] if isinstance(held_back, str) and not Path(held_back).exists() else held_back
    if is_python_file(str(model)):
        raise UsageError(
            f"inputs are held back for {model}, whose function brings its own; let it return a list of inputs, and "
            "the last quarter of them is held back."
        )
    if isinstance(texts, (str, Path)):
        return None, _other(model, {**options, "texts": None, "inputs_file": str(texts)})
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return None, _other(model, {**options, "texts": tuple(texts), "inputs_file": None})
    return held_back, None


def _built_in(model: Any, subject: Subject, options: dict[str, Any]) -> Subject | None:
    """Return a subject with the second set of built-in texts, where the first is in use."""
    return _second_texts(model, subject, options) if subject.facts.get("inputs_source") == "built-in texts" else None


def _second_texts(model: Any, subject: Subject, options: dict[str, Any]) -> Subject:
    from overflow_lab.subjects.demo import held_back_texts

    texts = held_back_texts({"kind": subject.kind, **subject.facts})
    return _other(model, {**options, "texts": texts, "inputs_file": None})


def _other(model: Any, options: dict[str, Any]) -> Subject:
    from overflow_lab.scan import subject_of

    return subject_of(model, None, options, None)
