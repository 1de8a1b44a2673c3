"""The samplers of the paper's study of calibration sets (Table B).

Those that need labels only are added to tuneport's when this module is imported. With one seed a small draw is a prefix
of a larger one; not so with `single_class`, which prefers a class of N samples.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from tuneport.data.dataset import Dataset, count_drawn
from tuneport.data.samplers import SAMPLERS, Sampler, round_robin, shuffled_classes
from tuneport.errors import DataError

CENTROID = {  # by the sign of the distance of a sample from the mean feature of its class
    "centroid_near": 1.0,  # the most typical of every class
    "centroid_far": -1.0,  # the least typical of every class
}


def select_by_features(
    dataset: Dataset,
    sampler: str,
    features: Tensor,
    *,
    samples: int | None = None,
    shots: int | None = None,
    seed: int = 0,
) -> NDArray[np.int64]:
    """Indices of the samples that a sampler of `CENTROID` draws, by their pre-trained features (N, width)."""
    count = count_drawn(dataset, samples, shots, labels_for=f"sampler '{sampler}'")
    if features.ndim != 2 or len(features) != len(dataset) or not bool(features.isfinite().all()):
        raise DataError(
            f"features of shape {tuple(features.shape)} for {len(dataset)} samples; "
            f"expected ({len(dataset)}, width), all finite."
        )
    labels, generator = torch.as_tensor(dataset.labels), torch.Generator().manual_seed(seed)
    groups = []
    for label in shuffled_classes(labels, generator):
        members = (labels == label).nonzero()[:, 0]
        points = features.detach().cpu()[members].double()  # (members, width)
        distance = (points - points.mean(dim=0)).norm(dim=1)
        groups.append(members[torch.argsort(CENTROID[sampler] * distance, stable=True)])
    indices: NDArray[np.int64] = round_robin(groups)[:count].numpy()
    return indices


def _half_class(labels: Tensor, count: int, generator: Generator) -> Tensor:
    present = shuffled_classes(labels, generator)
    chosen = present[: max(1, len(present) // 2)]
    samples = torch.randperm(len(labels), generator=generator)
    samples = samples[torch.isin(labels[samples], chosen)]
    if len(samples) < count:
        drawn = f"the {len(chosen)} of {len(present)} classes drawn by half_class"
        raise DataError(f"asked for {count} samples, but {drawn} have {len(samples)}; lower `samples`.")
    return samples[:count]


def _single_class(labels: Tensor, count: int, generator: Generator) -> Tensor:
    order = shuffled_classes(labels, generator)
    order = order[torch.argsort((torch.bincount(labels)[order] < count).int(), stable=True)]  # large classes first
    samples = torch.randperm(len(labels), generator=generator)
    return torch.cat([samples[labels[samples] == label] for label in order])[:count]


FEW_CLASSES: dict[str, Sampler] = {
    "half_class": _half_class,  # at random from a random half of the classes
    "single_class": _single_class,  # from one random class; if none is large enough, then from the next
}
SAMPLERS.update(FEW_CLASSES)
