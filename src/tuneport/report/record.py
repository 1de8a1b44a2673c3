"""The run record: its types and its JSON.

A record is a plain dict of JSON values that the pipeline builds. `tools/record_schema.py` makes its JSON Schema from
these types; a wheel has it as `schema.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from typing_extensions import NotRequired, TypedDict  # comes with torch; pydantic reads no other before Python 3.12

Record = Mapping[str, Any]


class Keywords:
    """JSON Schema keywords of an annotated type."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), **self.keywords}


Count = Annotated[int, Keywords(minimum=0)]
Digest = Annotated[str, Keywords(pattern="^[0-9a-f]{64}$")]
Digests = Annotated[dict[str, Digest], Keywords(description="SHA-256 by file name, relative to the path.")]
Dtype = Annotated[str, Keywords(enum=["float32", "float64", "bfloat16", "float16"])]


class Versions(TypedDict):
    torch: str
    transformers: str
    safetensors: str
    numpy: str
    python: str


class AdapterInput(TypedDict):
    rank: int | None
    base_model: str | None
    task_type: str | None


class Input(TypedDict):
    name: str
    path: NotRequired[str]
    revision: NotRequired[str]
    license: NotRequired[str | None]
    sha256: NotRequired[Digests]
    adapter: NotRequired[AdapterInput]
    parts: NotRequired[list[Input]]


class Labels(TypedDict):
    by: Literal["source"]
    agreement: Annotated[float, Keywords(minimum=0, maximum=1)] | None


class Data(TypedDict):
    name: str | None
    path: NotRequired[str]
    revision: NotRequired[str]
    sha256: NotRequired[Digests]
    split: NotRequired[str]
    classes: NotRequired[Count]
    indices: NotRequired[list[Count]]
    task: NotRequired[str]
    heads: NotRequired[list[str]]
    labels: NotRequired[Labels]
    protocol: NotRequired[Annotated[str, Keywords(description="How `tuneport evaluate` scores the test split.")]]


class Resolved(TypedDict):
    """What options became: the device and dtype that models ran in, and the name of the objective."""

    device: str
    dtype: Dtype
    loss: str | None


class Blocks(TypedDict):
    source: dict[str, Count]
    target: dict[str, Count]


class PreparedRecord(TypedDict):
    """The record of a transfer before anything has run."""

    tuneport: str
    command: Literal["transfer", "distill", "upgrade"]
    options: dict[str, Any]  # the fields of the command's config
    resolved: Resolved
    source: Input
    finetuned: Input
    target: Input
    data: Data
    versions: Versions
    blocks: Blocks
    tokens: NotRequired[dict[str, float]]
    notes: NotRequired[list[str]]


def write_record(path: Path, record: Record) -> Record:
    """Write the run record as JSON, with a list of the files in its folder; call it when all others are written.

    Returns:
        The record with that list.
    """
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
