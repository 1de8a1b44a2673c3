"""How well a language model predicts texts: perplexity, bits per character, and answers chosen by their likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.choices import candidates_of, each_answer
from ..data.dataset import UNLABELLED, Dataset, with_prompts
from ..errors import DataError, TuneportError
from ..models.base import Model
from ..types import Progress
from .accuracy import Evaluation, Protocol, check_samples
from .objectives import batch_for, choose_objective, next_tokens, questions_at_once, sample_losses


@dataclass(frozen=True)
class _Scores:
    """Of each sample: its loss in nats, the tokens to predict, those that are the likeliest, characters, and cuts."""

    losses: NDArray[np.float64]
    tokens: NDArray[np.int64]
    right: NDArray[np.int64]
    characters: NDArray[np.int64]
    cut: NDArray[np.int64]

    def evaluation(self, accuracy: float, samples: int, protocol: str) -> Evaluation:
        """Perplexity and bits per character over all samples."""
        bits, tokens, characters = self.losses / math.log(2), int(self.tokens.sum()), int(self.characters.sum())
        each = float(bits.sum() / characters) if characters else None
        rate, cut = float(np.exp(self.losses.sum() / tokens)), int(self.cut.sum())
        error = None
        if each is not None and len(bits) > 1:  # of a ratio of two sums
            spread = np.square(bits - each * self.characters).sum() * len(bits) / (len(bits) - 1)
            error = float(np.sqrt(spread) / characters)
        return Evaluation(accuracy, samples, protocol, rate, tokens, each, cut, bits=bits, error=error)


def perplexity(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress | None = None) -> Evaluation:
    """The loss of the texts, of their targets, or of the answers in chats, per token and per character.

    Perplexity is the exponential of the mean loss of a token. Bits per character divide the sum of all losses by the
    length of what is predicted, so that models with different tokenizers compare.
    """
    _check(model, data)
    found = _score(model, data, batch_size, progress)
    if not found.tokens.sum():
        raise DataError(f"{data} has no token to predict: its texts are empty, or of one token each.")
    return found.evaluation(100.0 * float(found.right.sum() / found.tokens.sum()), len(data), "perplexity")


def likelihood(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress | None = None) -> Evaluation:
    """Accuracy of the likeliest answer among the choices of each sample, or among the words for the classes.

    The likelihood is that of the whole answer, not divided by its length. Perplexity and bits per character are those
    of the right answers.
    """
    _check(model, data)
    parts, predicted = [], []
    size = questions_at_once(model, batch_size, max(map(len, candidates_of(data)), default=1))
    for start in range(0, len(data), size):
        part = data.subset(np.arange(start, min(start + size, len(data))))
        asked, counts = each_answer(part)
        assert part.labels is not None
        found = _score(model, asked, len(asked) if model.answer_logits is not None else batch_size, counts=counts)
        begin = 0
        for label, count in zip(part.labels, counts, strict=True):
            losses = found.losses[begin : begin + count]
            predicted.append(int(losses.argmin()))
            parts.append([values[begin + label] for values in vars(found).values()])
            begin += count
        if progress is not None:
            progress(len(part))
    chosen = _Scores(*(np.array(values) for values in zip(*parts, strict=True)))
    right = 100.0 * float(np.mean(np.array(predicted) == data.labels))
    scores, classes = chosen.evaluation(right, len(data), "likelihood"), () if data.choices else data.classes
    return replace(scores, predicted=np.array(predicted), labels=data.labels, classes=classes)


def usual_protocol(model: Model, data: Dataset, head: str | None = None) -> Protocol:
    """The protocol of a model and its data: by a head, by the likeliest answer, or by the loss of the texts."""
    if model.token_logits is None or head is not None:
        return "zero-shot"
    return "perplexity" if data.labels is None else "likelihood"


def _check(model: Model, data: Dataset) -> None:
    if model.token_logits is None:
        raise TuneportError(f"{model.name} writes no text; perplexity needs a causal or an encoder-decoder model.")
    model.check_kind(data)
    check_samples(data)


def _score(
    model: Model, data: Dataset, batch_size: int, progress: Progress | None = None, counts: Sequence[int] = ()
) -> _Scores:
    objective = choose_objective(data, [model])
    parts = []
    for start in range(0, len(data), batch_size):
        samples = data.subset(np.arange(start, min(start + batch_size, len(data))))
        encoded = objective.encode(model, with_prompts(samples))
        with torch.inference_mode():
            logits, labels = next_tokens(model, model.module, batch_for(model, encoded), counts)
            wanted = labels != UNLABELLED
            right = (logits.argmax(-1) == labels) & wanted
            sums = [each.sum(1).cpu().numpy() for each in (wanted, right)]
            losses = sample_losses(logits, labels).cpu().numpy()
        parts.append([losses, *sums, np.array(encoded.characters), np.array(encoded.cut, dtype=np.int64)])
        if progress is not None:
            progress(len(samples))
    return _Scores(*(np.concatenate(values) for values in zip(*parts, strict=True)))
