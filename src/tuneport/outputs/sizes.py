"""How large the updates of a transfer are."""

from __future__ import annotations

import math

from ..methods import Method
from ..pairing import Plan
from ..task_vectors.vector import TaskVector


def update_bytes(plan: Plan, vector: TaskVector, method: Method, lora: int | None = None) -> int:
    """The bytes of all updates in float32.

    Args:
        plan: the layers that are moved.
        vector: the task vector of the source, whose ranks the method may keep.
        method: moves it.
        lora: the rank of a LoRA; 0 if it is chosen later, which counts as one; None for dense updates.
    """
    numbers = 0
    for pair in plan.pairs:
        shape, weight = (pair.target.out_features, pair.target.in_features), pair.source.weight
        rank = vector.spec(weight).rank if method.keeps_rank and weight in vector else None
        if lora is not None:
            rank = min(lora or rank or 1, *shape)
        numbers += math.prod(shape) if rank is None else rank * sum(shape)
    return 4 * numbers
