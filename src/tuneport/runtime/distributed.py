"""The sums of a transfer on several processes.

Each process measures its part of the calibration batches. The sums of a block are reduced to the process that owns it,
which solves its maps and moves its layers; then every process receives the whole result. The first process owns all
layers of a method that moves them at once. The number of processes changes the result by rounding only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from ..errors import TuneportError
from ..maps.statistics import CrossCovariance, Statistics, WeightGradient
from ..measure.samples import Samples
from ..methods import Method, Problem, Transfer
from ..pairing import Plan, blocks_of
from ..processes import Ranks, agreed, from_all, lost_reported, ranks
from ..task_vectors.low_rank import Entry, LowRank
from ..task_vectors.vector import TaskVector


def share_of(samples: Samples) -> tuple[Samples, int]:
    """The part of the samples that this process measures, in whole batches, and the number of samples before it."""
    here = ranks()
    if here.size == 1:
        return samples, 0
    sizes = samples.batch_sizes
    first, last = (len(sizes) * rank // here.size for rank in (here.rank, here.rank + 1))
    return samples.take_batches(first, last), sum(sizes[:first])


def reduce_statistics(statistics: Statistics, plan: Plan, *, by_layer: bool, device: torch.device) -> Statistics:
    """The statistics over the samples of all processes, of the layers that this process owns.

    Those of this process are empty if it has no samples. `by_layer` says whether each layer is moved by itself.
    """
    here = ranks()
    if here.size == 1:
        return statistics
    owners = _owners(plan, here) if by_layer else {pair.target.name: 0 for pair in plan.pairs}
    owners |= {pair.target.name: 0 for pair in plan.loose}  # the first process moves loose tensors
    layout = _layout(statistics) if statistics.passes else None
    layouts = [each for each in from_all(layout) if each is not None]
    if any(each != layouts[0] for each in layouts):
        raise TuneportError("the processes measured different layers: give every process batches of one kind.")
    if layout is None:
        statistics = _zeros(layouts[0], device)
    distinct: dict[int, tuple[str, CrossCovariance]] = {}
    for key, covariance in sorted(statistics.covariances.items()):  # in an order that all processes share
        distinct.setdefault(id(covariance), (key[0], covariance))
    everyone = from_all((statistics.samples, dict(statistics.passes)))
    sums = {}
    with lost_reported():
        for layer, covariance in distinct.values():
            total = covariance.reduce(owners[layer])
            if owners[layer] == here.rank:
                sums[id(covariance)] = total
        names = sorted(statistics.weight_gradients)
        reduced = {name: statistics.weight_gradients[name].reduce(owners[name]) for name in names}
    covariances = {key: sums[id(own)] for key, own in statistics.covariances.items() if id(own) in sums}
    gradients = {name: gradient for name, gradient in reduced.items() if owners[name] == here.rank}
    passes: Counter[str] = Counter()
    for _, counted in everyone:
        passes.update(counted)
    return Statistics(covariances, gradients, sum(other[0] for other in everyone), dict(passes))


def _layout(statistics: Statistics) -> tuple[Any, ...]:
    """The keys of the sums, which of them share one, and the shapes: the same in all processes."""
    numbers: dict[int, int] = {}
    covariances = [
        (key, numbers.setdefault(id(found), len(numbers)), found.shape)
        for key, found in sorted(statistics.covariances.items())
    ]
    gradients = [(name, tuple(found.total.shape)) for name, found in sorted(statistics.weight_gradients.items())]
    return covariances, gradients


def _zeros(layout: tuple[Any, ...], device: torch.device) -> Statistics:
    """Sums over no samples."""
    covariances, gradients = layout
    shared = {number: CrossCovariance(*shape, device=device) for _, number, shape in covariances}
    keyed = {key: shared[number] for key, number, _ in covariances}
    return Statistics(keyed, {name: WeightGradient(shape, device=device) for name, shape in gradients})


def gather_transfer(problem: Problem, method: Method) -> Transfer:
    """Move the layers that this process owns, and receive those that the other processes moved."""
    here = ranks()
    if here.size == 1:
        return method.transfer(problem)
    plan = problem.plan
    if method.by_layer:
        owners = _owners(plan, here)
        mine = tuple(pair for pair in plan.pairs if owners[pair.target.name] == here.rank)
        problem = replace(problem, plan=replace(plan, pairs=mine, loose=plan.loose if here.first else ()))
    nothing = Transfer(TaskVector({}), ())
    answer = agreed(lambda: method.transfer(problem) if method.by_layer or here.first else nothing)
    everyone = from_all((answer.records, answer.kept))
    entries = gather_entries(answer.task_vector)
    records = {record.target: record for part in everyone for record in part[0]}
    order = [pair.target for pair in plan.pairs]
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
    for owner, names in enumerate(from_all(specs)):
        for name, parts in names.items():
            sent = _tensors(own[name]) if owner == here.rank else [None] * len(parts)
            found = [_broadcast(tensor, owner, *spec) for tensor, spec in zip(sent, parts, strict=True)]
            entries[name] = found[0] if len(found) == 1 else LowRank(found[0], found[1])
    return entries


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
        with lost_reported():
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
