"""A transfer within a given memory: which layers are measured in which pass, and the peak to expect.

Statistics may outgrow the memory, not the models: layers are then measured in groups, with one run over the
calibration data for each, and a group's statistics are gone before the next begins. The numbers do not change.
One small batch through both models, before any work, tells what a pass takes; the rest follows from shapes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import PIECE, CrossCovariance, Statistics, held_bytes
from .capture import INPUT, OUTPUT, Loss, PairedBatch, count_samples, measure, part_of, samples_at_once
from .errors import TuneportError
from .pairing import LayerPair
from .preparation import Job, PairedBatches
from .solver import together_bytes

UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}}
UNITS |= {f"{k}IB": 1024**i for i, k in enumerate("KMGT", 1)}


def parse_bytes(text: str) -> int:
    """A number of bytes as people write it.

    >>> parse_bytes("8GiB"), parse_bytes("1.5 MB"), parse_bytes("512")
    (8589934592, 1500000, 512)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = float(found[1]) * UNITS.get(found[2].upper(), 0) if found else 0.0
    if size < 1:
        raise TuneportError(f"the memory budget must be a size such as 8GiB or 500MB, got {text!r}.")
    return int(size)


def format_bytes(size: float) -> str:
    """
    >>> format_bytes(8589934592)
    '8.00 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    raise AssertionError


@dataclass(frozen=True, eq=False)
class Passes:
    """Groups of pairs, one run over the calibration data for each, and the bytes that they take.

    `fixed_bytes` are the models and the result; `group_bytes` what each group takes besides; the peak is the
    largest of these sums.
    """

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int
    group_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max(self.group_bytes, default=0)


def plan_passes(job: Job, budget: int | None) -> Passes:
    """Divide a job's layers so that the expected peak stays within the budget; None for all of them at once."""
    cost = _Cost(job)
    if budget is None:
        return Passes((job.plan.pairs,), cost.fixed, (cost.of(job.plan.pairs),))
    blocks = [list(group) for _, group in groupby(job.plan.pairs, key=lambda p: (p.target.stack, p.target.block))]
    groups: list[list[LayerPair]] = []
    for block in blocks:
        fits = cost.fixed + cost.of(block) <= budget
        for unit in [block] if fits else _by_weight(block):
            if groups and cost.fixed + cost.of([*groups[-1], *unit]) <= budget:
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    found = Passes(tuple(tuple(group) for group in groups), cost.fixed, tuple(cost.of(group) for group in groups))
    if found.peak_bytes > budget:
        raise TuneportError(
            f"a memory budget of {format_bytes(budget)} is too small: the models and the result take "
            f"{format_bytes(cost.fixed)}, the largest layer {format_bytes(max(found.group_bytes))} besides. Give at "
            f"least {format_bytes(found.peak_bytes)}, a smaller --batch-size, or fewer --max-tokens."
        )
    if len(groups) > 1 and not job.method.by_layer:
        raise TuneportError(
            f"method {job.record.get('method')} moves all layers at once: give it {format_bytes(cost.peak())}, or use "
            "a method that moves them one by one, such as bico."
        )
    return found


def in_groups(job: Job, passes: Passes | None) -> list[Job]:
    """A job for each group; tensors outside layers go with the first."""
    if passes is None or len(passes.groups) < 2:
        return [job]
    plans = [
        replace(job.plan, pairs=pairs, loose=job.plan.loose if pairs is passes.groups[0] else ())
        for pairs in passes.groups
    ]
    return [replace(job, plan=plan) for plan in plans]


def _by_weight(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The parts of a fused weight stay together."""
    units: dict[str, list[LayerPair]] = {}
    for pair in pairs:
        units.setdefault(pair.target.weight, []).append(pair)
    return list(units.values())


class _Cost:
    """What groups of layers take, from one small batch through both models."""

    def __init__(self, job: Job) -> None:
        self._job = job
        modules = (job.source.module, job.target.module)
        self.fixed = sum(_model_bytes(module) for module in modules) + _result_bytes(job)
        self._statistics, self._saved, self._size = _probe(job) if job.method.signals else (Statistics(), (0, 0), 1)
        self._samples = job.samples or (
            count_samples(job.batches) if isinstance(job.batches, (list, tuple)) else self._size
        )
        self._batch = self._samples
        if isinstance(job.batches, PairedBatches):
            self._batch = min(job.batches.size, self._samples)
        elif isinstance(job.batches, (list, tuple)):
            self._batch = max((count_samples([batch]) for batch in job.batches), default=1)
        self._batch = min(self._batch, samples_at_once(job.target.device) or self._batch)

    def peak(self) -> int:
        return self.fixed + self.of(self._job.plan.pairs)

    def of(self, pairs: Iterable[LayerPair]) -> int:
        """The peak of measuring and solving these pairs, beyond the fixed bytes."""
        pairs = list(pairs)
        names = {pair.target.name for pair in pairs}
        held, kept_inputs, kept_gradients, widest = 0, 0, 0, 0
        works: dict[tuple[int, int], list[int]] = {}
        maps: dict[tuple[str, int | None], int] = {}
        blocks = {pair.target.name: (pair.target.stack, pair.target.block) for pair in pairs}
        seen: set[int] = set()
        for (layer, signal), covariance in self._statistics.covariances.items():
            if layer not in names or id(covariance) in seen:
                continue
            seen.add(id(covariance))
            held += self._held(covariance)
            rows = covariance.tokens * self._batch // self._size
            signals = rows * covariance.shape[0] * covariance.signal_dtype.itemsize
            if signal in (INPUT, OUTPUT):
                kept_inputs += signals
            else:
                kept_gradients += signals
            widest = max(widest, 8 * min(rows, PIECE) * sum(covariance.shape))
            mapped, working = _solving(covariance, self._tokens(covariance))
            maps[blocks[layer]] = maps.get(blocks[layer], 0) + mapped
            works.setdefault(covariance.shape, []).append(working)
        source, target = (saved * self._batch // self._size for saved in self._saved)
        measuring = max(source + kept_inputs, kept_inputs + kept_gradients, kept_gradients + target) + widest
        gradients = [self._statistics.weight_gradients[name] for name in names & set(self._statistics.weight_gradients)]
        held += sum(12 * gradient.total.numel() for gradient in gradients)
        device = self._job.target.device
        work = max((self._at_once(shape, len(each)) * max(each) for shape, each in works.items()), default=0)
        moving = max((_moving(pair) for pair in pairs), default=0)
        solved = min(sum(maps.values()), held_bytes(device) + max(maps.values(), default=0))
        return held + max(measuring, solved + max(work, moving))

    def _at_once(self, shape: tuple[int, int], count: int) -> int:
        """How many maps of a shape are in work together."""
        if self._job.target.device.type == "cpu":
            return 1
        return min(count, max(together_bytes(self._job.target.device) // (8 * shape[0] * shape[1]), 1))

    def _tokens(self, covariance: CrossCovariance) -> int:
        tokens = covariance.tokens * self._samples // self._size
        return min(tokens, self._job.max_tokens or tokens)

    def _held(self, covariance: CrossCovariance) -> int:
        """The bytes of a covariance when all tokens are in, by the rule that it follows itself."""
        rows = self._tokens(covariance) * sum(covariance.shape) * covariance.signal_dtype.itemsize
        dense = 8 * covariance.shape[0] * covariance.shape[1]
        return rows if 2 * rows <= dense else dense


def _solving(covariance: CrossCovariance, tokens: int) -> tuple[int, int]:
    """Bytes of one map, and of the work on it."""
    short, long = sorted(covariance.shape)
    if 3 * tokens <= short:
        return 8 * 2 * tokens * (short + long), 8 * (5 * tokens * (short + long) + 12 * tokens**2)
    return 8 * short * (short + long), 8 * short * (2 * long + 5 * short)


def _moving(pair: LayerPair) -> int:
    """Bytes of a dense update on its way: in source, mixed and target coordinates, in float64."""
    (d_out, d_in), (e_out, e_in) = ((layer.out_features, layer.in_features) for layer in (pair.source, pair.target))
    return 8 * (d_out * d_in + e_out * d_in + e_out * e_in)


def _probe(job: Job) -> tuple[Statistics, tuple[int, int], int]:
    """Statistics of one small batch, the bytes that each model saves for its backward pass, and the batch's size."""
    assert job.source_loss is not None
    assert job.target_loss is not None
    batches: Any = job.batches
    if isinstance(batches, PairedBatches):
        batches = replace(batches, indices=batches.indices[:1])
    elif not isinstance(batches, (list, tuple)):
        raise TuneportError("a memory budget needs batches that can be gone through again: pass a list.")
    elif batches:
        size = count_samples(batches[:1])
        batches = [batches[0] if isinstance(batches[0], PairedBatch) else part_of(batches[0], size, 0, 1)]
    counts = [0, 0]

    def counted(loss: Loss, side: int, module: nn.Module) -> Loss:
        def run(model: nn.Module, batch: Any) -> Tensor:
            with _saved_bytes(module, lambda size: counts.__setitem__(side, counts[side] + size)):
                return loss(model, batch)

        return run

    statistics = measure(
        job.source.module,
        job.target.module,
        job.plan.pairs,
        batches,
        signals=job.method.signals,
        source_loss=counted(job.source_loss, 0, job.source.module),
        target_loss=counted(job.target_loss, 1, job.target.module),
        match=job.match,
    )
    return statistics, (counts[0], counts[1]), statistics.samples


@contextmanager
def _saved_bytes(module: nn.Module, add: Callable[[int], None]) -> Iterator[None]:
    """Count what autograd saves, each storage once, parameters not at all."""
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            add(storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _model_bytes(module: nn.Module) -> int:
    tensors = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _result_bytes(job: Job) -> int:
    """The target's task vector, float32, where its entries are dense."""
    parameters: Mapping[str, Tensor] = dict(job.target.module.named_parameters())
    dense = {
        pair.target.weight
        for pair in job.plan.pairs
        if not job.method.keeps_rank or job.task_vector.spec(pair.source.weight).rank is None
    }
    return sum(4 * parameters[name].numel() for name in dense)
