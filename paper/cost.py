"""The cost of a transfer in floating-point operations: by the paper's formula, and as torch counts a run.

A multiplication and an addition are two operations. torch counts matrix products, convolutions and attention; it does
not count decompositions, which solve the maps.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from tuneport.measure.samples import DatasetSamples, Measurement
from tuneport.measure.signals import NEEDS_BACKWARD
from tuneport.methods import Method, get_method
from tuneport.models.base import Model
from tuneport.pipeline.solve import measure, problem_of
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Sides

FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token of a pass, in the paper's appendix
UPDATE = 10  # FLOPs per parameter of a step of Adam, for any number of tokens
FINE_TUNING_STEPS = 2000  # of the paper's protocol


def paper_cost(measurement: Measurement) -> dict[str, int]:
    """Apply the paper's formula (eqs. 13 to 17).

    Returns:
        FLOPs of the `passes`: 2 P forward and 4 P backward per token and model; of the `alignment`:
        2 L (M d_A d_B + d_A^2 d_B) + L (d_A^2 d_B + d_A d_B^2) with the most common widths; their `total`; and of
        `fine tuning`: 2,000 steps, each a pass over as many tokens of the target and an update, 10 P_B.
    """
    sizes, tokens = Sides(*map(count_parameters, measurement.models)), count_tokens(measurement)
    backward = BACKWARD if NEEDS_BACKWARD & measurement.signals else 0
    passes = (FORWARD + backward) * sum(size * count for size, count in zip(sizes, tokens, strict=True))
    sides = zip(*((pair.source.in_features, pair.target.in_features) for pair in measurement.plan.pairs), strict=True)
    d_A, d_B = sorted(Counter(widths).most_common(1)[0][0] for widths in sides)
    L, M, maps = len(measurement.plan.pairs), tokens.target, len(measurement.signals)  # each signal gives a map
    alignment = maps * L * (M * d_A * d_B + d_A**2 * d_B) + L * (d_A**2 * d_B + d_A * d_B**2)
    tuning = FINE_TUNING_STEPS * ((FORWARD + BACKWARD) * M + UPDATE) * sizes.target
    return {"passes": passes, "alignment": alignment, "total": passes + alignment, "fine tuning": tuning}


def count_parameters(model: Model) -> int:
    """Count the parameters of a model."""
    return sum(parameter.numel() for parameter in model.module.parameters())


def count_tokens(measurement: Measurement) -> Sides[int]:
    """Count the tokens of all samples in each model, by the layout of its inputs."""
    assert isinstance(measurement.samples, DatasetSamples)
    first = next(iter(measurement.samples.take(slice(1))))
    sides = zip(measurement.models, (first.source, first.target), strict=True)
    layouts = [model.inputs.layout(batch[0]) if model.inputs.layout is not None else None for model, batch in sides]
    return Sides(
        *(len(measurement.samples) * (found.prefix + math.prod(found.grid) if found else 1) for found in layouts)
    )


def count_flops(measurement: Measurement, change: TaskVector, method: str | Method) -> Mapping[str, int]:
    """Run a transfer, and count the operations of its two stages."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: _added}) as measuring:
        statistics = measure(measurement)
    with FlopCounterMode(display=False) as solving:
        get_method(method).transfer(problem_of(measurement, change, statistics))
    return {
        "passes and sums": measuring.get_total_flops(),
        "alignment and transport, without decompositions": solving.get_total_flops(),
    }


def _added(_: Sequence[int], left: Sequence[int], right: Sequence[int], **__: object) -> int:
    """Count a product that is added in place, by its shapes: torch leaves it out."""
    return 2 * left[0] * left[1] * right[1]
