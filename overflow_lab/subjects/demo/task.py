"""The demo's text task: number words to digits, "four hundred and seven" -> "407". Standard library only."""

from __future__ import annotations

import random

MAX_DIGITS = 6
# fmt: off
UNITS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine",
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen",
    "seventeen", "eighteen", "nineteen",
)
# fmt: on
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
WORDS = (*UNITS, *TENS, "hundred", "thousand", "and")


def spell(number: int) -> str:
    """Return the British English words for `number`, from 0 to 999,999.

    Raises ValueError outside that range.
    """
    if not 0 <= number < 10**MAX_DIGITS:
        raise ValueError(f"cannot spell {number}: the task has 0 to {10**MAX_DIGITS - 1}, choose one of them")
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _below_thousand(rest)
    head = f"{_below_thousand(thousands)} thousand"
    if not rest:
        return head
    return f"{head} {'and ' if rest < 100 else ''}{_below_thousand(rest)}"


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    if not hundreds:
        return _below_hundred(rest)
    return f"{UNITS[hundreds]} hundred" + (f" and {_below_hundred(rest)}" if rest else "")


def _below_hundred(number: int) -> str:
    if number < len(UNITS):
        return UNITS[number]
    tens, unit = divmod(number, 10)
    return TENS[tens - 2] + (f"-{UNITS[unit]}" if unit else "")


def is_held_out(number: int) -> bool:
    """Say whether training never sees `number`: one in sixteen of those with three or more digits."""
    return number >= 100 and (number * 2654435761 >> 8) % 16 == 0  # Knuth's multiplicative hash


def sample(rng: random.Random, count: int, *, held_out: bool) -> list[int]:
    """Return `count` random numbers, all held out or none of them; three in ten of their digits are zeros."""
    numbers: list[int] = []
    while len(numbers) < count:
        digits = rng.choices(range(1, MAX_DIGITS + 1), weights=(1, 2, 4, 6, 8, 8))[0]
        # Zeros are what the words leave out, hence the hard part: a uniform draw has too few of them.
        number = int("".join("0" if rng.random() < 0.3 else rng.choice("0123456789") for _ in range(digits)))
        if is_held_out(number) == held_out:
            numbers.append(number)
    return numbers
