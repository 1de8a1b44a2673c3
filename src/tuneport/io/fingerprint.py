"""A fingerprint of a model's weights that survives another dtype and other shards, and tells models apart.

It holds a few values of some tensors. Rounding to half precision moves them by less than half a percent, a fine-tune by
several, and another model by more than their own size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from .tensors import describe

TENSORS = 16  # evenly spaced among the matrices, by name
VALUES = 8  # evenly spaced in each
SAME = 0.01  # largest relative difference of two copies of one model
LARGEST = 2**28  # bytes of a tensor that is read for it


def weights_fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """The fingerprint, as JSON; empty if the tensors hold no matrix of floating-point numbers."""
    specs = {name: describe(tensors, name) for name in sorted(tensors)}
    names = [
        name
        for name, spec in specs.items()
        if len(spec.shape) > 1 and spec.dtype.is_floating_point and 0 < spec.nbytes <= LARGEST
    ]
    chosen = dict.fromkeys(names[index * len(names) // TENSORS] for index in range(TENSORS)) if names else {}
    found = {name: _values(tensors[name]) for name in chosen}
    return json.dumps(found) if found else ""


def same_weights(fingerprint: str, tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether the tensors are those of a fingerprint; None if it cannot be read, or has none of their names."""
    try:
        known = json.loads(fingerprint)
        names = [name for name in known if name in tensors and 0 < describe(tensors, name).nbytes <= LARGEST]
        return _same([(known[name], _values(tensors[name])) for name in names])
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def same_fingerprints(first: str, second: str) -> bool | None:
    """Return whether two fingerprints are of the same weights; None if one is unreadable, or if they share no name."""
    try:
        one, two = json.loads(first), json.loads(second)
        return _same([(one[name], two[name]) for name in one if name in two])
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _same(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> bool | None:
    values = [(np.array(one, dtype=np.float64), np.array(two, dtype=np.float64)) for one, two in pairs]
    distance = math.fsum(float(np.square(one - two).sum()) for one, two in values)
    size = math.fsum(float(np.square(one).sum()) for one, _ in values)
    return math.sqrt(distance / size) <= SAME if size > 0 else None


def _values(tensor: Tensor) -> list[float]:
    flat = tensor.detach().flatten()
    places = [(2 * index + 1) * len(flat) // (2 * VALUES) for index in range(VALUES)]
    return [float(f"{float(flat[place]):.5g}") for place in places]
