"""Checks that catch swapped and foreign inputs before any work: is this a fine-tune of this base, and for these labels?

A fine-tune changes the weights of its base by a few percent of their norm: 5 to 6 in our models. The weights of another
base have nothing in common with them: the difference is larger than their norm, and takes them away. On labelled
samples a fine-tune is better than its base. It is refused where it is clearly worse (a sign test) than a base that is
better than a guess, and where it is neither clearly better than its base nor better than a guess: a head or classes in
another order. With fewer than `LEAST` samples the second is chance.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import MeasureConfig
from ..data.dataset import align_labels
from ..errors import CheckpointError
from ..measure.chance import LEVEL, direction, tail
from ..measure.measurement import Calibration
from ..measure.objectives import TokenLoss
from ..measure.samples import DatasetSamples
from ..measure.signals import frozen
from ..models.base import Model
from ..models.change import Change, is_whole
from ..models.weights import finetuned
from ..pairing import Plan
from ..task_vectors.vector import TaskVector
from .heads import scores_by

LEAST_LEFT = 0.5  # of the weights of the base in a fine-tune: their coefficient in it
LAYERS = 16  # in which that is measured
LEAST = 100  # samples from which a guess can be told from skill
GO_ON = "or pass `accept_unlikely=True`"


@dataclass(frozen=True, eq=False)
class InputCheck:
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


def check_inputs(
    source: Model, change: Change, plan: Plan, calibration: Calibration, config: MeasureConfig
) -> InputCheck:
    """Run the fine-tuned source and its base on the samples, if they are whole and the samples have true labels.

    Raises:
        CheckpointError: if this cannot be a fine-tune of this base for these labels, unless that is accepted.
    """
    found = InputCheck(check_weights(source, change.vector, plan, accept=config.accept_unlikely))
    if not count_forward_passes(source, change, calibration, config.exclude):
        return found
    samples, losses = calibration.samples, calibration.losses
    assert isinstance(samples, DatasetSamples)
    if losses is not None and isinstance(losses.source, TokenLoss):
        return _by_tokens(source, change, samples, losses.source, found.change)
    return _by_classes(source, change, samples, found.change, accept=config.accept_unlikely)


def check_weights(source: Model, vector: TaskVector, plan: Plan, *, accept: bool = False) -> float | None:
    """The norm of the change over that of the base; a CheckpointError if the fine-tune has most likely another base."""
    change, left = _change(source, vector, plan)
    if left < LEAST_LEFT and not accept:
        raise CheckpointError(
            f"the fine-tune differs from {source.name} by {change:.2f} times the norm of its weights, and little "
            f"of them is left in it: it has most likely another base. Check `source` and `finetuned`, {GO_ON}."
        )
    return change


def count_forward_passes(source: Model, change: Change, calibration: Calibration, exclude: Sequence[str]) -> int:
    """The number of samples that the source answers in `check_inputs`, with its fine-tune and without."""
    samples, losses = calibration.samples, calibration.losses
    if not isinstance(samples, DatasetSamples) or not is_whole(source, change, exclude) or calibration.by_source:
        return 0
    classes = calibration.heads is not None and samples.dataset.labels is not None
    tokens = losses is not None and isinstance(losses.source, TokenLoss)
    return 2 * len(samples) if classes or tokens else 0


def _by_classes(
    source: Model, change: Change, samples: DatasetSamples, size: float | None, *, accept: bool
) -> InputCheck:
    assert samples.heads is not None
    head, chosen = samples.heads.source, samples.chosen
    labels = align_labels(chosen, head.classes).labels
    whole = change.teacher if change.fits_head else change.vector
    scores = tuple(
        scores_by(source, vector, head, chosen, batch_size=samples.size) for vector in (TaskVector({}), whole)
    )
    base, tuned = (each.argmax(-1) == labels for each in scores)
    counts = int(base.sum()), int(tuned.sum())
    if not accept:
        _check_right(source, base, tuned, len(head.classes))
    return InputCheck(size, len(samples), "accuracy", *counts, scores=(scores[0], scores[1]))


def _check_right(source: Model, base: NDArray[np.bool_], tuned: NDArray[np.bool_], classes: int) -> None:
    count, right = len(tuned), int(tuned.sum())
    better = direction(int((tuned & ~base).sum()), int((base & ~tuned).sum()))
    found = f"the fine-tuned source is right on {right} of {count} samples"
    skilled = [tail(count, int(each.sum()), 1 / classes) < LEVEL for each in (base, tuned)]
    if better < 0 and skilled[0]:
        raise CheckpointError(
            f"{found} and its base {source.name} on {int(base.sum())}: the two may be swapped, or the data are of "
            f"another task. Check `source`, `finetuned` and `data`, {GO_ON}."
        )
    if count >= LEAST and better < 1 and not skilled[1]:
        raise CheckpointError(
            f"{found}, no more than a guess among {classes} classes: check `head`, and that the classes of the data "
            f"are in the order of the fine-tune, {GO_ON}."
        )


def _by_tokens(
    source: Model, change: Change, samples: DatasetSamples, loss: TokenLoss, size: float | None
) -> InputCheck:
    """The losses of texts; a fine-tune may well be worse on texts of another kind, so that nothing is refused."""

    def losses() -> NDArray[np.float64]:
        with frozen(source.module), torch.no_grad():
            return torch.cat([loss.each(source.module, batch.source) for batch in samples]).numpy()

    base = losses()
    with finetuned(source, change.vector):
        tuned = losses()
    return InputCheck(size, len(samples), "loss", float(base.mean()), float(tuned.mean()))


def _change(source: Model, vector: TaskVector, plan: Plan) -> tuple[float | None, float]:
    """The norm of the change over that of the base, and the share of the base that is left in the fine-tune.

    Both are measured in some of the paired layers. An adapter stores its change as factors, which say nothing of its
    base.
    """
    weights = dict.fromkeys(pair.source.weight for pair in plan.pairs)
    return relation(source.stored_parameters(), vector, weights)


def relation(stored: Mapping[str, Tensor], vector: TaskVector, weights: Iterable[str]) -> tuple[float | None, float]:
    """The norm of a change over that of its base, and the share of the base that is left in it, in some layers."""
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
