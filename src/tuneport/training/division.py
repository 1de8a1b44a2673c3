"""What is held out to judge a student, what it is taught, and in how many steps.

Few own samples are cross-fitted: each half judges a student that the other half has taught, and both together decide
whether, and for how many steps, a last student is taught on all of them. Other samples, of anything, can be taught
beside the own ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import DistillConfig
from ..data.answers import prompt_of
from ..data.dataset import Dataset
from ..errors import DataError
from ..measure.answers import is_passages
from ..measure.samples import DatasetSamples
from ..measure.unseen import others
from ..models.base import Model
from .loop import Schedule
from .matching import Matching

FEWEST = 8  # samples
READ = 128  # samples that are read at once to see which can be compared
HELD_OUT, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.1, 10, 200  # share of the samples; never more than half of them
FEW = 50  # fewer own samples all judge and are all taught; if written ones can judge, they are only taught
FEW_STUDENTS = 3  # of few own samples: one of each half, and one of all
OWN, OWN_OF_WRITTEN = 2, 8  # own samples are at least one of so many that are taught; beside written ones, fewer
OWN_PASSAGES = 2  # own passages are taught so many times as often as written ones
STEPS, MOST_STEPS, EPOCHS = 300, 2000, 10  # of a run whose steps follow from the samples
PASSAGE_EPOCHS = 1  # of passages, each token of which teaches: read more often, they are learnt by heart
STEPS_BESIDE = 1000  # at least, if other images are taught beside the own ones
RATE = 0.12  # the learning rate of a model of width one
LORA_RATE = 5.0  # times that of all weights, in a run of STEPS
LORA_CLIP = 1.0  # the norm to which larger gradients are scaled down


@dataclass(frozen=True, eq=False)
class Extra:
    """Samples that are taught beside the own ones, answered as those are; they judge too if they are `like_own`.

    `views_of` are the places of the own samples that each one is a view of: those of held-out samples are not taught.
    """

    data: Dataset
    like_own: bool = False
    views_of: NDArray[np.int64] | None = None


class Fold(NamedTuple):
    """Samples that judge a student, and those that it is taught before."""

    held_out: DatasetSamples
    taught: DatasetSamples


class Division(NamedTuple):
    """One fold; if own samples are few two, in each of which one half of them judges what the other half has taught.

    All own samples and the others are then taught in the end; None where the student of the one fold is the last.
    """

    folds: tuple[Fold, ...]
    all_own: DatasetSamples | None


def divide(samples: DatasetSamples, own: int, extra: Extra | None) -> Division:
    """Divide the samples; those of the first `own` places of the data set are the own ones.

    Beside extra ones, own samples are repeated until they are a fixed share of what is taught; passages that a language
    model continues only a few times, since it would learn them by heart. Of few own samples none is held out if extra
    ones are like them.
    """
    mine, more = (samples.take(np.flatnonzero(part)) for part in (samples.indices < own, samples.indices >= own))
    like_own, few = extra is not None and extra.like_own, len(mine) < FEW
    parts = None if of_passages(samples) else OWN_OF_WRITTEN if like_own else OWN
    if like_own and few:
        held_out, more = hold_out(more)
        return Division((Fold(held_out, _beside(mine, more, parts)),), None)

    def fold(held_out: DatasetSamples, taught: DatasetSamples) -> Fold:
        rest = more
        if mine.dataset.kind == "text":
            taught = taught.take(others(taught.chosen, held_out.chosen))
        if not len(taught):
            raise DataError(f"a distillation needs at least {FEWEST} samples that differ: more of them are the same.")
        if extra is not None and extra.views_of is not None:
            left = np.setdiff1d(mine.indices, taught.indices)
            rest = more.take(np.flatnonzero(~np.isin(extra.views_of[more.indices - own], left)))
        return Fold(held_out, _beside(taught, rest, parts))

    if not few:
        return Division((fold(*hold_out(mine)),), None)
    last, first = _ends(mine, len(mine) // 4 * 2)
    return Division((fold(last, first), fold(first, last)), _beside(mine, more, parts))


def of_passages(samples: DatasetSamples) -> bool:
    """Whether the samples are passages that a language model continues."""
    return samples.heads is None and samples.models.target.generates is not None and is_passages(samples.dataset)


def hold_out(samples: DatasetSamples) -> tuple[DatasetSamples, DatasetSamples]:
    """The samples that are held out, and those that the student learns from."""
    return _ends(samples, min(max(round(HELD_OUT * len(samples)), FEWEST_HELD_OUT), len(samples) // 2, MOST_HELD_OUT))


def _ends(samples: DatasetSamples, count: int) -> tuple[DatasetSamples, DatasetSamples]:
    """The last samples, so many of them, and those before; one more if two answers of a prompt would be divided."""
    if len(samples) < FEWEST:
        raise DataError(
            f"a distillation needs at least {FEWEST} samples, of which some are held out; got {len(samples)}."
        )
    first = len(samples) - count
    if samples.dataset.kind == "text" and len({str(_asked(samples, place)) for place in (first - 1, first)}) == 1:
        first -= 1
    return samples.take(slice(first, None)), samples.take(slice(first))


def _asked(samples: DatasetSamples, place: int) -> Any:
    """What a sample asks: a text, or a chat up to the answer."""
    sample = samples.dataset.inputs[int(samples.indices[place])]
    return prompt_of(sample) if isinstance(sample, list) else sample


def _beside(own: DatasetSamples, more: DatasetSamples, parts: int | None) -> DatasetSamples:
    """Own samples, repeated until they are one of so many `parts`, or for passages a fixed number of times; others."""
    times = math.ceil(len(more) / ((parts - 1) * max(len(own), 1))) if parts is not None else OWN_PASSAGES
    times = max(times, 1) if len(more) else 1
    return replace(own, indices=np.concatenate([np.tile(own.indices, times), more.indices]))


def comparable(samples: DatasetSamples, matching: Matching, own: int) -> DatasetSamples:
    """The samples on which teacher and student can be compared; the first ones are the `own` ones."""
    if matching.comparable is None:
        return samples
    kept = torch.cat([matching.comparable(sides) for sides in replace(samples, size=READ).encoded()])
    found = samples.take(kept.nonzero()[:, 0].numpy())
    if len(found) < FEWEST <= len(samples):
        raise DataError(
            f"teacher and student can be compared on {int(kept[:own].sum())} of {own} samples, and a distillation "
            f"needs at least {FEWEST}: a text needs a token that both models predict, and a question two answers."
        )
    return found


def schedule_of(
    config: DistillConfig, model: Model, usual: int, count: int, *, beside: bool = False, passages: bool = False
) -> Schedule:
    """A tenth of the steps for the warm-up, no weight decay: the student shall stay near its start.

    The learning rate follows from the student's width unless it is given, and is lower for a LoRA that is taught longer
    and would forget more; the batch size is the `usual` one, and steps follow from the number of samples, whether they
    are `passages`, and whether other images are taught `beside` the own ones.
    """
    batch, least = config.batch_size or usual, STEPS_BESIDE if beside else STEPS
    epochs = PASSAGE_EPOCHS if passages else EPOCHS
    steps = config.steps or min(max(round(epochs * count / batch), least), MOST_STEPS)
    rate = RATE / median_low(layer.in_features for layer in model.architecture.layers)
    clip = None
    if config.lora is not None:
        rate, clip = rate * LORA_RATE * math.sqrt(STEPS / max(steps, STEPS)), LORA_CLIP
    rate = config.learning_rate or rate
    return Schedule(steps, batch, rate, weight_decay=0.0, seed=config.seed, warmup=warm_up(steps), clip=clip)


def warm_up(steps: int) -> int:
    """A tenth of the steps; of few steps ten, but not more than a third."""
    return min(max(10, steps // 10), steps // 3)
