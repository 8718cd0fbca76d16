"""How a generative model from transformers is asked to answer: by greedy and by beam search, as its own config ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from overflow_lab.errors import UsageError
from overflow_lab.subjects.options import SubjectOptions
from overflow_lab.subjects.shape import decoder_positions, is_encoder_decoder
from overflow_lab.subjects.subject import Generation


@dataclass(frozen=True)
class Decode:
    """Turns generated token ids into text by the tokenizer, without special tokens."""

    tokenizer: Any

    def __call__(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def generation_of(
    model: Any, options: SubjectOptions, *, tokenizer: Any = None, padding: int | None = None
) -> Generation:
    """Return how `model` answers: searches, lengths and special tokens, from its `generation_config` and `options`.

    `padding` overrules the padding token of the config. Raises UsageError for a model that cannot generate.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or not model.can_generate():
        raise UsageError(f"{type(model).__name__} cannot generate; leave generate=True out, or give a model that can")
    two_sided = is_encoder_decoder(model.config)
    ends = _ends(model)
    padding = _padding(model, tokenizer, padding, ends)
    tokens = options.max_new_tokens
    limit = decoder_positions(model.config) if two_sided else None
    if limit is not None:
        tokens = max(1, min(tokens, limit - 8))  # the decoder starts with some tokens of its own
    common: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
    if padding is not None:
        common["pad_token_id"] = padding
    strategies = {"greedy": {"num_beams": 1, **common}}
    if options.num_beams > 1:
        strategies["beam"] = {"num_beams": options.num_beams, **common}
    decode: Callable[[Sequence[int]], str] | None = Decode(tokenizer) if tokenizer is not None else None
    start = _first_integer(settings.decoder_start_token_id, settings.bos_token_id) if two_sided else None
    return Generation(strategies, decode=decode, encoder_decoder=two_sided, padding=padding, ends=ends, start=start)


def _ends(model: Any) -> tuple[int, ...]:
    ends = model.generation_config.eos_token_id
    ends = ends if ends is not None else getattr(model.config, "eos_token_id", None)
    return tuple(ends) if isinstance(ends, list | tuple) else (() if ends is None else (int(ends),))


def _padding(model: Any, tokenizer: Any, given: int | None, ends: tuple[int, ...]) -> int | None:
    """Return the padding token: without one of its own, a model's `generate` pads with the end."""
    own = _first_integer(given, model.generation_config.pad_token_id, getattr(model.config, "pad_token_id", None))
    return _first_integer(own, next(iter(ends), None), getattr(tokenizer, "pad_token_id", None))


def _first_integer(*values: Any) -> int | None:
    return next((value for value in values if isinstance(value, int)), None)
