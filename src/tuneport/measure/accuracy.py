"""How good a model is at a task: a model and labelled data in, a number out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from ..data.dataset import UNLABELLED, Dataset, align_labels, with_prompts
from ..data.tasks import read_data
from ..errors import DataError, TuneportError, unknown_name
from ..models.base import Model
from ..models.heads import Head
from ..types import Progress
from .objectives import batch_for, next_tokens, objective_of, token_cross_entropy

Protocol = Literal["zero-shot", "linear-probe", "perplexity"]
PROTOCOLS: tuple[Protocol, ...] = ("zero-shot", "linear-probe", "perplexity")


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent over `samples` test samples; of language models, of next tokens, with the perplexity."""

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
    for batch, labels in encoded(model, data, batch_size):
        with torch.inference_mode():
            scores = head.scores(model, model.module, batch)
        right += int((scores.argmax(-1).cpu() == labels).sum())
        if progress is not None:
            progress(len(labels))
    return Evaluation(100.0 * right / len(data), len(data), "zero-shot")


def before_and_after(model: Model, changed: nn.Module, head: Head, test: Dataset) -> dict[str, Any]:
    """Zero-shot accuracy of a model as it is and with a changed module, as plain values for a run record."""
    before, after = (zero_shot(model.with_module(module), head, test) for module in (model.module, changed))
    return {
        "data": test.name,
        "samples": before.samples,
        "protocol": before.protocol,
        "before": before.accuracy,
        "after": after.accuracy,
    }


def read_test_split(data: str | Path | None) -> Dataset:
    """The test split of the data, which must have labels; `check_test_split` compares them with a head."""
    if data is None:
        raise DataError(_NO_HEAD)
    return read_data(data, "test")


def check_test_split(test: Dataset, head: Head | None) -> None:
    """Refuse a test split that the head cannot score."""
    if head is None:
        raise DataError(_NO_HEAD)
    align_labels(test, head.classes)


_NO_HEAD = "an accuracy needs labelled data and a head for it: pass --data."


def linear_probe(
    model: Model, train: Dataset, test: Dataset, *, batch_size: int = 128, progress: Progress | None = None
) -> Evaluation:
    """Accuracy on `test` of a logistic regression on the model's features of `train` (scikit-learn, C = 1)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    if train.labels is None or test.labels is None:
        raise DataError(f"a linear probe needs labels: {train if train.labels is None else test} has none.")
    for data in (train, test):
        _check_samples(data)
    test = align_labels(test, train.classes)
    if len(np.unique(train.labels)) < 2:
        raise DataError(f"a linear probe needs samples of at least two classes; {train} shows one.")
    seen = features(model, train, batch_size=batch_size, progress=progress).double().numpy()
    scaler = StandardScaler().fit(seen)
    probe = LogisticRegression(max_iter=2000, tol=1e-6).fit(scaler.transform(seen), train.labels)
    assert test.labels is not None
    unseen = features(model, test, batch_size=batch_size, progress=progress).double().numpy()
    right = probe.predict(scaler.transform(unseen)) == test.labels
    return Evaluation(100.0 * float(right.mean()), len(test), "linear-probe")


def perplexity(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress | None = None) -> Evaluation:
    """How well a language model predicts the texts, or their targets: exp of the mean loss per predicted token.

    Perplexities of models with different tokenizers do not compare.
    """
    if model.token_logits is None:
        raise TuneportError(f"{model.name} writes no text; perplexity needs a causal or an encoder-decoder model.")
    model.check_kind(data)
    _check_samples(data)
    objective = objective_of(data, [model])
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
    value = float(np.exp(loss / tokens))
    return Evaluation(100.0 * right / tokens, len(data), "perplexity", value, tokens)


def features(model: Model, data: Dataset, *, batch_size: int = 128, progress: Progress | None = None) -> Tensor:
    """The model's features (N, width) of every sample, in order, on the CPU."""
    if model.features is None:
        raise TuneportError(f"{model.name} gives no features: tuneport does not know its family.")
    rows = []
    for batch, labels in encoded(model, data, batch_size):
        with torch.inference_mode():
            rows.append(model.features(model.module, batch).float().cpu())
        if progress is not None:
            progress(len(labels))
    return torch.cat(rows)


def encoded(model: Model, data: Dataset, batch_size: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """The samples as the model wants them, on its device, batch by batch, with their labels."""
    _check_samples(data)
    if model.encode is None:
        raise TuneportError(model.unreadable)
    model.check_kind(data)
    if model.prompted:
        data = with_prompts(data)
    for inputs, labels in batches(data, np.arange(len(data)), batch_size):
        yield model.inputs(model.encode(inputs)), labels


def _check_samples(data: Dataset) -> None:
    if not len(data):
        raise DataError(f"{data} has no samples: give data with some.")


def check_protocol(name: str) -> Protocol:
    """The protocol of that name, or an error that lists what there is."""
    for known in PROTOCOLS:
        if name == known:
            return known
    raise TuneportError(unknown_name("protocol", name, PROTOCOLS))


def batches(dataset: Dataset, indices: ArrayLike, size: int) -> Iterator[tuple[list[Any], Tensor]]:
    """The samples at `indices`, `size` at a time, in order, with their labels; the last batch may be smaller.

    Images are read when their batch is asked for. Labels of unlabelled data are all -100, which
    cross-entropy ignores: a loss over nothing else is NaN.
    """
    if size <= 0:
        raise DataError(f"asked for batches of {size}; expected at least 1.")
    chosen = dataset.subset(indices)
    labels = np.full(len(chosen), UNLABELLED, dtype=np.int64) if chosen.labels is None else chosen.labels
    return (
        (list(chosen.inputs[start : start + size]), torch.as_tensor(labels[start : start + size]))
        for start in range(0, len(chosen), size)
    )
