"""The run record of a job before anything has run, with notes on what a user may not expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, cast

from ..data.samplers import DEFAULT_SAMPLES
from ..job import Drawn, Job
from ..models.base import Model
from ..models.open import slow_note
from ..pairing import nearest_block
from ..report import record as records
from ..report.provenance import base_note, identity_of, package_version, versions
from ..task_vectors.lora_format import Adapter
from ..types import Sides
from .change import Finetuned, exclude_note, names_of
from .options import Options


def _identity_of_all(parts: Sequence[Finetuned]) -> records.Input:
    """The identity of several fine-tunes whose changes are added."""
    inputs = [identity_of(part) for part in parts]
    return {"name": " + ".join(part["name"] for part in inputs), "parts": inputs}


def _text_notes(models: Sides[Model], samples: Drawn, cut: Sides[int]) -> Iterator[str]:
    """What the models do not read as the data have it: texts that are cut, chats without a template."""
    for model, count in zip(models, cut, strict=True):
        assert model.reader is not None
        if count:
            length = model.reader.longest
            more = ": raise `max_length`" if length < model.reader.limit else ""
            yield f"{count} of {len(samples)} texts are cut at {length} tokens of {model.name}{more}"
        if samples.dataset.has_chats and not model.reader.tokenizer.chat_template:
            yield f"{model.name} has no chat template: it reads the messages one after the other"


def prepared_record(
    job: Job,
    given: Options,
    finetuned: Sequence[Finetuned],
    data: records.Data,
    *,
    loss: str | None,
    task: str | None,
    dtype_note: str,
) -> records.PreparedRecord:
    """The run record before anything has run: options, inputs and their SHA-256, versions.

    Args:
        job: what will run.
        given: the options, with the device and dtype that were chosen.
        finetuned: the parts whose changes are added.
        data: what was read and drawn.
        loss, task: the names of the objective and of the task of the data.
        dtype_note: about the dtype.
    """
    own = {"loss": given["loss"] is not None and not isinstance(given["loss"], str)}
    own |= {"match": given["match"] is not None, "pairs": given["pairs"] is not None}
    own["depth_rule"] = given["depth_rule"] is not nearest_block
    values: dict[str, Any] = {
        **given,
        "samples": (len(job.samples) if isinstance(job.samples, Drawn) else 0) or given["samples"],
        "labels": given["labels"],
        "loss": loss,
        "columns": dict(given["columns"] or {}),
        "exclude": list(given["exclude"]),
        "roles": dict(given["roles"] or {}),
        "python": [name for name, was_given in own.items() if was_given],
    }
    if task is not None:
        data["task"] = task
    record: records.PreparedRecord = {
        "tuneport": package_version("tuneport"),
        "command": "transfer",
        "options": cast(records.Options, {name: values[name] for name in records.Options.__annotations__}),
        "source": identity_of(job.source),
        "finetuned": identity_of(finetuned[0]) if len(finetuned) == 1 else _identity_of_all(finetuned),
        "target": identity_of(job.target),
        "data": data,
        "versions": versions(),
        "blocks": {"source": dict(job.plan.source_blocks), "target": dict(job.plan.target_blocks)},
    }
    offloads = given["memory_budget"] is not None and not given["device"].startswith("cpu")  # also live modules
    notes = [dtype_note, None if offloads else slow_note(*job.models)]
    notes.append(base_note(finetuned[0], job.source) if isinstance(finetuned[0], Adapter) else None)
    if isinstance(job.samples, Drawn) and (found := job.samples.coverage()) is not None:
        record["tokens"] = {**asdict(found), "share": round(found.share, 4)}
        notes += _text_notes(job.models, job.samples, Sides(found.source_cut, found.target_cut))
    if isinstance(job.samples, Drawn):
        if given["samples"] is None and given["shots"] is None and (count := len(job.samples)) < DEFAULT_SAMPLES:
            notes.append(f"the data have {count} samples, fewer than the usual {DEFAULT_SAMPLES}: all are used")
        notes += job.samples.warnings(1 in (given["max_tokens"], record.get("tokens", {}).get("target_matched")))
    if given["exclude"]:
        names = [names for model in job.models for names in (model.file_names, model.tensors)]
        notes.append(exclude_note(given["exclude"], *names, *map(names_of, finetuned)))
    if any(notes):
        record["notes"] = [note for note in notes if note]
    return record
