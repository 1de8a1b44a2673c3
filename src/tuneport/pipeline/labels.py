"""Labels that the fine-tuned source gives to calibration samples.

If there are plenty of data without labels, more samples are worth more than true labels (docs/what-we-tried.md).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from ..data.dataset import Dataset, align_labels
from ..data.samplers import SAMPLERS
from ..errors import DataError, TuneportError, unknown_name
from ..measure.accuracy import encode_batches
from ..measure.signals import frozen
from ..models.base import Model
from ..models.heads import Head
from ..task_vectors.vector import TaskVector
from .scale import Scaled

LABELS = ("data", "source")  # whose labels the samples have


def check_labels(name: str, sampler: str, shots: int | None) -> None:
    """Refuse an unknown name, and a draw by labels that are not used."""
    if name not in LABELS:
        raise TuneportError(unknown_name("labels", name, LABELS))
    by_class = sampler in SAMPLERS and SAMPLERS[sampler].needs_labels
    if name == "source" and (by_class or shots is not None):
        need = "`shots` needs" if shots is not None else f"sampler '{sampler}' needs"
        raise DataError(f'with `labels="source"` the labels of the data are not used, but {need} them.')


def labelled_by(model: Model, change: TaskVector, head: Head, data: Dataset, *, batch_size: int = 32) -> Dataset:
    """The samples with the classes that the model with its change gives them, whatever their own labels are.

    The model is restored.
    """
    model.require_in_memory("labelling samples", "give a larger one, or data with labels")
    blank = replace(data, labels=np.zeros(len(data), dtype=np.int64), classes=head.classes)
    with Scaled(model.module, change, model.stored_parameters()) as tuned, frozen(tuned.module):
        tuned.set(1.0)
        with torch.no_grad():
            batches = encode_batches(model, blank, batch_size)
            found = [head.scores(model, tuned.module, batch).argmax(-1).cpu() for batch, _ in batches]
    return replace(blank, labels=torch.cat(found).numpy())


def agreement(labelled: Dataset, known: Dataset) -> float | None:
    """The share of labels that are those that the data have; None where they have none, or other classes."""
    if known.labels is None or labelled.labels is None:
        return None
    try:
        known = align_labels(known, labelled.classes)
    except DataError:
        return None
    return float(np.mean(known.labels == labelled.labels))
