"""From what a user gives to a Job that has been checked whole: models, task vector, plan, samples, losses.

Everything that can be wrong with the input is found here, before the first forward pass, with one clear line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.dataset import Dataset, align_labels
from ..data.samplers import select
from ..data.tasks import read_data, split_reference
from ..errors import CheckpointError, DataError, TuneportError
from ..io.hub import local
from ..job import Drawn, Given, Job, Samples
from ..measure.accuracy import features
from ..measure.objectives import Objective, check_objective, forward_only, load_loss, objective_of
from ..measure.signals import NEEDS_BACKWARD
from ..measure.tokens import Match
from ..methods import METHODS, Method, get_method
from ..models.base import Model, ModelLike
from ..models.heads import Head, choose_head
from ..models.open import dtype_on, open_both, pick_device, pick_dtype, runnable, slow_note
from ..pairing import DepthRule, LayerPair, nearest_block
from ..report.provenance import base_note, data_identity, identity_of, package_version, versions
from ..report.record import Data, Options, PreparedRecord
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from ..types import Completion, Loss, Sides
from .change import Finetuned, change_of, exclude_note, names_of, opened
from .labels import agreement, check_labels, labelled_by
from .plan import plan_of


def prepare(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    method: str | Method = "bico",
    samples: int | None = None,
    shots: int | None = None,
    sampler: str = "random",
    seed: int = 0,
    head: str | None = None,
    labels: str = "data",
    loss: str | Loss | tuple[Loss, Loss] | None = None,
    match: Match | None = None,
    pairs: Sequence[LayerPair] | None = None,
    roles: Mapping[str, str | None] | None = None,
    depth_rule: DepthRule = nearest_block,
    exclude: Sequence[str] = (),
    completion: Completion = "svd",
    max_tokens: int | None = None,
    memory_budget: int | None = None,
    batch_size: int = 32,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    extra_signals: Iterable[str] = (),
    scored: bool = False,
) -> Job:
    """Open everything, pair the layers and draw the samples: a Job in which nothing is left to go wrong.

    `samples` (100 unless given) or `shots` per class are drawn by `sampler` and `seed` from the training
    split; `head` names the zero-shot head; `labels` says whose labels they have, those of the "data" or, without
    looking at those, of the fine-tuned "source"; `loss` is the name of an objective, MODULE:FUNCTION, an own
    `loss(module, batch)`, or one for each model, in place of the one that data and models suggest; `pairs`,
    `roles` and `depth_rule` override the pairing; `exclude` holds name patterns of tensors to leave alone;
    `max_tokens` caps the tokens of all samples together that the maps are made from, and `memory_budget` the bytes
    that models, statistics and result may take on the `device`: models that do not fit stay in RAM or in their files,
    and live modules run on the `device` too. `dtype` is that in which models run. `extra_signals` prepares for
    methods that measure more, `scored` for a scale that is chosen on labelled samples.
    """
    method, name = _named(method)
    loss_name = loss if isinstance(loss, str) else None
    wanted = None if loss_name is None or ":" in loss_name else check_objective(loss_name)
    if isinstance(loss, str):
        loss = None if wanted else load_loss(loss)
    check_labels(labels, sampler, shots)
    where = pick_device(device)
    _check_limits(max_tokens, memory_budget)
    if isinstance(finetuned, (str, Path)):
        finetuned = local(finetuned)
    task, named = None, data  # TASK:PATH, of which the rest of the house sees the path
    if isinstance(data, (str, Path)):
        task, data = split_reference(data)
        named = data if task is None else named

    dtype, note = dtype_on(where, dtype, source, target)
    models = open_both(
        source,
        target,
        device=where,
        dtype=pick_dtype(dtype),
        memory_budget=memory_budget,
        trust_remote_code=trust_remote_code,
    )
    elsewhere = memory_budget is not None and where.type != "cpu"  # live modules run on the device too
    notes = [note, "" if elsewhere else slow_note(*models)]
    tuned = opened(finetuned)
    vector = change_of(models.source, tuned, exclude)

    if isinstance(data, (str, Path)) and not Path(data).exists():
        raise DataError(f"no data at {data}: no such file or folder.")
    signals = method.signals | frozenset(extra_signals)
    runs, gradients = bool(signals) or scored, bool(NEEDS_BACKWARD & signals) or scored
    asked = None
    if runs and isinstance(named, (str, Path, Dataset)):
        asked = _asked(named, models, wanted)
        if loss is None and gradients and asked.objective.name == "classification":
            asked = _with_heads(asked, named, models, head, labels, where)
    by_source = labels == "source" and asked is not None and asked.heads is not None
    if labels == "source" and gradients and not by_source:
        raise DataError(
            '`labels="source"` needs data with classes: give data, not batches, and leave `loss` out or classification.'
        )

    plan = plan_of(*models, vector, pairs=pairs, roles=roles, depth_rule=depth_rule, exclude=exclude)
    method.check(plan)
    if runs and data is None:
        raise DataError(f"method {name} needs calibration data: pass `data`, or batches with a loss in Python.")
    losses = _losses(models, asked, loss, gradients) if runs else None

    calibration: Samples = Given()
    count, about = 0, None
    if asked is not None:
        indices = select(
            replace(asked.dataset, labels=None) if by_source else asked.dataset,
            samples=samples,
            shots=shots,
            sampler=sampler,
            seed=seed,
            features=lambda chosen: _features(models.target, chosen, where),
        )
        calibration = drawn = Drawn(models, asked.dataset, indices, asked.heads, batch_size, asked.objective)
        if by_source:
            calibration = drawn = _labelled_by_source(drawn, _whole_change(models.source, tuned) if exclude else vector)
        count, about = len(indices), data_identity(data, asked.dataset, indices, asked.heads)
        if by_source:
            share = agreement(drawn.dataset, asked.dataset.subset(indices))
            about["labels"] = {"by": "source", "agreement": None if share is None else round(share, 4)}
    elif runs:
        assert not isinstance(data, (str, Path, Dataset))
        assert data is not None
        calibration = Given(data)

    usual = asked.objective.name if asked is not None and gradients and loss is None else None
    own = {"loss": loss_name is None and loss is not None, "match": match is not None, "pairs": pairs is not None}
    own["depth_rule"] = depth_rule is not nearest_block
    options: Options = {
        "samples": count or samples,
        "shots": shots,
        "sampler": sampler,
        "seed": seed,
        "head": head,
        "labels": "source" if by_source else "data",
        "loss": loss_name or usual,
        "completion": completion,
        "max_tokens": max_tokens,
        "memory_budget": memory_budget,
        "batch_size": batch_size,
        "exclude": list(exclude),
        "roles": dict(roles or {}),
        "python": [name for name, given in own.items() if given],
        "device": str(where),
        "dtype": dtype,
    }
    job = Job(
        models,
        vector,
        plan,
        method,
        calibration,
        losses,
        heads=asked.heads if asked is not None else None,
        match=match,
        completion=completion,
        max_tokens=max_tokens,
        memory_budget=memory_budget,
        seed=seed,
        device=where if memory_budget is not None else None,
    )
    about = (about or data_identity(data)) | ({"task": task.name} if task is not None else {})
    return replace(job, record=_record(job, name, options, tuned, about, notes))


def _named(method: str | Method) -> tuple[Method, str]:
    """The method, and the name that it is known by."""
    method, name = (get_method(method), method) if isinstance(method, str) else (method, type(method).__name__)
    return method, next((known for known, registered in METHODS.items() if registered == method), name)


def _check_limits(max_tokens: int | None, memory_budget: int | None) -> None:
    if max_tokens is not None and max_tokens < 1:
        raise TuneportError(f"max_tokens must be at least 1, got {max_tokens}. Leave it out to use every token.")
    if memory_budget is not None and memory_budget < 1:
        raise TuneportError(f"memory_budget must be a number of bytes, got {memory_budget}.")


@dataclass(frozen=True, eq=False)
class _Asked:
    """What both models are asked: the data, the objective on them, and heads where classes are to be told apart."""

    dataset: Dataset
    objective: Objective
    heads: Sides[Head] | None = None


def _asked(data: str | Path | Dataset, models: Sides[Model], wanted: str | None) -> _Asked:
    """The training split, with the objective of that name or the one that data and models suggest."""
    dataset = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False)
    for model in models:
        if model.encode is None:
            raise TuneportError(model.unreadable)
        model.check_kind(dataset)
    return _Asked(dataset, objective_of(dataset, models, wanted))


def _with_heads(
    asked: _Asked,
    data: str | Path | Dataset,
    models: Sides[Model],
    wanted: str | None,
    labels: str,
    device: torch.device,
) -> _Asked:
    """The same with a head of each model, which must know the classes of the samples."""
    dataset = asked.dataset
    writer, other = sorted(models, key=lambda model: model.generates is None)
    if writer.generates is not None and other.generates is None and wanted is None:
        raise TuneportError(
            f"{writer.name} writes text and {other.name} does not: give two models of one kind, or a head for the "
            f"classes of {dataset.name} with `head=FILE`."
        )
    if labels == "data" and not isinstance(data, Dataset):
        dataset = read_data(data, "train")  # says what is missing where there are no labels
    heads = []
    for model in models:
        with runnable(model, device):
            heads.append(choose_head(model, wanted, dataset))
    known = dataset
    if labels == "source":  # its labels are its head's classes
        blank = np.zeros(0, dtype=np.int64)
        known = Dataset((), blank, heads[0].classes, name=f"the head of {models[0].name}")
    for head in heads:
        align_labels(known, head.classes)
    return replace(asked, dataset=dataset, heads=Sides(*heads))


def _losses(
    models: Sides[Model], asked: _Asked | None, loss: Loss | tuple[Loss, Loss] | None, gradients: bool
) -> Sides[Loss]:
    if isinstance(loss, tuple):
        return Sides(*loss)
    if loss is not None:
        return Sides(loss, loss)
    if asked is not None and (asked.heads is not None or asked.objective.name != "classification"):
        heads = asked.heads or (None, None)
        return Sides(*(asked.objective.loss(model, head) for model, head in zip(models, heads, strict=True)))
    for model in models:
        if gradients or (model.features is None and model.logits is None):
            known = model.features is not None
            reason = "batches say nothing of the task" if known else f"{model.name} is a module tuneport does not know"
            raise TuneportError(f"{reason}: pass loss=lambda module, batch: ...")
    return Sides(forward_only(models.source), forward_only(models.target))


def _features(model: Model, dataset: Dataset, device: torch.device) -> Tensor:
    with runnable(model, device):
        return features(model, dataset)


def _whole_change(source: Model, finetuned: Finetuned) -> TaskVector:
    """All that the fine-tune changes, whatever a transfer is to leave alone."""
    try:
        return change_of(source, finetuned)
    except CheckpointError as error:
        raise CheckpointError(
            f"the fine-tuned source cannot label samples, for it does not fit its base: {error}"
        ) from error


def _labelled_by_source(drawn: Drawn, vector: TaskVector) -> Drawn:
    """The same samples, labelled by the fine-tuned source."""
    assert drawn.heads is not None
    labelled = labelled_by(drawn.models.source, vector, drawn.heads.source, drawn.chosen, batch_size=drawn.size)
    return replace(drawn, dataset=labelled, indices=np.arange(len(labelled)))


def _record(
    job: Job,
    method: str,
    options: Options,
    finetuned: Finetuned,
    data: Data,
    known: Sequence[str],
) -> PreparedRecord:
    """The run record before anything has run: options, inputs and their SHA-256, versions."""
    record: PreparedRecord = {
        "tuneport": package_version("tuneport"),
        "command": "transfer",
        "method": method,
        "options": options,
        "source": identity_of(job.source),
        "finetuned": identity_of(finetuned),
        "target": identity_of(job.target),
        "data": data,
        "versions": versions(),
        "blocks": {"source": dict(job.plan.source_blocks), "target": dict(job.plan.target_blocks)},
    }
    if isinstance(job.samples, Drawn) and (found := job.samples.coverage()) is not None:
        record["tokens"] = {**asdict(found), "share": round(found.share, 4)}
    named = [names for model in (job.source, job.target) for names in (model.file_names, model.tensors)]
    notes = [*known, base_note(finetuned, job.source) if isinstance(finetuned, Adapter) else None]
    if options["exclude"]:
        notes.append(exclude_note(options["exclude"], *named, names_of(finetuned)))
    if any(notes):
        record["notes"] = [note for note in notes if note]
    return record
