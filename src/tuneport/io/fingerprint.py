"""Whether files and weights are the same: digests of their bytes, and fingerprints of a few of their values.

A fingerprint survives another dtype and other shards, and tells models apart. Rounding to half precision moves its
values by less than half a percent, a fine-tune by several, and another model by more than their own size.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError
from .output import PathLike
from .tensors import Tensors, describe

SETTLED = 2 * 10**9  # nanoseconds after its last change, from which on a file shows a further one
TENSORS = 16  # evenly spaced among the matrices, by name
VALUES = 8  # evenly spaced in each
SAME = 0.01  # largest relative difference of two copies of one model
LARGEST = 2**28  # bytes of a tensor that is read for it


def file_digests(paths: Iterable[PathLike]) -> dict[str, str]:
    """The SHA-256 of each file, under its path as given; a file that has not changed is read once."""
    digests = {}
    for path in paths:
        try:
            found = os.stat(path)
            settled = time.time_ns() - found.st_mtime_ns > SETTLED  # else it may change again at the same time
            digest = _digest if settled else _digest.__wrapped__
            state = (found.st_size, found.st_mtime_ns, found.st_ino)
            digests[os.fspath(path)] = digest(os.path.abspath(path), *state)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    return digests


@lru_cache(maxsize=4096)
def _digest(path: str, *_: int) -> str:
    """The SHA-256 of a file in a state: its size, when it was changed, and its number on the disk."""
    from huggingface_hub.utils.sha import sha_fileobj

    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


def digest_of(text: str, tensors: Tensors) -> str:
    """SHA-256 of a text and of tensors with their names, shapes and dtypes, read one at a time."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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


def same_weights(fingerprint: str, other: Mapping[str, Tensor] | str) -> bool | None:
    """Whether a fingerprint is of the same weights as some tensors, or as another fingerprint.

    None if a fingerprint cannot be read, or if the two share no name.
    """
    try:
        known = json.loads(fingerprint)
        if isinstance(other, str):
            found = json.loads(other)
        else:
            names = [name for name in known if name in other and 0 < describe(other, name).nbytes <= LARGEST]
            found = {name: _values(other[name]) for name in names}
        pairs = [(values, found[name]) for name, values in known.items() if found.get(name)]
        arrays = [(np.array(one, dtype=np.float64), np.array(two, dtype=np.float64)) for one, two in pairs]
        distance = math.fsum(float(np.square(one - two).sum()) for one, two in arrays)
        size = math.fsum(float(np.square(one).sum()) for one, _ in arrays)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None
    return math.sqrt(distance / size) <= SAME if size > 0 else None


def _values(tensor: Tensor) -> list[float]:
    flat = tensor.detach().flatten()
    places = [(2 * index + 1) * len(flat) // (2 * VALUES) for index in range(VALUES)]
    return [float(f"{float(flat[place]):.5g}") for place in places]
