"""Objectives: how calibration samples become batches, and the loss of a model on a batch.

Losses are sums over samples, or over the tokens to predict, with equal weights as in training.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.answers import candidates_of, each_answer, last_answer
from ..data.dataset import UNLABELLED, Dataset
from ..errors import DataError, TuneportError, brief, reraised, unknown_name
from ..models.base import Model, widened
from ..models.heads import Head
from ..models.tokenizer import Encoded
from ..types import Loss
from .tokens import scores_on

Batch = tuple[dict[str, Tensor], Tensor]  # the arguments of the module's forward, and class or token numbers
CONTRASTED = 32  # pairs of texts that are compared with one another
ANSWERS_AT_ONCE = 4  # rows of answers for each sample of the batch size, if a model reads a question once


@dataclass(frozen=True)
class Objective:
    """`encode` makes a batch of samples for a model, `loss` makes the loss of a model with a head.

    `together` is the size of a batch whose loss compares its samples; None if the loss is a sum over independent ones.
    """

    name: str
    encode: Callable[[Model, Dataset], Encoded]
    loss: Callable[[Model, Head | None], Loss]
    together: int | None = None


def choose_objective(dataset: Dataset, models: Sequence[Model], wanted: str | None = None) -> Objective:
    """The objective of that name, or the default for the data and the models; checks that they allow it."""
    name = check_objective(wanted or _choose_default(dataset, models))
    for model in models:
        if name in ("causal", "seq2seq") and model.generates != name:
            can = f"generates as {model.generates}" if model.generates else "writes no text"
            raise TuneportError(f"the {name} loss needs a model that predicts tokens that way; {model.name} {can}.")
    if name == "contrastive" and not _has_pairs(dataset):
        raise DataError(f"the contrastive loss needs pairs of texts; {dataset} has none: columns text and text_pair.")
    if dataset.answers == "none" and name in ("causal", "seq2seq"):
        raise DataError(
            f"{dataset} has prompts without answers: give the answers, or let the old model write them, with upgrade "
            "or distill."
        )
    if name == "seq2seq" and read_answers(dataset) is None and not dataset.has_chats:
        raise DataError(f"the seq2seq loss needs what is to be written; {dataset} has no column target or label.")
    return OBJECTIVES[name]


def with_each_answer(objective: Objective) -> Objective:
    """The objective with a row for each answer that a sample may have, whichever is right."""

    def encode(model: Model, samples: Dataset) -> Encoded:
        rows, counts = each_answer(samples)
        return replace(objective.encode(model, rows), counts=tuple(counts))

    return replace(objective, name="answers", encode=encode)


def check_objective(name: str) -> str:
    """The name, or an error that lists all objectives."""
    if name not in OBJECTIVES:
        raise TuneportError(unknown_name("loss", name, OBJECTIVES) + " Or pass MODULE:FUNCTION.")
    return name


def _choose_default(dataset: Dataset, models: Sequence[Model]) -> str:
    kinds = [model.generates for model in models if model.generates is not None]
    if len(set(kinds)) > 1:
        raise TuneportError("one model is causal and the other an encoder-decoder; pass a loss for each in Python.")
    if kinds and len(kinds) == len(models):
        return kinds[0]
    contrast = _has_pairs(dataset) and dataset.labels is None and any(model.outputs.logits is None for model in models)
    return "contrastive" if contrast else "classification"


def _has_pairs(dataset: Dataset) -> bool:
    return dataset.kind == "text" and len(dataset) > 0 and isinstance(dataset.inputs[0], tuple)


def read_answers(dataset: Dataset) -> Sequence[str] | None:
    """The text to write for each sample, from its target, its choices, or its label; a chat holds its answers."""
    if dataset.targets is not None or dataset.labels is None or dataset.has_chats:
        return dataset.targets
    return [answers[label] for answers, label in zip(candidates_of(dataset), dataset.labels, strict=True)]


def load_loss(name: str) -> Loss:
    """Import a custom `loss(module, batch)` by its name MODULE:FUNCTION, from the working folder or the path."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        given: Loss = getattr(importlib.import_module(module), function)
    except Exception as error:
        reason = f"{type(error).__name__}: {brief(error)}"
        raise TuneportError(f"the loss {name} cannot be imported: {reason}.") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(given):
        raise TuneportError(f"the loss {name} is not a function.")

    def loss(part: nn.Module, batch: Any) -> Tensor:
        with reraised(f"the loss {name} failed", TuneportError):
            return given(part, batch)

    return loss


def batch_for(model: Model, encoded: Encoded) -> Batch:
    """The batch of a loss, on the device and in the dtype of the model."""
    labels = encoded.labels if encoded.labels is not None else torch.empty(0)
    return model.place(encoded.inputs), labels.to(model.device)


def forward_only(model: Model) -> Loss:
    """A loss that runs a model, for signals of the forward pass."""
    forward = model.outputs.logits or model.outputs.features
    if forward is None:
        raise TuneportError(f"{model.name} cannot be run on raw samples: tuneport does not know its family.")
    return lambda module, batch: forward(module, batch[0]).sum()


@dataclass(frozen=True, eq=False)
class ModelLoss:
    """A loss of a model; only that of classes uses its head."""

    model: Model
    head: Head | None = None


class TokenLoss(ModelLoss):
    """The cross-entropy of the tokens to predict: their sum, or that of `each` sample."""

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        scores, labels, _ = labelled_tokens(self.model, module, batch)
        return F.cross_entropy(widened(scores), labels, reduction="sum")

    def each(self, module: nn.Module, batch: Batch, counts: Sequence[int] = ()) -> Tensor:
        """The sums of the samples (N,), in float64; `counts` as for `next_tokens`."""
        scores, labels, rows = labelled_tokens(self.model, module, batch, counts)
        return sum_by_row(F.cross_entropy(widened(scores), labels, reduction="none"), rows, len(batch[1]))


def sum_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """The sums (N,) in float64 of the values (M,) that are in each of the rows (M,)."""
    return values.new_zeros(count, dtype=torch.float64).index_add(0, rows, values.double())


def labelled_tokens(
    model: Model, module: nn.Module, batch: Batch, counts: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (M, vocabulary) of the tokens with a label, row by row, their labels (M,), and their rows (M,).

    `counts` as for `next_tokens`. The scores of other tokens are not computed: each has as many as the vocabulary.
    """
    labels = batch[1]
    if counts and model.shares_questions:
        scores, labels = next_tokens(model, module, batch, counts)
        named = labels != UNLABELLED
        return scores[named], labels[named], named.nonzero()[:, 0]
    if model.generates == "causal":  # the scores at a token are those of the next one
        labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], UNLABELLED)], dim=1)
    named = labels != UNLABELLED
    scores = _run_in_parts(model, module, batch, named, len(labels))
    if labels.is_meta:  # a forecast has no values: all tokens
        return scores, labels.flatten(), labels.flatten()
    return scores, labels[named], named.nonzero()[:, 0]


def next_tokens(model: Model, module: nn.Module, batch: Batch, counts: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Scores (N, K, vocabulary) and their labels (N, K), from the first position on that has a label.

    For a causal model the scores are shifted by one position. With `counts`, the first `counts[0]` rows are answers to
    one question, and so on: what they share is read once if the model can.
    """
    inputs, labels = batch
    size = len(labels)
    if counts and model.generation is not None and model.generation.answer_logits is not None:
        found = model.generation.answer_logits(module, inputs, labels, counts)
        if found is not None:
            return found
        size = -(-size // ANSWERS_AT_ONCE)  # whole passes of the batch size
    shift = int(model.generates == "causal")  # the scores of a token are those of the next one
    columns = (labels[:, shift:] != UNLABELLED).any(0).nonzero()
    first = int(columns[0]) if len(columns) else 0
    wanted = torch.zeros_like(labels, dtype=torch.bool)
    wanted[:, first : labels.shape[1] - shift] = True
    scores = _run_in_parts(model, module, batch, wanted, size)
    return scores.view(len(labels), -1, scores.shape[-1]), labels[:, first + shift :]


def _run_in_parts(model: Model, module: nn.Module, batch: Batch, wanted: Tensor, size: int) -> Tensor:
    """The scores (M, vocabulary) of the tokens that are wanted (N, T), of so many rows at a time."""
    assert model.generation is not None
    inputs, labels = batch
    each = [
        model.generation.token_logits(module, {key: value[at : at + size] for key, value in inputs.items()}, *part)
        for at, *part in zip(range(0, len(labels), size), labels.split(size), wanted.split(size), strict=True)
    ]
    return each[0] if len(each) == 1 else torch.cat(each)


def questions_at_once(model: Model, batch_size: int, answers: int) -> int:
    """How many questions with so many answers each are one batch; the answers of a question read once are short."""
    rows = batch_size * (ANSWERS_AT_ONCE if model.shares_questions else 1)
    return max(rows // answers, 1)


def _encode_classes(model: Model, samples: Dataset) -> Encoded:
    if model.inputs.encode is None:
        raise TuneportError(model.unreadable)
    inputs = list(samples.inputs)
    reader = model.inputs.reader
    encoded = reader.texts(inputs) if reader is not None else Encoded(model.inputs.encode(inputs), None, ())
    return replace(encoded, labels=_answers(model, samples, encoded))


def _answers(model: Model, samples: Dataset, encoded: Encoded) -> Tensor:
    """The labels (N,) of samples; what the scores of a teacher say of tokens (N, T), or as numbers (N, outputs)."""
    if model.regresses:
        unknown = np.full((len(samples), len(model.outputs.classes)), np.nan)
        known = unknown if samples.scores is None else samples.scores
        return torch.as_tensor(known, dtype=torch.float32)
    if model.task == "token":
        if samples.scores is None:
            return torch.full(encoded.inputs["input_ids"].shape, UNLABELLED)
        scores = scores_on(samples.scores, encoded.spans[0])
        return scores.argmax(-1).masked_fill(scores.isnan().any(-1), UNLABELLED)
    return torch.full((len(samples),), UNLABELLED) if samples.labels is None else torch.as_tensor(samples.labels)


class HeadLoss(ModelLoss):
    """The loss of a head: the cross-entropy of samples or tokens, or half the squared error of a regression."""

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        return self._losses(module, batch, "sum")

    def each(self, module: nn.Module, batch: Batch) -> Tensor:
        """The sums of the samples (N,), in float64."""
        return self._losses(module, batch, "none").double().view(len(batch[1]), -1).sum(1)

    def _losses(self, module: nn.Module, batch: Batch, reduction: str) -> Tensor:
        assert self.head is not None
        scores, labels = self.head.scores(self.model, module, batch[0]), batch[1]
        if self.model.regresses:
            return F.mse_loss(scores, labels, reduction=reduction) / 2
        return F.cross_entropy(scores.flatten(0, -2), labels.flatten(), reduction=reduction)


class ContrastiveLoss(ModelLoss):
    """Classify the second text of each first text among those of the batch."""

    def __call__(self, module: nn.Module, batch: Batch) -> Tensor:
        outputs = self.model.outputs
        assert outputs.features is not None
        vectors = F.normalize(widened(outputs.features(module, batch[0])), dim=-1)
        return F.cross_entropy(outputs.logit_scale * vectors[0::2] @ vectors[1::2].T, batch[1], reduction="sum")


def _encode_pairs(model: Model, samples: Dataset) -> Encoded:
    return replace(model.reader.pairs(list(samples.inputs)), labels=torch.arange(len(samples)))


def _encode_continuations(model: Model, samples: Dataset) -> Encoded:
    whose = {"taught": samples.answers == "teacher", "last": samples.answers == "choice"}
    return model.reader.continuations(list(samples.inputs), read_answers(samples), **whose)


def _encode_answers(model: Model, samples: Dataset) -> Encoded:
    if samples.has_chats:
        questions, answers = zip(*map(last_answer, samples.inputs), strict=True)
        return model.reader.answers(["\n".join(part["content"] for part in chat) for chat in questions], answers)
    return model.reader.answers(list(samples.inputs), list(read_answers(samples) or ()))


OBJECTIVES: Mapping[str, Objective] = {
    "classification": Objective("classification", _encode_classes, HeadLoss),
    "contrastive": Objective("contrastive", _encode_pairs, ContrastiveLoss, together=CONTRASTED),
    "causal": Objective("causal", _encode_continuations, TokenLoss),
    "seq2seq": Objective("seq2seq", _encode_answers, TokenLoss),
}
