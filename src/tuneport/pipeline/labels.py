"""Labels that the fine-tuned source gives to calibration samples.

If there are plenty of data without labels, more samples are worth more than true labels (docs/what-we-tried.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.dataset import Dataset, align_labels, with_prompts
from ..data.samplers import SAMPLERS
from ..errors import DataError, TuneportError, unknown_name
from ..job import Drawn, Job
from ..measure.accuracy import encode_batches
from ..measure.signals import frozen
from ..models.base import Model
from ..models.heads import Head
from ..task_vectors.vector import TaskVector
from .heads import with_scores
from .scale import Scaled

LABELS = ("data", "source")  # whose labels the samples have


def check_labels(name: str | None, sampler: str, shots: int | None) -> None:
    """Refuse an unknown name, and a draw by labels that are not used."""
    if name is not None and name not in LABELS:
        raise TuneportError(unknown_name("labels", name, LABELS))
    by_class = sampler in SAMPLERS and SAMPLERS[sampler].needs_labels
    if name == "source" and (by_class or shots is not None):
        need = "`shots` needs" if shots is not None else f"sampler '{sampler}' needs"
        raise DataError(f'with `labels="source"` the labels of the data are not used, but {need} them.')


def scores_by(model: Model, change: TaskVector, head: Head, data: Dataset, *, batch_size: int = 32) -> NDArray[Any]:
    """The scores of a `Dataset` that the model, with its change, gives to the samples; it is restored after."""
    model.require_in_memory("labelling samples", "give a larger one, or data with labels")
    with Scaled(model.module, change, model.stored_parameters()) as tuned, frozen(tuned.module):
        tuned.set(1.0)
        with torch.no_grad():
            batches = encode_batches(model, data, batch_size)
            found = [head.scores(model, tuned.module, batch).double().cpu() for batch, _ in batches]
    return torch.cat(found).numpy() if model.task != "token" else _by_spans(model, data, chain(*found))


def _by_spans(model: Model, data: Dataset, found: Iterable[Tensor]) -> NDArray[Any]:
    """The spans of the tokens of each text and their scores, NaN for special tokens, of rows (T, classes)."""
    assert model.reader is not None
    rows = np.empty(len(data), dtype=object)
    texts = with_prompts(data).inputs if model.prompted else data.inputs
    for number, (text, scores) in enumerate(zip(texts, found, strict=True)):
        encoded = model.reader.texts([text])  # without padding, which is on the right
        assert encoded.inside is not None
        inside = encoded.inside[0]
        rows[number] = encoded.spans[0][0], scores[: len(inside)].masked_fill(~inside[:, None], torch.nan)
    return rows


def labelled_by(scores: NDArray[Any], model: Model, classes: tuple[str, ...], data: Dataset) -> Dataset:
    """The samples with the classes of the model's highest scores; labels of their own are not looked at.

    Samples without one class each have no labels: their scores say what is right.
    """
    labels = scores.argmax(-1).astype(np.int64) if model.labels_samples else None
    return replace(data, labels=labels, classes=classes)


def agreement(labelled: Dataset, known: Dataset) -> float | None:
    """The share of labels that are those that the data have; None where they have none, or other classes."""
    if known.labels is None or labelled.labels is None:
        return None
    try:
        known = align_labels(known, labelled.classes)
    except DataError:
        return None
    return float(np.mean(known.labels == labelled.labels))


def measurable(job: Job, scores: tuple[NDArray[Any], NDArray[Any]] | None = None) -> Job:
    """The job with the scores of the fine-tuned source and of its base, to which heads of the target are fitted.

    `scores` are those of the base and of the fine-tuned source, where they are known. Jobs that fit no head stay as
    they are.
    """
    if job.teacher is None:
        return job
    samples, source = job.samples, job.source
    assert isinstance(samples, Drawn)
    assert samples.heads is not None
    head, chosen = samples.heads.source, samples.chosen
    base, tuned = scores or (None, None)
    if base is None and chosen.base_scores is None and job.target.classifier is not None:
        base = scores_by(source, TaskVector({}), head, chosen, batch_size=samples.size)
    if tuned is None and chosen.scores is None:
        tuned = scores_by(source, job.teacher, head, chosen, batch_size=samples.size)
    return replace(job, samples=with_scores(samples, None if chosen.scores is not None else tuned, base))
