"""Distillation: an old model teaches a new one (`pipeline.lessons`).

From paths to an output, without a transfer before it. `pipeline.upgrade` makes routes of the same parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import DistillConfig, DistillInputs, LessonsConfig, TransferConfig
from ..data.dataset import Dataset
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import OptionError, TuneportError
from ..io.places import local
from ..measure.samples import Calibration
from ..methods import get_method
from ..models.base import Model, ModelLike
from ..models.change import Change, change_of, opened
from ..models.heads import Head, choose_head
from ..models.open import DTYPES, dtype_on, open_both, outline_model, pick_device
from ..models.weights import shard
from ..outputs import Output, Update, output_of
from ..pairing import Plan
from ..processes import ranks, undivided
from ..report.provenance import data_identity, identity_of
from ..runtime.resume import Work, fingerprint
from ..synthetic.samples import OldModel
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from ..training.student import require_lora
from ..types import Events, Sides
from .evaluate import with_protocol
from .inputs import about_inputs, conditions_of
from .lessons import Lessons, lessons_of, read_own, samples_of
from .run import check_out, claimed_by_first, write_result, write_taught
from .transfer import Result, Setup, untouched


def distill(
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | None = None,
    source: ModelLike | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> Result:
    """Let a fine-tuned model teach another one on samples; labels and answers of the data are not used.

    Args:
        finetuned: the teacher: a model, or an adapter or a task vector with its base as `source`.
        target: the student, which need not have a layer in common with the teacher.
        data: a path, or a Dataset; samples come from the training split. Prompts without answers are enough, and with
            the option `synthetic` a sentence in place of samples.
        source: the base of an adapter or of a task vector.
        events: listens to the run.
        options: the fields of `DistillConfig`.

    Returns:
        The student, which can be applied and saved.
    """
    config = DistillConfig.of(**options)
    found = _prepare(finetuned, target, data, source, config)
    return _taught(found, config, events or Events())


def distill_to_folder(inputs: DistillInputs, config: DistillConfig, events: Events | None = None) -> Mapping[str, Any]:
    """Distill, write the student (as an adapter where a LoRA is trained) and return the run record.

    A killed run can be resumed to the same bytes.
    """
    out, output = Path(inputs.out), output_of(_output_options(config))
    check_out(out, output, config, inputs.finetuned, inputs.target, inputs.data, inputs.source, config.head)
    found = _prepare(inputs.finetuned, inputs.target, inputs.data, inputs.source, config)
    found = replace(found, about=with_protocol(found.about, found.old.models.target, inputs.data, config))
    work = Work(out, conditions_of(found.about, config), config.save_every)
    size = _size(found.old.models.target, config, output)

    def make(work: Work) -> Mapping[str, Any]:
        result = _taught(found, config, events or Events(), work)
        return write_result(result, out, events or Events(), overwrite=config.overwrite)

    with claimed_by_first(out):
        return write_taught(work, output, config, make, size)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """Teacher and student, opened and checked; `own` are drawn samples, or None if they are to be written."""

    old: OldModel
    own: Dataset | None
    heads: Sides[Head] | None
    about: Mapping[str, Any]
    data: Any = None


def _prepare(
    finetuned: Any, target: Any, data: str | Path | Dataset | None, source: Any, config: DistillConfig
) -> _Prepared:
    """Open teacher and student and draw the samples; also the change that makes the source the teacher."""
    if data is None and config.synthetic is None:
        raise OptionError("a distillation needs samples: pass `data`, or `synthetic=N` and `describe`, one sentence.")
    if config.lora is not None:
        require_lora()
    device = pick_device(config.device)
    tuned = opened(local(finetuned) if isinstance(finetuned, (str, Path)) else finetuned)
    part = isinstance(tuned, (Adapter, TaskVector)) or (isinstance(tuned, (str, Path)) and Path(tuned).is_file())
    if source is None and part:
        raise TuneportError("an adapter or a task vector teaches together with its base: pass `source`.")
    base: Any = tuned if source is None else source
    dtype, _ = dtype_on(device, config.dtype, base, target)
    kind = DTYPES[dtype]
    if config.shard and ranks().size == 1:
        raise OptionError("`shard` divides models over several processes: start them with torchrun, or leave it out.")
    if config.shard:
        models = Sides(*(outline_model(model, dtype=kind) for model in (base, target)))
    else:
        models = open_both(base, target, device=device, dtype=kind, trust_remote_code=config.trust_remote_code)
    models = Sides(*(model.cut_at(config.max_length) for model in models))
    vector = TaskVector({}) if source is None else change_of(models.source, tuned)
    if config.shard:
        shard(models.source, models.source.module, device, vector)
        models, vector = Sides(models.source.with_module(models.source.module), models.target), TaskVector({})
    for model in models:
        if model.inputs.encode is None:
            raise TuneportError(model.unreadable)
    about = about_inputs("distill", config, models, [tuned], None)
    about |= {"resolved": {"device": str(device), "dtype": dtype}, **about_others(config)}
    if data is None:
        return _Prepared(OldModel(models, vector), None, None, {**about, "data": {"name": "written samples"}})
    task, where = split_reference(data) if isinstance(data, (str, Path)) else (None, data)
    dataset = read_own(data, config)
    for model in models:
        model.check_kind(dataset)
    heads = _heads(models, config.head, dataset)
    unlabelled = replace(dataset, labels=None)
    indices = select(unlabelled, samples=config.samples, sampler=config.sampler, seed=config.seed)
    read = data_identity(where, dataset, indices, heads)
    about["data"] = read if task is None else {**read, "task": task.name}
    old = OldModel(models, vector, None if heads is None else heads.source)
    return _Prepared(old, dataset.subset(indices), heads, about, data)


def about_others(config: LessonsConfig) -> dict[str, Any]:
    """The identities of extra samples and of a generator, for the record."""
    found: dict[str, Any] = {}
    if config.extra is not None:
        extra = read_data(config.extra, "train", labelled=False)
        found["extra"] = data_identity(config.extra, extra, np.arange(len(extra)))
    if config.generator is not None:
        found["generator"] = identity_of(config.generator)
    elif config.generator_url is not None:
        found["generator"] = {"name": config.generator_url}
    return found


def _heads(models: Sides[Model], wanted: str | None, dataset: Dataset) -> Sides[Head] | None:
    """A head for each model; none for writers, or where nothing names classes: then similarities are taught."""
    if all(model.generates is not None for model in models):
        return None
    if wanted is None and not dataset.classes and any(model.outputs.logits is None for model in models):
        return None
    return Sides(*(choose_head(model, wanted, dataset) for model in models))


def _taught(found: _Prepared, config: DistillConfig, events: Events, work: Work | None = None) -> Result:
    """Gather the lessons and teach them."""
    models = found.old.models
    with undivided() if config.shard else nullcontext():
        lessons = lessons_of(found.old, found.own, config, found.data, work, events)
        samples = samples_of(models, lessons.own, found.heads)
        about = {**found.about, "resolved": {**found.about["resolved"], "loss": samples.objective.name}}
        about["fingerprint"] = fingerprint(conditions_of(found.about, config))
        setup = Setup(models, Change(found.old.vector), Plan(()), Calibration(samples), about)
        start = untouched(setup, _output_options(config))
        saved = None if work is None else work.state("training/state")
        return told(start.taught(config, extra=lessons.extra, events=events, saved=saved), lessons, config)


def told(result: Result, lessons: Lessons, config: LessonsConfig) -> Result:
    """A student with what is said of the samples that were written for it, and their texts where they are kept."""
    if lessons.written is None:
        return result
    texts = lessons.written.texts if config.keep_texts else ()
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    record = {**result.record, "synthetic": lessons.written.record}
    return replace(result, record=record, texts={"texts.jsonl": lines} if lines else {})


def _output_options(config: DistillConfig) -> TransferConfig:
    """How the student is written: as an adapter where a LoRA is trained."""
    return TransferConfig(as_="model" if config.lora is None else "adapter", overwrite=config.overwrite)


def _size(target: Model, config: DistillConfig, output: Output) -> int:
    """The expected number of bytes of the output."""
    if config.lora is None:
        return output.size(Plan(()), Update(target, TaskVector({})), get_method("naive"))
    return 4 * sum(config.lora * (layer.out_features + layer.in_features) for layer in target.architecture.layers)
