"""Merge several task vectors of one base into one: a weighted sum, TIES or DARE, by peft's merge functions."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ..errors import TuneportError, unknown_name
from ..io.tensors import LazyMapping, TensorSpec
from .vector import TaskVector

DENSITY = 0.2  # the share of entries that TIES keeps in its paper
RULES = ("sum", "ties", "dare", "dare-ties")


def merge(
    vectors: Sequence[TaskVector],
    weights: Sequence[float] | None = None,
    *,
    rule: str = "sum",
    density: float = DENSITY,
    seed: int = 0,
) -> TaskVector:
    """One task vector of several of the same base; an entry that a vector lacks counts as zero.

    A sum keeps low-rank entries low-rank. TIES keeps the largest entries of each tensor and averages those of the
    elected sign; DARE keeps entries at random and rescales them. Both make dense entries.

    `weights` are a factor for each vector (1), `density` the share of entries that TIES and DARE keep, of each tensor
    of each vector, `seed` that of the entries that DARE keeps.
    """
    factors = [1.0] * len(vectors) if weights is None else [float(weight) for weight in weights]
    if rule not in RULES:
        raise TuneportError(unknown_name("rule", rule, RULES))
    if not vectors or len(factors) != len(vectors):
        raise TuneportError(f"{len(vectors)} task vectors and {len(factors)} `weights`: give a weight for each vector.")
    if not 0 < density <= 1:
        raise TuneportError(f"`density` must be above 0 and at most 1, got {density:g}.")
    total = reduce(add, (vector * factor for vector, factor in zip(vectors, factors, strict=True)))
    if rule == "sum":
        return total
    try:
        from peft.utils import merge_utils
    except ImportError as error:
        raise TuneportError(f'rule {rule} needs peft: pip install "tuneport[adapters]".') from error
    combine = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear, "dare-ties": merge_utils.dare_ties}[rule]

    def merged(name: str) -> Tensor:
        parts = [vector.dense(name) if name in vector else torch.zeros(total.shape(name)) for vector in vectors]
        # one seed for each tensor: the result does not depend on the order in which tensors are read
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + zlib.crc32(name.encode()))
            return combine(parts, torch.tensor(factors), density)

    return TaskVector(LazyMapping(total, merged), lambda name: TensorSpec(total.shape(name), total.dtype(name)))
