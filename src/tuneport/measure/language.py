"""How well a language model predicts texts: perplexity, bits per character, and answers chosen by their likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from ..data.choices import candidates_of, each_answer
from ..data.dataset import UNLABELLED, Dataset, with_prompts
from ..errors import DataError, TuneportError
from ..models.base import Model, widened
from ..models.tokenizer import Encoded
from ..processes import divided
from ..types import Progress, ignore
from .accuracy import BySample, Evaluation, Protocol, check_samples
from .chance import ratio, standard_error
from .objectives import batch_for, choose_objective, labelled_tokens, questions_at_once, sum_by_row
from .samples import by_length


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

    Perplexity is the exponential of the mean loss of a token. Bits per character divide the losses of the tokens that
    spell the texts by the length of the texts, so that models with different tokenizers and chat templates compare:
    special tokens and the end of a turn do not count.
    """
    _check(model, data)
    found = _score(model, data, batch_size, progress)
    if not found.tokens.sum():
        raise DataError(f"{data} has no token to predict: its texts are empty, or of one token each.")
    return found.evaluation(100.0 * float(found.right.sum() / found.tokens.sum()), len(data), "perplexity")


def likelihood(model: Model, data: Dataset, *, batch_size: int = 16, progress: Progress = ignore) -> Evaluation:
    """Accuracy of the likeliest answer among the choices of each sample, or among the words for the classes.

    The likelihood is that of the whole answer, not divided by its length. Perplexity and bits per character are those
    of the right answers.
    """
    _check(model, data)
    size = questions_at_once(model, batch_size, max(map(len, candidates_of(data)), default=1))

    def scored(start: int) -> tuple[list[int], list[list[Any]]]:
        part = data.subset(np.arange(start, min(start + size, len(data))))
        asked, counts = each_answer(part)
        assert part.labels is not None
        found = _score(model, asked, len(asked) if model.shares_questions else batch_size, counts=counts)
        begin, chosen, rows = 0, [], []
        for label, count in zip(part.labels, counts, strict=True):
            chosen.append(int(found.losses[begin : begin + count].argmin()))
            rows.append([values[begin + label] for values in vars(found).values()])
            begin += count
        progress(len(part))
        return chosen, rows

    answered = divided(range(0, len(data), size), scored)
    predicted = [place for chosen, _ in answered for place in chosen]
    parts = [row for _, rows in answered for row in rows]
    chosen = _Scores(*(np.array(values) for values in zip(*parts, strict=True)))
    right = 100.0 * float(np.mean(np.array(predicted) == data.labels))
    scores, classes = chosen.evaluation(right, len(data), "likelihood"), () if data.choices else data.classes
    by_sample = replace(scores.by_sample, predicted=np.array(predicted), labels=data.labels, classes=classes)
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
