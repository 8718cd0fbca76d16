"""Turn lists of texts, token ids, pictures and sounds into the tensors of one batch; no global seed is drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from overflow_lab.errors import UsageError, one_line
from overflow_lab.subjects.media import spectrum
from overflow_lab.subjects.shape import Features
from overflow_lab.subjects.subject import Batch

SEED = 20
# Twelve lengths in tokens: a short batch, a batch that needs much padding, a long batch.
LENGTHS = (5, 8, 7, 6, 1, 90, 24, 12, 64, 120, 96, 80)


def random_ids(
    vocabulary: int, special: frozenset[int], limit: int | None, *, rows: int = len(LENGTHS), even: bool = False
) -> tuple[list[int], ...]:
    """Return `rows` lists of random token ids in [0, vocabulary) that avoid `special` ids, seeded.

    Lengths are those of LENGTHS, at most `limit`; with `even` every list is `limit` long. UsageError for no vocabulary.
    """
    allowed = torch.tensor([i for i in range(vocabulary) if i not in special] or list(range(vocabulary)))
    if len(allowed) == 0:
        raise UsageError("the config names no vocab_size, so no token ids can be drawn; add it, or give a tokenizer")
    generator = torch.Generator().manual_seed(SEED)
    wanted = [limit or 1] * rows if even else [LENGTHS[i % len(LENGTHS)] for i in range(rows)]
    lengths = [length if limit is None else min(length, limit) for length in wanted]
    return tuple(allowed[torch.randint(len(allowed), (n,), generator=generator)].tolist() for n in lengths)


@dataclass(frozen=True)
class Texts:
    """Encodes texts by the model's tokenizer, padded to the longest and cut at `limit` tokens."""

    tokenizer: Any
    limit: int | None
    vocabulary: int

    def __call__(self, texts: list[str]) -> Batch:
        """Return the batch of `texts`; UsageError when they give no token, or one that the embedding has no row for."""
        try:
            encoded = self.tokenizer(
                texts,
                padding=True,
                truncation=self.limit is not None,
                max_length=self.limit,
                return_tensors="pt",
            )
        except Exception as error:
            reason = one_line(error, limit=200)
            raise UsageError(f"the tokenizer fails on the texts ({reason}); use the model's own") from error
        ids = encoded["input_ids"]
        if ids.numel() == 0:
            raise UsageError(f"the tokenizer makes no token of {texts[0][:40]!r}; give texts that are not empty")
        if self.vocabulary and int(ids.max()) >= self.vocabulary:
            raise UsageError(
                f"the tokenizer gives token id {int(ids.max())}, the model has {self.vocabulary}; use the "
                "tokenizer that the model was trained with"
            )
        mask = encoded.get("attention_mask")
        tokens = int(mask.sum()) if mask is not None else ids.numel()
        return Batch(inputs=dict(encoded), samples=len(texts), tokens=tokens, texts=tuple(texts))


@dataclass(frozen=True)
class Ids:
    """Pads lists of token ids to the longest, on the left or the right, with an attention mask."""

    padding: int
    left: bool = False

    def __call__(self, rows: list[list[int]]) -> Batch:
        """Return the batch of `rows`: input_ids and attention_mask, int64, (rows, longest)."""
        longest = max(len(row) for row in rows)
        ids = torch.full((len(rows), longest), self.padding)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for number, row in enumerate(rows):
            place = slice(longest - len(row), None) if self.left else slice(0, len(row))
            ids[number, place], mask[number, place] = torch.tensor(row), 1
        return Batch(inputs={"input_ids": ids, "attention_mask": mask}, samples=len(rows), tokens=int(mask.sum()))


@dataclass(frozen=True)
class Pictures:
    """Encodes pictures by the model's image processor, or, without one, scaled to its size and to -1..1."""

    processor: Any
    size: tuple[int, int]
    channels: int

    def __call__(self, pictures: list[Any]) -> Batch:
        """Return the batch of `pictures`, uint8 arrays of (height, width, 3)."""
        if self.processor is None:
            pixels = torch.stack([self._plain(picture) for picture in pictures])
            return Batch(inputs={"pixel_values": pixels}, samples=len(pictures))
        try:
            encoded = self.processor(images=pictures, return_tensors="pt")
        except Exception as error:
            reason = one_line(error, limit=200)
            raise UsageError(f"the image processor fails on the pictures ({reason}); check its config") from error
        return Batch(inputs=dict(encoded), samples=len(pictures))

    def _plain(self, picture: Any) -> torch.Tensor:
        pixels = torch.as_tensor(picture).permute(2, 0, 1)[None].float() / 127.5 - 1.0
        pixels = torch.nn.functional.interpolate(pixels, size=self.size, mode="bilinear")[0]
        if self.channels == 3:
            return pixels
        return pixels.mean(0, keepdim=True).expand(self.channels, -1, -1).clone()


@dataclass(frozen=True)
class Sounds:
    """Encodes sounds by the model's feature extractor, or, without one, as waveforms or plain log spectra."""

    extractor: Any
    main_input: str
    features: Features | None
    rate: int

    def __call__(self, sounds: list[Any]) -> Batch:
        """Return the batch of `sounds`, float32 arrays of samples at `rate` Hz."""
        if self.extractor is None:
            return self._plain(sounds)
        try:
            options = {} if self.features is not None and self.features.bins_first else {"padding": True}
            encoded = self.extractor(sounds, sampling_rate=self.rate, return_tensors="pt", **options)
        except Exception as error:
            reason = one_line(error, limit=200)
            raise UsageError(f"the feature extractor fails on the sounds ({reason}); check its config") from error
        return Batch(inputs=dict(encoded), samples=len(sounds))

    def _plain(self, sounds: list[Any]) -> Batch:
        waves = [torch.as_tensor(sound) for sound in sounds]
        if self.features is not None:
            shape = self.features
            pictures = [spectrum(wave, shape.bins, shape.frames) for wave in waves]
            stacked = torch.stack(pictures if shape.bins_first else [picture.T for picture in pictures])
            return Batch(inputs={self.main_input: stacked}, samples=len(sounds))
        longest = max(len(wave) for wave in waves)
        padded, mask = torch.zeros(len(waves), longest), torch.zeros(len(waves), longest, dtype=torch.long)
        for number, wave in enumerate(waves):
            centred = wave - wave.mean()
            padded[number, : len(wave)] = centred / torch.sqrt(centred.square().mean() + 1e-7)
            mask[number, : len(wave)] = 1
        return Batch(inputs={self.main_input: padded, "attention_mask": mask}, samples=len(sounds))
