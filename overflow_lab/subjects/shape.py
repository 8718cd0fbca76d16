"""What a model from transformers takes: read off the loaded model and its config, as plain values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
DECODER_POSITIONS = ("max_target_positions", *POSITIONS)
OTHER_INPUTS = {
    "image": {"pixel_values"},
    "video": {"pixel_values_videos"},
    "audio": {"input_values", "input_features", "audio_values"},
}
DEFAULT_IMAGE = 224
DEFAULT_RATE = 16_000


@dataclass(frozen=True)
class Features:
    """The shape of an audio feature: `bins` by `frames`, bins first or last."""

    bins: int
    frames: int
    bins_first: bool


@dataclass(frozen=True)
class Shape:
    """What a model takes. `modalities` is a tuple of "text", "image", "audio" in that order; empty when none fits.

    `accepted` are the argument names of forward. `positions` is the longest input in tokens, room for the answer taken
    off; None without a limit. `decoder_start` is set when the forward needs `decoder_input_ids` from the inputs.
    `image_size` is (height, width) in pixels; `rate` in Hz; `frames` None when sound goes in as a waveform.
    """

    class_name: str
    model_type: str
    main_input: str
    modalities: tuple[str, ...]
    accepted: frozenset[str]
    vocabulary: int = 0
    special_ids: frozenset[int] = frozenset()
    padding: int | None = None
    pads_left: bool = False
    positions: int | None = None
    decoder_start: int | None = None
    image_size: tuple[int, int] = (DEFAULT_IMAGE, DEFAULT_IMAGE)
    channels: int = 3
    rate: int = DEFAULT_RATE
    frames: Features | None = None
    notes: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        """Say whether forward has an argument of this name."""
        return name in self.accepted or name == self.main_input

    def text_limit(self, max_length: int | None) -> int | None:
        """Return the longest text in tokens: the smaller of the model's limit and the user's; None without either."""
        limits = [limit for limit in (self.positions, max_length) if limit is not None]
        return min(limits) if limits else None


def shape_of(model: Any, *, answers: bool, max_new_tokens: int, rate: int | None = None) -> Shape:
    """Return the shape of `model`. With `answers` the model is asked to generate `max_new_tokens`: decoder-only models
    then pad on the left and keep room for them, and encoder-decoder models get no `decoder_input_ids` here.
    """
    config = model.config
    text = _text_config(config)
    accepted = frozenset(inspect.signature(model.forward).parameters)
    main = _main_input(model)
    modalities = _modalities(model, main, accepted)
    two_sided = is_encoder_decoder(config)
    positions = _positions(model, config, text)
    if positions is not None and answers and not two_sided:
        positions = max(1, positions - max_new_tokens)
    frames = _features(config, main)
    if modalities == ("audio",) and main == "input_features" and frames is None:
        modalities = ()
    needs_decoder = two_sided and not answers and "decoder_input_ids" in accepted
    return Shape(
        class_name=type(model).__name__,
        model_type=str(config.model_type),
        main_input=main,
        modalities=modalities,
        accepted=accepted,
        vocabulary=_vocabulary(model, text),
        special_ids=frozenset(_special_ids(config)) | frozenset(_special_ids(text)),
        padding=_padding(model, text),
        pads_left=answers and not two_sided,
        positions=positions,
        decoder_start=_decoder_start(config, text) if needs_decoder else None,
        image_size=_image_size(config),
        channels=_first(_with_parts(config), "num_channels", "in_channels", "in_chans") or 3,
        rate=rate or DEFAULT_RATE,
        frames=frames,
        notes=_notes(model, modalities, accepted),
    )


def is_encoder_decoder(config: Any) -> bool:
    """Say whether the model has an encoder and a decoder that are called together."""
    return bool(getattr(config, "is_encoder_decoder", False))


def decoder_positions(config: Any) -> int | None:
    """Return how many tokens the decoder of an encoder-decoder model can be at most; None without a limit."""
    return _first((getattr(config, "decoder", None) or config, _text_config(config)), *DECODER_POSITIONS)


def _main_input(model: Any) -> str:
    main = model.main_input_name
    return str(main[0]) if isinstance(main, list | tuple) else str(main)


def _modalities(model: Any, main: str, accepted: frozenset[str]) -> tuple[str, ...]:
    declared = model.input_modalities
    kinds = {declared} if isinstance(declared, str) else set(declared)
    takes_text, takes_image = "input_ids" in accepted, "pixel_values" in accepted
    sound = bool({"input_values", "input_features"} & accepted)
    if not model.can_generate() and takes_text and "text" in kinds:  # towers that are called together, as in CLIP
        if takes_image and "image" in kinds:
            return ("text", "image")
        if sound and "audio" in kinds and main != "input_ids":
            return ("text", "audio")
    if main == "input_ids" and takes_text:
        return ("text",)
    if main == "pixel_values":
        return ("image",)
    return ("audio",) if main in {"input_values", "input_features"} else ()


def _notes(model: Any, modalities: tuple[str, ...], accepted: frozenset[str]) -> tuple[str, ...]:
    declared = model.input_modalities
    kinds = {declared} if isinstance(declared, str) else set(declared)
    # The text class of a multimodal family declares them all, and takes none of the others.
    rest = sorted(kind for kind in kinds - set(modalities) if OTHER_INPUTS.get(kind, set()) & accepted)
    if modalities == ("text",) and rest:
        return (f"the model also takes {' and '.join(rest)}: only its text part was run",)
    return ()


def _text_config(config: Any) -> Any:
    try:
        return config.get_text_config()
    except Exception:  # ambiguous configs raise; the main one is as good a guess
        return config


def _with_parts(config: Any) -> tuple[Any, ...]:
    parts = (getattr(config, name, None) for name in ("vision_config", "encoder", "audio_config", "backbone_config"))
    return (config, *(part for part in parts if part is not None))


def _first(configs: tuple[Any, ...], *names: str) -> int | None:
    """Return the first positive integer under one of `names` in one of `configs`."""
    for config in configs:
        for name in names:
            value = getattr(config, name, None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def _positions(model: Any, config: Any, text: Any) -> int | None:
    positions = _first((text, config), *POSITIONS)
    if positions is None:
        return None
    for module in model.modules():
        table = getattr(module, "position_embeddings", None)
        if isinstance(table, torch.nn.Embedding) and table.padding_idx is not None:
            return positions - table.padding_idx - 1  # RoBERTa counts positions from behind the padding index
    return positions


def _vocabulary(model: Any, text: Any) -> int:
    size = _first((text,), "vocab_size") or 0
    try:
        table = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):
        table = None
    rows = table.num_embeddings if isinstance(table, torch.nn.Embedding) else size
    return min(size, rows) if size else rows


def _special_ids(config: Any) -> Iterator[int]:
    for name, value in vars(config).items():
        if name.endswith(("_token_id", "_token_index")):
            for each in value if isinstance(value, list | tuple) else (value,):
                if isinstance(each, int) and each >= 0:
                    yield each


def _padding(model: Any, text: Any) -> int | None:
    for config in (getattr(model, "generation_config", None), model.config, text):
        value = getattr(config, "pad_token_id", None)
        if isinstance(value, int) and value >= 0:
            return value
    return None


def _decoder_start(config: Any, text: Any) -> int:
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    configs = (config, getattr(config, "decoder", None), text)
    found = (getattr(each, name, None) for name in names for each in configs)
    return next((value for value in found if isinstance(value, int)), 0)


def _image_size(config: Any) -> tuple[int, int]:
    for each in _with_parts(config):
        size = getattr(each, "image_size", None)
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
        if isinstance(size, dict) and {"height", "width"} <= set(size):
            return int(size["height"]), int(size["width"])
    return DEFAULT_IMAGE, DEFAULT_IMAGE


def _features(config: Any, main: str) -> Features | None:
    bins = _first((config,), "num_mel_bins")
    sources = _first((config,), "max_source_positions")
    if main == "input_features":
        if config.model_type == "speech_to_text":
            return Features(config.input_feat_per_channel, 200, bins_first=False)
        if bins and sources:
            return Features(bins, 2 * sources, bins_first=True)  # Whisper: two frames a position
        width = _first((config,), "feature_projection_input_dim")
        return Features(width, 200, bins_first=False) if width else None
    length = _first((config,), "max_length")
    if config.model_type == "audio-spectrogram-transformer" and bins and length:
        return Features(bins, length, bins_first=False)
    return None
