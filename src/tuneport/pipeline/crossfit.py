"""A scale chosen by two halves of the samples, each judging the maps of the other, by forward passes only.

No map is judged on samples that it has seen, unless there are too few to divide, which the choice then says. The
maps that ship come from all samples. The rules of the choice are in `scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..job import Job, PairedBatches
from ..maps.procrustes import Statistics
from ..measure.batches import PairedBatch, count_samples
from ..measure.signals import frozen
from ..methods import Transfer
from .scale import SCALES, Rule, ScaleChoice, Scaled, Score, choose_scale, first_half, score_of_classes


def halves(job: Job) -> tuple[Job, Job]:
    """The job with each half of its samples, for a scale chosen by `transfer_auto`; twice the same where too few."""
    if isinstance(job.batches, PairedBatches):
        count = first_half(len(job.batches.indices))
        if count == len(job.batches.indices):
            return job, job
        first, second = (
            replace(
                job,
                batches=replace(job.batches, indices=side),
                samples=len(side),
                max_tokens=token_share(job, len(side), job.samples),
            )
            for side in np.split(job.batches.indices, [count])
        )
        return first, second
    batches = list(job.batches)
    if not batches:
        raise DataError("choosing a scale needs labelled calibration data; pass --data, or a number as the scale.")
    if len(batches) == 1:
        return (whole := replace(job, batches=batches)), whole
    count = (len(batches) + 1) // 2
    first, second = (
        replace(job, batches=side, samples=count_samples(side), max_tokens=token_share(job, len(side), len(batches)))
        for side in (batches[:count], batches[count:])
    )
    return first, second


def token_share(job: Job, part: int, whole: int) -> int | None:
    """The part of the token limit that goes to a part of the samples."""
    return None if job.max_tokens is None else max(job.max_tokens * part // whole, 1)


def transfer_auto(
    sides: tuple[Job, Job], solve: Callable[[Statistics], Transfer], found: tuple[Statistics, Statistics],
    whole: Statistics, rule: Rule = "auto",
) -> tuple[Transfer, ScaleChoice]:  # fmt: skip
    """Choose the scale of a transfer, by a rule, by two halves of the samples, each judging the maps of the other.

    The maps that ship come from the `whole` statistics.
    """
    held_out = sides[0] is not sides[1]
    answers: dict[float, list[Answers]] = {scale: [] for scale in SCALES}
    for statistics, judge in zip(found, reversed(sides), strict=True):
        batches = [batch.target if isinstance(batch, PairedBatch) else batch for batch in judge.batches]
        with Scaled(judge.target.module, solve(statistics).task_vector, judge.target.stored_parameters()) as scaled:
            for scale, seen in answers.items():
                seen += _answers(judge, scaled, scale, batches)
        if not held_out:
            break
    samples = sum(side.samples for side in (sides if held_out else sides[:1]))
    choice = choose_scale(lambda scale: _score(answers[scale]), samples=samples, held_out=held_out, rule=rule)
    return solve(whole), choice


Answers = tuple[Tensor, Tensor | None]  # of a batch: class scores and labels, or its mean loss for each sample


def _answers(job: Job, scaled: Scaled, scale: float, batches: Sequence[Any]) -> list[Answers]:
    """What the target says at one scale, forward passes only."""
    scaled.set(scale)
    assert job.target_loss is not None
    found: list[Answers] = []
    with frozen(scaled.module), torch.no_grad():
        for batch in batches:
            if job.target_head is not None:
                found.append((job.target_head.scores(job.target, scaled.module, batch[0]).cpu(), batch[1].cpu()))
            else:
                size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
                loss = float(job.target_loss(scaled.module, batch)) / size
                found.append((torch.full((size,), loss, dtype=torch.float64), None))
    return found


def _score(answers: Sequence[Answers]) -> Score:
    values = torch.cat([value for value, _ in answers])
    labels = [label for _, label in answers if label is not None]
    return score_of_classes(values, torch.cat(labels)) if labels else Score(float(values.mean()))
