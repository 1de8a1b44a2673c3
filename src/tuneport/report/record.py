"""The run record: its types, its JSON and its schema.

A record is a plain dict of JSON values that the pipeline builds. Its types are TypedDicts, so that a run needs no
library for them. pydantic (extra `test`) turns them into the JSON Schema that the package ships:

    python -m tuneport.report.record > src/tuneport/report/schema.json
"""

from __future__ import annotations

import json
import math
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
Positive = Annotated[int, Keywords(minimum=1)]
Seconds = Annotated[float, Keywords(minimum=0)]
Digest = Annotated[str, Keywords(pattern="^[0-9a-f]{64}$")]
Digests = Annotated[dict[str, Digest], Keywords(description="SHA-256 by file name, relative to the path.")]
Measured = float | None  # null if the number is NaN or infinite
Spectrum = Annotated[
    Sequence[Measured] | None,
    Keywords(description="Singular values of the cross-covariance at 17 evenly spaced places, the largest 1."),
]
Dtype = Annotated[str, Keywords(enum=["float32", "bfloat16", "float16"])]
Width = Annotated[int, Keywords(minimum=0, description="The largest possible rank of this map.")]


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


class Options(TypedDict):
    samples: int | None
    shots: int | None
    sampler: str
    seed: Count
    head: str | None
    labels: NotRequired[Literal["data", "source"]]
    loss: NotRequired[str | None]
    completion: Literal["svd", "none"]
    max_tokens: Positive | None
    memory_budget: Positive | None
    batch_size: Positive
    exclude: Sequence[str]
    roles: Mapping[str, str | None]
    python: NotRequired[list[str]]
    device: str
    dtype: NotRequired[Dtype]


class LayerEntry(TypedDict):
    target: str
    source: str
    rank_in: int | None
    rank_out: int | None
    residual_in: Measured
    residual_out: Measured
    norm_source: Measured
    norm_target: Measured
    rank: NotRequired[int | None]
    spectrum_in: NotRequired[Spectrum]
    spectrum_out: NotRequired[Spectrum]
    role: NotRequired[str]
    stack: NotRequired[str]
    block: NotRequired[int | None]
    width_in: NotRequired[Width]
    width_out: NotRequired[Width]


class KeptTensor(TypedDict):
    tensor: str
    reason: str


class Candidate(TypedDict):
    scale: float
    loss: Measured
    accuracy: Measured
    sharpness: NotRequired[Measured]


class ScaleChoiceEntry(TypedDict):
    rule: NotRequired[Literal["auto", "safe"]]
    samples: Count
    held_out: bool
    candidates: list[Candidate]


class Sizes(TypedDict):
    source: Count
    target: Count


class PaperCost(TypedDict):
    passes: Count
    alignment: Count
    total: Count
    fine_tuning: Count


class CountedCost(TypedDict):
    forward: Count
    backward: Count
    statistics: Count
    solves: Count
    transport: Count
    total: Count


class Cost(TypedDict):
    """Floating-point operations."""

    parameters: Sizes
    tokens: Sizes
    paper: PaperCost
    statistics_bytes: Count
    counted: CountedCost | None


class Evaluation(TypedDict):
    data: str
    samples: Count
    protocol: str
    before: float
    after: float


class TrialEntry(TypedDict):
    samples: Count
    loss_before: Measured
    loss_after: Measured
    loss_falls: Measured
    accuracy_before: NotRequired[Measured]
    accuracy_after: NotRequired[Measured]
    turned_right: NotRequired[int | None]
    turned_wrong: NotRequired[int | None]


class VerdictEntry(TypedDict):
    verdict: Literal["likely to help", "uncertain", "unlikely to help"]
    reasons: Sequence[str]
    trial: TrialEntry | None


class SimilarityEntry(TypedDict):
    target: str
    source: str
    role: str
    block: int | None
    signal: str
    tokens: Count
    cka: Measured
    cka_debiased: Measured
    cosine_before: Measured
    cosine_after: Measured
    cosine_held_out: Measured
    rank: int | None
    residual: Measured


class Blocks(TypedDict):
    source: dict[str, Count]
    target: dict[str, Count]


class PreparedRecord(TypedDict):
    """The record of a transfer before anything has run."""

    tuneport: str
    command: Literal["transfer"]
    options: Options
    source: Input
    finetuned: Input
    target: Input
    data: Data
    versions: Versions
    blocks: Blocks
    tokens: NotRequired[dict[str, float]]
    notes: NotRequired[list[str]]


class RunRecord(PreparedRecord):
    """The record of a transfer, before it is written."""

    method: str
    scale: float
    samples: Count
    seconds: Seconds
    fingerprint: Digest
    seconds_by_stage: dict[str, Seconds]
    passes: dict[str, Count]
    layers: list[LayerEntry]
    not_transported: list[KeptTensor]
    left_behind: list[KeptTensor]
    scale_choice: NotRequired[ScaleChoiceEntry]
    cost: NotRequired[Cost]
    evaluation: NotRequired[Evaluation]
    verdict: NotRequired[VerdictEntry]
    similarity: NotRequired[list[SimilarityEntry]]


Place = TypedDict("Place", {"out": str, "as": str})  # "as" is a keyword, which a class cannot have as a field


class TransferRecord(RunRecord, Place):
    """tuneport.json of a transfer."""


class ApplyRecord(TypedDict):
    """tuneport.json of a task vector applied to a model."""

    tuneport: str
    command: Literal["apply"]
    out: str
    scale: float
    tensors: Count
    base: Input
    vector: Input
    versions: Versions


OPEN = ("TransferRecord", "Options", "LayerEntry", "Versions")  # may have more keys than the schema names


def record_schema() -> dict[str, Any]:
    """The JSON Schema of tuneport.json. Needs pydantic."""
    from pydantic import TypeAdapter

    schema: dict[str, Any] = TypeAdapter(TransferRecord | ApplyRecord).json_schema()
    for name, definition in schema["$defs"].items():
        definition["additionalProperties"] = name in OPEN
        for item in definition["properties"].values():
            item.pop("title", None)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "tuneport.schema.json",
        "title": "tuneport run record",
        "description": "The content of tuneport.json in an output, of the output of `transfer --json`, and of the "
        "metadata entry 'record' of a task vector made by a transfer.",
        **schema,
    }


def write_record(path: Path, record: Record) -> None:
    """Write the run record as JSON."""
    path.write_text(to_json(record) + "\n", encoding="utf-8")


def to_json(record: Any) -> str:
    """JSON text of a record; NaN and infinity become null."""
    return json.dumps(_plain(record), indent=1, ensure_ascii=False, allow_nan=False)


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


if __name__ == "__main__":
    print(json.dumps(record_schema(), indent=2))
