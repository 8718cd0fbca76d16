"""A checkpoint of transformers, in a folder or on the hub, as a subject."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from overflow_lab.errors import UsageError
from overflow_lab.subjects.checkpoint import (
    PROCESSOR_FILES,
    Checkpoint,
    Source,
    auto_map_of,
    blamed_on,
    check_weights,
    read_config,
)
from overflow_lab.subjects.generation import generation_of
from overflow_lab.subjects.inputs import Tools, inputs_for
from overflow_lab.subjects.media import NO_PILLOW
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.quiet import quiet_loading
from overflow_lab.subjects.saving import save_model
from overflow_lab.subjects.shape import Shape, shape_of
from overflow_lab.subjects.subject import Subject
from overflow_lab.subjects.tasks import Choice, choose
from overflow_lab.subjects.tensors import parameter_count, stored_dtype, usable_device


def from_folder(
    folder: Path,
    options: SubjectOptions,
    *,
    name: str | None = None,
    kind: str = "folder",
    texts: Sequence[str] | None = None,
) -> Subject:
    """Return the subject in a folder that `save_pretrained` wrote; the network is never touched.

    `texts` are the inputs where the user gives none. Raises UsageError, in one line, when it cannot be loaded.
    """
    title = name or folder.resolve().name
    return _subject(Source(str(folder), str(folder) if name is None else name, True, options), title, kind, texts)


def from_hub(name: str, options: SubjectOptions) -> Subject:
    """Return the subject that the hub has under `name`, from the local cache if it is there (HF_HUB_OFFLINE holds)."""
    return _subject(Source(name, name, False, options), name, "hub", None)


def _subject(source: Source, title: str, kind: str, texts: Sequence[str] | None) -> Subject:
    options = source.options
    device = usable_device(options.device)
    config, raw, path = read_config(source)
    choice = choose(
        _class_names(raw),
        model_type=str(config.model_type),
        auto_map=auto_map_of(raw),
        task=options.task,
    )
    check_weights(source, raw)
    checkpoint = Checkpoint(source, choice, config, device)
    model: Any = checkpoint.first()
    answers = options.generate and choice.task.answers and bool(model.can_generate())
    shape = shape_of(model, answers=answers, max_new_tokens=options.max_new_tokens)
    tools, notes = _tools(source, shape)
    rate = getattr(tools.feature_extractor, "sampling_rate", None)
    if rate:
        shape = shape_of(model, answers=answers, max_new_tokens=options.max_new_tokens, rate=int(rate))
    inputs = inputs_for(shape, tools, options, texts=texts)
    facts = {
        **_facts(model, raw, choice, tools),
        "inputs_source": inputs.source,
        "revision": options.revision,
        "commit": _commit(path),
    }
    return Subject(
        name=title,
        kind=kind,
        load=checkpoint,
        batches=inputs.batches,
        generation=generation_of(model, options, tokenizer=tools.tokenizer, padding=shape.padding)
        if answers and shape.modalities
        else None,
        loader_casts=bool(loader_reasons(model)),
        facts={key: value for key, value in facts.items() if value is not None},
        notes=tuple(note for note in (choice.note, *checkpoint.notes, *notes, *inputs.notes) if note),
        save=functools.partial(save_model, source),
    )


def _class_names(raw: Mapping[str, Any]) -> list[str]:
    names = raw.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def loader_reasons(model: Any) -> tuple[str, ...]:
    """Return why `from_pretrained(dtype=...)` may give another model than `.to(dtype)`; empty when it does not.

    Modules that the class keeps in float32; and float buffers that are not saved (rotary frequencies): the loader makes
    them anew, often in float32 whatever the dtype, while `.to` casts them.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    saved = set(model.state_dict())
    own = {n for n, b in model.named_buffers() if b.dtype == torch.float32 and n not in saved}
    anew = {name.rpartition(".")[2] for name in _still_wide(model, own)} if own else set()
    return (*(f"keeps {name} in float32" for name in sorted(kept)), *(f"makes {name} anew" for name in sorted(anew)))


def _still_wide(model: Any, names: set[str]) -> set[str]:
    """Return those buffers that the class makes in float32 even when it is built in float16; built on no memory."""
    try:
        with quiet_loading(), torch.device("meta"):
            # A deep copy, since building a model writes its dtype into the config.
            narrow = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float16)
    except Exception:  # a class that cannot be built on the meta device: then the buffers may differ, and that is said
        return names
    return {name for name, buffer in narrow.named_buffers() if name in names and buffer.dtype == torch.float32}


def _facts(model: Any, raw: Any, choice: Choice, tools: Tools) -> dict[str, Any]:
    processor = tools.image_processor or tools.feature_extractor
    return {
        "class": type(model).__name__,
        "model_type": str(model.config.model_type),
        "task": choice.task.name,
        "parameters": parameter_count(model),
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or stored_dtype(model),
        "attn_implementation": getattr(model.config, "_attn_implementation", None),
        "tokenizer": type(tools.tokenizer).__name__ if tools.tokenizer is not None else None,
        "processor": type(processor).__name__ if processor is not None else None,
        "loader": ", ".join(loader_reasons(model)) or None,
    }


def _commit(path: str) -> str | None:
    """Return the commit in a cached file's path (.../snapshots/<commit>/config.json), if it has one."""
    found = re.search(r"[/\\]snapshots[/\\]([0-9a-f]{40})[/\\]", path)
    return found[1] if found else None


def _tools(source: Source, shape: Shape) -> tuple[Tools, tuple[str, ...]]:
    """Load the tokenizer and processors that the model's inputs and answers need, where the checkpoint has them."""
    notes: list[str] = []
    tokenizer = image_processor = feature_extractor = None
    if source.has_tokenizer():
        tokenizer = _loaded(source, "AutoTokenizer", "the tokenizer", notes)
        if tokenizer is not None:
            _prepare(tokenizer, shape)
    processed = {"image", "audio"} & set(shape.modalities)
    if processed and source.file(*PROCESSOR_FILES):
        if "image" in processed:
            if importlib.util.find_spec("PIL") is None:
                raise UsageError(NO_PILLOW)
            image_processor = _loaded(source, "AutoImageProcessor", "the image processor", notes)
        else:
            feature_extractor = _loaded(source, "AutoFeatureExtractor", "the feature extractor", notes)
    for kind, found in (("image", image_processor), ("audio", feature_extractor)):
        if kind in processed and found is None:
            notes.append(f"the model has no processor for {kind}: its inputs are made from the config's sizes alone")
    return Tools(tokenizer, image_processor, feature_extractor), tuple(notes)


def _loaded(source: Source, auto: str, what: str, notes: list[str]) -> Any:
    """Load by the class named `auto`; a failure is a note, unless the user's own texts depend on it."""
    import transformers

    try:
        with blamed_on(source, what):
            trust = source.options.trust_remote_code
            return getattr(transformers, auto).from_pretrained(source.place, trust_remote_code=trust, **source.where)
    except UsageError as error:
        if source.options.texts is not None or source.options.inputs_file is not None:
            raise
        notes.append(str(error))
        return None


def _prepare(tokenizer: Any, shape: Shape) -> None:
    """Give the tokenizer (ours alone, never saved) a padding token and side, and the limit that it knows itself."""
    if tokenizer.pad_token_id is None:
        # GPT-2 and Llama have none; what stands there is masked.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    if shape.pads_left:
        tokenizer.padding_side = "left"
