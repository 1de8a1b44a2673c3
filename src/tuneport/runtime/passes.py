"""How a transfer is divided into runs over the calibration data, and what its parts take.

What sums, kept signals, maps and results take follows from shapes and from the tokens of one batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..errors import TuneportError
from ..io.sizes import format_bytes
from ..job import Job, PairedBatches, runs_on
from ..maps.polar import together_bytes, within
from ..maps.procrustes import CrossCovariance, held_bytes
from ..maps.products import work_bytes
from ..measure.batches import count_samples
from ..measure.signals import INPUT, OUTPUT
from ..models.offload import Placement
from ..pairing import LayerPair
from ..task_vectors.low_rank import LowRank
from .forecast import ShapeSum


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


def in_blocks(job: Job) -> list[Job]:
    """A job for each block of the target; tensors outside layers go with the first."""
    blocks = blocks_of(job.plan.pairs)
    plans = [
        replace(job.plan, pairs=tuple(pairs), loose=job.plan.loose if pairs is blocks[0] else ()) for pairs in blocks
    ]
    return [replace(job, plan=plan) for plan in plans]


def check_by_layer(job: Job, needed: int) -> None:
    if not job.method.by_layer:
        raise TuneportError(
            f"method {job.record.get('method')} moves all layers at once: give it {format_bytes(needed)}, or use "
            "a method that moves them one by one, such as bico."
        )


def grouped(pairs: Iterable[LayerPair], fits: Callable[[list[LayerPair]], bool]) -> list[list[LayerPair]]:
    """Pairs in groups that fit, as long as they can be: whole blocks, or weights where a block does not fit."""
    groups: list[list[LayerPair]] = []
    for block in blocks_of(pairs):
        for unit in [block] if fits(block) else _by_weight(block):
            if groups and fits([*groups[-1], *unit]):
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def units(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The smallest groups that there are."""
    return [unit for block in blocks_of(pairs) for unit in _by_weight(block)]


def blocks_of(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """The pairs of each block of the target, in their order."""
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
        with within(self._job.memory_budget):
            together, held = together_bytes(device), held_bytes(device)
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
