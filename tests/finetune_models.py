"""A trained T5 whose `wo` peaks where T5-base's does in public reports, and the numbers that it spells."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from transformers import T5ForConditionalGeneration

from overflow_lab.subjects import demo
from overflow_lab.subjects.demo.rescale import INNER_EXPONENT, RESIDUAL_EXPONENT, rescale
from overflow_lab.subjects.demo.task import sample, spell
from overflow_lab.subjects.demo.train import build_tokenizer, encode

PEAK = 66_246.0


def largest_wo(model: Any) -> float:
    """Return the largest magnitude of any `wo` on 128 held-out numbers, measured by hooks of the test's own."""
    found: list[float] = []

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        found.append(output.detach().float().abs().max().item())

    handles = [m.register_forward_hook(note) for name, m in model.named_modules() if name.endswith(".wo")]
    with torch.no_grad():
        model(**encode(build_tokenizer(), sample(random.Random(5), 128, held_out=True)))
    for handle in handles:
        handle.remove()
    return max(found)


def save(folder: Path) -> Path:
    """Write the demo as it was trained, its residual stream scaled so that `wo` peaks at PEAK; return the folder.

    The function is the demo's: each writer of the stream takes the factor, its norms' eps the square of it.
    """
    model: Any = T5ForConditionalGeneration.from_pretrained(demo.folder(), dtype=torch.float32).eval()
    rescale(model, residual=-RESIDUAL_EXPONENT, inner=-INNER_EXPONENT)
    factor = PEAK / largest_wo(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.split(".")[-2] in ("o", "wo"):
                weight.mul_(factor)
        model.shared.weight.mul_(factor)
        model.decoder.final_layer_norm.weight.div_(factor)
    for config in (model.config, model.encoder.config, model.decoder.config):
        config.layer_norm_epsilon *= factor**2
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def pairs(count: int, *, seed: int = 7) -> list[tuple[str, str]]:
    """Return number words and digits, of numbers that are not held out."""
    return [(spell(number), str(number)) for number in sample(random.Random(seed), count, held_out=False)]


def accuracy(model: Any, *, count: int = 200) -> float:
    """Return the share of held-out numbers that greedy search spells exactly."""
    tokenizer, numbers = build_tokenizer(), sample(random.Random(9), count, held_out=True)
    inputs = encode(tokenizer, numbers)
    inputs.pop("labels")
    texts = tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=32), skip_special_tokens=True)
    right = sum(1 for text, number in zip(texts, numbers, strict=True) if text == str(number))
    return right / count
