"""A transfer planned from configurations alone: no weights, no data, models of any size on any machine.

A change of every linear layer and texts of one length are assumed. The plan for a number of devices is that of one of
them: its part of the batches, all layers, both models at home.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
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
from ..models.open import outline_model
from ..models.opening import pick_device, pick_dtype
from ..runtime.budget import plan_passes
from ..runtime.cost import flops_of
from ..runtime.forecast import foretell
from ..runtime.passes import Passes, Sums
from ..runtime.speed import Rates, probe, seconds_of
from ..task_vectors.vector import TaskVector
from .plan import plan_of

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
        raise TuneportError("pass --memory-budget: the memory of one device, such as 80GiB.")
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
