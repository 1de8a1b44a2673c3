"""Open, check and describe what a user gives: both base models, and what the fine-tune changed in the source.

Is this a fine-tune of this base, and for these labels? A fine-tune changes the weights of its base by a few percent of
their norm. The weights of another base have nothing in common with them: the difference takes them away. On labelled
samples a fine-tune is refused where it is clearly worse (a sign test) than a base that is better than a guess, and
where it is no better than a guess itself: a head or classes in another order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import MeasureConfig
from ..config.options import Config
from ..data.dataset import DEFAULT_SAMPLES, align_labels
from ..errors import CheckpointError
from ..io.fingerprint import file_digests
from ..measure.accuracy import LEAST, LEVEL, direction, tail
from ..measure.fitted_heads import labelling_by, renamed_classes, scores_by, take_head, with_heads
from ..measure.objectives import TokenLoss, batch_for
from ..measure.samples import Calibration, DatasetSamples
from ..measure.signals import frozen
from ..models.base import Model, ModelLike
from ..models.change import (
    Change,
    Finetuned,
    added_by,
    change_of,
    check_base,
    check_changes,
    exclude_note,
    is_whole,
    names_of,
    opened,
    sum_of_changes,
)
from ..models.open import DTYPES, dtype_on, open_both, pick_device
from ..models.weights import finetuned
from ..pairing import Plan
from ..processes import divided
from ..report.provenance import base_note, identity_of, package_version, versions
from ..report.record import to_json
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from ..types import Progress, Sides, ignore
from .scale import ScaleChoice

LEAST_LEFT = 0.5  # of the weights of the base in a fine-tune: their coefficient in it
LAYERS = 16  # in which that is measured
TEXTS = 16  # that the fine-tuned source and its base read at most: their losses refuse nothing
DECIDING = ("tuneport", "resolved", "versions", "source", "finetuned", "target", "data", "extra", "generator")
GO_ON = "or pass `accept_unlikely=True`"


def open_models(source: ModelLike, target: ModelLike, config: MeasureConfig) -> Sides[Model]:
    """Open both base models in the same way."""
    device = pick_device(config.device)
    dtype, _ = dtype_on(device, config.dtype, source, target)
    return open_both(
        source,
        target,
        device=device,
        dtype=DTYPES[dtype],
        memory_budget=config.memory_budget,
        trust_remote_code=config.trust_remote_code,
    )


def read_change(
    models: Sides[Model], finetuned: Finetuned | Sequence[Finetuned], config: MeasureConfig, *, has_samples: bool
) -> tuple[Sides[Model], Change]:
    """Read what a fine-tune changed; both models get a head for its classes, if it has one that is to be fitted.

    No head is fitted on the caller's own batches: `has_samples` says whether samples will be drawn from data.
    """
    given = finetuned if isinstance(finetuned, (list, tuple)) else [cast(Finetuned, finetuned)]
    parts = tuple(map(opened, given))
    for part in () if config.accept_unlikely else parts:
        check_base(models.source, part)
    exclude = config.exclude
    tuned: Any = parts[0] if len(parts) == 1 else sum_of_changes(models.source, parts, exclude)
    headed = _headed(models, tuned, config) if has_samples else None
    models = headed or models
    vector = change_of(models.source, tuned, exclude)
    check_changes(vector, (name for name in vector if not models.source.matches(name, exclude)), exclude)
    if headed is not None:
        source, vector = take_head(models.source, tuned, vector, exclude)
        models = Sides(source, models.target)
    fits, whole = headed is not None, None
    if fits or config.labels == "source":
        try:
            whole = change_of(models.source, tuned) if exclude else vector
        except CheckpointError as error:
            reason = "the fine-tuned source cannot label samples, for it does not fit its base"
            raise CheckpointError(f"{reason}: {error}") from error
        whole = whole.subset(name for name in whole if not fits or name not in models.source.head)
    models = Sides(*(model.cut_at(config.max_length) for model in models))  # a head makes a model anew
    return models, Change(vector, parts, whole, added_by(models, tuned, exclude), fits)


def _headed(models: Sides[Model], tuned: Finetuned, config: MeasureConfig) -> Sides[Model] | None:
    """Both models with a head for the classes of the fine-tune, if it has one and it is to be fitted."""
    fits = config.head_fit != "none" and config.head is None and config.loss in (None, "classification")
    labelling = renamed_classes(labelling_by(tuned, models.source) if fits else None, config.classes)
    if labelling is None:
        return None
    headed = with_heads(models, labelling, config.trust_remote_code)
    assert headed.source.classifier is not None
    return None if headed.source.matches(f"{headed.source.classifier.path}.weight", config.exclude) else headed


@dataclass(frozen=True, eq=False)
class InputCheck:
    """The fine-tuned source and its base on the calibration samples."""

    change: float | None  # the norm of the change over that of the base
    samples: int = 0
    metric: str = "accuracy"
    source: float | None = None  # samples that are right, or the mean loss of a sample
    finetuned: float | None = None
    scores: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None  # of the base, and of the fine-tuned source

    def record(self, choice: ScaleChoice | None) -> dict[str, Any]:
        """The entry of the run record; where the same samples chose the scale, the target is scored at zero, too."""
        target: float | None = None
        if choice is not None and choice.samples == self.samples:
            found = choice.scores[0.0]
            right = None if found.accuracy is None else round(found.accuracy * self.samples)
            target = right if self.metric == "accuracy" else found.loss if right is None else None
        numbers = {"source": self.source, "finetuned": self.finetuned, "target": target, "change": self.change}
        return {"samples": self.samples, "metric": self.metric, **numbers, "sentence": self.sentence}

    @property
    def sentence(self) -> str:
        """For the user, before anything is measured; nothing where nothing is known."""
        if self.source is None:
            return ""
        if self.metric == "accuracy":
            right = f"the fine-tuned source is right on {self.finetuned} of {self.samples} samples"
            return f"{right}, its base on {self.source}"
        return f"the fine-tuned source has a loss of {self.finetuned:.4g} nats a text, its base {self.source:.4g}"


def check_inputs(
    source: Model,
    change: Change,
    plan: Plan,
    calibration: Calibration,
    config: MeasureConfig,
    progress: Progress = ignore,
) -> InputCheck:
    """Run the fine-tuned source and its base on the samples, if they are whole and the samples have true labels.

    Raises:
        CheckpointError: if this cannot be a fine-tune of this base for these labels, unless that is accepted.
    """
    found = InputCheck(check_weights(source, change.vector, plan, accept=config.accept_unlikely))
    if not count_forward_passes(source, change, calibration, config.exclude):
        return found
    samples, losses = calibration.samples, calibration.losses
    assert isinstance(samples, DatasetSamples)
    if losses is not None and isinstance(losses.source, TokenLoss):
        # a fine-tune may well be worse on texts of another kind, so that nothing is refused
        texts, vectors = _some_texts(samples), (TaskVector({}), change.vector)
        base_loss, loss = (_mean_loss(source, vector, texts, losses.source, progress) for vector in vectors)
        return replace(found, samples=len(texts), metric="loss", source=base_loss, finetuned=loss)
    assert samples.heads is not None
    head, chosen, scores = samples.heads.source, samples.chosen, []
    labels = align_labels(chosen, head.classes).labels
    for vector in (TaskVector({}), change.teacher if change.fits_head else change.vector):
        scores.append(scores_by(source, vector, head, chosen, batch_size=samples.size))
        progress(len(samples))
    base, tuned = (each.argmax(-1) == labels for each in scores)
    if not config.accept_unlikely:
        check_right(source, base, tuned, len(head.classes))
    counts: dict[str, Any] = {"source": int(base.sum()), "finetuned": int(tuned.sum())}
    return replace(found, samples=len(samples), **counts, scores=(scores[0], scores[1]))


def check_weights(source: Model, vector: TaskVector, plan: Plan, *, accept: bool = False) -> float | None:
    """The norm of the change over that of the base; a CheckpointError if the fine-tune has most likely another base."""
    weights = dict.fromkeys(pair.source.weight for pair in plan.pairs)
    change, left = relation(source.stored_parameters(), vector, weights)
    if left < LEAST_LEFT and not accept:
        raise CheckpointError(
            f"the fine-tune differs from {source.name} by {change:.2f} times the norm of its weights, and little "
            f"of them is left in it: it has most likely another base. Check `source` and `finetuned`, {GO_ON}."
        )
    return change


def count_forward_passes(source: Model, change: Change, calibration: Calibration, exclude: Sequence[str]) -> int:
    """The number of samples that the source answers in `check_inputs`, with its fine-tune and without."""
    samples, losses = calibration.samples, calibration.losses
    if not isinstance(samples, DatasetSamples) or not is_whole(source, change, exclude) or calibration.by_source:
        return 0
    classes = calibration.heads is not None and samples.dataset.labels is not None
    tokens = losses is not None and isinstance(losses.source, TokenLoss)
    return 2 * (len(_some_texts(samples)) if tokens else len(samples) if classes else 0)


def check_right(source: Model, base: NDArray[np.bool_], tuned: NDArray[np.bool_], classes: int) -> None:
    """Refuse a fine-tune that is right on so few samples that it cannot be one for these labels.

    `base` and `tuned` say which samples each of the two has right, among so many classes.
    """
    count, right = len(tuned), int(tuned.sum())
    better = direction(base, tuned)
    found = f"the fine-tuned source is right on {right} of {count} samples"
    skilled = [tail(count, int(each.sum()), 1 / classes) < LEVEL for each in (base, tuned)]
    if better < 0 and skilled[0]:
        raise CheckpointError(
            f"{found} and its base {source.name} on {int(base.sum())}: the two may be swapped, or the data are of "
            f"another task. Check `source`, `finetuned` and `data`, {GO_ON}."
        )
    if count >= LEAST and not skilled[1]:
        raise CheckpointError(
            f"{found}, no more than a guess among {classes} classes: check `head`, and that the classes of the data "
            f"are in the order of the fine-tune, {GO_ON}."
        )


def _some_texts(samples: DatasetSamples) -> DatasetSamples:
    """TEXTS of the samples at most, the same ones whatever their order."""
    some = np.sort(samples.indices)[:: -(-len(samples) // TEXTS)]
    return samples.take(np.flatnonzero(np.isin(samples.indices, some)))


def _mean_loss(source: Model, vector: TaskVector, texts: DatasetSamples, loss: TokenLoss, progress: Progress) -> float:
    """The mean loss of a text, by the source with a change."""
    batches = [batch_for(source, encoded) for encoded in texts.encoded_for(0)]
    with finetuned(source, vector), frozen(source.module), torch.no_grad():
        found = torch.cat(divided(batches, lambda batch: loss.each(source.module, batch).cpu()))
    progress(len(texts))
    return float(found.numpy().mean())


def relation(stored: Mapping[str, Tensor], vector: TaskVector, weights: Iterable[str]) -> tuple[float | None, float]:
    """The norm of a change over that of its base, and the share of the base that is left in it, in some layers.

    An adapter stores its change as factors, which say nothing of its base.
    """
    names = [name for name in weights if name in vector and name in stored and vector.spec(name).rank is None]
    chosen = dict.fromkeys(names[index * len(names) // LAYERS] for index in range(LAYERS)) if names else {}
    change = base = along = 0.0
    for name in chosen:
        weight = stored[name]
        if weight.is_floating_point():
            before, delta = weight.flatten().double().cpu(), vector.dense(name).flatten().double().cpu()
            change, base = change + float(delta @ delta), base + float(before @ before)
            along += float(delta @ before)
    if not base > 0 or not math.isfinite(change):
        return None, 1.0
    return math.sqrt(change / base), 1 + along / base


def describe_inputs(
    models: Sides[Model],
    change: Change,
    plan: Plan,
    calibration: Calibration,
    drawn: dict[str, Any],
    config: MeasureConfig,
) -> dict[str, Any]:
    """Describe a transfer before anything has run: options, inputs and their SHA-256, versions, notes for the user."""
    device, samples = pick_device(config.device), calibration.samples
    opened = [model.module if model.weights.folder is None else model.name for model in models]
    dtype, dtype_note = dtype_on(device, config.dtype, *opened)
    record = about_inputs("transfer", config, models, change.parts, drawn)
    record["resolved"] = {"device": str(device), "dtype": dtype, "loss": calibration.loss_name}
    record["blocks"] = {"source": dict(plan.source_blocks), "target": dict(plan.target_blocks)}
    notes: list[str | None] = [dtype_note]
    if change.parts and isinstance(change.parts[0], Adapter):
        notes.append(base_note(change.parts[0], models.source))
    if isinstance(samples, DatasetSamples):
        if (found := samples.coverage()) is not None:
            record["tokens"] = {**found, "share": round(found["target_matched"] / max(found["target_tokens"], 1), 4)}
            notes += _text_notes(models, samples, Sides(found["source_cut"], found["target_cut"]))
        if config.samples is None and config.shots is None and (count := len(samples)) < DEFAULT_SAMPLES:
            notes.append(f"the data have {count} samples, fewer than the usual {DEFAULT_SAMPLES}: all are used")
        notes += samples.warnings(1 in (config.max_tokens, record.get("tokens", {}).get("target_matched")))
    if config.exclude:
        names = [names for model in models for names in (model.weights.file_names, model.weights.tensors)]
        notes.append(exclude_note(config.exclude, *names, *map(names_of, change.parts)))
    if any(notes):
        record["notes"] = [note for note in notes if note]
    return record


def about_inputs(
    command: str, config: Config, models: Sides[Model], parts: Iterable[Any], drawn: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The first entries of a record: options, and inputs with their SHA-256; `parts` are fine-tunes that are added."""
    tuned = [identity_of(part) for part in parts]
    names = " + ".join(part["name"] for part in tuned)
    return {
        "tuneport": package_version("tuneport"),
        "command": command,
        "options": config.to_json(),
        "resolved": {},
        "source": identity_of(models.source),
        "finetuned": tuned[0] if len(tuned) == 1 else {"name": names, "parts": tuned},
        "target": identity_of(models.target),
        **({} if drawn is None else {"data": drawn}),
        "versions": versions(),
        "blocks": {"source": {}, "target": {}},
    }


def _text_notes(models: Sides[Model], samples: DatasetSamples, cut: Sides[int]) -> Iterator[str]:
    """What the models do not read as the data have it: texts that are cut, chats without a template."""
    for model, count in zip(models, cut, strict=True):
        if count:
            length = model.reader.longest
            more = ": raise `max_length`" if length < model.reader.limit else ""
            yield f"{count} of {len(samples)} texts are cut at {length} tokens of {model.name}{more}"
        if samples.dataset.has_chats and not model.reader.tokenizer.chat_template:
            yield f"{model.name} has no chat template: it reads the messages one after the other"


def conditions_of(about: Mapping[str, Any], config: Config, **resolved: Any) -> dict[str, Any]:
    """What decides a result, as JSON values: inputs without their paths, and options that are no mere control.

    `resolved` are the values of options as they are used. A head that is a file counts with what it holds.
    """
    control = {item.name for item, option in config.options() if option.control} | resolved.keys()
    options = {name: value for name, value in config.to_json().items() if name not in control}
    kept = {key: about[key] for key in DECIDING if key in about}
    if (head := options.get("head")) is not None and Path(head).is_file():
        kept["head"] = [*file_digests([head]).values()]
    plain: dict[str, Any] = _without_paths(json.loads(to_json({"options": options, **resolved, **kept})))
    return plain


def _without_paths(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(item) for key, item in value.items() if key not in ("path", "protocol")}
    return [_without_paths(item) for item in value] if isinstance(value, list) else value
