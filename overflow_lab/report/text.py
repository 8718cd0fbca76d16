"""How numbers, names and messages are written for people: one place, so that every reporter writes them alike."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any

MISSING = "–"
MINUS = "−"
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_ABSOLUTE_PATH = re.compile(r"""(?<![\w:/.<\\])(?:[A-Za-z]:[\\/]|/|\\\\)(?:[^\s\\/'":<>]+[\\/])+([^\s\\/'":<>]*)""")
_QUOTED_PATH = re.compile(r"""(['"`])(?:[A-Za-z]:|~)?[\\/](?:[^'"`]*[\\/])?([^'"`\\/]*)\1""")
_HOME_PATH = re.compile(r"""(?<!\w)~[\\/](?:[^\s\\/'":<>]+[\\/])*([^\s\\/'":<>]*)""")
# Letters are shown as they are; what moves the cursor, turns the direction or breaks an encoder is shown as an escape.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

_WORDS = {
    "ok": "ok",
    "overflow": "overflow",
    "nan": "NaN",
    "underflow": "underflow",
    "precision": "precision lost",
    "unsupported": "unsupported",
}
_SHAPES = {"none": "✓", "warning": "▲", "error": "✕"}


def missing(value: Any) -> bool:
    """Return whether `value` is None, NaN or pandas' NA."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and math.isnan(value))


def number(value: float | None) -> str:
    """Return a magnitude for reading: 547,171 or 0.0312 or 1.2e-07; NaN and None as a dash."""
    if value is None or missing(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e9 or size < 1e-4:
        return _signed(f"{value:.2e}")
    if size >= 99.95 or value == int(value):
        return _signed(f"{value:,.0f}")
    return _signed(f"{value:.3g}")


def bits(value: float | None) -> str:
    """Return bits with one decimal, a real minus sign and infinities in words that fit a table."""
    if value is None or missing(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    shown = f"{value:.1f}"
    return "0.0" if shown == "-0.0" else _signed(shown)


def share(value: float | None) -> str:
    """Return a share from 0 to 1 in percent; "0%" is for exactly zero, "100%" for exactly all."""
    if value is None or missing(value):
        return MISSING
    if value == 0:
        return "0%"
    if value < 0.001:
        return "<0.1%"
    if 0.999 <= value < 1:
        return ">99.9%"
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def count(value: float | None) -> str:
    """Return a count with thousands separated, a dash where there is none."""
    return MISSING if value is None or missing(value) else f"{int(value):,}"


def plural(n: int, noun: str) -> str:
    """Return "1 input", "2 inputs", "1,204 tokens"."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def power(exponent: int) -> str:
    """Return 2 to the `exponent` in superscript digits."""
    return "2" + str(exponent).translate(_SUPERSCRIPTS)


def shorten(name: str, limit: int) -> str:
    """Return `name` cut in the middle to at most `limit` characters; both ends of a module path say most."""
    if len(name) <= limit:
        return name
    head = (limit - 1) // 2
    return f"{name[:head]}…{name[len(name) - (limit - 1 - head) :]}"


def visible(value: object, limit: int = 400) -> str:
    """Return text as one line that is safe to show: control and direction characters escaped, cut at `limit`."""
    cut = shorten(str(value), 4 * limit)
    shown = "".join(_escape(c) if unicodedata.category(c) in _UNSEEN else c for c in cut)
    return shorten(shown, limit)


def block(value: object) -> str:
    """Return a text of several lines, such as code, that is safe to show: line by line visible, tabs as spaces."""
    lines = str(value).strip("\n").expandtabs(4).split("\n")
    return "\n".join(visible(line, max(len(line), 1) * 10).rstrip() for line in lines)


def module_name(path: str, limit: int = 400) -> str:
    """Return a module path for reading; the root, whose path is empty, gets a name."""
    return visible(path, limit) if path else "(the model itself)"


def sentence(value: object, limit: int = 600) -> str:
    """Return a message as a sentence: visible, without absolute paths, its first letter a capital."""
    shown = without_paths(value, limit)
    return shown[:1].upper() + shown[1:]


def without_paths(value: object, limit: int = 400) -> str:
    """Return visible text in which absolute paths are cut to their last part: they name people and machines."""
    cut = _QUOTED_PATH.sub(r"\1…/\2\1", visible(value, limit))
    return _ABSOLUTE_PATH.sub(r"…/\1", _HOME_PATH.sub(r"…/\1", cut))


def model_name(subject_name: object) -> str:
    """Return a subject's name without the folders of an absolute path."""
    shown = visible(subject_name, 200)
    if re.match(r"(/|~|[A-Za-z]:[\\/]|\\\\)", shown):
        return re.split(r"[\\/]", shown.rstrip("\\/"))[-1] or shown
    return shown


def verdict_word(verdict: str) -> str:
    """Return a verdict in the words of a headline."""
    return _WORDS.get(verdict, visible(verdict, 40))


def severity_shape(severity: str) -> str:
    """Return a character that tells severities apart by shape."""
    return _SHAPES.get(severity, "?")


def headline(verdict: str, severity: str) -> str:
    """Return what a verdict means for somebody who wants to run the model: "breaks: overflow", "works", ..."""
    word = verdict_word(verdict)
    if verdict == "ok":
        return "works"
    if verdict == "unsupported":
        return "cannot run" if severity == "error" else "runs in part"
    lead = {"error": "breaks", "warning": "risky"}.get(severity, "noted")
    return f"{lead}: {word}"


def _signed(text: str) -> str:
    """Return a number with a typographic minus before it and a short exponent."""
    mantissa, e, exponent = text.partition("e")
    mantissa = mantissa.replace("-", MINUS)
    return f"{mantissa}e{int(exponent)}" if e else mantissa


def _escape(character: str) -> str:
    """Return an escape such as \\x1b or \\u202e for a character that must not act."""
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
