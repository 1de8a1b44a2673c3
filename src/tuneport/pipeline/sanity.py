"""Checks that catch swapped and foreign inputs before any work: is this a fine-tune of this base, and for these labels?

A fine-tune changes the weights of its base by a few percent of their norm: 5 to 6 in our models. The weights of another
base have nothing in common with them: the difference is larger than their norm, and takes them away. On labelled
samples a fine-tune is better than its base. It is refused where it is clearly worse (a sign test) than a base that is
better than a guess, and where it is neither clearly better than its base nor better than a guess: a head or classes in
another order. With fewer than `LEAST` samples the second is chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.dataset import align_labels
from ..errors import CheckpointError, TuneportError
from ..io.checkpoint import open_checkpoint, read_json
from ..io.fingerprint import same_weights
from ..job import Drawn, Job
from ..measure.chance import LEVEL, direction, tail
from ..measure.objectives import TokenLoss
from ..measure.signals import frozen
from ..models.base import Model
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from .change import Finetuned, is_task_vector
from .evaluation import finetuned_source, is_whole
from .labels import scores_by

LEAST_LEFT = 0.5  # of the weights of the base in a fine-tune: their coefficient in it
LAYERS = 16  # in which that is measured
LEAST = 100  # samples from which a guess can be told from skill
GO_ON = "or pass `accept_unlikely=True`"


@dataclass(frozen=True, eq=False)
class Seen:
    """The fine-tuned source and its base on the calibration samples."""

    change: float | None  # the norm of the change over that of the base
    samples: int = 0
    metric: str = "accuracy"
    source: float | None = None  # samples that are right, or the mean loss of a sample
    finetuned: float | None = None
    scores: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # of the base, and of the fine-tuned source

    def record(self, target: float | None) -> dict[str, Any]:
        """The entry of the run record; `target` is known where the scale was chosen, which scores it at zero."""
        numbers = {"source": self.source, "finetuned": self.finetuned, "target": target, "change": self.change}
        return {"samples": self.samples, "metric": self.metric, **numbers, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """For the user, before anything is measured; nothing where nothing is known."""
        if self.source is None or self.finetuned is None:
            return ""
        if self.metric == "accuracy":
            right = f"the fine-tuned source is right on {self.finetuned} of {self.samples} samples"
            return f"{right}, its base on {self.source}"
        return f"the fine-tuned source has a loss of {self.finetuned:.4g} nats a text, its base {self.source:.4g}"


def look(job: Job) -> Seen:
    """Run the fine-tuned source and its base on the samples, if they are whole and the samples have true labels.

    A CheckpointError says what cannot be a fine-tune of this base for these labels, unless the job accepts it.
    """
    seen = Seen(check_weights(job))
    if not answers(job):
        return seen
    assert isinstance(job.samples, Drawn)
    if job.losses is not None and isinstance(job.losses.source, TokenLoss):
        return _by_tokens(job, job.samples, job.losses.source, seen.change)
    return _by_classes(job, job.samples, seen.change)


def check_weights(job: Job) -> float | None:
    """The norm of the change over that of the base; a CheckpointError if the fine-tune has most likely another base."""
    change, left = _change(job)
    if left < LEAST_LEFT and not job.accept_unlikely:
        raise CheckpointError(
            f"the fine-tune differs from {job.source.name} by {change:.2f} times the norm of its weights, and little "
            f"of them is left in it: it has most likely another base. Check `source` and `finetuned`, {GO_ON}."
        )
    return change


def answers(job: Job) -> int:
    """The number of samples that the source answers in `look`, with its fine-tune and without."""
    if not isinstance(job.samples, Drawn) or not is_whole(job) or job.by_source:
        return 0
    classes = job.heads is not None and job.samples.dataset.labels is not None
    tokens = job.losses is not None and isinstance(job.losses.source, TokenLoss)
    return 2 * len(job.samples) if classes or tokens else 0


def _by_classes(job: Job, samples: Drawn, change: float | None) -> Seen:
    assert job.heads is not None
    head, chosen = job.heads.source, samples.chosen
    labels = align_labels(chosen, head.classes).labels
    whole = job.teacher if job.teacher is not None else job.task_vector
    scores = tuple(
        scores_by(job.source, vector, head, chosen, batch_size=samples.size) for vector in (TaskVector({}), whole)
    )
    base, tuned = (each.argmax(-1) == labels for each in scores)
    counts = int(base.sum()), int(tuned.sum())
    if not job.accept_unlikely:
        _check_right(job, base, tuned, len(head.classes))
    return Seen(change, len(samples), "accuracy", *counts, scores=(scores[0], scores[1]))


def _check_right(job: Job, base: NDArray[np.bool_], tuned: NDArray[np.bool_], classes: int) -> None:
    count, right = len(tuned), int(tuned.sum())
    better = direction(int((tuned & ~base).sum()), int((base & ~tuned).sum()))
    found = f"the fine-tuned source is right on {right} of {count} samples"
    skilled = [tail(count, int(each.sum()), 1 / classes) < LEVEL for each in (base, tuned)]
    if better < 0 and skilled[0]:
        raise CheckpointError(
            f"{found} and its base {job.source.name} on {int(base.sum())}: the two may be swapped, or the data are of "
            f"another task. Check `source`, `finetuned` and `data`, {GO_ON}."
        )
    if count >= LEAST and better < 1 and not skilled[1]:
        raise CheckpointError(
            f"{found}, no more than a guess among {classes} classes: check `head`, and that the classes of the data "
            f"are in the order of the fine-tune, {GO_ON}."
        )


def _by_tokens(job: Job, samples: Drawn, loss: TokenLoss, change: float | None) -> Seen:
    """The losses of texts; a fine-tune may well be worse on texts of another kind, so that nothing is refused."""

    def losses() -> NDArray[np.float64]:
        with frozen(job.source.module), torch.no_grad():
            return torch.cat([loss.each(job.source.module, batch.source) for batch in samples]).numpy()

    base = losses()
    with finetuned_source(job):
        tuned = losses()
    return Seen(change, len(samples), "loss", float(base.mean()), float(tuned.mean()))


def _change(job: Job) -> tuple[float | None, float]:
    """The norm of the change over that of the base, and the share of the base that is left in the fine-tune.

    Both are measured in some of the paired layers. An adapter stores its change as factors, which say nothing of its
    base.
    """
    weights = dict.fromkeys(pair.source.weight for pair in job.plan.pairs)
    return relation(job.source.stored_parameters(), job.task_vector, weights)


def relation(stored: Mapping[str, Tensor], vector: TaskVector, weights: Iterable[str]) -> tuple[float | None, float]:
    """Return the norm of a change over that of its base, and the share of the base that is left, in some layers."""
    names = [name for name in weights if name in vector and name in stored and vector.spec(name).rank is None]
    chosen = dict.fromkeys(names[index * len(names) // LAYERS] for index in range(LAYERS)) if names else {}
    change = base = along = 0.0
    for name in chosen:
        weight = stored[name]
        if weight.is_floating_point():
            before, delta = weight.flatten().double().cpu(), vector.dense(name).flatten().double().cpu()
            change, base = change + float(delta @ delta), base + float(before @ before)
            along += float(delta @ before)
    if not base > 0 or not math.isfinite(change):
        return None, 1.0
    return math.sqrt(change / base), 1 + along / base


def stated_fingerprint(finetuned: Finetuned) -> str:
    """The fingerprint of its base that a task-vector file, or an adapter by tuneport, has; else nothing."""
    try:
        if isinstance(finetuned, Adapter):
            folder = finetuned.files[0].parent if finetuned.files else None
            known = folder is not None and (folder / "tuneport.json").is_file()
            record: Mapping[str, Any] = {}
            if known and folder is not None:
                record = read_json(folder / "tuneport.json", "a run record", limit=10**8)
            return str(record.get("base_fingerprint", ""))
        if isinstance(finetuned, (str, Path)) and is_task_vector(Path(finetuned)):
            return open_checkpoint(Path(finetuned)).metadata.get("base_fingerprint", "")
    except (TuneportError, AttributeError):
        return ""
    return ""


def check_base(source: Model, finetuned: Finetuned) -> None:
    """Refuse a task-vector file or an adapter whose fingerprint is that of another base."""
    stated = stated_fingerprint(finetuned)
    if stated and same_weights(stated, source.tensors) is False:
        name = finetuned.name if isinstance(finetuned, Adapter) else finetuned
        raise CheckpointError(
            f"{name} was made for other weights than those of {source.name}: give its own base as `source`, {GO_ON}."
        )
