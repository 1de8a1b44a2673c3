"""Open what a user gives: both base models, and what the fine-tune changed in the source, with its head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from ..config import MeasureConfig
from ..errors import CheckpointError, TuneportError
from ..models.base import Model, ModelLike
from ..models.change import Change, Finetuned, added_by, change_of, check_base, check_changes, opened, sum_of_changes
from ..models.open import dtype_on, open_both, pick_device, pick_dtype
from ..task_vectors.vector import TaskVector
from ..types import Sides
from .heads import labelling_by, take_head, with_heads


def open_models(source: ModelLike, target: ModelLike, config: MeasureConfig) -> Sides[Model]:
    """Open both base models in the same way."""
    device = pick_device(config.device)
    dtype, _ = dtype_on(device, config.dtype, source, target)
    return open_both(
        source,
        target,
        device=device,
        dtype=pick_dtype(dtype),
        memory_budget=config.memory_budget,
        trust_remote_code=config.trust_remote_code,
    )


def read_change(
    models: Sides[Model], finetuned: Finetuned | Sequence[Finetuned], config: MeasureConfig, *, has_samples: bool
) -> tuple[Sides[Model], Change]:
    """Read what a fine-tune changed; both models get a head for its classes, if it has one that is to be fitted.

    Args:
        models: both base models.
        finetuned: the fine-tuned source, an adapter of it, or a task vector; of a list, the changes are added.
        config: the options.
        has_samples: whether samples will be drawn from data; no head is fitted on the caller's own batches.

    Returns:
        The models, with their heads, and the change.
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
    fits = headed is not None or _fits_projection(models, config)
    whole = None
    if fits or config.labels == "source":
        whole = _whole(models.source, tuned) if exclude else vector
        whole = whole.subset(name for name in whole if not fits or name not in models.source.head)
    models = Sides(*(model.cut_at(config.max_length) for model in models))  # a head makes a model anew
    return models, Change(vector, parts, whole, added_by(models, tuned, exclude), fits)


def _headed(models: Sides[Model], tuned: Finetuned, config: MeasureConfig) -> Sides[Model] | None:
    """Both models with a head for the classes of the fine-tune, if it has one and it is to be fitted."""
    fits = config.head_fit != "none" and config.head is None and config.loss in (None, "classification")
    labelling = labelling_by(tuned, models.source) if fits else None
    if labelling is None:
        return None
    headed = with_heads(models, labelling, config.trust_remote_code)
    return None if headed.source.matches(f"{headed.source.classifier}.weight", config.exclude) else headed


def _fits_projection(models: Sides[Model], config: MeasureConfig) -> bool:
    """Whether the target's projection is to be fitted; an error if that is wanted and impossible."""
    if config.head_fit != "projection" or models.target.classifier is not None:
        return False
    if models.target.projection is None:
        raise TuneportError(
            f'`head_fit="projection"` needs a target whose features come from a projection, and {models.target.name} '
            "has none."
        )
    if config.labels == "data":
        raise TuneportError('a projection is fitted to the scores of the source: leave out `labels="data"`.')
    return True


def _whole(source: Model, finetuned: Finetuned) -> TaskVector:
    """All that the fine-tune changes, also the tensors of `exclude`."""
    try:
        return change_of(source, finetuned)
    except CheckpointError as error:
        reason = "the fine-tuned source cannot label samples, for it does not fit its base"
        raise CheckpointError(f"{reason}: {error}") from error
