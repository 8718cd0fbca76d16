"""All rows of a long table in little room: gzipped JSON as base64, which the page's script unpacks on demand."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

# Characters of base64 that one table may take: two of them and the pictures stay below 1 MB.
BUDGET = 270_000


def packed(rows: Sequence[Any], *, budget: int = BUDGET) -> tuple[str, int]:
    """Return the rows packed, and how many they are: as many from the first as fit into `budget` characters."""
    count = len(rows)
    while count:
        made = _pack(rows[:count])
        if len(made) <= budget:
            return made, count
        count = min(int(count * budget / len(made) * 0.97), count - 1)
    return "", 0


def _pack(rows: Sequence[Any]) -> str:
    plain = json.dumps(rows, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(plain.encode("utf-8", "backslashreplace"), 9, mtime=0)).decode()
