"""The run record of a transfer: its inputs before anything has run, and its result. Nothing reads it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ..config import MeasureConfig
from ..data.samplers import DEFAULT_SAMPLES
from ..measure.measurement import Calibration
from ..measure.samples import DatasetSamples
from ..methods import LayerRecord, Method, name_of
from ..models.base import Model
from ..models.change import Change, exclude_note, names_of
from ..models.open import dtype_on, pick_device, slow_note
from ..pairing import Plan
from ..report import record as records
from ..report.provenance import base_note, identity_of, package_version, versions
from ..report.record import to_json
from ..task_vectors.lora_format import Adapter
from ..types import ScaleRule, Sides
from .checks import InputCheck
from .scale import ScaleChoice


def describe_inputs(
    models: Sides[Model],
    change: Change,
    plan: Plan,
    calibration: Calibration,
    drawn: records.Data,
    config: MeasureConfig,
) -> records.PreparedRecord:
    """Describe a transfer before anything has run: options, inputs and their SHA-256, versions, notes for the user."""
    device = pick_device(config.device)
    opened = [model.module if model.folder is None else model.name for model in models]
    dtype, dtype_note = dtype_on(device, config.dtype, *opened)
    record: records.PreparedRecord = {
        "tuneport": package_version("tuneport"),
        "command": "transfer",
        "options": config.to_json(),
        "resolved": {"device": str(device), "dtype": dtype, "loss": calibration.loss_name},
        "source": identity_of(models.source),
        "finetuned": _identity_of_parts(change),
        "target": identity_of(models.target),
        "data": drawn,
        "versions": versions(),
        "blocks": {"source": dict(plan.source_blocks), "target": dict(plan.target_blocks)},
    }
    samples = calibration.samples
    notes: list[str | None] = [dtype_note]
    offloads = config.memory_budget is not None and device.type != "cpu"  # also live modules
    notes.append(None if offloads else slow_note(*models))
    first = change.parts[0] if change.parts else None
    notes.append(base_note(first, models.source) if isinstance(first, Adapter) else None)
    if isinstance(samples, DatasetSamples):
        if (found := samples.coverage()) is not None:
            record["tokens"] = {**asdict(found), "share": round(found.share, 4)}
            notes += _text_notes(models, samples, Sides(found.source_cut, found.target_cut))
        if config.samples is None and config.shots is None and (count := len(samples)) < DEFAULT_SAMPLES:
            notes.append(f"the data have {count} samples, fewer than the usual {DEFAULT_SAMPLES}: all are used")
        notes += samples.warnings(1 in (config.max_tokens, record.get("tokens", {}).get("target_matched")))
    if config.exclude:
        names = [names for model in models for names in (model.file_names, model.tensors)]
        notes.append(exclude_note(config.exclude, *names, *map(names_of, change.parts)))
    if any(notes):
        record["notes"] = [note for note in notes if note]
    return record


def _identity_of_parts(change: Change) -> records.Input:
    """The identity of the fine-tune, or of several whose changes are added."""
    inputs = [identity_of(part) for part in change.parts]
    if len(inputs) == 1:
        return inputs[0]
    return {"name": " + ".join(part["name"] for part in inputs), "parts": inputs}


def _text_notes(models: Sides[Model], samples: DatasetSamples, cut: Sides[int]) -> Iterator[str]:
    """What the models do not read as the data have it: texts that are cut, chats without a template."""
    for model, count in zip(models, cut, strict=True):
        assert model.reader is not None
        if count:
            length = model.reader.longest
            more = ": raise `max_length`" if length < model.reader.limit else ""
            yield f"{count} of {len(samples)} texts are cut at {length} tokens of {model.name}{more}"
        if samples.dataset.has_chats and not model.reader.tokenizer.chat_template:
            yield f"{model.name} has no chat template: it reads the messages one after the other"


def conditions_of(
    about: Mapping[str, Any], config: MeasureConfig, method: Method, scale: float | str
) -> dict[str, Any]:
    """Everything that decides the result, as JSON values; the paths of the inputs do not."""
    inputs = {key: dict(about[key]) for key in ("source", "finetuned", "target", "data")}
    for identity in inputs.values():
        identity.pop("path", None)
        identity.pop("protocol", None)  # of a later evaluation
    control = {item.name for item, option in config.options() if option.control} | {"method", "scale"}
    options = {name: value for name, value in config.to_json().items() if name not in control}
    kept = {key: about[key] for key in ("tuneport", "resolved", "versions")}
    plain: dict[str, Any] = json.loads(
        to_json({**kept, "options": options, "method": name_of(method), **inputs, "scale": scale})
    )
    return plain


def choice_entry(choice: ScaleChoice) -> dict[str, Any]:
    """How a scale was chosen."""
    candidates = [
        {"scale": value, "loss": found.loss, "accuracy": found.accuracy, "sharpness": found.sharpness}
        for value, found in choice.scores.items()
    ]
    return {"rule": choice.rule, "samples": choice.samples, "held_out": choice.held_out, "candidates": candidates}


def check_entry(checked: InputCheck, choice: ScaleChoice | None) -> dict[str, Any]:
    """What the fine-tuned source, its base and the target do on the samples, as far as it is known."""
    target = None
    if choice is not None and choice.samples == checked.samples:  # the choice of the scale has scored the target
        found = choice.scores[0.0]
        if checked.metric == "loss":
            target = found.loss if found.accuracy is None else None
        elif found.accuracy is not None:
            target = round(found.accuracy * checked.samples)
    return checked.record(target)


def layer_entries(plan: Plan, layers: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The records of the layers, each with its role and block and the largest possible ranks of its maps."""
    places = {
        pair.target.name: {
            "role": pair.target.role,
            "stack": pair.target.stack,
            "block": pair.target.block,
            "width_in": min(pair.source.in_features, pair.target.in_features),
            "width_out": min(pair.source.out_features, pair.target.out_features),
        }
        for pair in plan.pairs
    }
    return [{**asdict(layer), **places.get(layer.target, {})} for layer in layers]


def rule_of(scale: float | ScaleRule) -> str | None:
    """The name of the rule that chooses the scale, if one does."""
    return scale if isinstance(scale, str) else None
