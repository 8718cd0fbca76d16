"""The keys by which charts, links and rows of the report name one site: `#site=KEY` leads to its row."""

from __future__ import annotations

import re
from urllib.parse import quote

from overflow_lab.report import text

_SPACE = re.compile(r"\s+")
_LONGEST = 200


def layer_key(module: str, port: str) -> str:
    """Return the key of a module's output: "encoder.block.0/output"."""
    return _one_word(f"{text.visible(module, _LONGEST)}/{text.visible(port, 80)}")


def operation_key(precision: str, module: str, op: str, ordinal: int) -> str:
    """Return the key of an operation: "float16/encoder.block.0/aten.add", with its ordinal where that is not 0."""
    last = f"/{ordinal}" if ordinal else ""
    return _one_word(f"{text.visible(precision, 60)}/{text.visible(module, _LONGEST)}/{text.visible(op, 80)}{last}")


def anchor(key: str) -> str:
    """Return the link to a site on the page itself."""
    return f"#site={quote(key, safe='/.:@!$&()*+,;=~_-')}"


def _one_word(key: str) -> str:
    """Return a key without white space, which an id of HTML must not have."""
    return _SPACE.sub("_", key)
