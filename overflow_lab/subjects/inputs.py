"""The inputs of a model from transformers: what it needs, the built-in ones for it, and the batches made of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch

from overflow_lab.errors import UsageError
from overflow_lab.subjects import encoders, files, media
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.shape import Shape
from overflow_lab.subjects.subject import Batch
from overflow_lab.subjects.tensors import fresh_batches, usable_device
from overflow_lab.subjects.texts import built_in

DECODER_TOKENS = 6


@dataclass(frozen=True)
class Tools:
    """What the checkpoint brings to turn texts, images and sounds into tensors; None where it has none."""

    tokenizer: Any = None
    image_processor: Any = None
    feature_extractor: Any = None


@dataclass(frozen=True)
class Batches:
    """Samples in batches of `size`, encoded when they are walked; re-iterable as often as `samples` is."""

    samples: Iterable[Any]
    size: int
    encode: Callable[[list[Any]], Batch]

    def __iter__(self) -> Iterator[Batch]:
        samples = iter(self.samples)
        while chunk := list(islice(samples, self.size)):
            yield self.encode(chunk)


@dataclass(frozen=True)
class Inputs:
    """The batches, where they come from ("built-in texts", "--text", "file: NAME"), and notes for the report."""

    batches: Iterable[Batch]
    source: str
    notes: tuple[str, ...] = ()


def inputs_for(shape: Shape, tools: Tools, options: SubjectOptions, *, texts: Sequence[str] | None = None) -> Inputs:
    """Return the inputs of a model of this `shape`: those that `options` name, or the built-in ones.

    `texts` replaces the built-in texts. Raises UsageError when the model takes none of text, image and sound, or when
    texts are given and there is no tokenizer.
    """
    samples, source = _given(shape, options)
    kinds = shape.modalities
    if not kinds:
        raise UsageError(
            f"{shape.class_name} takes {shape.main_input!r}, for which there are no built-in inputs; scan a function "
            "that returns the model and its inputs: path/to/file.py:function"
        )
    notes: list[str] = list(shape.notes)
    if samples is not None and "text" in kinds and tools.tokenizer is None:
        raise UsageError(f"{source} needs a tokenizer and the model has none; save one into its folder")
    if samples is None:
        samples, source = _defaults(shape, tools, options, texts)
        if "text" in kinds and tools.tokenizer is None:
            notes.append("the model has no tokenizer: the inputs are random token ids, and the answers have no text")
    elif kinds == ("text", "image"):
        samples = _Zipped(samples, tuple(media.pictures(shape.image_size, shape.channels)))
    batches: Iterable[Batch] = Batches(samples, options.batch_size, _encoder(shape, tools, options))
    # A file is a stream; but an empty file, a wrong column or tokenizer is told now, not in the middle of a scan.
    batches = tuple(batches) if options.inputs_file is None else _tried(batches)
    return Inputs(fresh_batches(batches, usable_device(options.device)), source, tuple(notes))


def _tried(batches: Iterable[Batch]) -> Iterable[Batch]:
    next(iter(batches))
    return batches


def _given(shape: Shape, options: SubjectOptions) -> tuple[Iterable[Any] | None, str]:
    if options.texts is not None:
        if "text" not in shape.modalities:
            raise UsageError(f"{shape.class_name} takes no text; leave --text out, or give files by --inputs")
        return options.texts, "--text"
    if options.inputs_file is None:
        return None, ""
    rows = files.Rows(options.inputs_file, options.column, options.template)
    if "text" in shape.modalities:
        return rows, f"file: {rows.name}"
    load = media.open_picture if "image" in shape.modalities else partial(media.open_sound, rate=shape.rate)
    return files.Media(rows, load), f"file: {rows.name}"


def _defaults(
    shape: Shape, tools: Tools, options: SubjectOptions, texts: Sequence[str] | None
) -> tuple[Iterable[Any], str]:
    parts: list[tuple[Sequence[Any], str]] = []
    if "text" in shape.modalities:
        if tools.tokenizer is not None:
            parts.append((tuple(texts or built_in(shape.model_type)), "built-in texts"))
        else:
            limit = shape.text_limit(options.max_length)
            parts.append((encoders.random_ids(shape.vocabulary, shape.special_ids, limit), "random token ids"))
    if "image" in shape.modalities:
        parts.append((tuple(media.pictures(shape.image_size, shape.channels)), "built-in pictures"))
    if "audio" in shape.modalities:
        parts.append((tuple(media.sounds(shape.rate)), "built-in sounds"))
    source = " and ".join(name for _, name in parts)
    if len(parts) == 1:
        return parts[0][0], source
    return tuple(zip(*(_cycled(samples, max(len(s) for s, _ in parts)) for samples, _ in parts), strict=True)), source


def _cycled(samples: Sequence[Any], count: int) -> list[Any]:
    return [samples[i % len(samples)] for i in range(count)]


@dataclass(frozen=True)
class _Zipped:
    """Texts from the user beside the built-in pictures, for models that take both."""

    texts: Iterable[str]
    pictures: Sequence[Any]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for number, text in enumerate(self.texts):
            yield text, self.pictures[number % len(self.pictures)]


def _encoder(shape: Shape, tools: Tools, options: SubjectOptions) -> Callable[[list[Any]], Batch]:
    encoders_of: list[Callable[[list[Any]], Batch]] = []
    if "text" in shape.modalities:
        limit = shape.text_limit(options.max_length)
        if tools.tokenizer is not None:
            encoders_of.append(encoders.Texts(tools.tokenizer, limit, shape.vocabulary))
        else:
            encoders_of.append(encoders.Ids(shape.padding or 0, left=shape.pads_left))
    if "image" in shape.modalities:
        encoders_of.append(encoders.Pictures(tools.image_processor, shape.image_size, shape.channels))
    if "audio" in shape.modalities:
        encoders_of.append(encoders.Sounds(tools.feature_extractor, shape.main_input, shape.frames, shape.rate))
    return _Combined(tuple(encoders_of), shape)


@dataclass(frozen=True)
class _Combined:
    """Joins the encoders of a model, drops what its forward does not take, and starts the decoder where needed."""

    encoders: tuple[Callable[[list[Any]], Batch], ...]
    shape: Shape

    def __call__(self, samples: list[Any]) -> Batch:
        columns = [samples] if len(self.encoders) == 1 else [list(column) for column in zip(*samples, strict=True)]
        parts = [encode(column) for encode, column in zip(self.encoders, columns, strict=True)]
        inputs = {name: value for part in parts for name, value in part.inputs.items()}
        kept = {name: value for name, value in inputs.items() if self.shape.takes(name)}
        if self.shape.decoder_start is not None:
            kept["decoder_input_ids"] = self._decoder_ids(len(samples))
        first = parts[0]
        return dataclasses.replace(first, inputs=kept, tokens=max(part.tokens for part in parts))

    def _decoder_ids(self, rows: int) -> torch.Tensor:
        ids = encoders.random_ids(self.shape.vocabulary, self.shape.special_ids, DECODER_TOKENS, rows=rows, even=True)
        start = self.shape.decoder_start
        return torch.tensor([[start, *row] for row in ids])
