"""The samplers of the paper's study of calibration sets (Table B), added to tuneport's when this module is imported.

With one seed a small draw is a prefix of a larger one; not so with `single_class`, which prefers a class of N samples.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Generator, Tensor

from tuneport.data.samplers import SAMPLERS, Sampler, round_robin, shuffled, shuffled_classes
from tuneport.errors import DataError


def _by_distance(labels: Tensor, count: int, generator: Generator, features: Tensor | None, sign: float) -> Tensor:
    assert features is not None  # `select` has checked
    groups = []
    for label in shuffled_classes(labels, generator):
        members = (labels == label).nonzero()[:, 0]
        points = features.detach().cpu()[members].double()  # (members, width)
        distance = (points - points.mean(dim=0)).norm(dim=1)
        groups.append(members[torch.argsort(sign * distance, stable=True)])
    return round_robin(groups)[:count]


def _half_class(labels: Tensor, count: int, generator: Generator, _: Tensor | None) -> Tensor:
    present = shuffled_classes(labels, generator)
    chosen = present[: max(1, len(present) // 2)]
    samples = shuffled(len(labels), generator)
    samples = samples[torch.isin(labels[samples], chosen)]
    if len(samples) < count:
        drawn = f"the {len(chosen)} of {len(present)} classes drawn by half_class"
        raise DataError(f"asked for {count} samples, but {drawn} have {len(samples)}; lower `samples`.")
    return samples[:count]


def _single_class(labels: Tensor, count: int, generator: Generator, _: Tensor | None) -> Tensor:
    order = shuffled_classes(labels, generator)
    order = order[torch.argsort((torch.bincount(labels)[order] < count).int(), stable=True)]  # large classes first
    samples = shuffled(len(labels), generator)
    return torch.cat([samples[labels[samples] == label] for label in order])[:count]


def _centroid(description: str, sign: float) -> Sampler:
    return Sampler(description, partial(_by_distance, sign=sign), needs_features=True, balanced=True)


PAPER_SAMPLERS = {
    "centroid_near": _centroid("the most typical of every class: nearest to its mean feature", 1.0),
    "centroid_far": _centroid("the least typical of every class: farthest from its mean feature", -1.0),
    "half_class": Sampler("at random from a random half of the classes", _half_class),
    "single_class": Sampler(
        "at random from one random class; if no class is large enough, all of one and then of the next", _single_class
    ),
}
SAMPLERS.update(PAPER_SAMPLERS)
