"""The run record as JSON: a plain dict that the pipeline builds.

`tools/record_schema.py` has its types and makes its JSON Schema; a wheel has it as `schema.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Record = Mapping[str, Any]


def write_record(path: Path, record: Record) -> Record:
    """Write the run record, last of all files of its folder, with a list of them; return it with that list."""
    folder = path.parent
    files = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if not file.is_dir()}
    record = {**record, "files": sorted({*files, path.name})}
    path.write_text(to_json(record) + "\n", encoding="utf-8")
    return record


def to_json(record: Any) -> str:
    """JSON text of a record; NaN and infinity become null, and control characters are escaped.

    >>> to_json(["caf\u00e9", "\u202egpj.exe", float("nan")])
    '[\\n "caf\u00e9",\\n "\\\\u202egpj.exe",\\n null\\n]'
    """
    text = json.dumps(_plain(record), indent=1, ensure_ascii=False, allow_nan=False)
    return re.sub(r"[^\n -~]", lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if isinstance(value, (Sequence, Iterable)):
        return [_plain(item) for item in value]
    return str(value)
