"""Accuracy and perplexity of a model on labelled data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from ..data.dataset import UNLABELLED, Dataset, align_labels, with_prompts
from ..data.tasks import read_data
from ..errors import DataError, TuneportError, unknown_name
from ..models.base import Model
from ..models.heads import Head
from ..types import Progress
from .objectives import batch_for, choose_objective, next_tokens, token_cross_entropy

Protocol = Literal["zero-shot", "linear-probe", "perplexity"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
_NO_HEAD = "an accuracy needs labelled data and a head for it: pass `data`."


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent over `samples` test samples; of next tokens, with the perplexity, for language models."""

    accuracy: float
    samples: int
    protocol: str
    perplexity: float | None = None
    tokens: int | None = None


def zero_shot(
    model: Model, head: Head, data: Dataset, *, batch_size: int = 128, progress: Progress | None = None
) -> Evaluation:
    """Accuracy of the highest class score, with the head as it is."""
    data = align_labels(data, head.classes)
    right = 0
    for batch, labels in encode_batches(model, data, batch_size, progress):
        with torch.inference_mode():
            scores = head.scores(model, model.module, batch)
        right += int((scores.argmax(-1).cpu() == labels).sum())
    return Evaluation(100.0 * right / len(data), len(data), "zero-shot")


def evaluate_change(model: Model, changed: nn.Module, head: Head, test: Dataset) -> dict[str, Any]:
    """Zero-shot accuracy of a model as it is and with a changed module, as plain values for a run record."""
    before, after = (zero_shot(model.with_module(module), head, test) for module in (model.module, changed))
    described = {"data": test.name, "samples": before.samples, "protocol": before.protocol}
    return {**described, "before": before.accuracy, "after": after.accuracy}


def read_test_split(data: str | Path | None) -> Dataset:
    """Read the test split, which must have labels. `check_test_split` compares them with a head."""
    if data is None:
        raise DataError(_NO_HEAD)
    return read_data(data, "test")


def check_test_split(test: Dataset, head: Head | None) -> None:
    """Refuse a test split that the head cannot score."""
    if head is None:
        raise DataError(_NO_HEAD)
    align_labels(test, head.classes)


def linear_probe(
    model: Model, train: Dataset, test: Dataset, *, batch_size: int = 128, progress: Progress | None = None
) -> Evaluation:
    """Accuracy on `test` of a logistic regression on the model's features of `train` (scikit-learn, C = 1)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    for data in (train, test):
        if data.labels is None:
            raise DataError(f"a linear probe needs labels: {data} has none.")
        _check_samples(data)
    test = align_labels(test, train.classes)
    if len(np.unique(np.asarray(train.labels))) < 2:
        raise DataError(f"a linear probe needs samples of at least two classes; {train} shows one.")
    seen, unseen = (
        compute_features(model, data, batch_size=batch_size, progress=progress).double().numpy()
        for data in (train, test)
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, tol=1e-6)).fit(seen, train.labels)
    right = probe.predict(unseen) == test.labels
    return Evaluation(100.0 * float(right.mean()), len(test), "linear-probe")


def perplexity(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress | None = None) -> Evaluation:
    """Exp of the mean loss per predicted token of the texts, or of their targets.

    Perplexities of models with different tokenizers do not compare.
    """
    if model.token_logits is None:
        raise TuneportError(f"{model.name} writes no text; perplexity needs a causal or an encoder-decoder model.")
    model.check_kind(data)
    _check_samples(data)
    objective = choose_objective(data, [model])
    loss, right, tokens = 0.0, 0, 0
    for start in range(0, len(data), batch_size):
        samples = data.subset(np.arange(start, min(start + batch_size, len(data))))
        batch = batch_for(model, objective.encode(model, with_prompts(samples)))
        with torch.inference_mode():
            logits, labels = next_tokens(model, model.module, batch)
            loss += float(token_cross_entropy(logits, labels))
            wanted = labels != UNLABELLED
            right += int((logits.argmax(-1) == labels)[wanted].sum())
            tokens += int(wanted.sum())
        if progress is not None:
            progress(len(samples))
    if tokens == 0:
        raise DataError(f"{data} has no token to predict: its texts are empty, or of one token each.")
    return Evaluation(100.0 * right / tokens, len(data), "perplexity", float(np.exp(loss / tokens)), tokens)


def compute_features(model: Model, data: Dataset, *, batch_size: int = 128, progress: Progress | None = None) -> Tensor:
    """The model's features (N, width) of every sample, in order, on the CPU."""
    if model.features is None:
        raise TuneportError(f"{model.name} gives no features: tuneport does not know its family.")
    rows = []
    for batch, _ in encode_batches(model, data, batch_size, progress):
        with torch.inference_mode():
            rows.append(model.features(model.module, batch).float().cpu())
    return torch.cat(rows)


def encode_batches(
    model: Model, data: Dataset, batch_size: int, progress: Progress | None = None
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield batches of encoded samples on the model's device, with their labels; images are read batch by batch.

    Labels of unlabelled data are all -100, which cross-entropy ignores: a loss over nothing else is NaN.
    """
    if batch_size <= 0:
        raise DataError(f"asked for batches of {batch_size}; expected at least 1.")
    _check_samples(data)
    if model.encode is None:
        raise TuneportError(model.unreadable)
    model.check_kind(data)
    if model.prompted:
        data = with_prompts(data)
    labels = np.full(len(data), UNLABELLED, dtype=np.int64) if data.labels is None else data.labels
    for start in range(0, len(data), batch_size):
        part = slice(start, start + batch_size)
        batch = model.inputs(model.encode(list(data.inputs[part]))), torch.as_tensor(labels[part])
        yield batch
        if progress is not None:
            progress(len(batch[1]))


def _check_samples(data: Dataset) -> None:
    if not len(data):
        raise DataError(f"{data} has no samples: give data with some.")


def check_protocol(name: str) -> Protocol:
    """The protocol of that name, or an error that lists all protocols."""
    if name not in PROTOCOLS:
        raise TuneportError(unknown_name("protocol", name, PROTOCOLS))
    return name
