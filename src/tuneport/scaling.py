"""How strongly to apply a transfer: a scale chosen on calibration samples, by forward passes only.

The samples are parted into two halves; maps made from one half are judged on the other, so no sample judges a map
that it has made. Zero is always a candidate: an automatic transfer may leave the target as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .task_vector import Entry, LowRank, TaskVector

SCALES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
FEWEST = 4  # samples that can be parted
LOSS_WEIGHT = 0.4  # accuracy that a rise of the loss by one nat is worth
ANYTHING = 0.4  # standard errors of the accuracy that a change must bring,
DOUBLING = 1.0  # and each doubling of the scale beyond one


@dataclass(frozen=True)
class Score:
    """What a model does on some samples: the mean loss and, where there are classes, the share it gets right."""

    loss: float
    accuracy: float | None = None


@dataclass(frozen=True)
class ScaleChoice:
    """The chosen scale, the score of every candidate, and how many samples it was chosen on."""

    scale: float
    scores: Mapping[float, Score]
    samples: int
    held_out: bool


def first_half(count: int) -> int:
    """How many of `count` samples are the first half; all of them where too few to be parted.

    >>> [first_half(n) for n in (1, 3, 10, 25)]
    [1, 3, 5, 13]
    """
    return (count + 1) // 2 if count >= FEWEST else count


def pooled(scores: Sequence[tuple[Score, int]]) -> Score:
    """The score on several sets of samples together, each given with its number of samples."""
    count = max(sum(size for _, size in scores), 1)
    accuracies = [score.accuracy for score, _ in scores]
    right = None
    if all(value is not None for value in accuracies):
        right = sum((value or 0.0) * size for value, (_, size) in zip(accuracies, scores, strict=True)) / count
    return Score(sum(score.loss * size for score, size in scores) / count, right)


def choose_scale(
    score: Callable[[float], Score], *, samples: int, held_out: bool, candidates: Sequence[float] = SCALES
) -> ScaleChoice:
    """The candidate with the greatest merit, or the least loss where there are no classes.

    Merit is accuracy, that of a scale above zero averaged with its two neighbours' (a single one is noise: with 20
    samples its standard error is ten points), less 0.4 of the rise of the loss. Scales beyond 1 extrapolate, and maps
    of few samples do so badly: each doubling must bring one standard error of the accuracy, and any change at all 0.4
    of one. Among equals the one nearest to 1 is taken.

    >>> losses = {0.0: 2.0, 0.5: 1.5, 1.0: 1.8}
    >>> choose_scale(lambda s: Score(losses[s]), samples=8, held_out=True, candidates=(0.0, 0.5, 1.0)).scale
    0.5
    """
    scores = {scale: score(scale) for scale in sorted({0.0, *candidates})}
    merits = merits_of(scores, samples)
    best = max(merits, key=lambda scale: (merits[scale], -abs(math.log(max(scale, 0.1)))))
    return ScaleChoice(best, scores, samples, held_out)


def merits_of(scores: Mapping[float, Score], samples: int) -> dict[float, float]:
    """The merit of every scale, by which `choose_scale` chooses; a scale whose loss is not a number has none."""
    scales, floor = sorted(scores), scores[0.0]
    merits = {}
    for index, scale in enumerate(scales):
        around = scales[max(index - 1, 0) : index + 2] if scale > 0 else [scale]
        near = [scores[other].accuracy for other in around]
        rise = scores[scale].loss - floor.loss
        merit = -rise
        if all(value is not None for value in near):
            smooth = sum(value or 0.0 for value in near) / len(near)
            error = 0.5 / math.sqrt(max(samples, 1))  # of a share, at most
            due = DOUBLING * math.log2(max(scale, 1.0)) + (ANYTHING if scale > 0 else 0.0)
            merit = smooth - LOSS_WEIGHT * rise - due * error
        merits[scale] = merit if math.isfinite(merit) else -math.inf
    return merits


class Scaled:
    """A module whose weights are `base + scale * delta`, set in place for each scale and restored at the end.

    Low-rank deltas are held as their factors and multiplied one tensor at a time.
    """

    def __init__(self, module: nn.Module, delta: TaskVector) -> None:
        self.module = module
        self._parts = [
            (parameter, parameter.detach().clone(), _beside(delta[name], parameter))
            for name, parameter in module.named_parameters()
            if name in delta
        ]

    def set(self, scale: float) -> None:
        """Give the module the weights of this scale."""
        with torch.no_grad():
            for parameter, base, delta in self._parts:
                parameter.copy_(base + scale * (delta.dense() if isinstance(delta, LowRank) else delta))

    def __enter__(self) -> Scaled:
        return self

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for parameter, base, _ in self._parts:
                parameter.copy_(base)


def _beside(entry: Entry, parameter: Tensor) -> Entry:
    """An entry on the device of its parameter; a dense one in its dtype too."""
    if isinstance(entry, LowRank):
        return LowRank(entry.out_factor.to(parameter.device), entry.in_factor.to(parameter.device))
    return entry.to(parameter)
