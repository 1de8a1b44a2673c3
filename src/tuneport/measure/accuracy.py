"""Accuracy of a model on labelled data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.dataset import UNLABELLED, Dataset, align_labels, with_prompts
from ..errors import DataError, TuneportError
from ..models.base import Model
from ..models.heads import Head
from ..processes import divided
from ..types import Progress, ignore

T = TypeVar("T")
Protocol = Literal["zero-shot", "linear-probe", "perplexity", "likelihood"]


@dataclass(frozen=True, eq=False)
class BySample:
    """What is known of each test sample."""

    predicted: NDArray[np.int64] | None = None  # its class or answer, by its number in `classes`
    labels: NDArray[np.int64] | None = None  # the right one
    classes: tuple[str, ...] = ()  # of all samples; none where each sample has choices of its own
    bits: NDArray[np.float64] | None = None  # those of its own characters
    characters: NDArray[np.int64] | None = None  # their number
    exact: NDArray[np.bool_] | None = None  # whether every likeliest token is the one to predict

    @property
    def spelled(self) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """The bits and the number of the characters of each sample, where they are known."""
        return None if self.bits is None or self.characters is None else (self.bits, self.characters)

    @property
    def right(self) -> NDArray[np.bool_] | None:
        """Whether each sample is right, where samples have classes or choices."""
        return None if self.predicted is None else self.predicted == self.labels

    def by_class(self) -> list[dict[str, Any]]:
        """The accuracy of each class that the samples have, in percent; nothing where there are no classes."""
        if self.right is None or self.labels is None:
            return []
        found = [(name, self.right[self.labels == number]) for number, name in enumerate(self.classes)]
        return [
            {"class": name, "samples": len(right), "accuracy": 100.0 * float(right.mean())}
            for name, right in found
            if len(right)
        ]


@dataclass(frozen=True)
class Evaluation:
    """Accuracy in percent over `samples` test samples.

    For language models it is that of next tokens (perplexity) or of answers (likelihood). Perplexities compare only
    under one tokenizer, bits per character also between tokenizers. `cut` counts texts that were longer than the limit.
    `error` is the standard error of the bits per character.
    """

    accuracy: float
    samples: int
    protocol: str
    perplexity: float | None = None
    tokens: int | None = None
    bits_per_character: float | None = None
    cut: int | None = None
    error: float | None = field(default=None, compare=False, repr=False)
    by_sample: BySample = field(default=BySample(), compare=False, repr=False)

    def plain(self) -> dict[str, Any]:
        """The known numbers over all samples, as JSON values."""
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        return {name: value for name, value in found.items() if value is not None}


def zero_shot(
    model: Model, head: Head, data: Dataset, *, batch_size: int = 128, progress: Progress = ignore
) -> Evaluation:
    """Accuracy of the highest class score, with the head as it is."""
    check_counted(model, head)
    data = align_labels(data, head.classes)

    def highest(batch: dict[str, Tensor]) -> NDArray[np.int64]:
        with torch.inference_mode():
            return head.scores(model, model.module, batch).argmax(-1).cpu().numpy()

    predicted = np.concatenate(each_batch(highest, model, data, batch_size, progress))
    right = 100.0 * float(np.mean(predicted == data.labels))
    return Evaluation(right, len(data), "zero-shot", by_sample=BySample(predicted, data.labels, head.classes))


def linear_probe(
    model: Model, train: Dataset, test: Dataset, *, batch_size: int = 128, progress: Progress = ignore
) -> Evaluation:
    """Accuracy on `test` of a logistic regression on the model's features of `train` (scikit-learn, C = 1)."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    for data in (train, test):
        if data.labels is None:
            raise DataError(f"a linear probe needs labels: {data} has none.")
        check_samples(data)
    test = align_labels(test, train.classes)
    if len(np.unique(np.asarray(train.labels))) < 2:
        raise DataError(f"a linear probe needs samples of at least two classes; {train} shows one.")
    seen, unseen = (
        compute_features(model, data, batch_size=batch_size, progress=progress).double().numpy()
        for data in (train, test)
    )
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000, tol=1e-6)).fit(seen, train.labels)
    predicted = probe.predict(unseen)
    right = 100.0 * float(np.mean(predicted == test.labels))
    return Evaluation(right, len(test), "linear-probe", by_sample=BySample(predicted, test.labels, train.classes))


def compute_features(model: Model, data: Dataset, *, batch_size: int = 128, progress: Progress = ignore) -> Tensor:
    """The model's features (N, width) of every sample, in order, on the CPU."""
    if model.outputs.features is None:
        raise TuneportError(f"{model.name} gives no features: tuneport does not know its family.")
    features = model.outputs.features

    def rows(batch: dict[str, Tensor]) -> Tensor:
        with torch.inference_mode():
            return features(model.module, batch).float().cpu()

    return torch.cat(each_batch(rows, model, data, batch_size, progress))


def each_batch(
    work: Callable[[dict[str, Tensor]], T],
    model: Model,
    data: Dataset,
    batch_size: int,
    progress: Progress = ignore,
) -> list[T]:
    """What `work` makes of each batch of encoded samples, in order; several processes divide the batches."""
    check_samples(data)
    starts = range(0, len(data), batch_size)

    def one(start: int) -> T:
        part = data.subset(np.arange(start, min(start + batch_size, len(data))))
        [found] = [work(batch) for batch, _ in encode_batches(model, part, batch_size, progress)]
        return found

    return divided(starts, one)


def encode_batches(
    model: Model, data: Dataset, batch_size: int, progress: Progress = ignore
) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
    """Yield batches of encoded samples on the model's device, with their labels; images are read batch by batch.

    Labels of unlabelled data are all -100, which cross-entropy ignores: a loss over nothing else is NaN.
    """
    check_samples(data)
    if model.inputs.encode is None:
        raise TuneportError(model.unreadable)
    model.check_kind(data)
    if model.inputs.prompted:
        data = with_prompts(data)
    labels = np.full(len(data), UNLABELLED, dtype=np.int64) if data.labels is None else data.labels
    for start in range(0, len(data), batch_size):
        part = slice(start, start + batch_size)
        batch = model.place(model.inputs.encode(list(data.inputs[part]))), torch.as_tensor(labels[part])
        yield batch
        progress(len(batch[1]))


def check_samples(data: Dataset) -> None:
    """Refuse data without a sample."""
    if not len(data):
        raise DataError(f"{data} has no samples: give data with some.")


def check_counted(model: Model, head: Head) -> None:
    """Refuse a head that does not give one class for each sample."""
    if head.class_embeds is None and not model.labels_samples:
        raise TuneportError(
            f"{model.name} {model.instead}, of which tuneport measures no accuracy: score its output with your own "
            "metric."
        )
