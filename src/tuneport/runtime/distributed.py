"""One transfer on several processes that `torchrun` starts.

Each process measures its part of the calibration batches. The sums of a block are reduced to the process that owns it,
which solves its maps and moves its layers; then every process receives the whole result. The number of processes
changes the result by rounding only; the same number gives the same bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import TuneportError
from ..maps.covariance import CrossCovariance
from ..maps.statistics import Statistics
from ..measure.samples import Samples
from ..methods import Problem, Transfer
from ..pairing import Plan, blocks_of
from ..task_vectors.low_rank import Entry, LowRank
from ..task_vectors.vector import TaskVector


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0


@contextmanager
def processes(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that torchrun started (gloo on the CPU, nccl on GPUs); without torchrun there is one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or dist.is_initialized():
        yield ranks()
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks()
    finally:
        dist.destroy_process_group()


def ranks() -> Ranks:
    """The rank of this process now."""
    joined = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if joined else Ranks()


def share_of(samples: Samples) -> tuple[Samples, int]:
    """The part of the samples that this process measures, in whole batches, and the number of samples before it."""
    here = ranks()
    if here.size == 1:
        return samples, 0
    samples = samples.listed()
    sizes = samples.batch_sizes
    if len(sizes) < here.size:
        raise TuneportError(
            f"{len(sizes)} calibration batches cannot be split over {here.size} processes: start fewer processes, or "
            "lower `batch_size`."
        )
    first, last = (len(sizes) * rank // here.size for rank in (here.rank, here.rank + 1))
    return samples.take_batches(first, last), sum(sizes[:first])


def reduce_statistics(statistics: Statistics, plan: Plan) -> Statistics:
    """The statistics over the samples of all processes, of the layers that this process owns."""
    here = ranks()
    if here.size == 1:
        return statistics
    owners = _owners(plan, here) | {pair.target.name: 0 for pair in plan.loose}  # the first process moves loose tensors
    distinct: dict[int, tuple[str, CrossCovariance]] = {}
    for key, covariance in sorted(statistics.covariances.items()):  # in an order that all processes share
        distinct.setdefault(id(covariance), (key[0], covariance))
    facts = [covariance.facts() for _, covariance in distinct.values()]
    keys = (sorted(statistics.covariances), sorted(statistics.weight_gradients), len(facts))
    everyone = _from_all((keys, statistics.samples, facts))
    if any(other[0] != keys for other in everyone):
        raise TuneportError("the processes measured different layers: give every process batches of one kind.")
    sums = {}
    for index, (layer, covariance) in enumerate(distinct.values()):
        total = covariance.reduce(owners[layer], [other[2][index] for other in everyone])
        if owners[layer] == here.rank:
            sums[id(covariance)] = total
    covariances = {key: sums[id(own)] for key, own in statistics.covariances.items() if id(own) in sums}
    reduced = {name: statistics.weight_gradients[name].reduce(owners[name]) for name in keys[1]}
    gradients = {name: gradient for name, gradient in reduced.items() if owners[name] == here.rank}
    return Statistics(covariances, gradients, sum(other[1] for other in everyone), dict(statistics.passes))


def gather_transfer(problem: Problem, transfer: Callable[[Problem], Transfer]) -> Transfer:
    """Move the layers that this process owns, and receive those that the other processes moved."""
    here = ranks()
    if here.size == 1:
        return transfer(problem)
    owners = _owners(problem.plan, here)
    mine = tuple(pair for pair in problem.plan.pairs if owners[pair.target.name] == here.rank)
    plan = replace(problem.plan, pairs=mine, loose=problem.plan.loose if here.first else ())
    answer = transfer(replace(problem, plan=plan))
    everyone = _from_all((answer.records, answer.kept))
    entries = gather_entries(answer.task_vector)
    records = {record.target: record for part in everyone for record in part[0]}
    order = [pair.target for pair in problem.plan.pairs]
    names = [name for layer in order for name in (layer.weight, layer.bias) if name in entries]
    return Transfer(
        TaskVector({name: entries[name] for name in dict.fromkeys((*names, *entries))}),
        tuple(records[layer.name] for layer in order if layer.name in records),
        tuple(item for part in everyone for item in part[1]),
    )


def gather_entries(own: Mapping[str, Entry]) -> dict[str, Entry]:
    """The entries of all processes, by rank. Tensors are sent one by one as bytes: no pickle, no second copy."""
    here = ranks()
    specs = {name: [(t.shape, t.dtype, t.device.type) for t in _tensors(entry)] for name, entry in own.items()}
    entries: dict[str, Entry] = {}
    for owner, names in enumerate(_from_all(specs)):
        for name, parts in names.items():
            sent = _tensors(own[name]) if owner == here.rank else [None] * len(parts)
            found = [_broadcast(tensor, owner, *spec) for tensor, spec in zip(sent, parts, strict=True)]
            entries[name] = found[0] if len(found) == 1 else LowRank(found[0], found[1])
    return entries


def _from_all(value: Any) -> list[Any]:
    """The values of all processes, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _tensors(entry: Entry) -> list[Tensor]:
    return [entry.out_factor, entry.in_factor] if isinstance(entry, LowRank) else [entry]


def _broadcast(tensor: Tensor | None, owner: int, shape: torch.Size, dtype: torch.dtype, device_type: str) -> Tensor:
    """The owner's tensor, on a device of the same type; all other processes pass None."""
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    if tensor is None:
        buffer = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8, device=device)
    else:
        buffer = tensor.detach().to(device).contiguous().flatten().view(torch.uint8)
    if buffer.numel():
        dist.broadcast(buffer, owner)
    return buffer.view(dtype).view(shape).to(device_type) if tensor is None else tensor


def _owners(plan: Plan, here: Ranks) -> dict[str, int]:
    """The process that solves each layer: whole blocks in turn, since layers of a block share statistics."""
    owners: dict[str, int] = {}
    weights: dict[str, int] = {}
    for index, pairs in enumerate(blocks_of(plan.pairs)):
        for pair in pairs:
            owners[pair.target.name] = weights.setdefault(pair.target.weight, index % here.size)
    return owners
