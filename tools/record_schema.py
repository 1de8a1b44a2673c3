"""The JSON Schema of tuneport.json, from the types of run records and the configs of commands. Needs pydantic.

python tools/record_schema.py

A wheel has it as `tuneport/report/schema.json`.
"""

from __future__ import annotations

import json
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter
from typing_extensions import NotRequired, TypedDict  # pydantic reads no other before Python 3.12

from tuneport.config import DistillConfig, TransferConfig
from tuneport.config.options import Config


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


Seconds = Annotated[float, Keywords(minimum=0)]
Share = Annotated[float, Keywords(minimum=0, maximum=1, description="Of the squared norm of the change.")]
Measured = float | None  # null if the number is NaN or infinite
Width = Annotated[int, Keywords(minimum=0, description="The largest possible rank of this map.")]


Files = Annotated[list[str], Keywords(description="All that the run wrote, which --overwrite replaces.")]


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
    role: NotRequired[str]
    stack: NotRequired[str]
    block: NotRequired[int | None]
    width_in: NotRequired[Width]
    width_out: NotRequired[Width]


class KeptTensor(TypedDict):
    tensor: str
    reason: str


class LeftTensor(KeptTensor):
    kind: str
    share: Share


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


class Evaluation(TypedDict):
    data: str
    samples: Count
    shared: NotRequired[Annotated[int, Keywords(minimum=1, description="Test samples left out: calibration has them.")]]
    held_out: NotRequired[
        Annotated[bool, Keywords(description="The data have one split, of which these are held out.")]
    ]
    sha256: NotRequired[Digest]  # of the samples and their labels
    protocol: str
    metric: Literal["accuracy", "bits per character", "fidelity"]
    before: float
    after: float
    source: NotRequired[float]
    scores: NotRequired[dict[str, dict[str, float | None]]]


class ScoredModel(TypedDict):
    role: Literal["finetuned", "target", "port", "distilled"]
    name: str
    words: str
    value: float
    low: float | None
    high: float | None
    samples: Count
    head: NotRequired[Annotated[Literal["own", "fitted"], Keywords(description="The classification layer.")]]


ByClass = TypedDict("ByClass", {"class": str, "samples": Count, "before": float, "after": float})


class TurnedSample(TypedDict):
    index: Count
    label: str
    before: str
    after: str
    text: NotRequired[str]
    thumbnail: NotRequired[str]


class Turned(TypedDict):
    """Samples of the test split whose class became right or wrong: all counts, and a dozen samples each."""

    right_count: Count
    wrong_count: Count
    right: list[TurnedSample]
    wrong: list[TurnedSample]


class Sanity(TypedDict):
    """The fine-tuned source and its base on the calibration samples: right ones, or the mean loss of a text."""

    samples: Count
    metric: Literal["accuracy", "loss"]
    source: float | None
    finetuned: float | None
    target: float | None
    change: Annotated[float | None, Keywords(description="The norm of the change over that of the base.")]
    sentence: str


class MarkEntry(TypedDict):
    step: Count
    loss: Measured
    held_out_loss: Measured
    agreement: Measured
    neutral: Annotated[float | None, Keywords(description="The loss on neutral passages, in nats per token.")]


class DistilledEntry(TypedDict):
    teacher: str
    matching: Literal["classes", "numbers", "similarities", "answers", "tokens", "texts"]
    samples: Count
    extra: Annotated[int, Keywords(minimum=0, description="Samples beside the own ones.")]
    views: Annotated[int, Keywords(minimum=0, description="Views of own prompts, with words left out.")]
    held_out: Count
    folds: Annotated[int, Keywords(minimum=1, description="Two: each half judged what the other half had taught.")]
    left_out: Annotated[int, Keywords(minimum=0, description="Samples with nothing to compare.")]
    steps: Count
    batch_size: Count
    learning_rate: float
    lora: int | None
    best: Annotated[int, Keywords(minimum=0, description="The step whose state is best; 0 is the start.")]
    again: Annotated[
        int, Keywords(minimum=0, description="Steps on all own samples after two folds; the last is kept.")
    ]
    neutral: Annotated[float | None, Keywords(description="The target's loss on neutral passages.")]
    curve: list[MarkEntry]
    seconds: Seconds


class RouteEntry(TypedDict):
    name: str
    score: float | None
    agreement: Annotated[float | None, Keywords(description="Percent of samples answered as by the old model.")]
    interval: Annotated[list[float] | None, Keywords(description="The ends of the 95 % interval of the agreement.")]
    flips: Annotated[int | None, Keywords(description="Samples that the old model has right, and this one wrong.")]
    neutral: Annotated[float | None, Keywords(description="Percent by which the loss on neutral text is higher.")]
    seconds: Seconds
    memory: int | None
    note: str


class SyntheticEntry(TypedDict):
    generator: str
    texts: Count
    asked: Count
    rounds: Count
    temperature: float
    judged: dict[str, int]
    dropped: dict[str, dict[str, int]]
    shares: dict[str, float]
    longest_run: Annotated[int, Keywords(minimum=0, description="Words in a row shared with an own sample.")]
    test_overlap: Annotated[float | None, Keywords(description="Null where the data have no test split.")]
    licences: dict[str, str | None]
    seconds: Seconds


class FittedHead(TypedDict):
    tensors: list[str]
    classes: list[str]


class RunRecord(PreparedRecord):
    """The record of a run, before it is written."""

    method: str
    scale: float
    samples: Count
    seconds: Seconds
    fingerprint: Digest
    seconds_by_stage: dict[str, Seconds]
    passes: dict[str, Count]
    layers: list[LayerEntry]
    not_transported: list[KeptTensor]
    head: NotRequired[FittedHead]
    left_behind: list[LeftTensor]
    scale_choice: NotRequired[ScaleChoiceEntry]
    distilled: NotRequired[DistilledEntry]
    synthetic: NotRequired[SyntheticEntry]
    extra: NotRequired[Data]
    generator: NotRequired[dict[str, Any]]
    routes: NotRequired[list[RouteEntry]]
    chosen: NotRequired[str]
    decision: NotRequired[str]
    evaluation: NotRequired[Evaluation]
    outcome: NotRequired[Literal["gain", "harm", "no clear change", "nothing moved", "not measured"]]
    headline: NotRequired[str]
    sanity: NotRequired[Sanity]
    adapter: NotRequired[dict[str, Any]]
    base_fingerprint: NotRequired[str]
    files: NotRequired[Files]
    recommendation: NotRequired[str]
    accuracies: NotRequired[list[ScoredModel]]
    by_class: NotRequired[list[ByClass]]
    turned: NotRequired[Turned]


Place = TypedDict("Place", {"out": str, "as": str})  # "as" is a keyword, which a class cannot have as a field


class TransferRecord(RunRecord, Place):
    """tuneport.json of a transfer."""

    moved_share: Share


class DistillRecord(RunRecord, Place):
    """tuneport.json of a distillation."""


class ApplyRecord(TypedDict):
    """tuneport.json of a task vector applied to a model."""

    tuneport: str
    command: Literal["apply"]
    out: str
    scale: float
    tensors: Count
    base: Input
    vector: Input
    files: Files
    notes: NotRequired[list[str]]
    versions: Versions


MergePlace = TypedDict("MergePlace", {"as": str})


class MergeRecord(MergePlace):
    """tuneport.json of several fine-tunes merged into one."""

    tuneport: str
    command: Literal["merge"]
    out: str
    rule: str
    weights: list[float]
    density: float
    seed: Count
    tensors: Count
    base: NotRequired[Input]
    finetuned: list[Input]
    adapter: NotRequired[dict[str, Any]]
    files: NotRequired[Files]
    notes: NotRequired[list[str]]
    versions: Versions


OPEN = ("TransferRecord", "LayerEntry", "Versions")  # may have more keys than the schema names
RUNS: dict[str, type[Config]] = {"TransferRecord": TransferConfig, "DistillRecord": DistillConfig}


def options_schema(config: type[Config]) -> dict[str, Any]:
    """The JSON Schema of the options of a command; all are there unless `python` names some as Python objects."""
    types = config.value_types()
    properties: dict[str, Any] = {"python": {"type": "array", "items": {"type": "string"}}}
    for item, about in config.options():
        if about.python or not about.recorded:
            continue
        name, kind = item.name.rstrip("_"), types[item.name]
        union = get_origin(kind) in (Union, UnionType)
        found = TypeAdapter(str if union and str in get_args(kind) else kind).json_schema()  # or a Python object
        bounds = {"exclusiveMinimum": about.above, "minimum": about.least, "maximum": about.most}
        found |= {key: value for key, value in bounds.items() if value is not None}
        found |= {"enum": list(about.choices)} if about.choices else {}
        properties[name] = {"anyOf": [found, {"type": "null"}]} if item.default is None else found
    plain = {"if": {"properties": {"python": {"maxItems": 0}}}, "then": {"required": list(properties)}}
    return {"type": "object", "properties": properties, "required": ["python"], **plain}


def record_schema() -> dict[str, Any]:
    """The JSON Schema of tuneport.json."""
    schema: dict[str, Any] = TypeAdapter(TransferRecord | DistillRecord | ApplyRecord | MergeRecord).json_schema()
    for name, config in RUNS.items():
        options = f"{config.command.capitalize()}Options"
        schema["$defs"][options] = options_schema(config)
        schema["$defs"][name]["properties"]["options"] = {"$ref": f"#/$defs/{options}"}
        schema["$defs"][name]["properties"]["command"] = {"const": config.command}
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


if __name__ == "__main__":
    print(json.dumps(record_schema(), indent=2))
