"""Classification heads: carried to the target whole, and fitted there in closed form; labels by the fine-tuned source.

A head that was fresh when training began has no meaning as a difference. The source takes the trained head as it is. On
the target, the last layer of the head is a ridge regression from its inputs to the class scores of the fine-tuned
source, centred over the classes, or to the labels of the data. Other fresh layers of a head stay as they are made.
A token classifier is fitted on the tokens of the texts, matched by their spans, a regression to the source's numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.dataset import Dataset, align_labels, as_numbers, with_prompts
from ..errors import CheckpointError, DataError, OptionError, first_of
from ..io.tensors import describe
from ..models.base import Batch, Labelling, Model
from ..models.change import Change, Finetuned, change_of
from ..models.heads import Head
from ..models.offload import with_attribute
from ..models.open import as_classifier, labelling_of
from ..models.weights import changed, finetuned
from ..processes import divided
from ..task_vectors.lora_format import PREFIX, Adapter
from ..task_vectors.vector import TaskVector
from ..types import Sides
from .accuracy import LEVEL, each_batch, tail
from .samples import DatasetSamples, Samples
from .signals import frozen
from .tokens import scores_on

PENALTIES = torch.logspace(-10, 3, 27, dtype=torch.float64)  # factors of the mean squared singular value


@dataclass(frozen=True, eq=False)
class Ridge:
    """The map `y = x W^T + b` of a fit, its penalty, and for every sample the prediction of a fit on all the others."""

    weight: Tensor
    bias: Tensor
    penalty: float
    left_out: Tensor


def ridge(inputs: Tensor, outputs: Tensor, *, intercept: bool = True) -> Ridge:
    """Minimise `|Y - X W^T - b|^2 + penalty |W|^2` over W and b, in float64; the intercept b is free, or zero.

    The penalty has the least squared leave-one-out error among `PENALTIES`, which one SVD of the centred inputs gives
    in closed form: the error of a sample is its residual divided by one minus its leverage.

    >>> found = ridge(torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[1.0], [3.0], [5.0]]))
    >>> round(float(found.weight), 6), round(float(found.bias), 6)
    (2.0, 1.0)
    """
    X, Y = inputs.double(), outputs.double()
    share = 1.0 if intercept else 0.0
    centre, mean = share * X.mean(0), share * Y.mean(0)
    U, S, Vh = torch.linalg.svd(X - centre, full_matrices=False)  # (N, k), (k,), (k, d)
    Z = U.T @ (Y - mean)  # (k, outputs)
    energy = S.square()
    typical = energy.mean().clamp(min=torch.finfo(torch.float64).tiny)

    def predicted(penalty: Tensor) -> Tensor:
        shrink = energy / (energy + penalty)
        fitted = mean + U @ (shrink[:, None] * Z)
        leverage = share / len(X) + U.square() @ shrink
        free = (1 - leverage).clamp(min=1e-12)  # a lone sample, or one that no other helps to predict
        left_out: Tensor = Y - (Y - fitted) / free[:, None]
        return left_out

    penalties = PENALTIES.to(X.device) * typical
    errors = torch.stack([(Y - predicted(each)).square().sum() for each in penalties])
    penalty = penalties[errors.argmin()]
    weight = (Z.T * (S / (energy + penalty))) @ Vh  # (outputs, d)
    return Ridge(weight, mean - weight @ centre, float(penalty), predicted(penalty))


LOOKED_AT = 8  # samples of a class, to see what the fine-tune answers
MOST_TOKENS = 20_000  # that fit the head of a token classifier: the cost grows with their number
TASK_TYPES = {"SEQ_CLS": "sequence", "TOKEN_CLS": "token"}  # of peft
_HEAD = re.compile(r"(classifier|score|head|classification_head)(\.modules_to_save)?(\.out_proj)?\.weight")


def is_head(name: str) -> bool:
    """Whether this is the name of the weight of a classification layer, in a model or in an adapter."""
    return _HEAD.fullmatch(name.removeprefix(PREFIX)) is not None


def labelling_by(finetuned: Finetuned, source: Model) -> Labelling | None:
    """What the classification layer of a fine-tune decides; that of its source where the fine-tune says nothing."""
    if isinstance(finetuned, TaskVector) or (isinstance(finetuned, (str, Path)) and Path(finetuned).is_file()):
        return source.labelling
    if not isinstance(finetuned, Adapter):
        return labelling_of(finetuned)
    rows = [describe(finetuned.tensors, key).shape[0] for key in finetuned.tensors if is_head(key)]
    if not rows or (source.labelling is not None and len(source.outputs.classes) == rows[-1]):
        return source.labelling
    task = "image" if source.inputs.kind == "image" else TASK_TYPES.get(finetuned.task_type or "", "sequence")
    named = len(finetuned.classes) == rows[-1]
    return Labelling(task, finetuned.classes if named else tuple(map(str, range(rows[-1]))))


def renamed_classes(labelling: Labelling | None, names: Sequence[str] | None) -> Labelling | None:
    """What a classification layer decides, with other names of its classes, in their order; None leaves them."""
    if names is None:
        return labelling
    if labelling is None:
        raise OptionError("`classes` names those of a classification layer, and there is none to fit: leave it out.")
    if len(set(names)) != len(labelling.classes) or len(set(names)) != len(names):
        count, has = len(labelling.classes), first_of(labelling.classes)
        raise OptionError(f"`classes` has {len(set(names))} different names; the head has {count} classes: {has}.")
    return replace(labelling, classes=tuple(names), names=tuple(names))


def answers_by_name(models: Sides[Model], change: Change, head: Head, data: Dataset) -> str:
    """Say what the fine-tune answers on a few samples of each class, and propose an order if it is clear."""
    if data.labels is None or as_numbers(head.classes) != list(range(len(head.classes))):
        return ""
    said, order, count = [], dict[int, str](), len(head.classes)
    for label, name in enumerate(data.classes):
        rows = np.flatnonzero(data.labels == label)[:LOOKED_AT]
        if not len(rows):
            continue
        found = scores_by(models.source, change.teacher, head, data.subset(rows)).argmax(-1)
        top = int(np.bincount(found).argmax())
        times = int((found == top).sum())
        said.append(f"{name}: {head.classes[top]} ({times} of {len(rows)})")
        if tail(len(rows), times, 1 / count) < LEVEL:
            order.setdefault(top, name)
    if not said:
        return ""
    words = f" On a few samples of each the fine-tune answers {first_of(said)}."
    if len(order) < count or len(data.classes) != count:
        return f"{words} That shows no clear order: give it as `classes`."
    return f"{words} So pass `classes={','.join(order[place] for place in range(count))!r}`."


def with_heads(models: Sides[Model], labelling: Labelling, trust_remote_code: bool) -> Sides[Model]:
    """Both models with a classification layer for the same classes."""
    for model in models:
        model.require_in_memory("fitting a head", 'give a larger one, or `head_fit="none"`')
    try:
        source = as_classifier(models.source, labelling, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Check that the fine-tune was fine-tuned from {models.source.name}.") from error
    return Sides(source, as_classifier(models.target, labelling, trust_remote_code=trust_remote_code))


def take_head(
    source: Model, finetuned: Finetuned, vector: TaskVector, exclude: Sequence[str]
) -> tuple[Model, TaskVector]:
    """The source with its trained head, whole, and what the `vector` of a fine-tune changes in other tensors."""
    others = [glob for glob in exclude if not any(source.matches(name, [glob]) for name in source.head)]
    whole = vector if len(others) == len(exclude) else change_of(source, finetuned, others)
    assert source.classifier is not None
    lost = sorted(name for name in source.classifier.fresh if name.endswith("weight") and name not in whole)
    if lost:
        raise CheckpointError(
            f"the fine-tune reads through {first_of(lost)}, which neither {source.name} nor the fine-tune holds: it "
            "was drawn when the training began and never saved. Save the base that was trained from with this part and "
            "give that as `source`, or train with it in modules_to_save."
        )
    stored = source.stored_parameters()
    head = {name: stored[name].double() + whole.dense(name).double().cpu() for name in source.head if name in whole}
    return source.with_head(head, rounded=False), vector.subset(name for name in vector if name not in source.head)


def with_scores(
    samples: DatasetSamples, scores: NDArray[Any] | None, base: NDArray[Any] | None = None
) -> DatasetSamples:
    """The samples with the scores of a teacher, which stay if none are given, and of its base."""
    chosen, model = samples.chosen, samples.models.source
    if scores is not None:
        chosen = replace(chosen, scores=_centred_rows(scores, model))
    return replace(samples, dataset=chosen, indices=np.arange(len(chosen)), base_scores=_centred_rows(base, model))


def _centred_rows(scores: NDArray[Any] | None, model: Model) -> NDArray[Any] | None:
    """The `scores` of a `Dataset`, centred over the classes."""
    if scores is None:
        return None
    if model.task != "token":
        return _centred(torch.as_tensor(scores).T, model).T.numpy()
    found = np.empty(len(scores), dtype=object)
    found[:] = [(spans, _centred(values.T, model).T) for spans, values in scores]
    return found


def _centred(scores: Tensor, model: Model) -> Tensor:
    """Scores (classes, ...) without their mean over the classes, which no softmax sees; independent ones stay."""
    return scores if model.regresses or model.multi_label else scores - scores.mean(0)


def scores_of_labels(data: Dataset, classes: tuple[str, ...]) -> NDArray[np.float64]:
    """One for the class of each sample and zero for the others."""
    return np.eye(len(classes))[align_labels(data, classes).labels]


def fit_head(model: Model, module: nn.Module, samples: Samples, batches: Sequence[Batch] = ()) -> dict[str, Tensor]:
    """The classification layer that a ridge regression finds on these samples, by live names.

    Where the model has its own layer for the classes, the regression also starts from there and fits the difference;
    the start with the smaller leave-one-out error wins. The samples are encoded unless their `batches` are given.
    """
    assert isinstance(samples, DatasetSamples)
    forward = model.outputs.logits or model.outputs.features
    assert model.classifier is not None
    assert forward is not None
    data, path, own = samples.chosen, model.classifier.path, model.classifier.own
    place, _, name = path.rpartition(".")

    def work(batch: Batch) -> Tensor:
        return forward(module, batch).double().cpu()

    # what the last layer reads: what the model gives with an identity in its place
    with with_attribute(module.get_submodule(place), name, nn.Identity()), frozen(module), torch.no_grad():
        inputs = divided(batches, work) if batches else each_batch(work, model, data, samples.size)
    X, Y = _regression(model, inputs, data)
    biased = getattr(module.get_submodule(path), "bias", None) is not None
    starts = [(torch.zeros(Y.shape[1], X.shape[1]).double(), torch.zeros(Y.shape[1]).double())]
    if f"{path}.weight" in own:
        given = (own.get(f"{path}.{name}", zero) for name, zero in zip(("weight", "bias"), starts[0], strict=True))
        weight, bias = (tensor.double().cpu() for tensor in given)
        starts.append((_centred(weight, model), _centred(bias, model)))
    found = []
    for weight, bias in starts:
        left = Y - X @ weight.T - bias
        fit = ridge(X, left, intercept=biased)
        found.append((float((left - fit.left_out).square().sum()), weight + fit.weight, bias + fit.bias))
    _, weight, bias = min(found, key=lambda item: item[0])
    return {f"{path}.weight": weight, **({f"{path}.bias": bias} if biased else {})}


def _regression(model: Model, inputs: Sequence[Tensor], data: Dataset) -> tuple[Tensor, Tensor]:
    """Inputs of the last layer, and the scores that it is to give: of each sample, or of the tokens of the texts."""
    assert data.scores is not None
    if model.task != "token":
        return torch.cat(list(inputs)), torch.as_tensor(data.scores)
    rows, start, texts = [], 0, with_prompts(data).inputs if model.inputs.prompted else data.inputs
    for batch in inputs:
        part = slice(start, start := start + len(batch))
        scores = scores_on(data.scores[part], model.reader.texts(list(texts[part])).spans[0])
        known = ~scores.isnan().any(-1)
        rows.append((batch[known], scores[known]))
    X, Y = (torch.cat(side) for side in zip(*rows, strict=True))
    every = -(-len(X) // MOST_TOKENS)
    return X[::every], Y[::every]


def is_bare(target: Model, *, fits: bool) -> bool:
    """Whether a head is fitted and the target has none of its own for the classes."""
    return fits and (target.classifier is None or f"{target.classifier.path}.weight" not in target.classifier.own)


def before_port(target: Model, samples: Samples, *, fits: bool) -> Model:
    """The target that a port is compared with; without a head of its own, one is fitted: its gain is not the port's."""
    return target.with_head(fit_head(target, target.module, samples)) if is_bare(target, fits=fits) else target


def measuring(target: Model, samples: Samples) -> AbstractContextManager[None]:
    """Context in which the target has the head that it is measured with, if its samples have scores of the base.

    That head says of the target's base features what the trained head says of the source's, so that their gradients
    compare. It is fitted on these samples only: those that judge what is measured have no part in it.
    """
    head = dict[str, Tensor]()
    if isinstance(samples, DatasetSamples) and samples.base_scores is not None:
        base = replace(samples.dataset, scores=samples.base_scores)
        head = fit_head(target, target.module, replace(samples, dataset=base))
    return changed(target.module, head)


def scores_by(model: Model, change: TaskVector, head: Head, data: Dataset, *, batch_size: int = 32) -> NDArray[Any]:
    """The scores of a `Dataset` that the model, with its change, gives to the samples; it is restored after."""
    model.require_in_memory("labelling samples", "give a larger one, or data with labels")
    with finetuned(model, change), frozen(model.module), torch.no_grad():
        found = each_batch(
            lambda batch: head.scores(model, model.module, batch).double().cpu(), model, data, batch_size
        )
    return torch.cat(found).numpy() if model.task != "token" else _by_spans(model, data, chain(*found))


def _by_spans(model: Model, data: Dataset, found: Iterable[Tensor]) -> NDArray[Any]:
    """The spans of the tokens of each text and their scores, NaN for special tokens, of rows (T, classes)."""
    rows = np.empty(len(data), dtype=object)
    texts = with_prompts(data).inputs if model.inputs.prompted else data.inputs
    for number, (text, scores) in enumerate(zip(texts, found, strict=True)):
        encoded = model.reader.texts([text])  # without padding, which is on the right
        assert encoded.inside is not None
        inside = encoded.inside[0]
        rows[number] = encoded.spans[0][0], scores[: len(inside)].masked_fill(~inside[:, None], torch.nan)
    return rows


def labelled_by(scores: NDArray[Any], model: Model, classes: tuple[str, ...], data: Dataset) -> Dataset:
    """The samples with the classes of the model's highest scores; those without one class each have no labels."""
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


def with_teacher_scores(
    models: Sides[Model], change: Change, samples: Samples, scores: tuple[NDArray[Any], NDArray[Any]] | None = None
) -> Samples:
    """The samples with scores (those given, where known) of the source and its base, where a head is fitted."""
    if not change.fits_head:
        return samples
    assert isinstance(samples, DatasetSamples)
    assert samples.heads is not None
    head, chosen = samples.heads.source, samples.chosen
    base, tuned = scores or (None, None)
    if base is None and models.target.classifier is not None:
        base = scores_by(models.source, TaskVector({}), head, chosen, batch_size=samples.size)
    if tuned is None and chosen.scores is None:
        tuned = scores_by(models.source, change.teacher, head, chosen, batch_size=samples.size)
    return with_scores(samples, None if chosen.scores is not None else tuned, base)
