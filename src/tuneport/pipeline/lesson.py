"""`tuneport distill`: a fine-tuned model teaches another one, from paths to an output, without a transfer before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import TuneportError
from ..io.hub import local
from ..io.output import claimed
from ..job import Drawn
from ..measure.objectives import choose_objective
from ..models.base import Model, ModelLike
from ..models.heads import Head, choose_head
from ..models.open import dtype_on, open_both, pick_device, pick_dtype
from ..report.provenance import data_identity, identity_of, package_version, versions
from ..runtime.resume import SAVE_EVERY, Work, fingerprint
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from ..training.distill import Lesson, Mark
from ..types import OutputKind, Progress, Sides
from .change import Finetuned, change_of, opened
from .distill import teach
from .port import finished, state_file
from .result import Result, check_output, output_bytes


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked distillation: samples with both models, what the fine-tune changes in the first, and the record."""

    samples: Drawn
    finetune: TaskVector
    lesson: Lesson
    record: dict[str, Any]


def prepare_lesson(
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset,
    lesson: Lesson,
    *,
    source: ModelLike | None = None,
    head: str | None = None,
    samples: int | None = None,
    sampler: str = "random",
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
) -> Prepared:
    """Open teacher and student, and draw the samples; labels of the data are not used.

    Args:
        finetuned: the teacher: a model, or an adapter or a task vector with its base as `source`.
        target: the student, which need not have a layer in common with the teacher.
        data: a path, or a Dataset; samples come from the training split.
        lesson: steps, learning rate, rank of a LoRA, seed.
        source: the base of an adapter or of a task vector.
        head: the zero-shot head of both models: a name in their heads/ folders, or a file.
        samples: the number of samples to draw, 100 by default.
        sampler: how they are drawn, without labels.
        device: where both models run.
        dtype: what they run in.
        trust_remote_code: let a checkpoint's own code run.
    """
    lesson.check()
    place = pick_device(device)
    tuned = opened(local(finetuned) if isinstance(finetuned, (str, Path)) else finetuned)
    part = isinstance(tuned, (Adapter, TaskVector)) or (isinstance(tuned, (str, Path)) and Path(tuned).is_file())
    if source is None and part:
        raise TuneportError("an adapter or a task vector teaches together with its base: pass `source`.")
    base: Any = tuned if source is None else source
    models = open_both(
        base,
        target,
        device=place,
        dtype=pick_dtype(dtype_on(place, dtype, base, target)[0]),
        trust_remote_code=trust_remote_code,
    )
    vector = TaskVector({}) if source is None else change_of(models.source, tuned)
    task, where = split_reference(data) if isinstance(data, (str, Path)) else (None, data)
    dataset = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False)
    for model in models:
        if model.encode is None:
            raise TuneportError(model.unreadable)
        model.check_kind(dataset)
    objective = choose_objective(dataset, models)
    heads = _heads(models, head, dataset) if objective.name == "classification" else None
    indices = select(replace(dataset, labels=None), samples=samples, sampler=sampler, seed=lesson.seed)
    drawn = Drawn(models, dataset, indices, heads, len(indices), objective)
    about = data_identity(where, dataset, indices, heads)
    record = _record(models, tuned, about if task is None else {**about, "task": task.name})
    record["options"] |= {"sampler": sampler, "seed": lesson.seed, "head": head, "device": str(place), "dtype": dtype}
    return Prepared(drawn, vector, lesson, record)


def _record(models: Sides[Model], finetuned: Finetuned, data: Mapping[str, Any]) -> dict[str, Any]:
    """The run record before anything has run, with the keys of a transfer's."""
    count = len(data["indices"])
    return {
        "tuneport": package_version("tuneport"),
        "command": "distill",
        "options": {
            "samples": count,
            "shots": None,
            "completion": "none",
            "max_tokens": None,
            "memory_budget": None,
            "batch_size": count,
            "exclude": [],
            "roles": {},
        },
        "source": identity_of(models.source),
        "finetuned": identity_of(finetuned),
        "target": identity_of(models.target),
        "data": data,
        "versions": versions(),
        "blocks": {"source": {}, "target": {}},
    }


def _heads(models: Sides[Model], wanted: str | None, dataset: Dataset) -> Sides[Head] | None:
    """A head for each model, or none where nothing names classes: then similarities are taught."""
    if wanted is None and not dataset.classes and any(model.logits is None for model in models):
        return None
    return Sides(*(choose_head(model, wanted, dataset) for model in models))


def run_lesson(
    prepared: Prepared,
    out: str | Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Progress | None = None,
    watch: Callable[[Mark], None] | None = None,
) -> dict[str, Any]:
    """Distill, write the student to `out` (as an adapter where a LoRA is trained) and return the run record."""
    out, lesson, target = Path(out), prepared.lesson, prepared.samples.models.target
    kind: OutputKind = "model" if lesson.lora is None else "adapter"
    conditions = {
        key: {name: item for name, item in value.items() if name != "path"} if isinstance(value, dict) else value
        for key, value in prepared.record.items()
    }
    conditions |= asdict(lesson)
    work = Work(out, conditions, save_every)
    with claimed(out):
        done = finished(out, kind) if resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            return done
        layers = [((layer.out_features, layer.in_features), lesson.lora) for layer in target.layers]
        check_output(out, kind, overwrite, needed_bytes=output_bytes(target, kind, layers))
        if not resume:
            work.remove()
        vector, entry = teach(
            prepared.samples,
            target,
            prepared.finetune,
            TaskVector({}),
            lesson,
            progress=progress,
            watch=watch,
            saved=state_file(work),
        )
        record = {
            **prepared.record,
            "method": "distill",
            "scale": 1.0,
            "samples": len(prepared.samples),
            "seconds": entry["seconds"],
            "fingerprint": fingerprint(conditions),
            "seconds_by_stage": {"distill": entry["seconds"]},
            "passes": {},
            "layers": [],
            "not_transported": [],
            "left_behind": [],
            "distilled": {"teacher": prepared.record["finetuned"]["name"], **entry},
        }
        result = Result(target, vector, (), (), 1.0, record)
        result.save(out, kind=kind, overwrite=overwrite)
        work.remove()
    return {**record, "out": str(out), "as": kind}
