"""A transfer that has been checked whole, and the samples that it is measured on.

What runs after preparation takes a Job. It is frozen: a part of it, such as some of its layers or samples, is a Job of
its own, made by `replace`. Samples are read and encoded anew each time they are gone through.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from .data.dataset import Dataset, align_labels, with_prompts
from .data.views import VIEWS, Views
from .measure.batches import PairedBatch
from .measure.objectives import Objective, batch_for
from .measure.tokens import Coverage, Match, coverage, match_spans, match_tokens
from .methods import Method
from .models.base import Model
from .models.heads import Head
from .models.offload import Placement
from .models.tokenizer import Encoded
from .pairing import Plan
from .task_vectors.vector import TaskVector
from .types import Completion, Loss


@dataclass(frozen=True, eq=False)
class Job:
    """A transfer that has been checked whole: what will be moved, and how it will be measured."""

    source: Model
    target: Model
    task_vector: TaskVector
    plan: Plan
    method: Method
    completion: Completion = "svd"
    batches: Iterable[Any] = ()
    samples: int = 0
    source_loss: Loss | None = None
    target_loss: Loss | None = None
    match: Match | None = None
    target_head: Head | None = None
    max_tokens: int | None = None
    memory_budget: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | None = None  # where it is to run; None: where the models are
    placements: tuple[Placement, Placement] | None = None  # of both models while they run


def runs_on(job: Job) -> torch.device:
    """Where a job's models run and its maps are solved."""
    if job.device is None or not (job.placements is not None or at_home(job)):
        return job.target.device
    return job.device


def at_home(job: Job) -> bool:
    """Whether the models are elsewhere than where they are to run."""
    return any(
        model.offloaded or (job.device is not None and model.device.type != job.device.type)
        for model in (job.source, job.target)
    )


@dataclass(frozen=True, eq=False)
class PairedBatches:
    """The chosen samples as both models want them, prepared batch by batch; can be gone through again."""

    source: Model
    target: Model
    dataset: Dataset
    indices: np.ndarray[Any, np.dtype[np.int64]]
    heads: tuple[Head, ...] | None
    size: int
    objective: Objective

    def __iter__(self) -> Iterator[PairedBatch]:
        for ours, theirs in self._encoded():
            yield self._paired(ours, theirs)

    def _paired(self, ours: Encoded, theirs: Encoded) -> PairedBatch:
        batches = [batch_for(model, side) for model, side in zip(self._sides, (ours, theirs), strict=True)]
        if ours.spans and theirs.spans:
            match = match_spans(ours.spans, theirs.spans)
        else:
            layouts = [
                model.layout(batch) if model.layout is not None else None
                for model, (batch, _) in zip(self._sides, batches, strict=True)
            ]
            match = match_tokens(*layouts)
        rows = len(next(iter(theirs.inputs.values())))
        size = len(theirs.labels) if theirs.labels is not None else rows
        part = None
        if rows == size and self.objective.by_sample:
            part = partial(self._part, ours, theirs)
        return PairedBatch(batches[0], batches[1], size=size, match=match, rows=rows, part=part)

    def _part(self, ours: Encoded, theirs: Encoded, start: int, stop: int) -> PairedBatch:
        return self._paired(ours.part(start, stop), theirs.part(start, stop))

    def coverage(self) -> Coverage | None:
        """How well the tokens of both models meet on all samples; None where they are not texts."""
        if self.source.reader is None or self.target.reader is None:
            return None
        return sum((coverage(ours.spans, theirs.spans) for ours, theirs in self._encoded()), Coverage())

    @property
    def _sides(self) -> tuple[Model, Model]:
        return self.source, self.target

    def _encoded(self) -> Iterator[tuple[Encoded, Encoded]]:
        chosen = [align_labels(self.dataset, self.heads[i].classes) if self.heads else self.dataset for i in range(2)]
        for start in range(0, len(self.indices), self.size):
            rows = self.indices[start : start + self.size]
            ours, theirs = (
                self.objective.encode(model, with_prompts(data.subset(rows)) if model.prompted else data.subset(rows))
                for model, data in zip(self._sides, chosen, strict=True)
            )
            yield ours, theirs


def views_of(job: Job) -> Job | None:
    """A job with changed views of the samples, for the input side only; None where there are none to be had.

    That is so where the batches are the caller's own, or pairs of texts.
    """
    if not isinstance(job.batches, PairedBatches) or not len(job.batches.indices):
        return None
    chosen = job.batches.dataset.subset(job.batches.indices)
    if chosen.kind != "image" and not isinstance(chosen.inputs[0], str):
        return None
    seed = int(job.record.get("options", {}).get("seed", 0) or 0)
    inputs = Views(chosen.inputs, VIEWS, seed)
    labels = None if chosen.labels is None else np.tile(chosen.labels, VIEWS)
    targets = None if chosen.targets is None else list(chosen.targets) * VIEWS
    more = replace(chosen, inputs=inputs, labels=labels, targets=targets)
    count = VIEWS * len(chosen)
    tokens = None if job.max_tokens is None else max(job.max_tokens * count // max(job.samples, 1), 1)
    batches = replace(job.batches, dataset=more, indices=np.arange(count))
    return replace(job, batches=batches, samples=count, max_tokens=tokens)
