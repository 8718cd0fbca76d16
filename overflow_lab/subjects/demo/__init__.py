"""The built-in subject: a small T5 that works in fp32 and bf16, and fails in fp16 as a trained T5 does.

It reads number words and writes digits. How it was made stands in docs/demo.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from overflow_lab.subjects.texts import built_in, held_back

# All of three digits and more are numbers that training never saw (task.is_held_out).
PROMPTS: tuple[str, ...] = (
    "seven",
    "forty-two",
    "two hundred and thirteen",
    "eight hundred and nine",
    "two thousand five hundred and thirty-one",
    "eight thousand and ninety-three",
    "forty thousand and nineteen",
    "eighty-seven thousand",
    "one hundred and twenty thousand and fourteen",
    "four hundred and four thousand",
    "four hundred and ninety-eight thousand and seventy-one",
    "seven hundred and thirty-six thousand nine hundred and forty",
)
ANSWERS: tuple[str, ...] = (
    "7",
    "42",
    "213",
    "809",
    "2531",
    "8093",
    "40019",
    "87000",
    "120014",
    "404000",
    "498071",
    "736940",
)
# Of the same kind, and never seen by the search for a remedy.
HELD_BACK: tuple[str, ...] = (
    "nine",
    "fifty-eight",
    "three hundred and forty-seven",
    "six hundred and two",
    "one thousand nine hundred and eighty-five",
    "five thousand and sixty-six",
    "seventy thousand and twelve",
    "ninety-three thousand",
    "two hundred and ten thousand and seventy",
    "six hundred and six thousand",
    "three hundred and fifty-one thousand eight hundred and twenty-nine",
    "nine hundred and eighty thousand four hundred and thirteen",
)


def folder() -> Path:
    """Return the `save_pretrained` folder of the model and its tokenizer; AutoModelForSeq2SeqLM loads it."""
    return Path(str(files(__name__))) / "model"


def built_in_texts(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the texts that a scan runs where none are given, by a recording's facts about its subject."""
    return PROMPTS if facts.get("kind") == "demo" else built_in(str(facts.get("model_type", "")))


def held_back_texts(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Return other built-in texts than those, on which a remedy is proven."""
    return HELD_BACK if facts.get("kind") == "demo" else held_back(str(facts.get("model_type", "")))
