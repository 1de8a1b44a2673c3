"""What a transfer would do and cost, before it runs.

From shapes alone: FLOPs are those of `cost`, and seconds follow from one small product, so they are a rough guide. Only
a memory budget for models in place makes one small batch run through them (`budget`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..job import Job
from ..measure.batches import PairedBatch
from ..measure.objectives import forward_only, token_loss
from ..methods import get_method
from ..models.offload import bytes_of
from ..models.open import outline_model, pick_device, pick_dtype
from ..runtime.budget import Sums, plan_passes
from ..runtime.cost import cost_of, flops_of
from ..runtime.forecast import foretell
from ..runtime.passes import Passes
from ..runtime.speed import Rates, probe, seconds_of
from ..task_vectors.vector import TaskVector
from .plan import left_behind, not_transported_by, plan_of


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
        "home": "files" if job.target.offloaded else "RAM",
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


DEVICES = (1, 2, 4, 8)


COLUMNS = ("devices", "runs over the data", "peak of a device", "at home", "fetched by a device", "seconds")


MOST = 2**24  # texts, and tokens in a batch, that a plan is made for


def prepare_shapes(
    source: str | Path,
    target: str | Path,
    *,
    method: str = "bico",
    samples: int = 100,
    length: int = 256,
    batch_size: int = 4,
    max_tokens: int | None = None,
    memory_budget: int | None = None,
    device: str = "cuda",
    dtype: str = "float32",
) -> Job:
    """A Job of two text models of which only the config.json is read; it can be planned and not run.

    The `device` is the one that is planned for, whether this machine has it or not.
    """
    if min(samples, length, batch_size) < 1 or max(samples, batch_size * length) > MOST:
        raise TuneportError(
            f"{samples} texts of {length} tokens in batches of {batch_size}: plan for one text or more, and for {MOST} "
            "texts and tokens in a batch at most."
        )
    ours, theirs = (outline_model(path, dtype=pick_dtype(dtype), weights=False) for path in (source, target))
    for model in (ours, theirs):
        if model.kind != "text" or model.generates == "seq2seq":
            raise TuneportError(f"{model.name}: only encoders and decoders of text are planned from shapes alone.")
    names = {layer.weight: layer.weight_shape for layer in ours.layers}
    names |= {layer.bias: (layer.out_features,) for layer in ours.layers if layer.bias is not None and not layer.rows}
    vector = TaskVector({name: torch.empty(shape, device="meta") for name, shape in names.items()})
    chosen = get_method(method)
    plan = plan_of(ours, theirs, vector)
    chosen.check(plan)
    count = -(-samples // batch_size)
    batch = PairedBatch(_texts(batch_size, length), _texts(batch_size, length), size=batch_size)
    losses = [token_loss(m) if m.generates == "causal" else forward_only(m) for m in (ours, theirs)]
    options = {"samples": samples, "length": length, "batch_size": batch_size, "max_tokens": max_tokens, "dtype": dtype}
    return Job(
        ours,
        theirs,
        vector,
        plan,
        chosen,
        batches=[batch] * count,
        samples=samples,
        source_loss=losses[0],
        target_loss=losses[1],
        max_tokens=max_tokens,
        memory_budget=memory_budget,
        record={"method": method, "options": options},
        device=torch.device(device),
    )


def _texts(size: int, length: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.zeros(size, length, dtype=torch.int64)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, ids


def rates_for(job: Job, told: Mapping[str, float]) -> Rates:
    """The rates that were told, and those of this machine where some were not."""
    if set(told) == {item.name for item in fields(Rates)}:
        return Rates(**told).with_(told)
    first = next(iter(job.batches))
    dtype = next(job.source.module.parameters()).dtype
    return probe(pick_device("auto"), dtype, first.source[1].numel()).with_(told)


def plan_devices(job: Job, rates: Rates, devices: tuple[int, ...] = DEVICES) -> list[dict[str, Any]]:
    """For each number of devices: runs over the data, bytes on one device and at home, and seconds by stage.

    Where the budget is too small, the line says why.
    """
    if job.memory_budget is None:
        raise TuneportError("a plan for devices needs `memory_budget`, the memory of one device.")
    flops = flops_of(job, job.samples)
    assert flops is not None
    forecast = foretell(job)
    sums = Sums(job, forecast.sums, forecast.size)
    lines: list[dict[str, Any]] = []
    for count in devices:
        try:
            passes = plan_passes(part := _part(job, count), job.memory_budget, forecast)
        except TuneportError as error:
            lines.append({"devices": count, "error": str(error)})
            continue
        anew = bool(passes.placements and any(placement.blocks for placement in passes.placements))
        returned = passes.home_bytes - _models_bytes(job) if passes.placements else 0
        found = seconds_of(flops, rates, runs=len(passes.groups), anew=anew, returned=returned, devices=count)
        found["fetch"] = passes.fetched_bytes / rates.link
        found["total"] = sum(seconds for stage, seconds in found.items() if stage != "total")
        line = {"devices": count, **line_of(passes, part), "seconds": found}
        # a device solves its share of the blocks, from the tokens of all
        solving = max(sums.held(group) // count + sums.solving(group) for group in passes.groups)
        lines.append({**line, "peak_bytes": max(line["peak_bytes"], solving)})
    return lines


def line_of(passes: Passes, job: Job) -> dict[str, Any]:
    """What a plan says of memory, as plain numbers."""
    kept = [
        sorted(set(placement.blocks) - placement.fetched) if placement.blocks else None
        for placement in passes.placements or ()
    ]
    return {
        "runs": len(passes.groups),
        "peak_bytes": passes.peak_bytes,
        "home_bytes": passes.home_bytes,
        "fetched_bytes": passes.fetched_bytes,
        "blocks_that_stay": ["all" if paths is None else len(paths) for paths in kept],
        "samples": job.samples,
    }


def _part(job: Job, count: int) -> Job:
    """One device's part of a job."""
    batches = list(job.batches)[: -(-len(list(job.batches)) // count)]
    samples = min(job.samples, len(batches) * batches[0].size)
    tokens = None if job.max_tokens is None else -(-job.max_tokens * samples // job.samples)
    return replace(job, batches=batches, samples=samples, max_tokens=tokens)


def _models_bytes(job: Job) -> int:
    return sum(bytes_of((*m.module.parameters(), *m.module.buffers())) for m in (job.source, job.target))


def describe_line(line: dict[str, Any]) -> list[str]:
    """A line of `plan_devices` in words."""
    if "error" in line:
        return [str(line["devices"]), line["error"], "", "", "", ""]
    return [
        str(line["devices"]),
        str(line["runs"]),
        format_bytes(line["peak_bytes"]),
        format_bytes(line["home_bytes"]),
        format_bytes(line["fetched_bytes"]),
        f"{line['seconds']['total']:.0f}",
    ]
