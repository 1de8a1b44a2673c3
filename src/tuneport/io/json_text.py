"""Parse JSON of strangers: a small text can hold millions of values, each of them many times larger in memory."""

from __future__ import annotations

import json
from typing import Any

MOST_VALUES = 2 * 10**6  # as objects of Python they take at most about 256 MiB


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; a ValueError if it is not JSON, nested too deeply, or has too many values."""
    values = sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for mark in ",[{")
    if values > MOST_VALUES:
        raise ValueError(f"it has about {values} values, and at most {MOST_VALUES} are read")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
