"""Draw the calibration samples, and choose what both models are asked about them.

Every error in the data is found here, before the first forward pass of a measurement, and reported in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..config import MeasureConfig
from ..data.dataset import Dataset, align_labels
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import DataError, TuneportError
from ..io.places import nearest_path
from ..measure.fitted_heads import agreement, answers_by_name, labelled_by, scores_by, scores_of_labels, with_scores
from ..measure.objectives import Objective, check_objective, choose_objective, forward_only, load_loss
from ..measure.samples import Calibration, DatasetSamples, Samples, UserBatches, by_length, samples_at_once
from ..measure.signals import NEEDS_BACKWARD, OUTPUT_GRADIENT
from ..models.base import Model
from ..models.change import Change
from ..models.heads import Head, choose_head
from ..models.open import pick_device, runnable
from ..report.provenance import data_identity
from ..types import Loss, Sides, Signal

Data = str | Path | Dataset | Iterable[Any]
SCORED: frozenset[Signal] = frozenset({OUTPUT_GRADIENT})  # needs a loss on labelled samples


def are_samples(data: Data | None) -> bool:
    """Whether samples are drawn from the data; else they are the caller's own batches, or none."""
    return isinstance(data, (str, Path, Dataset))


def draw_samples(
    models: Sides[Model],
    change: Change,
    data: Data | None,
    config: MeasureConfig,
    signals: frozenset[Signal],
    optional: frozenset[Signal] = frozenset(),
) -> tuple[Calibration, dict[str, Any]]:
    """Read the training split once, draw samples, and choose the objective, the losses and the heads.

    The `signals` are needed; the `optional` ones are left out where the data or the models do not have them.

    Returns:
        The calibration, and what was read and drawn, for the record.
    """
    where = split_reference(data) if isinstance(data, (str, Path)) else None
    if where is not None and not where.place.exists():
        raise DataError(f"no data at {where.place}: no such file or folder.{nearest_path(where.place)}")

    @cache
    def read() -> Dataset | None:
        if where is not None:
            return where.read("train", labelled=False, columns=config.columns)
        return data if isinstance(data, Dataset) else None

    more = signals | optional
    try:
        question = _ask(data, read, models, change, more, config)
    except TuneportError:
        if more == signals:
            raise
        more, question = signals, _ask(data, read, models, change, signals, config)
    losses = _losses(models, question, more)
    samples, about = _draw(data if where is None else where.place, question, models, config)
    if where is not None and where.task is not None:
        about["task"] = where.task.name
    found = Calibration(samples, more, losses, question.heads, config.match, question.by_source, question.loss_name)
    return _labelled(models.source, change, found, config.labels, about)


@dataclass(frozen=True, eq=False)
class _Question:
    """The task of both models: a data set if it is read, an objective or the caller's losses, and heads."""

    dataset: Dataset | None = None
    objective: Objective | None = None
    heads: Sides[Head] | None = None
    loss: Loss | tuple[Loss, Loss] | None = None
    loss_name: str | None = None
    by_source: bool = False  # the fine-tuned source labels the samples


def _ask(
    data: Data | None,
    read: Callable[[], Dataset | None],
    models: Sides[Model],
    change: Change,
    signals: frozenset[Signal],
    config: MeasureConfig,
) -> _Question:
    """Choose the objective, the loss and the heads; the data set is read if it is needed."""
    fits = change.fits_head
    loss, name = config.loss, config.loss if isinstance(config.loss, str) else None
    wanted = None if name is None or ":" in name else check_objective(name)
    if isinstance(loss, str):
        loss = None if wanted else load_loss(loss)
    question, gradients = _Question(loss=loss, loss_name=name), bool(NEEDS_BACKWARD & signals)
    if (dataset := read() if signals or fits else None) is not None:
        for model in models:
            if model.inputs.encode is None:
                raise TuneportError(model.unreadable)
            model.check_kind(dataset)
        objective = choose_objective(dataset, models, wanted)
        question = replace(question, dataset=dataset, objective=objective)
        if loss is None and (gradients or fits) and objective.name == "classification":
            _check_kinds(models, dataset, config, fits)
            needed = config.labels == "data" or (config.labels is None and not fits)
            if needed and dataset.labels is None and isinstance(data, (str, Path)):
                read_data(data, "train", columns=config.columns)  # the error names what is missing
            question = _with_heads(question, models, change, config)
        if loss is None and gradients:
            question = replace(question, loss_name=name or objective.name)
    if config.labels == "source" and gradients and not question.by_source:
        raise DataError(
            '`labels="source"` needs data with classes: give data, not batches, and leave `loss` out or classification.'
        )
    if signals and data is None:
        raise DataError(
            f"the method measures {' and '.join(sorted(signals))} and needs calibration data: pass `data`, or batches "
            "with a loss in Python."
        )
    return question


def _check_kinds(models: Sides[Model], dataset: Dataset, config: MeasureConfig, fits: bool) -> None:
    """Refuse kinds of models that do not go together, and labels that a head for tokens or numbers does not allow."""
    writer, other = sorted(models, key=lambda model: model.generates is None)
    if writer.generates is not None and other.generates is None and config.head is None:
        raise TuneportError(
            f"{writer.name} writes text and {other.name} does not: give two models of one kind, or a head for the "
            f"classes of {dataset.name} with `head=FILE`."
        )
    source = models.source
    if source.labels_samples or (fits and config.labels != "data"):
        return
    if config.labels == "data":
        raise DataError(f"{source.name} {source.instead}, and such labels are not read from data: leave out `labels`.")
    raise DataError(
        f'{source.name} {source.instead}, which needs a fitted head: leave out `head_fit="none"` and an `exclude` that '
        "names the head, or pass `loss`."
    )


def _with_heads(question: _Question, models: Sides[Model], change: Change, config: MeasureConfig) -> _Question:
    """Add a head of each model, which must know the classes of the samples."""
    device, known = pick_device(config.device), question.dataset
    assert known is not None
    heads = []
    for model in models:
        with runnable(model, device):
            heads.append(choose_head(model, config.head, known))
        if (embeds := heads[-1].class_embeds) is not None and bool((embeds == embeds[:1]).all()):
            raise DataError(
                f"all {len(embeds)} classes of the head {heads[-1].name} of {model.name} have one embedding: its loss "
                "has no gradient. Give a head with an embedding for each class."
            )
    if config.head_fit != "none" and (heads[0].class_embeds is None) != (heads[1].class_embeds is None):
        one, other = sorted(models, key=lambda model: model.outputs.logits is None)
        raise DataError(
            f"{one.name} has a classification layer and {other.name} has none, so their scores do not compare: give "
            'two models of one kind, or `head_fit="none"` to use the head that each has.'
        )
    by_source = config.labels == "source"
    if config.labels is None and change.fits_head:
        by_source = known.labels is None or not models.source.labels_samples
    if by_source:  # the labels are classes of the source's head
        name = f"the head of {models.source.name}"
        known = Dataset((), np.zeros(0, dtype=np.int64), heads[0].classes, name=name)
    try:
        for head in heads:
            align_labels(known, head.classes)
    except DataError as error:
        if not change.fits_head:
            raise
        shown = answers_by_name(models, change, heads[0], known)
        way = ' Or pass `labels="source"`: the fine-tuned source then labels the samples.'
        raise DataError(f"{error}{shown}{way}") from error
    return replace(question, heads=Sides(*heads), by_source=by_source)


def _losses(models: Sides[Model], question: _Question, signals: frozenset[Signal]) -> Sides[Loss] | None:
    """A loss for each model: the user's own, the objective's, or one that only runs the model forward."""
    if not signals:
        return None
    if question.loss is not None:
        return Sides(*question.loss) if isinstance(question.loss, tuple) else Sides(question.loss, question.loss)
    objective, heads = question.objective, question.heads or (None, None)
    if objective is not None and (question.heads is not None or objective.name != "classification"):
        return Sides(*(objective.loss(model, head) for model, head in zip(models, heads, strict=True)))
    for model in models:
        if NEEDS_BACKWARD & signals or (model.outputs.features is None and model.outputs.logits is None):
            known = model.outputs.features is not None
            reason = "batches say nothing of the task" if known else f"{model.name} is a module tuneport does not know"
            raise TuneportError(f"{reason}: pass loss=lambda module, batch: ...")
    return Sides(forward_only(models.source), forward_only(models.target))


def _draw(
    place: Data | None, question: _Question, models: Sides[Model], config: MeasureConfig
) -> tuple[Samples, dict[str, Any]]:
    """Draw the samples, and describe them for the record."""
    dataset = question.dataset
    if dataset is None or question.objective is None:
        own = place is not None and not isinstance(place, (str, Path, Dataset))
        return UserBatches(list(cast(Iterable[Any], place)) if own else ()), data_identity(place)

    indices = select(
        replace(dataset, labels=None) if question.by_source else dataset,
        samples=config.samples,
        shots=config.shots,
        sampler=config.sampler,
        seed=config.seed,
    )
    together = question.objective.together if question.loss is None else None
    size, order = together or config.batch_size, indices
    if together is None and dataset.kind == "text":
        size = min(size, samples_at_once(models) or size)
        order = by_length(dataset, indices) if size < len(indices) else indices
    drawn = DatasetSamples(models, dataset, order, question.heads, size, question.objective)
    return drawn, data_identity(place, dataset, indices, question.heads)


def _labelled(
    source: Model, change: Change, calibration: Calibration, labels: str | None, about: dict[str, Any]
) -> tuple[Calibration, dict[str, Any]]:
    """Add the scores that a head is fitted to, and the labels of the fine-tuned source if it labels the samples."""
    samples, heads = calibration.samples, calibration.heads
    if heads is None or not isinstance(samples, DatasetSamples):
        return calibration, about
    chosen, classes = samples.chosen, heads.source.classes
    if change.fits_head and labels == "data":
        return replace(calibration, samples=with_scores(samples, scores_of_labels(chosen, classes))), about
    if not calibration.by_source:
        return calibration, about
    scores = scores_by(source, change.teacher, heads.source, chosen, batch_size=samples.size)
    labelled = labelled_by(scores, source, classes, chosen)
    share = agreement(labelled, chosen)
    drawn = replace(samples, dataset=labelled, indices=np.arange(len(labelled)))
    found = replace(calibration, samples=with_scores(drawn, scores) if change.fits_head else drawn)
    return found, {**about, "labels": {"by": "source", "agreement": None if share is None else round(share, 4)}}
