"""A distillation between two opened models: the source with its fine-tune teaches the target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from ..errors import TuneportError
from ..job import Drawn, Samples
from ..models.base import Model
from ..task_vectors.vector import TaskVector
from ..training.distill import Lesson, Mark, distill
from ..training.state import StateFile
from ..training.student import student_of
from ..types import Progress, Sides
from .scale import Scaled


def teach(
    samples: Samples,
    target: Model,
    finetune: TaskVector,
    start: TaskVector,
    lesson: Lesson,
    *,
    progress: Progress | None = None,
    watch: Callable[[Mark], None] | None = None,
    saved: StateFile | None = None,
) -> tuple[TaskVector, dict[str, Any]]:
    """Distill, and return the student's change of the target with an entry for the run record.

    Args:
        samples: drawn for both models, which come back as they were.
        target: the student's model; its head may be another than that of the samples' target.
        finetune: the change of the source that makes it the teacher.
        start: the change of the target that the student begins with.
        lesson, progress, watch, saved: see `tuneport.training.distill.distill`.
    """
    if not isinstance(samples, Drawn):
        raise TuneportError("a distillation draws its own samples: pass a data set or a path, not batches.")
    lesson.check()
    source = samples.models.source
    samples = replace(samples, models=Sides(source, target))
    for model in samples.models:
        model.require_in_memory("a distillation", "give a larger one, or distill on a larger machine")
    student = student_of(target, start, lesson.lora, lesson.seed)
    started = time.perf_counter()
    with Scaled(source.module, finetune, source.stored_parameters()) as teacher:
        teacher.set(1.0)
        found = distill(samples, student.module, lesson, progress=progress, watch=watch, saved=saved)
    return student.change(), {
        "matching": found.matching,
        "samples": found.samples,
        "held_out": found.held_out,
        "left_out": found.left_out,
        "steps": lesson.steps,
        "batch_size": found.batch_size,
        "learning_rate": found.learning_rate,
        "lora": lesson.lora,
        "blocks": lesson.blocks,
        "best": found.best,
        "curve": [asdict(mark) for mark in found.curve],
        "seconds": round(time.perf_counter() - started, 3),
    }
