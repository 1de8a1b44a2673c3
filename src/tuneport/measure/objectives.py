"""What the models are asked on the calibration samples: how a batch is made of them, and the loss on it.

A batch is `(inputs, labels)`: what the module's forward takes, and class numbers or token numbers. Losses are sums:
over samples, and over the tokens to be predicted, each of which counts the same, as in training. An own loss is any
`loss(module, batch)` that returns such a sum.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data.dataset import UNLABELLED, Dataset
from ..errors import DataError, TuneportError, unknown_name
from ..models.base import Model, widened
from ..models.heads import Head
from ..models.tokenizer import Encoded, Reader
from ..types import Loss


@dataclass(frozen=True)
class Objective:
    """A way to ask: `encode` makes a batch of samples for a model, `loss` scores one.

    `by_sample` says that the loss is a sum over samples that do not see each other, so that batches may be divided.
    """

    name: str
    summary: str
    encode: Callable[[Model, Dataset], Encoded]
    loss: Callable[[Model, Head | None], Loss]
    by_sample: bool = True


def objective_of(dataset: Dataset, models: Sequence[Model], wanted: str | None = None) -> Objective:
    """The objective of that name, or the one that the data and both models allow; an error says what is missing."""
    name = check_objective(wanted or _usual(dataset, models))
    for model in models:
        if name in ("causal", "seq2seq") and model.generates != name:
            can = f"generates as {model.generates}" if model.generates else "writes no text"
            raise TuneportError(f"the {name} loss needs a model that predicts tokens that way; {model.name} {can}.")
    first = dataset.inputs[0] if len(dataset) else ""
    if name == "contrastive" and (dataset.kind != "text" or isinstance(first, str)):
        raise DataError(f"the contrastive loss needs pairs of texts; {dataset} has none: columns text and text_pair.")
    if name == "seq2seq" and answers_of(dataset) is None:
        raise DataError(f"the seq2seq loss needs what is to be written; {dataset} has no column target or label.")
    return OBJECTIVES[name]


def check_objective(name: str) -> str:
    """The name, or an error that lists what there is."""
    if name not in OBJECTIVES:
        raise TuneportError(unknown_name("loss", name, OBJECTIVES) + " Or pass MODULE:FUNCTION.")
    return name


def _usual(dataset: Dataset, models: Sequence[Model]) -> str:
    ways = {model.generates for model in models}
    if ways and None not in ways:
        if len(ways) > 1:
            raise TuneportError("one model is causal and the other an encoder-decoder; pass a loss for each in Python.")
        return str(ways.pop())
    pairs = dataset.kind == "text" and len(dataset) > 0 and not isinstance(dataset.inputs[0], str)
    heads = all(model.logits is not None for model in models)
    return "contrastive" if pairs and dataset.labels is None and not heads else "classification"


def answers_of(dataset: Dataset) -> Sequence[str] | None:
    """What is to be written for each sample: its target, or the words for its label."""
    if dataset.targets is not None:
        return dataset.targets
    if dataset.labels is None:
        return None
    words = dataset.label_texts or dataset.classes
    return [words[label] for label in dataset.labels]


def load_loss(name: str) -> Loss:
    """The user's own `loss(module, batch)`, named MODULE:FUNCTION, from the working folder or the path."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except Exception as error:
        raise TuneportError(f"the loss {name} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(os.getcwd())
    if not callable(found):
        raise TuneportError(f"the loss {name} is not a function.")
    loss: Loss = found
    return loss


def batch_for(model: Model, encoded: Encoded) -> tuple[dict[str, Tensor], Tensor]:
    """The batch that a loss takes, where and as the model runs."""
    labels = encoded.labels if encoded.labels is not None else torch.empty(0)
    return model.inputs(encoded.inputs), labels.to(model.device)


def forward_only(model: Model) -> Loss:
    """Dummy loss for forward-only capture."""
    forward = model.logits or model.features
    if forward is None:
        raise TuneportError(f"{model.name} cannot be run on raw samples: tuneport does not know its family.")

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return forward(module, batch[0]).sum()

    return loss


def token_loss(model: Model) -> Loss:
    """Sum over the tokens to be predicted of their cross-entropy."""

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        return token_cross_entropy(*next_tokens(model, module, batch))

    return loss


def token_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over labels that are not to be ignored, of scores (N, T, vocabulary) against labels (N, T)."""
    scores = widened(logits.flatten(0, 1))
    return F.cross_entropy(scores, labels.flatten(), ignore_index=UNLABELLED, reduction="sum")


def next_tokens(model: Model, module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Scores (N, T, vocabulary) and the labels (N, T) they are to hit; a causal model's are one place apart."""
    inputs, labels = batch
    assert model.token_logits is not None
    logits = model.token_logits(module, inputs, labels)
    return (logits[:, :-1], labels[:, 1:]) if model.generates == "causal" else (logits, labels)


def _plain(model: Model, samples: Dataset) -> Encoded:
    """The inputs as they are, with class labels."""
    labels = torch.full((len(samples),), UNLABELLED) if samples.labels is None else torch.as_tensor(samples.labels)
    if model.reader is not None:
        return replace(model.reader.texts(list(samples.inputs)), labels=labels)
    if model.encode is None:
        raise TuneportError(model.unreadable)
    return Encoded(model.encode(list(samples.inputs)), labels, ())


def _classification(model: Model, head: Head | None) -> Loss:
    assert head is not None

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(head.scores(model, module, inputs), labels, reduction="sum")

    return loss


def _reader(model: Model) -> Reader:
    if model.reader is None:
        raise TuneportError(model.unreadable)
    return model.reader


def _pairs(model: Model, samples: Dataset) -> Encoded:
    return replace(_reader(model).pairs(list(samples.inputs)), labels=torch.arange(len(samples)))


def _contrastive(model: Model, head: Head | None) -> Loss:
    """Each first text is to find its second among those of the batch."""
    del head

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        inputs, labels = batch
        assert model.features is not None
        vectors = F.normalize(widened(model.features(module, inputs)), dim=-1)
        return F.cross_entropy(model.logit_scale * vectors[0::2] @ vectors[1::2].T, labels, reduction="sum")

    return loss


def _continued(model: Model, samples: Dataset) -> Encoded:
    return _reader(model).continuations(list(samples.inputs), answers_of(samples))


def _answered(model: Model, samples: Dataset) -> Encoded:
    answers = answers_of(samples)
    assert answers is not None
    return _reader(model).answers(list(samples.inputs), list(answers))


OBJECTIVES: Mapping[str, Objective] = {
    "classification": Objective("classification", "cross-entropy of the head's class scores", _plain, _classification),
    "contrastive": Objective(
        "contrastive",
        "each text finds its partner among those of the batch (pairs of texts)",
        _pairs,
        _contrastive,
        False,
    ),
    "causal": Objective(
        "causal", "next tokens of the text, or of the target after it", _continued, lambda model, _: token_loss(model)
    ),
    "seq2seq": Objective(
        "seq2seq", "tokens of the target, or of the label's words, from the text", _answered, lambda m, _: token_loss(m)
    ),
}
