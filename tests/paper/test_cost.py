"""The cost of a transfer: the paper's formula by hand, and torch's count against that of bare passes and sums."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from builders.folders import Zoo, load
from builders.runs import measured, prepare
from paper.cost import count_flops, paper_cost

SAMPLES = 24


def test_the_paper_by_hand(zoo: Zoo) -> None:
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES)
    sizes = [sum(p.numel() for p in load(zoo[f"clip_vision-{part}"]).parameters()) for part in ("base", "target")]
    tokens = [SAMPLES * 5, SAMPLES * 10]  # 2 x 2 and 3 x 3 patches and a class token
    L, M, d_A, d_B = len(job.plan.pairs), tokens[1], 16, 24
    align = 2 * L * (M * d_A * d_B + d_A**2 * d_B) + L * (d_A**2 * d_B + d_A * d_B**2)
    passes = 6 * (sizes[0] * tokens[0] + sizes[1] * tokens[1])
    assert paper_cost(job.measurement) == {
        "passes": passes,
        "alignment": align,
        "total": passes + align,
        "fine tuning": 2000 * (6 * tokens[1] + 10) * sizes[1],  # an update does not grow with the tokens
    }
    forward = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES, signals="theseus")
    assert paper_cost(forward.measurement)["passes"] == passes // 3


def test_the_count_of_a_run(zoo: Zoo) -> None:
    """A method without gradients runs both models forward once and sums products of their tokens."""
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES, signals="theseus", scale=1.0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        for batch in job.samples:
            job.source.module(**batch.source[0])
            job.target.module(**batch.target[0])
    sums = {id(found): found for found in measured(job).covariances.values()}.values()
    dense = [found for found in sums if found.rows is None]
    products = sum(2 * found.tokens * found.shape[0] * found.shape[1] for found in dense)
    forward = count_flops(job.measurement, job.task_vector, "theseus")
    assert dense
    assert counter.get_total_flops() < forward["passes and sums"] <= counter.get_total_flops() + products
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES, scale=1.0)
    both = count_flops(job.measurement, job.task_vector, "bico")
    assert both["passes and sums"] > forward["passes and sums"]
    transport = "alignment and transport, without decompositions"
    assert both[transport] > forward[transport] > 0
