"""Distillation: a fine-tuned model teaches another one, from paths to an output, without a transfer before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..config import DistillConfig, DistillInputs, TransferConfig
from ..data.dataset import Dataset
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import TuneportError
from ..io.hub import local
from ..io.output import claimed
from ..measure.objectives import choose_objective
from ..measure.samples import DatasetSamples
from ..methods import get_method
from ..models.base import Model, ModelLike
from ..models.change import change_of, opened
from ..models.heads import Head, choose_head
from ..models.open import dtype_on, open_both, path_of, pick_device, pick_dtype
from ..outputs import Output, Update, output_of
from ..pairing import Plan
from ..report.provenance import data_identity, identity_of, package_version, versions
from ..runtime.resume import Work, fingerprint
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from ..training.distill import teach
from ..training.state import StateFile
from ..types import Events, Sides
from .evaluate import with_protocol
from .result import Result
from .run import finished, state_file


def distill(
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset,
    source: ModelLike | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> Result:
    """Let a fine-tuned model teach another one on samples; labels of the data are not used.

    Args:
        finetuned: the teacher: a model, or an adapter or a task vector with its base as `source`.
        target: the student, which need not have a layer in common with the teacher.
        data: a path, or a Dataset; samples come from the training split.
        source: the base of an adapter or of a task vector.
        events: listens to the run.
        options: the fields of `DistillConfig`.

    Returns:
        The student, which can be applied and saved.
    """
    config = DistillConfig.of(**options)
    samples, change, about = _prepare(finetuned, target, data, source, config)
    return _run(samples, change, about, config, events)


def distill_to_folder(inputs: DistillInputs, config: DistillConfig, events: Events | None = None) -> Mapping[str, Any]:
    """Distill, write the student (as an adapter where a LoRA is trained) and return the run record.

    A killed run can be resumed to the same bytes.
    """
    out, output, events = Path(inputs.out), output_of(_output_options(config)), events or Events()
    read = (inputs.finetuned, inputs.target, inputs.data, inputs.source, config.head)
    places = [path_of(path) for path in read if isinstance(path, (str, Path))]
    output.check_place(out, config.overwrite or config.resume, inputs=places)
    samples, change, about = _prepare(inputs.finetuned, inputs.target, inputs.data, inputs.source, config)
    about = with_protocol(about, samples.models.target, inputs.data, config.head)
    conditions = _conditions(about, config)
    work = Work(out, conditions, config.save_every)
    with claimed(out):
        done = finished(out, output) if config.resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            return done
        size = _size(samples.models.target, config, output)
        output.check_place(out, config.overwrite, needed_bytes=size)
        if not config.resume:
            work.remove()
        events.plan(config.steps)
        result = _run(samples, change, about, config, events, state_file(work))
        written = result.write(out, overwrite=config.overwrite)
        work.remove()
    return written


def _prepare(
    finetuned: Any, target: Any, data: str | Path | Dataset, source: Any, config: DistillConfig
) -> tuple[DatasetSamples, TaskVector, dict[str, Any]]:
    """Open teacher and student and draw the samples; also the change that makes the source the teacher."""
    device = pick_device(config.device)
    tuned = opened(local(finetuned) if isinstance(finetuned, (str, Path)) else finetuned)
    part = isinstance(tuned, (Adapter, TaskVector)) or (isinstance(tuned, (str, Path)) and Path(tuned).is_file())
    if source is None and part:
        raise TuneportError("an adapter or a task vector teaches together with its base: pass `source`.")
    base: Any = tuned if source is None else source
    dtype, _ = dtype_on(device, config.dtype, base, target)
    models = open_both(
        base,
        target,
        device=device,
        dtype=pick_dtype(dtype),
        trust_remote_code=config.trust_remote_code,
    )
    vector = TaskVector({}) if source is None else change_of(models.source, tuned)
    task, where = split_reference(data) if isinstance(data, (str, Path)) else (None, data)
    dataset = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False)
    for model in models:
        if model.encode is None:
            raise TuneportError(model.unreadable)
        model.check_kind(dataset)
    objective = choose_objective(dataset, models)
    heads = _heads(models, config.head, dataset) if objective.name == "classification" else None
    unlabelled = replace(dataset, labels=None)
    indices = select(unlabelled, samples=config.samples, sampler=config.sampler, seed=config.seed)
    drawn = DatasetSamples(models, dataset, indices, heads, len(indices), objective)
    read = data_identity(where, dataset, indices, heads)
    about = {
        "tuneport": package_version("tuneport"),
        "command": "distill",
        "options": config.to_json(),
        "resolved": {"device": str(device), "dtype": dtype, "loss": objective.name},
        "source": identity_of(models.source),
        "finetuned": identity_of(tuned),
        "target": identity_of(models.target),
        "data": read if task is None else {**read, "task": task.name},
        "versions": versions(),
        "blocks": {"source": {}, "target": {}},
    }
    return drawn, vector, about


def _heads(models: Sides[Model], wanted: str | None, dataset: Dataset) -> Sides[Head] | None:
    """A head for each model, or none where nothing names classes: then similarities are taught."""
    if wanted is None and not dataset.classes and any(model.logits is None for model in models):
        return None
    return Sides(*(choose_head(model, wanted, dataset) for model in models))


def _run(
    samples: DatasetSamples,
    change: TaskVector,
    about: Mapping[str, Any],
    config: DistillConfig,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> Result:
    target = samples.models.target
    vector, entry = teach(samples, target, change, TaskVector({}), config, events=events, saved=saved)
    record = {
        **about,
        "method": "distill",
        "scale": 1.0,
        "samples": len(samples),
        "seconds": entry["seconds"],
        "fingerprint": fingerprint(_conditions(about, config)),
        "seconds_by_stage": {"distill": entry["seconds"]},
        "passes": {},
        "layers": [],
        "not_transported": [],
        "left_behind": [],
        "distilled": {"teacher": about["finetuned"]["name"], **entry},
    }
    return Result(Update(target, vector), (), (), _output_options(config), record)


def _output_options(config: DistillConfig) -> TransferConfig:
    """How the student is written: as an adapter where a LoRA is trained."""
    return TransferConfig(as_="model" if config.lora is None else "adapter", overwrite=config.overwrite)


def _conditions(about: Mapping[str, Any], config: DistillConfig) -> dict[str, Any]:
    """Everything that decides the student, without the paths of the inputs."""
    control = {item.name for item, option in config.options() if option.control}
    return {
        key: {
            name: item
            for name, item in value.items()
            if name not in ("path", "protocol") and not (key == "options" and name in control)
        }
        if isinstance(value, dict)
        else value
        for key, value in about.items()
    }


def _size(target: Model, config: DistillConfig, output: Output) -> int:
    """The expected number of bytes of the output."""
    if config.lora is None:
        return output.size(Plan(()), Update(target, TaskVector({})), get_method("naive"))
    return 4 * sum(config.lora * (layer.out_features + layer.in_features) for layer in target.layers)
