"""What a transfer would do and cost, before it runs.

From shapes alone: FLOPs are those of `cost`, and seconds follow from one small product, so they are a rough guide. Only
a memory budget for models in place makes one small batch run through them (`budget`).
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from ..job import Job
from ..models.offload import is_hollow
from ..runtime.budget import plan_passes
from ..runtime.cost import cost_of
from ..task_vectors.vector import TaskVector
from .plan import left_behind, not_transported_by


def expected(job: Job) -> dict[str, Any]:
    """What a job would do and cost: the pairing, what stays, bytes of statistics, FLOPs, and seconds on this machine.

    FLOPs are those of `cost_of`; seconds divide them by the speed of a small matrix product, so they are a rough
    guide.
    """
    cost = cost_of(job)
    counted, paper = cost["counted"], cost["paper"]
    passes = counted["forward"] + counted["backward"] if counted else paper["passes"]
    alignment = counted["total"] - passes if counted else paper["alignment"]
    runs_in = next(job.target.module.parameters()).dtype
    seconds = passes / _speed(job, runs_in) + alignment / _speed(job, torch.float64)
    return {
        "method": job.record["method"],
        "samples": job.samples,
        "layers": [
            {
                "target": pair.target.name,
                "target_shape": [pair.target.out_features, pair.target.in_features],
                "source": pair.source.name,
                "source_shape": [pair.source.out_features, pair.source.in_features],
            }
            for pair in job.plan.pairs
        ],
        "not_transported": [asdict(item) for item in not_transported_by(job, _moved(job), job.method.kept(job.plan))],
        "left_behind": [asdict(item) for item in left_behind(job)],
        "expected": {
            "statistics_bytes": cost["statistics_bytes"],
            "flops": passes,
            "alignment_flops": alignment,
            "seconds": round(seconds, 1),
            "cost": cost,
            **_within(job),
        },
    }


def _within(job: Job) -> dict[str, Any]:
    """The division that a memory budget asks for, where there is one."""
    if job.memory_budget is None:
        return {}
    found = plan_passes(job, job.memory_budget)
    return {
        "peak_bytes": found.peak_bytes,
        "groups": [len(group) for group in found.groups],
        "home": "files" if is_hollow(job.target.module) else "RAM",
        "home_bytes": found.home_bytes,
        "fetched_bytes": found.fetched_bytes,
    }


def _moved(job: Job) -> TaskVector:
    """A stand-in for the result: the names that the method would move."""
    stays = {item.tensor for item in job.method.kept(job.plan)}
    pairs = [pair for pair in job.plan.pairs if pair.target.name not in stays]
    names = {pair.target.weight for pair in pairs}
    names |= {pair.target.bias for pair in pairs if pair.target.bias and pair.source.bias}
    if job.method.moves_loose:
        names |= {pair.target.name for pair in job.plan.loose} - stays
    return TaskVector({name: torch.empty(0) for name in names})


def _speed(job: Job, dtype: torch.dtype) -> float:
    """FLOP per second of a product of two 512 x 512 matrices on the target's device, after one to warm up."""
    matrix = torch.ones(512, 512, dtype=dtype, device=job.target.device)
    for _ in range(2):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])
    return 2 * 512**3 / (time.perf_counter() - started)
