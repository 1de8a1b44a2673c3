"""How strongly to apply a transfer: a scale chosen on calibration samples, by forward passes only.

Zero is always a candidate, and no scale is chosen that scores worse than zero on the samples it is chosen
on: an automatic transfer never ships a model that calibration says is worse than the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .task_vector import Entry, LowRank, TaskVector

SCALES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
HOLD_OUT = 0.25
LEAST_HELD_OUT = 5


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


def fitting_samples(count: int) -> int:
    """How many of `count` samples make the maps while the rest choose the scale; all of them where too few.

    >>> [fitting_samples(n) for n in (1, 10, 20, 100)]
    [1, 10, 15, 75]
    """
    held_out = int(count * HOLD_OUT)
    return count - held_out if held_out >= LEAST_HELD_OUT else count


def choose_scale(
    score: Callable[[float], Score], *, samples: int, held_out: bool, candidates: Sequence[float] = SCALES
) -> ScaleChoice:
    """The candidate with the least loss among those at least as accurate as no transfer at all.

    >>> losses = {0.0: 2.0, 0.5: 1.5, 1.0: 1.8}
    >>> choose_scale(lambda s: Score(losses[s]), samples=8, held_out=True, candidates=(0.0, 0.5, 1.0)).scale
    0.5
    """
    scores = {scale: score(scale) for scale in dict.fromkeys((0.0, *candidates))}
    floor = scores[0.0].accuracy
    allowed = [
        scale
        for scale, found in scores.items()
        if floor is None or (found.accuracy is not None and found.accuracy >= floor)
    ]
    best = min(allowed, key=lambda scale: (scores[scale].loss, scale))
    return ScaleChoice(best if scores[best].loss < scores[0.0].loss else 0.0, scores, samples, held_out)


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
