"""A transfer within a given memory: what lives where, which layers are measured in which pass, and the peak to expect.

Where statistics outgrow the memory, layers are measured in groups, with one run over the calibration data for each, and
a group's statistics are gone before the next begins. Where models do, their blocks stay at home (RAM under a GPU, files
under RAM) and come when they run. The numbers do not change. Models in place are tried with one small batch
before any work; models at home are tried on shapes alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from .alignment import HELD, PIECE, CrossCovariance, Statistics
from .capture import INPUT, NEEDS_BACKWARD, OUTPUT, Loss, PairedBatch, count_samples, measure
from .errors import TuneportError
from .forecast import Forecast, ShapeSum, foretell
from .offload import Placement, block_paths, bytes_of, is_hollow, sizes
from .pairing import LayerPair
from .preparation import Job, PairedBatches, free_memory
from .solver import STREAMS
from .task_vector import LowRank

UNITS = {"": 1, "B": 1, **{f"{k}B": 1000**i for i, k in enumerate("KMGT", 1)}}
SLACK = 0.03  # of a GPU's budget: what its libraries take for themselves
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

    `fixed_bytes` are the models and the result, as far as they are in this memory; `group_bytes` what each group takes
    besides; the peak is the largest of these sums. `placements` say where both models are while they run, where
    that is not where they were given; `home_bytes` is what stays at home, `fetched_bytes` what comes from there
    in all runs together, and `shelved` whether the result goes to a file of its own, block by block.
    """

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int
    group_bytes: tuple[int, ...]
    placements: tuple[Placement, Placement] | None = None
    home_bytes: int = 0
    fetched_bytes: int = 0
    shelved: bool = False

    @property
    def peak_bytes(self) -> int:
        return self.fixed_bytes + max(self.group_bytes, default=0)


def plan_passes(job: Job, budget: int | None) -> Passes:
    """Divide a job's layers so that the expected peak stays within the budget; None for all of them at once."""
    if budget is not None and _at_home(job):
        return _Placing(job, budget).passes()
    cost = _Cost(job)
    if budget is None:
        return Passes((job.plan.pairs,), cost.fixed, (cost.of(job.plan.pairs),))
    groups = _grouped(job.plan.pairs, lambda pairs: cost.fixed + cost.of(pairs) <= budget)
    found = Passes(tuple(tuple(group) for group in groups), cost.fixed, tuple(cost.of(group) for group in groups))
    if found.peak_bytes > budget:
        raise TuneportError(
            f"a memory budget of {format_bytes(budget)} is too small: the models and the result take "
            f"{format_bytes(cost.fixed)}, the largest layer {format_bytes(max(found.group_bytes))} besides. Give at "
            f"least {format_bytes(found.peak_bytes)}, a smaller --batch-size, or fewer --max-tokens."
        )
    if len(groups) > 1:
        _check_by_layer(job, cost.peak())
    return found


def in_blocks(job: Job) -> list[Job]:
    """A job for each block of the target; tensors outside layers go with the first."""
    blocks = _by_block(job.plan.pairs)
    plans = [
        replace(job.plan, pairs=tuple(pairs), loose=job.plan.loose if pairs is blocks[0] else ()) for pairs in blocks
    ]
    return [replace(job, plan=plan) for plan in plans]


def _check_by_layer(job: Job, needed: int) -> None:
    if not job.method.by_layer:
        raise TuneportError(
            f"method {job.record.get('method')} moves all layers at once: give it {format_bytes(needed)}, or use "
            "a method that moves them one by one, such as bico."
        )


def _grouped(pairs: Iterable[LayerPair], fits: Callable[[list[LayerPair]], bool]) -> list[list[LayerPair]]:
    """Pairs in groups that fit, as long as they can be: whole blocks, or weights where a block does not fit."""
    groups: list[list[LayerPair]] = []
    for block in _by_block(pairs):
        for unit in [block] if fits(block) else _by_weight(block):
            if groups and fits([*groups[-1], *unit]):
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def _units(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The smallest groups that there are."""
    return [unit for block in _by_block(pairs) for unit in _by_weight(block)]


def _by_block(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    return [list(group) for _, group in groupby(pairs, key=lambda p: (p.target.stack, p.target.block))]


def in_groups(job: Job, passes: Passes | None) -> list[Job]:
    """A job for each group; tensors outside layers go with the first."""
    if passes is None:
        return [job]
    job = replace(job, placements=passes.placements)
    if len(passes.groups) < 2:
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


class _Sums:
    """What the statistics of groups of layers take, from the sums of one small batch."""

    def __init__(self, job: Job, sums: Mapping[tuple[str, str], CrossCovariance | ShapeSum], size: int) -> None:
        self._job, self._sums, self._size = job, sums, size
        self._samples = job.samples or (count_samples(job.batches) if isinstance(job.batches, (list, tuple)) else size)
        self.batch = self._samples
        if isinstance(job.batches, PairedBatches):
            self.batch = min(job.batches.size, self._samples)
        elif isinstance(job.batches, (list, tuple)):
            self.batch = max((count_samples([batch]) for batch in job.batches), default=1)

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
        """One piece of a batch in the dtype of the sums."""
        return max((8 * min(self._rows(found), PIECE) * sum(found.shape) for _, found in self._of(pairs)), default=0)

    def solving(self, pairs: Sequence[LayerPair]) -> int:
        """Maps, the work on them, and an update on its way."""
        maps: dict[tuple[str, int | None], int] = {}
        blocks = {pair.target.name: (pair.target.stack, pair.target.block) for pair in pairs}
        work = 0
        for (layer, _), found in self._of(pairs):
            mapped, working = _solving(found.shape, self.tokens(found))
            maps[blocks[layer]] = maps.get(blocks[layer], 0) + mapped
            work = max(work, working)
        streams = STREAMS if runs_on(self._job).type == "cuda" else 1
        moving = max((_moving(pair) for pair in pairs), default=0)
        return min(sum(maps.values()), HELD + max(maps.values(), default=0)) + max(streams * work, moving)

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


class _Cost:
    """What groups of layers take with both models in place, from one small batch through them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        modules = (job.source.module, job.target.module)
        self.fixed = sum(bytes_of((*module.parameters(), *module.buffers())) for module in modules) + _result_bytes(job)
        self._statistics, self._saved, self._size = _probe(job) if job.method.signals else (Statistics(), (0, 0), 1)
        self._sums = _Sums(job, self._statistics.covariances, self._size)

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

    def __init__(self, job: Job, budget: int) -> None:
        self._job, self._budget = job, budget
        self._device = runs_on(job)
        self._room = budget if self._device.type == "cpu" else int(budget * (1 - SLACK))
        self._models = (job.source, job.target)
        self._paths = [block_paths(model.layers) for model in self._models]
        found = [sizes(model.module, paths) for model, paths in zip(self._models, self._paths, strict=True)]
        self._rest, self._blocks = [rest for rest, _ in found], [blocks for _, blocks in found]
        self._forecast: Forecast = foretell(job)
        self._sums = _Sums(job, self._forecast.sums, self._forecast.size)
        whole = _result_bytes(job)
        here = result_device(job).type == self._device.type
        self._shelved = job.method.by_layer and (
            (here and whole > self._room // 4) or (not here and whole + self._models_bytes() > free_memory())
        )
        self._result = whole if here and not self._shelved else 0  # held on the device to the end
        self._shelving = _result_bytes(job, by_block=True) if here and self._shelved else 0
        self._known: dict[Any, int] = {}

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
            _check_by_layer(self._job, self._peak(pairs, away))
        return self._found(groups, away)

    def _divided(self, away: tuple[Placement, Placement]) -> list[tuple[LayerPair, ...]]:
        """Groups whose peaks stay within the room; tried, and divided further where the first guess was short."""
        pairs = self._job.plan.pairs
        spare = self._room - self._fixed(away)
        bound = self._bound(away)
        largest = max(map(bound, _units(pairs)))
        groups: list[tuple[LayerPair, ...]] = []
        for _ in range(4):
            if largest > spare:
                break
            groups = [tuple(group) for group in _grouped(pairs, lambda group: bound(group) <= spare)]
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

    def _placements(
        self, *, anew: bool, fetched: Sequence[Sequence[str]] = ((), ())
    ) -> tuple[Placement, Placement]:
        ours, theirs = (
            Placement(self._device, paths if anew else (), frozenset(gone), model.parameters() if is_hollow(model.module) else None)
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
        """What one batch takes at its worst; each case is run on shapes once."""
        key = (tuple(pair.target.name for pair in pairs), *((p.blocks, p.fetched) for p in placements))
        if key not in self._known:
            self._known[key] = self._forecast.peak(pairs, placements)
        return self._known[key]

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
        home = self._models_bytes() + (0 if result_device(self._job).type == self._device.type else _result_bytes(self._job))
        fetched = len(groups) * (stay + times * batches * coming)
        division = tuple(tuple(group) for group in groups)
        return Passes(division, fixed, parts, placements, home, fetched, self._shelved)

    def _models_bytes(self) -> int:
        return sum(self._rest) + sum(sum(blocks.values()) for blocks in self._blocks)


def runs_on(job: Job) -> torch.device:
    """Where a job's models run and its maps are solved."""
    at_home = job.device is not None and (job.placements is not None or _at_home(job))
    return job.device if at_home and job.device is not None else job.target.device


def result_device(job: Job) -> torch.device:
    """Where the result will be: where the source's task vector is."""
    smallest = min(
        (pair.source.weight for pair in job.plan.pairs), key=lambda name: math.prod(job.task_vector.spec(name).shape)
    )
    entry = job.task_vector[smallest]
    found = entry.out_factor.device if isinstance(entry, LowRank) else entry.device
    return torch.device("cpu") if found.type == "meta" else found


def _at_home(job: Job) -> bool:
    """Whether the models are elsewhere than where they are to run."""
    return any(
        is_hollow(model.module) or (job.device is not None and model.device.type != job.device.type)
        for model in (job.source, job.target)
    )


def _solving(shape: tuple[int, int], tokens: int) -> tuple[int, int]:
    """Bytes of one map, and of the work on it."""
    short, long = sorted(shape)
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
        batches = [batches[0] if isinstance(batches[0], PairedBatch) else _first_sample(batches[0], size)]
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


def _first_sample(batch: Any, size: int) -> Any:
    """The first of `size` samples, in the same nest of tensors."""
    if isinstance(batch, Tensor):
        return batch[:1] if batch.ndim and len(batch) == size else batch
    if isinstance(batch, Mapping):
        return {key: _first_sample(value, size) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_first_sample(value, size) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


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


def _result_bytes(job: Job, by_block: bool = False) -> int:
    """The target's task vector, float32, where its entries are dense; or its largest block."""
    dense: dict[tuple[str, int | None], dict[str, int]] = {}
    for pair in job.plan.pairs:
        if not job.method.keeps_rank or job.task_vector.spec(pair.source.weight).rank is None:
            block = dense.setdefault((pair.target.stack, pair.target.block), {})
            block[pair.target.weight] = 4 * math.prod(pair.target.weight_shape)
    found = [sum(block.values()) for block in dense.values()]
    return max(found, default=0) if by_block else sum(found)
