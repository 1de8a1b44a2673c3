"""Evaluation: accuracy of a model on labelled data, how well it predicts texts, and what of it may be chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.answers import candidates_of, each_answer
from ..data.dataset import UNLABELLED, Dataset, align_labels, with_prompts
from ..errors import DataError, TuneportError
from ..models.base import Model, widened
from ..models.heads import Head
from ..models.tokenizer import Encoded
from ..processes import divided
from ..types import Progress, ignore
from .objectives import batch_for, choose_objective, labelled_tokens, questions_at_once, sum_by_row
from .samples import by_length

LEVEL = 0.05  # a difference that chance makes less often than this is clear
LEAST = 100  # samples from which a guess can be told from skill


def share_interval(right: int, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of samples (Wilson's).

    >>> [round(end, 3) for end in share_interval(45, 50)]
    [0.786, 0.957]
    """
    from scipy.stats import binomtest

    interval = binomtest(right, samples).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def tail(count: int, least: int, share: float) -> float:
    """Return the probability that at least `least` of `count` independent events of this probability happen.

    >>> round(tail(3, 2, 0.5), 9)
    0.5
    """
    from scipy.stats import binom

    return float(binom.sf(least - 1, count, share))


def direction(before: NDArray[np.bool_], after: NDArray[np.bool_]) -> int:
    """Return 1 if clearly more samples become right than wrong, -1 if clearly fewer, else 0 (McNemar, exact)."""
    from scipy.stats import binomtest

    better, worse = int((after & ~before).sum()), int((before & ~after).sum())
    if better == worse or binomtest(better, better + worse).pvalue >= LEVEL:
        return 0
    return 1 if better > worse else -1


def ratio(sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> tuple[float, NDArray[np.float64]]:
    """Return the ratio of two sums over samples, and the part of each sample in its deviation.

    >>> ratio(np.array([2.0, 4.0]), np.array([1, 3]))
    (1.5, array([ 0.125, -0.125]))
    """
    whole = int(sizes.sum())
    found = float(sums.sum() / whole)
    return found, (sums - found * sizes) / whole


def standard_error(parts: NDArray[np.float64]) -> float | None:
    """Return the standard error of a ratio, or of the difference of two, by the parts of its samples; of one, None."""
    count = len(parts)
    return math.sqrt(float(np.square(parts).sum()) * count / (count - 1)) if count > 1 else None


def shift(
    first: tuple[NDArray[np.float64], NDArray[np.int64]], second: tuple[NDArray[np.float64], NDArray[np.int64]]
) -> int:
    """Return the sign of the difference of two ratios over the same samples, or 0 within two standard errors.

    >>> sizes = np.array([1, 1, 1, 1])
    >>> shift((np.array([-1.0, -1.2, -0.9, -1.1]), sizes), (np.zeros(4), sizes))
    -1
    """
    (one, parts), (two, others) = ratio(*first), ratio(*second)
    error = standard_error(parts - others)
    return int(np.sign(one - two)) if error is not None and abs(one - two) > 2 * error else 0


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

    def one(start: int) -> T:
        part = data.subset(np.arange(start, min(start + batch_size, len(data))))
        found = work(encode_batch(model, part))
        progress(len(part))
        return found

    return divided(range(0, len(data), batch_size), one)


def encode_batch(model: Model, data: Dataset) -> dict[str, Tensor]:
    """The samples as one batch, on the model's device."""
    if model.inputs.encode is None:
        raise TuneportError(model.unreadable)
    model.check_kind(data)
    inputs = (with_prompts(data) if model.inputs.prompted else data).inputs
    return model.place(model.inputs.encode(list(inputs)))


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


@dataclass(frozen=True)
class _Scores:
    """Of each sample: its loss in nats, also of its own characters alone, and counts of what there is to predict."""

    losses: NDArray[np.float64]
    own: NDArray[np.float64]  # without the tokens that spell no character: the end of a turn, special tokens
    tokens: NDArray[np.int64]
    right: NDArray[np.int64]
    characters: NDArray[np.int64]
    cut: NDArray[np.int64]

    def evaluation(self, accuracy: float, samples: int, protocol: str) -> Evaluation:
        """Perplexity and bits per character over all samples."""
        bits, tokens = self.own / math.log(2), int(self.tokens.sum())
        rate, cut = float(np.exp(self.losses.sum() / tokens)), int(self.cut.sum())
        each, error = None, None
        if self.characters.sum():
            each, parts = ratio(bits, self.characters)
            error = standard_error(parts)
        by_sample = BySample(bits=bits, characters=self.characters, exact=self.right == self.tokens)
        return Evaluation(accuracy, samples, protocol, rate, tokens, each, cut, error, by_sample)


def perplexity(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress = ignore) -> Evaluation:
    """The loss of the texts, of their targets, or of the answers in chats, per token and per character.

    Bits per character divide the losses of the tokens that spell the texts by the length of the texts, so that models
    with different tokenizers and templates compare: special tokens and the end of a turn do not count.
    """
    _check(model, data)
    found = _score(model, data, batch_size, progress)
    if not found.tokens.sum():
        raise DataError(f"{data} has no token to predict: its texts are empty, or of one token each.")
    return found.evaluation(100.0 * float(found.right.sum() / found.tokens.sum()), len(data), "perplexity")


def likelihood(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress = ignore) -> Evaluation:
    """Accuracy of the likeliest answer among the choices, or the words for the classes; perplexity of the right ones.

    The likelihood is that of the whole answer, not divided by its length.
    """
    _check(model, data)
    size = questions_at_once(model, batch_size, max(map(len, candidates_of(data)), default=1))

    def scored(start: int) -> list[NDArray[Any]]:
        part = data.subset(np.arange(start, min(start + size, len(data))))
        asked, counts = each_answer(part)
        asked = replace(asked, answers="choice")  # earlier answers of a chat are part of the question
        found = _score(model, asked, len(asked) if model.shares_questions else batch_size, counts=counts)
        assert part.labels is not None
        begins = np.cumsum([0, *counts[:-1]])
        predicted = np.array([losses.argmin() for losses in np.split(found.losses, begins[1:])])
        progress(len(part))
        return [predicted, *(values[begins + part.labels] for values in vars(found).values())]

    predicted, *parts = map(np.concatenate, zip(*divided(range(0, len(data), size), scored), strict=True))
    right = 100.0 * float(np.mean(predicted == data.labels))
    scores, classes = _Scores(*parts).evaluation(right, len(data), "likelihood"), () if data.choices else data.classes
    by_sample = replace(scores.by_sample, predicted=predicted, labels=data.labels, classes=classes)
    return replace(scores, by_sample=by_sample)


def answer_likelihoods(model: Model, data: Dataset) -> NDArray[np.float64]:
    """The mean log-likelihood of a token of each sample's answer (N,)."""
    found = _score(model, data, batch_size=32)
    likelihoods: NDArray[np.float64] = -found.losses / np.maximum(found.tokens, 1)
    return likelihoods


def usual_protocol(model: Model, data: Dataset, head: str | None = None) -> Protocol:
    """The protocol of a model and its data: by a head, by the likeliest answer, or by the loss of the texts."""
    if model.generation is None or head is not None:
        return "zero-shot"
    return "perplexity" if data.labels is None and data.choices is None else "likelihood"


def _check(model: Model, data: Dataset) -> None:
    if model.generation is None:
        raise TuneportError(f"{model.name} writes no text; perplexity needs a causal or an encoder-decoder model.")
    model.check_kind(data)
    check_samples(data)


def _score(
    model: Model, data: Dataset, batch_size: int, progress: Progress = ignore, counts: Sequence[int] = ()
) -> _Scores:
    objective = choose_objective(data, [model])

    # rows that are answers to one question stay together
    order = np.arange(len(data)) if counts else by_length(data, np.arange(len(data)))

    def scored(start: int) -> list[NDArray[Any]]:
        samples = data.subset(order[start : start + batch_size])
        encoded = objective.encode(model, with_prompts(samples))
        with torch.inference_mode():
            scores, labels, rows = labelled_tokens(model, model.module, batch_for(model, encoded), counts)
            losses = F.cross_entropy(widened(scores), labels, reduction="none").double()
            own, right = losses * _own(model, encoded).to(losses.device), scores.argmax(-1) == labels
            values = (losses, own, torch.ones_like(labels), right)
            sums = [sum_by_row(each, rows, len(samples)).cpu().numpy() for each in values]
        progress(len(samples))
        counted = [each.astype(np.int64) for each in sums[2:]]
        return [*sums[:2], *counted, np.array(encoded.characters), np.array(encoded.cut, dtype=np.int64)]

    parts = divided(range(0, len(data), batch_size), scored)
    found = (np.concatenate(values) for values in zip(*parts, strict=True))
    return _Scores(*(values[np.argsort(order)] for values in found))


def _own(model: Model, encoded: Encoded) -> Tensor:
    """Whether each token with a label (M,), row by row, spells characters of a text."""
    assert encoded.labels is not None
    assert encoded.inside is not None
    first = int(model.generates == "causal")  # its first token is not predicted
    return encoded.inside[:, first:][encoded.labels[:, first:] != UNLABELLED]
