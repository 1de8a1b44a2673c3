"""What a transfer would do and cost, from shapes alone: no forward pass."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch

from .budget import plan_passes
from .capture import NEEDS_BACKWARD
from .pipeline import left_behind, not_transported_by
from .preparation import Job, PairedBatches
from .task_vector import TaskVector

SHARED_INPUTS = {"q": "attention", "k": "attention", "v": "attention", "gate": "gated", "up": "gated"}


def expected(job: Job) -> dict[str, Any]:
    """What a job would do and cost: the pairing, what stays, bytes of statistics, FLOPs, and seconds on this machine.

    FLOPs follow the paper's cost model: 2 P per token forward and 4 P backward for each model, and for each map
    2 M d_A d_B to accumulate, about 20 min(d)^2 max(d) to solve, and the two products of the transport. Seconds
    divide them by the speed of a small matrix product, so they are a rough guide.
    """
    seen = job.samples * _tokens_per_sample(job)
    tokens = min(seen, job.max_tokens or seen)
    statistics_bytes, alignment = 0, 0
    counted: set[tuple[str, int | None, str]] = set()
    for pair in job.plan.pairs:
        source, target = pair.source, pair.target
        reads = (
            "attention" if target.role in ("q", "k", "v") else "gated" if target.role in ("gate", "up") else target.name
        )
        shared = (target.stack, target.block, reads)
        sides = (
            (source.in_features, target.in_features, pair.input_map, {"input", "input_gradient"}),
            (source.out_features, target.out_features, pair.output_map, {"output", "output_gradient"}),
        )
        for ours, theirs, fixed, names in sides:
            wanted = names & job.method.signals
            if fixed is not None or not wanted or (wanted == {"input"} and shared in counted):
                continue
            statistics_bytes += min(8 * ours * theirs, max(4 * tokens * (ours + theirs), 1))
            alignment += 2 * tokens * ours * theirs + 20 * min(ours, theirs) ** 2 * max(ours, theirs)
        counted.add(shared)
        alignment += 2 * source.out_features * target.out_features * source.in_features
        alignment += 2 * target.out_features * source.in_features * target.in_features
    weights = [
        sum(layer.in_features * layer.out_features for layer in model.layers) for model in (job.source, job.target)
    ]
    per_token = 0 if not job.method.signals else 6 if NEEDS_BACKWARD & job.method.signals else 2
    passes = per_token * seen * sum(weights)
    seconds = passes / _speed(job, torch.float32) + alignment / _speed(job, torch.float64)
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
        "not_transported": [asdict(item) for item in not_transported_by(job, _moved(job), ())],
        "left_behind": [asdict(item) for item in left_behind(job)],
        "expected": {
            "statistics_bytes": statistics_bytes,
            "flops": passes,
            "alignment_flops": alignment,
            "seconds": round(seconds, 1),
            **_within(job),
        },
    }


def _within(job: Job) -> dict[str, Any]:
    """The division that a memory budget asks for, where there is one."""
    if job.memory_budget is None:
        return {}
    found = plan_passes(job, job.memory_budget)
    return {"peak_bytes": found.peak_bytes, "groups": [len(group) for group in found.groups]}


def _moved(job: Job) -> TaskVector:
    """A stand-in for the result: the names that the method would move."""
    names = {pair.target.weight for pair in job.plan.pairs}
    names |= {pair.target.bias for pair in job.plan.pairs if pair.target.bias and pair.source.bias}
    if job.method.moves_loose:
        names |= {pair.target.name for pair in job.plan.loose}
    return TaskVector({name: torch.empty(0) for name in names})


def _speed(job: Job, dtype: torch.dtype) -> float:
    """FLOP per second of a product of two 512 x 512 matrices on the target's device, after one to warm up."""
    matrix = torch.ones(512, 512, dtype=dtype, device=job.target.device)
    for _ in range(2):
        started = time.perf_counter()
        float((matrix @ matrix)[0, 0])
    return 2 * 512**3 / (time.perf_counter() - started)


def _tokens_per_sample(job: Job) -> int:
    """Tokens of one sample in the target, found by preparing one batch (no forward pass)."""
    if not isinstance(job.batches, PairedBatches) or job.target.layout is None:
        return 1
    first = next(iter(replace(job.batches, indices=job.batches.indices[:1])))
    layout = job.target.layout(first.target[0])
    return layout.prefix + layout.grid[0] * layout.grid[1]
