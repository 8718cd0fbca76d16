"""Which class loads a checkpoint, and what kind of model it then is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from overflow_lab.errors import UsageError


@dataclass(frozen=True)
class Task:
    """A kind of model: its name on the command line, the transformers Auto class, and that class's table of models.

    `answers` says that such models are asked to generate.
    """

    name: str
    auto: str
    table: str
    answers: bool = False


# In this order a class is looked up: Whisper is also in later tables, and multimodal models among the causal ones.
TASKS = (
    Task("speech-seq2seq", "AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", answers=True),
    Task("seq2seq-lm", "AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", answers=True),
    Task(
        "image-text-to-text", "AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", answers=True
    ),
    Task("causal-lm", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", answers=True),
    Task("masked-lm", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    Task(
        "sequence-classification",
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    Task("token-classification", "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    Task("question-answering", "AutoModelForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
    Task("image-classification", "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    Task("ctc", "AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    Task("audio-classification", "AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    Task("object-detection", "AutoModelForObjectDetection", "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES"),
    Task("semantic-segmentation", "AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    Task("depth-estimation", "AutoModelForDepthEstimation", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES"),
    Task("base", "AutoModel", "MODEL_MAPPING_NAMES"),
)
OTHER = Task("other", "AutoModel", "")

# What the end of a class name says, for classes that this transformers does not have (any longer).
ENDINGS = (
    ("ForConditionalGeneration", "seq2seq-lm"),
    ("WithLMHeadModel", "seq2seq-lm"),
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForSequenceClassification", "sequence-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForImageClassification", "image-classification"),
    ("ForCTC", "ctc"),
)


@dataclass(frozen=True)
class Choice:
    """The class to load with, its task, and whether it is an Auto class (which decides about remote code)."""

    loader: Any
    task: Task
    auto: bool
    note: str = ""


def task_named(name: str) -> Task:
    """Return the task called `name`; UsageError, with the names there are, if there is none."""
    for task in TASKS:
        if task.name == name:
            return task
    raise UsageError(f"there is no task {name!r}; choose one of {', '.join(task.name for task in TASKS)}")


def task_of(class_name: str) -> Task:
    """Return the task of the transformers class `class_name`: the first table that has it; OTHER without any."""
    return next((task for task in TASKS if class_name in _classes(task.table)), OTHER)


def choose(architectures: list[str], *, model_type: str, auto_map: Mapping[str, Any], task: str | None) -> Choice:
    """Return the class that loads a checkpoint whose config has these `architectures`.

    The class named there, when transformers has it; the Auto class in `auto_map` for code that comes with the model;
    the Auto class of `task` when the user names one; AutoModel in all other cases, with a note where that is a guess.
    """
    import transformers

    known = [name for name in architectures if _is_model(transformers, name)]
    if task is not None:
        wanted = task_named(task)
        fitting = [name for name in known if name in _classes(wanted.table)]
        if fitting:
            return Choice(getattr(transformers, fitting[0]), wanted, auto=False)
        return Choice(getattr(transformers, wanted.auto), wanted, auto=True)
    if known:
        return Choice(getattr(transformers, known[0]), task_of(known[0]), auto=False)
    own = [each for each in TASKS if each.auto in auto_map]
    if own:
        return Choice(getattr(transformers, own[0].auto), own[0], auto=True)
    return _guess(transformers, architectures, model_type)


def _guess(transformers: Any, architectures: list[str], model_type: str) -> Choice:
    for name in architectures:
        for ending, task_name in ENDINGS:
            task = task_named(task_name)
            if name.endswith(ending) and model_type in _table(task.table):
                note = f"the class {name} is not in transformers {transformers.__version__}: loaded by {task.auto}"
                return Choice(getattr(transformers, task.auto), task, auto=True, note=note)
    named = f"the class {architectures[0]} is not in transformers" if architectures else "the config names no class"
    note = f"{named}: loaded by AutoModel, without a head"
    return Choice(transformers.AutoModel, OTHER, auto=True, note=note)


def _is_model(transformers: Any, name: str) -> bool:
    found = getattr(transformers, name, None) if name.isidentifier() else None
    return isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)


def _table(name: str) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    return dict(getattr(modeling_auto, name, {}))


def _classes(table: str) -> set[str]:
    names: set[str] = set()
    for value in _table(table).values():
        names.update((value,) if isinstance(value, str) else value)
    return names
