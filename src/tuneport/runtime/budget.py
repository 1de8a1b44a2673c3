"""A transfer within a given memory: what lives where, which layers are measured in which pass, and the peak to expect.

Where statistics outgrow the memory, layers are measured in groups, with one run over the calibration data for each, and
a group's statistics are gone before the next begins. Where models do, their blocks stay at home (RAM under a GPU, files
under RAM) and come when they run. The numbers do not change. Models in place are tried with one small batch
before any work; models at home are tried on shapes alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TuneportError
from ..io.sizes import format_bytes, free_memory
from ..job import Job, PairedBatches, at_home, runs_on
from ..maps.covariance import CrossCovariance, work_bytes
from ..maps.polar import together_bytes
from ..maps.procrustes import held_bytes
from ..maps.statistics import Statistics
from ..measure.batches import PairedBatch, count_samples, part_of, samples_at_once
from ..measure.capture import measure_pairs
from ..measure.signals import INPUT, NEEDS_BACKWARD, OUTPUT
from ..models.offload import Placement, block_paths, bytes_of, sizes
from ..pairing import LayerPair
from ..task_vectors.low_rank import LowRank
from ..types import Loss
from .forecast import Forecast, ShapeSum, foretell
from .passes import Passes, check_by_layer, grouped, units

SLACK = 0.08  # of a GPU's budget: what its libraries take for themselves, and what a forecast may miss


def plan_passes(job: Job, budget: int | None, forecast: Forecast | None = None) -> Passes:
    """Divide a job's layers so that the expected peak stays within the budget; None for all of them at once.

    A `forecast` of the same models and batches, where there is one, need not be made again.
    """
    if budget is not None and at_home(job):
        if not job.method.signals:  # the models never run
            pairs = job.plan.pairs
            return Passes((pairs,), result_bytes(job), (Sums(job, {}, 1).solving(pairs),))
        return _Placing(job, budget, forecast).passes()
    cost = _Cost(job)
    if budget is None:
        return Passes((job.plan.pairs,), cost.fixed, (cost.of(job.plan.pairs),))
    groups = grouped(job.plan.pairs, lambda pairs: cost.fixed + cost.of(pairs) <= budget)
    found = Passes(tuple(tuple(group) for group in groups), cost.fixed, tuple(cost.of(group) for group in groups))
    if found.peak_bytes > budget:
        raise TuneportError(
            f"a memory budget of {format_bytes(budget)} is too small: the models and the result take "
            f"{format_bytes(cost.fixed)}, the largest layer {format_bytes(max(found.group_bytes))} besides. Give at "
            f"least {format_bytes(found.peak_bytes)}, a smaller --batch-size, or fewer --max-tokens."
        )
    if len(groups) > 1:
        check_by_layer(job, cost.peak())
    return found


def _within(bound: Callable[[Sequence[LayerPair]], int], room: int) -> Callable[[list[LayerPair]], bool]:
    return lambda group: bound(group) <= room


class _Cost:
    """What groups of layers take with both models in place, from one small batch through them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        modules = (job.source.module, job.target.module)
        self.fixed = sum(bytes_of((*module.parameters(), *module.buffers())) for module in modules) + result_bytes(job)
        self._statistics, self._saved, self._size = _probe(job) if job.method.signals else (Statistics(), (0, 0), 1)
        most = samples_at_once(job.target.device)
        self._sums = Sums(job, self._statistics.covariances, self._size, most)

    def peak(self) -> int:
        return self.fixed + self.of(self._job.plan.pairs)

    def of(self, pairs: Iterable[LayerPair]) -> int:
        """The peak of measuring and solving these pairs, beyond the fixed bytes."""
        pairs = list(pairs)
        sums = self._sums
        forward, backward = sums.kept(pairs)
        source, target = (saved * sums.batch // self._size for saved in self._saved)
        measuring = max(source + forward, forward + backward, backward + target) + sums.widest(pairs)
        names = {pair.target.name for pair in pairs} & set(self._statistics.weight_gradients)
        held = sums.held(pairs) + sum(12 * self._statistics.weight_gradients[name].total.numel() for name in names)
        return held + max(measuring, sums.solving(pairs))


class _Placing:
    """The division of a job whose models are at home: what comes to the device for good, what when it runs."""

    def __init__(self, job: Job, budget: int, forecast: Forecast | None) -> None:
        self._job, self._budget = job, budget
        self._device = runs_on(job)
        self._room = budget if self._device.type == "cpu" else int(budget * (1 - SLACK))
        self._models = (job.source, job.target)
        self._paths = [block_paths(model.layers) for model in self._models]
        found = [sizes(model.module, paths) for model, paths in zip(self._models, self._paths, strict=True)]
        self._rest, self._blocks = [rest for rest, _ in found], [blocks for _, blocks in found]
        self._forecast: Forecast = foretell(job) if forecast is None else forecast.of_part(job)
        self._sums = Sums(job, self._forecast.sums, self._forecast.size)
        whole = result_bytes(job)
        here = result_device(job).type == self._device.type
        self._shelved = job.method.by_layer and (
            (here and whole > self._room // 4) or (not here and whole + self._models_bytes() > free_memory())
        )
        self._result = whole if here and not self._shelved else 0  # held on the device to the end
        self._shelving = result_bytes(job, by_block=True) if here and self._shelved else 0

    def passes(self) -> Passes:
        pairs = self._job.plan.pairs
        whole = self._placements(anew=False)
        if self._peak(pairs, whole) <= self._room:
            return self._found([pairs], whole)
        away = self._placements(anew=True, fetched=self._paths)
        if self._peak(pairs, away) <= self._room:
            return self._found([pairs], self._with_guests(pairs, away))
        groups = self._divided(away)
        if len(groups) > 1:
            check_by_layer(self._job, self._peak(pairs, away))
        return self._found(groups, away)

    def _divided(self, away: tuple[Placement, Placement]) -> list[tuple[LayerPair, ...]]:
        """Groups whose peaks stay within the room; tried, and divided further where the first guess was short."""
        pairs = self._job.plan.pairs
        spare = self._room - self._fixed(away)
        bound = self._bound(away)
        largest = max(map(bound, units(pairs)))
        groups: list[tuple[LayerPair, ...]] = []
        for _ in range(8):
            if largest > spare:
                break
            groups = [tuple(group) for group in grouped(pairs, _within(bound, spare))]
            over = max(self._peak(group, away) for group in sorted(groups, key=bound)[-2:]) - self._room
            if over <= 0:
                return groups
            spare -= over
        least_room = (self._fixed(away) + largest + max(self._room - self._fixed(away) - spare, 0)) / self._room
        raise TuneportError(
            f"a memory budget of {format_bytes(self._budget)} is too small: what is outside the blocks takes "
            f"{format_bytes(self._fixed(away))} and the largest layer {format_bytes(largest)} besides. Give at least "
            f"{format_bytes(least_room * self._budget)}, a smaller --batch-size, or fewer --max-tokens."
        )

    def _bound(self, away: tuple[Placement, Placement]) -> Callable[[Sequence[LayerPair]], int]:
        """What a group takes at most beyond what is fixed, without a run on shapes for each."""
        pairs = self._job.plan.pairs
        least = max(self._live(few, away) for few in (pairs[:1], pairs[-1:]))
        outside = self._fixed(away) - self._result - self._shelving

        def bound(group: Sequence[LayerPair]) -> int:
            kept = sum(self._sums.kept(group))
            return self._sums.held(group) + max(least + kept, self._sums.solving(group) - outside)

        return bound

    def _with_guests(
        self, pairs: Sequence[LayerPair], away: tuple[Placement, Placement]
    ) -> tuple[Placement, Placement]:
        """As many blocks as there is room for stay on the device."""
        spare = self._room - self._peak(pairs, away)
        fetched = [list(paths) for paths in self._paths]
        for side in (1, 0):
            for path, size in self._blocks[side].items():
                if size <= spare:
                    spare -= size
                    fetched[side].remove(path)
        return self._placements(anew=True, fetched=fetched)

    def _placements(self, *, anew: bool, fetched: Sequence[Sequence[str]] = ((), ())) -> tuple[Placement, Placement]:
        ours, theirs = (
            Placement(
                self._device,
                paths if anew else (),
                frozenset(gone),
                model.parameters() if model.offloaded else None,
            )
            for model, paths, gone in zip(self._models, self._paths, fetched, strict=True)
        )
        return ours, theirs

    def _fixed(self, placements: tuple[Placement, Placement]) -> int:
        """What is on the device for good."""
        stays = [
            rest + sum(size for path, size in blocks.items() if path not in placement.fetched)
            for rest, blocks, placement in zip(self._rest, self._blocks, placements, strict=True)
        ]
        return sum(stays) + self._result

    def _peak(self, pairs: Sequence[LayerPair], placements: tuple[Placement, Placement]) -> int:
        """Measuring with what is on the device for good, or solving without the models."""
        measuring = self._fixed(placements) + self._live(pairs, placements)
        return self._sums.held(pairs) + max(measuring, self._result + self._shelving + self._sums.solving(pairs))

    def _live(self, pairs: Sequence[LayerPair], placements: tuple[Placement, Placement]) -> int:
        """What one batch takes at its worst; that some blocks stay makes it less by one of them at most."""
        gone = [frozenset(placement.blocks) for placement in placements]
        ours, theirs = (replace(p, fetched=blocks) for p, blocks in zip(placements, gone, strict=True))
        return self._forecast.peak(pairs, (ours, theirs))

    def _found(self, groups: Sequence[Sequence[LayerPair]], placements: tuple[Placement, Placement]) -> Passes:
        fixed = self._fixed(placements)
        if len(groups) == 1:
            parts: tuple[int, ...] = (self._peak(groups[0], placements) - fixed,)
        else:
            bound = self._bound(placements)
            highest = max(self._peak(group, placements) for group in sorted(groups, key=bound)[-2:]) - fixed
            parts = tuple(min(bound(group), highest) for group in groups)
        coming = sum(
            size
            for blocks, placement in zip(self._blocks, placements, strict=True)
            for path, size in blocks.items()
            if path in placement.fetched
        )
        times = 2 if NEEDS_BACKWARD & self._job.method.signals else 1
        batches = -(-self._forecast.samples // self._forecast.size)
        stay = sum(self._rest) + sum(sum(blocks.values()) for blocks in self._blocks) - coming
        home = self._models_bytes() + (
            0 if result_device(self._job).type == self._device.type else result_bytes(self._job)
        )
        fetched = len(groups) * (stay + times * batches * coming)
        division = tuple(tuple(group) for group in groups)
        return Passes(division, fixed, parts, placements, home, fetched, self._shelved)

    def _models_bytes(self) -> int:
        return sum(self._rest) + sum(sum(blocks.values()) for blocks in self._blocks)


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

    statistics = measure_pairs(
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


class Sums:
    """What the statistics of groups of layers take, from the sums of one small batch."""

    def __init__(
        self, job: Job, sums: Mapping[tuple[str, str], CrossCovariance | ShapeSum], size: int, most: int | None = None
    ) -> None:
        """`size` samples gave the `sums`; at most `most` run at once, whatever the batches."""
        self._job, self._sums, self._size = job, sums, size
        self._samples = job.samples or (count_samples(job.batches) if isinstance(job.batches, (list, tuple)) else size)
        self.batch = self._samples
        if isinstance(job.batches, PairedBatches):
            self.batch = min(job.batches.size, self._samples)
        elif isinstance(job.batches, (list, tuple)):
            self.batch = max((count_samples([batch]) for batch in job.batches), default=1)
        self.batch = min(self.batch, most or self.batch)

    def held(self, pairs: Iterable[LayerPair]) -> int:
        """The statistics when all tokens are in."""
        return sum(self._held(found) for _, found in self._of(pairs))

    def kept(self, pairs: Iterable[LayerPair]) -> tuple[int, int]:
        """The source's inputs or outputs, and its gradients, that one batch keeps for the target."""
        forward = backward = 0
        for (_, signal), found in self._of(pairs):
            size = self._rows(found) * found.shape[0] * found.signal_dtype.itemsize
            forward, backward = (forward + size, backward) if signal in (INPUT, OUTPUT) else (forward, backward + size)
        return forward, backward

    def widest(self, pairs: Iterable[LayerPair]) -> int:
        """The work on one piece of a batch."""
        device = runs_on(self._job)
        return max(
            (work_bytes(self._rows(found), found.shape, found.signal_dtype, device) for _, found in self._of(pairs)),
            default=0,
        )

    def solving(self, pairs: Sequence[LayerPair]) -> int:
        """Maps, the work on them, and an update on its way."""
        maps: dict[tuple[str, int | None], int] = {}
        works: dict[tuple[int, int], list[int]] = {}
        blocks = {pair.target.name: (pair.target.stack, pair.target.block) for pair in pairs}
        device = runs_on(self._job)
        for (layer, _), found in self._of(pairs):
            mapped, working = _solving(found.shape, self.tokens(found), device)
            maps[blocks[layer]] = maps.get(blocks[layer], 0) + mapped
            works.setdefault(found.shape, []).append(working)
        moving = max((_moving(pair) for pair in pairs), default=0)
        together, held = (size(device, self._job.memory_budget) for size in (together_bytes, held_bytes))
        at_once = {
            shape: 1 if device.type == "cpu" else min(len(each), max(together // (8 * shape[0] * shape[1]), 1))
            for shape, each in works.items()
        }
        work = max((at_once[shape] * max(each) for shape, each in works.items()), default=0)
        return min(sum(maps.values()), held + max(maps.values(), default=0)) + max(work, moving)

    def tokens(self, found: CrossCovariance | ShapeSum) -> int:
        """The tokens of all samples that a sum will have seen."""
        tokens = found.tokens * self._samples // self._size
        return min(tokens, self._job.max_tokens or tokens)

    def _of(self, pairs: Iterable[LayerPair]) -> Iterator[tuple[tuple[str, str], CrossCovariance | ShapeSum]]:
        names = {pair.target.name for pair in pairs}
        seen: set[int] = set()
        for key, found in self._sums.items():
            if key[0] in names and id(found) not in seen:
                seen.add(id(found))
                yield key, found

    def _rows(self, found: CrossCovariance | ShapeSum) -> int:
        return found.tokens * self.batch // self._size

    def _held(self, found: CrossCovariance | ShapeSum) -> int:
        """The bytes of a sum when all tokens are in, by the rule that it follows itself."""
        rows = self.tokens(found) * sum(found.shape) * found.signal_dtype.itemsize
        dense = 8 * found.shape[0] * found.shape[1]
        return rows if 2 * rows <= dense else dense


def result_device(job: Job) -> torch.device:
    """Where the result will be: where the source's task vector is."""
    smallest = min(
        (pair.source.weight for pair in job.plan.pairs), key=lambda name: math.prod(job.task_vector.spec(name).shape)
    )
    entry = job.task_vector[smallest]
    found = entry.out_factor.device if isinstance(entry, LowRank) else entry.device
    return torch.device("cpu") if found.type == "meta" else found


def _solving(shape: tuple[int, int], tokens: int, device: torch.device) -> tuple[int, int]:
    """Bytes of one map, and of the work on it: by eigenvectors on a CPU, elsewhere by an iteration for any rank."""
    short, long = sorted(shape)
    if 3 * tokens <= short:
        return 8 * 2 * tokens * (short + long), 8 * (5 * tokens * (short + long) + 12 * tokens**2)
    work = 2 * long + 5 * short if device.type == "cpu" else 5 * long + 8 * short
    return 8 * short * (short + long), 8 * short * work


def _moving(pair: LayerPair) -> int:
    """Bytes of a dense update on its way: in source, mixed and target coordinates, in float64."""
    (d_out, d_in), (e_out, e_in) = ((layer.out_features, layer.in_features) for layer in (pair.source, pair.target))
    return 8 * (d_out * d_in + e_out * d_in + e_out * e_in)


def result_bytes(job: Job, by_block: bool = False) -> int:
    """The target's task vector, float32, where its entries are dense; or its largest block."""
    dense: dict[tuple[str, int | None], dict[str, int]] = {}
    for pair in job.plan.pairs:
        if not job.method.keeps_rank or job.task_vector.spec(pair.source.weight).rank is None:
            block = dense.setdefault((pair.target.stack, pair.target.block), {})
            block[pair.target.weight] = 4 * math.prod(pair.target.weight_shape)
    found = [sum(block.values()) for block in dense.values()]
    return max(found, default=0) if by_block else sum(found)
