"""From what a user gives to a checked Job: models, task vector, plan, samples, losses.

Every error in the input is found here, before the first forward pass, and reported in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from typing_extensions import Unpack

from ..data.dataset import Dataset, align_labels
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import CheckpointError, DataError, TuneportError
from ..io.hub import nearest_path
from ..job import Drawn, Given, Job, Samples
from ..measure.accuracy import compute_features
from ..measure.objectives import Objective, check_objective, choose_objective, forward_only, load_loss
from ..measure.signals import NEEDS_BACKWARD, OUTPUT_GRADIENT
from ..methods import Method, get_method
from ..models.base import Model, ModelLike
from ..models.heads import Head, choose_head
from ..models.open import dtype_on, open_both, pick_device, pick_dtype, runnable
from ..report import record as records
from ..report.provenance import data_identity
from ..task_vectors.vector import TaskVector
from ..types import Loss, Sides, Signal
from .change import Finetuned, added_by, change_of, check_changes, every_layer, opened, sum_of_changes
from .described import prepared_record
from .heads import labelling_by, scores_of_labels, take_head, with_heads, with_scores
from .labels import agreement, labelled_by, scores_by
from .options import Options, check_options
from .plan import plan_of
from .sanity import check_base

Data = str | Path | Dataset | Iterable[Any]
SCORED: frozenset[Signal] = frozenset({OUTPUT_GRADIENT})  # a job with this signal has a loss on labelled samples


def prepare(
    source: ModelLike,
    finetuned: Finetuned | Sequence[Finetuned] | None,
    target: ModelLike,
    data: Data | None = None,
    *,
    signals: str | Method | Iterable[Signal] = "bico",
    scored: bool | None = False,
    **options: Unpack[Options],
) -> Job:
    """Open everything, pair the layers and draw the samples.

    Args:
        source: the old base model, as a path, a name or a live module.
        finetuned: the fine-tuned source, an adapter of it, or a task vector; of a list, the changes are added. None,
            for a comparison of the bases: every layer counts as changed, and the job cannot be transferred.
        target: the new base model.
        data: a path or a Dataset, from which samples are drawn, or batches for the option `loss`.
        signals: what will be measured: the signals of a method (or its name), or a set of signals.
        scored: whether samples will be scored by a loss, also where no signal needs one; None: where they can be.
        options: see `tuneport.pipeline.options.Options`.
    """
    given = check_options(options)
    wanted = get_method(signals).signals if isinstance(signals, (str, Method)) else frozenset(signals)
    device = pick_device(given["device"])
    dtype, note = dtype_on(device, given["dtype"], source, target)
    models = open_both(
        source,
        target,
        device=device,
        dtype=pick_dtype(dtype),
        memory_budget=given["memory_budget"],
        trust_remote_code=given["trust_remote_code"],
    )
    models, parts, tuned, vector, headed = _change(models, finetuned, data, given)
    models = Sides(*(model.cut_at(given["max_length"]) for model in models))
    fits = headed or _fits_projection(models, given)
    question, wanted = _ask_scored(data, models, wanted, given, device, fits=fits, scored=scored)
    plan = plan_of(
        *models,
        vector,
        pairs=given["pairs"],
        roles=given["roles"],
        depth_rule=given["depth_rule"],
        norms=given["norms"],
        exclude=given["exclude"],
        fitted=_fitted_names(models.target) if question.fits else frozenset(),
    )
    losses = _losses(models, question, wanted)
    samples, about = _draw(question, models, tuned, vector, given, device)
    teacher = None
    if question.fits:
        teacher = _whole_change(models.source, tuned) if given["exclude"] else vector
        teacher = teacher.subset(name for name in teacher if name not in models.source.head)
    job = Job(
        models,
        vector,
        plan,
        wanted,
        samples,
        losses,
        heads=question.heads,
        teacher=teacher,
        added=added_by(models, tuned, given["exclude"]),
        match=given["match"],
        completion=given["completion"],
        max_tokens=given["max_tokens"],
        memory_budget=given["memory_budget"],
        seed=given["seed"],
        by_source=question.by_source,
        accept_unlikely=given["accept_unlikely"],
        device=device if given["memory_budget"] is not None else None,
    )
    known: Options = {**given, "device": str(device), "dtype": dtype}
    names = {"loss": question.loss_name, "task": question.task}
    return replace(job, record=prepared_record(job, known, parts, about, **names, dtype_note=note))


def _change(
    models: Sides[Model], finetuned: Finetuned | Sequence[Finetuned] | None, data: Data | None, given: Options
) -> tuple[Sides[Model], list[Finetuned], Finetuned, TaskVector, bool]:
    """What a fine-tune changes: the models, its parts, their sum, its task vector, and whether its head is fitted.

    The models get a head for the classes of the fine-tune, if it has one that is to be fitted.
    """
    if finetuned is None:
        vector = every_layer(models.source)
        return models, [vector], vector, vector, False
    parts = list(map(opened, finetuned if isinstance(finetuned, (list, tuple)) else [cast(Finetuned, finetuned)]))
    for part in () if given["accept_unlikely"] else parts:
        check_base(models.source, part)
    tuned = parts[0] if len(parts) == 1 else sum_of_changes(models.source, parts, given["exclude"])
    headed = _headed(models, tuned, data, given)
    models = headed or models
    vector, exclude = change_of(models.source, tuned, given["exclude"]), given["exclude"]
    check_changes(vector, (name for name in vector if not models.source.matches(name, exclude)), exclude)
    if headed is not None:
        source, vector = take_head(models.source, tuned, vector, exclude)
        models = Sides(source, models.target)
    return models, parts, tuned, vector, headed is not None


def _headed(models: Sides[Model], tuned: Finetuned, data: Data | None, given: Options) -> Sides[Model] | None:
    """Both models with a head for the classes of the fine-tune, if it has one and it is to be fitted."""
    fits = given["head_fit"] != "none" and given["head"] is None and given["loss"] in (None, "classification")
    own_batches = not isinstance(data, (str, Path, Dataset))
    labelling = labelling_by(tuned, models.source) if fits and not own_batches else None
    if labelling is None:
        return None
    headed = with_heads(models, labelling, given["trust_remote_code"])
    return None if headed.source.matches(f"{headed.source.classifier}.weight", given["exclude"]) else headed


def _fits_projection(models: Sides[Model], given: Options) -> bool:
    """Whether the target's projection is to be fitted; an error if that is wanted and impossible."""
    if given["head_fit"] != "projection" or models.target.classifier is not None:
        return False
    if models.target.projection is None:
        raise TuneportError(
            f'`head_fit="projection"` needs a target whose features come from a projection, and {models.target.name} '
            "has none."
        )
    if given["labels"] == "data":
        raise TuneportError('a projection is fitted to the scores of the source: leave out `labels="data"`.')
    return True


def _fitted_names(target: Model) -> frozenset[str]:
    return target.head or frozenset({target.projection.weight} if target.projection is not None else ())


@dataclass(frozen=True, eq=False)
class _Question:
    """The task of both models: a data set or the caller's batches, an objective or the caller's losses, and heads."""

    data: Data | None = None  # without the task of "TASK:PATH"
    task: str | None = None
    dataset: Dataset | None = None
    objective: Objective | None = None
    heads: Sides[Head] | None = None
    loss: Loss | tuple[Loss, Loss] | None = None
    loss_name: str | None = None
    by_source: bool = False  # the fine-tuned source labels the samples
    fits: bool = False  # the target's head is fitted


def _ask_scored(
    data: Data | None,
    models: Sides[Model],
    signals: frozenset[Signal],
    given: Options,
    device: torch.device,
    *,
    fits: bool,
    scored: bool | None,
) -> tuple[_Question, frozenset[Signal]]:
    """The question with a loss on labelled samples, if it is wanted, or if None and it can be; and its signals."""
    more = signals if scored is False else signals | SCORED
    try:
        return _ask(data, models, more, given, device, fits=fits), more
    except TuneportError:
        if scored is not None or more == signals:
            raise
    return _ask(data, models, signals, given, device, fits=fits), signals


def _ask(
    data: Data | None,
    models: Sides[Model],
    signals: frozenset[Signal],
    given: Options,
    device: torch.device,
    *,
    fits: bool,
) -> _Question:
    """Read the training split once, and choose the objective, the loss and the heads."""
    loss, name = given["loss"], given["loss"] if isinstance(given["loss"], str) else None
    wanted = None if name is None or ":" in name else check_objective(name)
    if isinstance(loss, str):
        loss = None if wanted else load_loss(loss)
    task, place = None, data
    if isinstance(data, (str, Path)):
        task, place = split_reference(data)  # "TASK:PATH": only PATH is passed on
        if not Path(place).exists():
            raise DataError(f"no data at {place}: no such file or folder.{nearest_path(place)}")
        data = place if task is None else data
    question = _Question(place, task.name if task is not None else None, loss=loss, loss_name=name, fits=fits)
    gradients = bool(NEEDS_BACKWARD & signals)
    if (signals or fits) and isinstance(data, (str, Path, Dataset)):
        columns = given["columns"]
        dataset = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False, columns=columns)
        for model in models:
            if model.encode is None:
                raise TuneportError(model.unreadable)
            model.check_kind(dataset)
        objective = choose_objective(dataset, models, wanted)
        question = replace(question, dataset=dataset, objective=objective)
        if loss is None and (gradients or fits) and objective.name == "classification":
            _check_same_kind(models, dataset, given["head"])
            _check_labels(models.source, given["labels"], fits)
            needed = given["labels"] == "data" or (given["labels"] is None and not fits)
            if needed and dataset.labels is None and not isinstance(data, Dataset):
                read_data(data, "train", columns=columns)  # the error names what is missing
            question = _with_heads(question, models, given, device)
        if loss is None and gradients:
            question = replace(question, loss_name=name or objective.name)
    if given["labels"] == "source" and gradients and not question.by_source:
        raise DataError(
            '`labels="source"` needs data with classes: give data, not batches, and leave `loss` out or classification.'
        )
    if signals and data is None:
        raise DataError(
            f"the method measures {' and '.join(sorted(signals))} and needs calibration data: pass `data`, or batches "
            "with a loss in Python."
        )
    return question


def _check_same_kind(models: Sides[Model], dataset: Dataset, head: str | None) -> None:
    """Refuse a model that writes text with one that does not, unless a head is given for both."""
    writer, other = sorted(models, key=lambda model: model.generates is None)
    if writer.generates is not None and other.generates is None and head is None:
        raise TuneportError(
            f"{writer.name} writes text and {other.name} does not: give two models of one kind, or a head for the "
            f"classes of {dataset.name} with `head=FILE`."
        )


def _check_labels(source: Model, labels: str | None, fits: bool) -> None:
    """Refuse what a head for tokens or numbers does not allow: it is fitted, and only the fine-tuned source labels."""
    if source.labels_samples or (fits and labels != "data"):
        return
    if labels == "data":
        raise DataError(f"{source.name} {source.instead}, and such labels are not read from data: leave out `labels`.")
    raise DataError(
        f'{source.name} {source.instead}, which needs a fitted head: leave out `head_fit="none"` and an `exclude` that '
        "names the head, or pass `loss`."
    )


def _with_heads(question: _Question, models: Sides[Model], given: Options, device: torch.device) -> _Question:
    """Add a head of each model, which must know the classes of the samples."""
    known = question.dataset
    assert known is not None
    heads = []
    for model in models:
        with runnable(model, device):
            heads.append(choose_head(model, given["head"], known))
        if (embeds := heads[-1].class_embeds) is not None and bool((embeds == embeds[:1]).all()):
            raise DataError(
                f"all {len(embeds)} classes of the head {heads[-1].name} of {model.name} have one embedding: its loss "
                "has no gradient. Give a head with an embedding for each class."
            )
    if given["head_fit"] != "none" and (heads[0].class_embeds is None) != (heads[1].class_embeds is None):
        one, other = sorted(models, key=lambda model: model.logits is None)
        raise DataError(
            f"{one.name} has a classification layer and {other.name} has none, so their scores do not compare: give "
            'two models of one kind, or `head_fit="none"` to use the head that each has.'
        )
    by_source = given["labels"] == "source"
    if given["labels"] is None and question.fits:
        by_source = known.labels is None or not models.source.labels_samples
    if by_source:  # the labels are classes of the source's head
        name = f"the head of {models.source.name}"
        known = Dataset((), np.zeros(0, dtype=np.int64), heads[0].classes, name=name)
    try:
        for head in heads:
            align_labels(known, head.classes)
    except DataError as error:
        way = ' Or pass `labels="source"`: the fine-tuned source then labels the samples.'
        raise DataError(f"{error}{way if question.fits else ''}") from error
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
        if NEEDS_BACKWARD & signals or (model.features is None and model.logits is None):
            known = model.features is not None
            reason = "batches say nothing of the task" if known else f"{model.name} is a module tuneport does not know"
            raise TuneportError(f"{reason}: pass loss=lambda module, batch: ...")
    return Sides(forward_only(models.source), forward_only(models.target))


def _draw(
    question: _Question,
    models: Sides[Model],
    tuned: Finetuned,
    vector: TaskVector,
    given: Options,
    device: torch.device,
) -> tuple[Samples, records.Data]:
    """Draw the samples, and describe them for the record."""
    dataset, data = question.dataset, question.data
    if dataset is None or question.objective is None:
        own = data is not None and not isinstance(data, (str, Path, Dataset))
        return Given(cast(Iterable[Any], data) if own else ()), data_identity(data)

    def look(chosen: Dataset) -> torch.Tensor:
        with runnable(models.target, device):
            return compute_features(models.target, chosen)

    indices = select(
        replace(dataset, labels=None) if question.by_source else dataset,
        samples=given["samples"],
        shots=given["shots"],
        sampler=given["sampler"],
        seed=given["seed"],
        features=look,
    )
    together = question.objective.together if question.loss is None else None
    drawn = Drawn(models, dataset, indices, question.heads, together or given["batch_size"], question.objective)
    about = data_identity(data, dataset, indices, question.heads)
    if question.heads is None:
        return drawn, about
    chosen, head = drawn.chosen, question.heads.source
    if question.fits and given["labels"] == "data":
        return with_scores(drawn, scores_of_labels(chosen, head.classes)), about
    if not question.by_source:
        return drawn, about
    change = _whole_change(models.source, tuned) if given["exclude"] else vector
    change = change.subset(name for name in change if not question.fits or name not in models.source.head)
    scores = scores_by(models.source, change, head, chosen, batch_size=drawn.size)
    labelled = labelled_by(scores, models.source, head.classes, chosen)
    share = agreement(labelled, chosen)
    about["labels"] = {"by": "source", "agreement": None if share is None else round(share, 4)}
    drawn = replace(drawn, dataset=labelled, indices=np.arange(len(labelled)))
    return with_scores(drawn, scores) if question.fits else drawn, about


def _whole_change(source: Model, finetuned: Finetuned) -> TaskVector:
    """All that the fine-tune changes, also the tensors of `exclude`."""
    try:
        return change_of(source, finetuned)
    except CheckpointError as error:
        reason = "the fine-tuned source cannot label samples, for it does not fit its base"
        raise CheckpointError(f"{reason}: {error}") from error
