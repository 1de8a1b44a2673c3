"""Fit a transfer into a memory budget: where models and result are, which layers are measured in which pass, the peak.

If statistics exceed the budget, layers are measured in groups, with one run over the calibration data each, and the
statistics of a group are freed before the next group starts. If models exceed it, their blocks stay off the device (in
RAM for a GPU, in files for a CPU) and are fetched when they run. The results do not change. The peak comes from
`forecast`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..errors import TuneportError
from ..io.sizes import format_bytes, free_memory
from ..job import Job
from ..measure.signals import NEEDS_BACKWARD
from ..methods import Method, get_method
from ..models.offload import Placement, block_paths, sizes
from ..pairing import LayerPair
from ..types import Sides
from .forecast import Forecast, NeedsValuesError
from .passes import Passes, check_by_layer, grouped, units

SLACK = 0.08  # of a GPU's budget, for its libraries and for errors of the forecast

Placements = Sides[Placement]


def plan_passes(
    job: Job, budget: int | None, forecast: Forecast | None = None, *, method: str | Method = "bico"
) -> Passes:
    """Divide a job's layers so that the predicted peak stays within `budget` bytes; None: all layers at once.

    A `forecast` of the same models and batches, if there is one, is used again.
    """
    method = get_method(method)
    job = job.for_(method)
    offloaded = budget is not None and job.needs_placement
    if forecast is not None:
        forecast = forecast.of_part(job)
    else:
        try:
            forecast = Forecast.of(job)
        except NeedsValuesError:
            if offloaded:
                raise
            forecast = Forecast.of(job, on_meta=False)
    if not offloaded:
        return _InPlace(job, method, budget, forecast).passes()
    if not job.signals:  # the models never run
        pairs = job.plan.pairs
        return Passes((pairs,), result_bytes(job, method), (forecast.solving_bytes(pairs),))
    return _Offloaded(job, method, budget, forecast).passes()


class _InPlace:
    """The division of a job whose models are on the device they run on."""

    fixed = "the models and the result take"

    def __init__(self, job: Job, method: Method, budget: int | None, forecast: Forecast) -> None:
        self._job, self._method, self._budget, self._forecast = job, method, budget, forecast
        self._device = job.runs_on
        slack = 0.0 if self._device.type == "cpu" else SLACK
        self._limit = math.inf if budget is None else int(budget * (1 - slack))
        self._models = (job.source, job.target)
        self._paths = [block_paths(model.layers) for model in self._models]
        found = [sizes(model.module, paths) for model, paths in zip(self._models, self._paths, strict=True)]
        self._rest, self._blocks = [rest for rest, _ in found], [blocks for _, blocks in found]
        self._result = result_bytes(job, method)  # on the device to the end

    def passes(self) -> Passes:
        pairs = self._job.plan.pairs
        groups = [pairs] if self._peak(pairs, None) <= self._limit else self._divided(None)
        return Passes(tuple(groups), self._fixed(None), self._group_bytes(groups, None))

    def _models_bytes(self) -> int:
        return sum(self._rest) + sum(sum(blocks.values()) for blocks in self._blocks)

    def _fixed(self, placements: Placements | None) -> int:
        """The bytes that are on the device all the time while models run."""
        del placements
        return self._models_bytes() + self._result

    def _solving(self, pairs: Sequence[LayerPair]) -> int:
        """The peak while maps are solved, without statistics."""
        return self._fixed(None) + self._forecast.solving_bytes(pairs)

    def _live(self, pairs: Sequence[LayerPair], placements: Placements | None) -> int:
        """The most that one batch needs."""
        return self._forecast.peak(pairs, placements)

    def _peak(self, pairs: Sequence[LayerPair], placements: Placements | None) -> int:
        """The peak of measuring and solving these pairs."""
        measuring = self._fixed(placements) + self._live(pairs, placements)
        return self._forecast.statistics_bytes(pairs) + max(measuring, self._solving(pairs))

    def _bound(self, placements: Placements | None) -> Callable[[Sequence[LayerPair]], int]:
        """An upper bound on a group's bytes beyond the fixed ones, which needs no run of the forecast."""
        pairs = self._job.plan.pairs
        least = max(self._live(few, placements) for few in (pairs[:1], pairs[-1:]))
        fixed = self._fixed(placements)

        def bound(group: Sequence[LayerPair]) -> int:
            measuring = least + self._forecast.signal_bytes(group)
            return self._forecast.statistics_bytes(group) + max(measuring, self._solving(group) - fixed)

        return bound

    def _divided(self, placements: Placements | None) -> list[tuple[LayerPair, ...]]:
        """Groups whose peaks stay within the budget: by the bound, and smaller if the forecast of a group is higher."""
        pairs = self._job.plan.pairs
        fixed, bound = self._fixed(placements), self._bound(placements)
        limit = spare = int(self._limit) - fixed
        largest = max(map(bound, units(pairs)))
        for _ in range(8):
            if largest > spare:
                break
            groups = [tuple(group) for group in grouped(pairs, _fits(bound, spare))]
            over = max(self._peak(group, placements) for group in sorted(groups, key=bound)[-2:]) - int(self._limit)
            if over <= 0:
                if len(groups) > 1:
                    check_by_layer(self._method, self._peak(pairs, placements))
                return groups
            spare -= over
        assert self._budget is not None
        least = (fixed + largest + max(limit - spare, 0)) / self._limit * self._budget
        raise TuneportError(
            f"a `memory_budget` of {format_bytes(self._budget)} is too small: {self.fixed} {format_bytes(fixed)}, and "
            f"the largest layer {format_bytes(largest)}. Give at least {format_bytes(least)}, a smaller `batch_size`, "
            "or fewer `max_tokens`."
        )

    def _group_bytes(self, groups: Sequence[Sequence[LayerPair]], placements: Placements | None) -> tuple[int, ...]:
        """The bytes of each group beyond the fixed ones."""
        fixed = self._fixed(placements)
        if len(groups) == 1:
            return (self._peak(groups[0], placements) - fixed,)
        bound = self._bound(placements)
        highest = max(self._peak(group, placements) for group in sorted(groups, key=bound)[-2:]) - fixed
        return tuple(min(bound(group), highest) for group in groups)


class _Offloaded(_InPlace):
    """The division of a job whose models are not on the device: which blocks stay there, which are fetched to run."""

    fixed = "the tensors outside the blocks take"

    def __init__(self, job: Job, method: Method, budget: int | None, forecast: Forecast) -> None:
        super().__init__(job, method, budget, forecast)
        whole = self._result
        on_device = result_device(job).type == self._device.type
        self._in_files = method.by_layer and (
            (on_device and whole > int(self._limit) // 4)
            or (not on_device and whole + self._models_bytes() > free_memory())
        )
        self._result = whole if on_device and not self._in_files else 0
        self._one_block = result_bytes(job, method, by_block=True) if on_device and self._in_files else 0
        self._host_bytes = self._models_bytes() + (0 if on_device else whole)

    def passes(self) -> Passes:
        pairs = self._job.plan.pairs
        placements = self._placements(recomputed=False)
        groups = [pairs]
        if self._peak(pairs, placements) > self._limit:
            placements = self._placements(recomputed=True, fetched=self._paths)
            if self._peak(pairs, placements) <= self._limit:
                placements = self._with_resident_blocks(pairs, placements)
            else:
                groups = self._divided(placements)
        return Passes(
            tuple(groups),
            self._fixed(placements),
            self._group_bytes(groups, placements),
            placements,
            self._host_bytes,
            self._fetched_bytes(len(groups), placements),
            self._in_files,
        )

    def _with_resident_blocks(self, pairs: Sequence[LayerPair], placements: Placements) -> Placements:
        """Keep as many blocks on the device as fit."""
        spare = self._limit - self._peak(pairs, placements)
        fetched = [list(paths) for paths in self._paths]
        for side in (1, 0):
            for path, size in self._blocks[side].items():
                if size <= spare:
                    spare -= size
                    fetched[side].remove(path)
        return self._placements(recomputed=True, fetched=fetched)

    def _placements(self, *, recomputed: bool, fetched: Sequence[Sequence[str]] = ((), ())) -> Placements:
        each = (
            Placement(
                self._device,
                paths if recomputed else (),
                frozenset(own),
                model.parameters() if model.offloaded else None,
            )
            for model, paths, own in zip(self._models, self._paths, fetched, strict=True)
        )
        return Sides(*each)

    def _fixed(self, placements: Placements | None) -> int:
        assert placements is not None
        return self._models_bytes() - self._coming(placements) + self._result

    def _solving(self, pairs: Sequence[LayerPair]) -> int:
        return self._result + self._one_block + self._forecast.solving_bytes(pairs)  # the models are gone by then

    def _live(self, pairs: Sequence[LayerPair], placements: Placements | None) -> int:
        """The most that one batch needs, as if every block were fetched: at most one block too much."""
        assert placements is not None
        fetched = Sides(*(replace(placement, fetched=frozenset(placement.blocks)) for placement in placements))
        return self._forecast.peak(pairs, fetched)

    def _coming(self, placements: Placements) -> int:
        """The bytes of the blocks that are fetched."""
        return sum(
            size
            for blocks, placement in zip(self._blocks, placements, strict=True)
            for path, size in blocks.items()
            if path in placement.fetched
        )

    def _fetched_bytes(self, runs: int, placements: Placements) -> int:
        """The bytes that come to the device in all runs over the samples."""
        coming = self._coming(placements)
        times = 2 if NEEDS_BACKWARD & self._job.signals else 1
        batches = -(-self._forecast.samples // self._forecast.size)
        return runs * (self._models_bytes() - coming + times * batches * coming)


def _fits(bound: Callable[[Sequence[LayerPair]], int], most: int) -> Callable[[Sequence[LayerPair]], bool]:
    return lambda group: bound(group) <= most


def result_device(job: Job) -> torch.device:
    """The device of the result: that of the source's task vector."""
    smallest = min(
        (pair.source.weight for pair in job.plan.pairs), key=lambda name: math.prod(job.task_vector.spec(name).shape)
    )
    entry = job.task_vector[smallest]
    found = entry.device
    return torch.device("cpu") if found.type == "meta" else found


def result_bytes(job: Job, method: Method, by_block: bool = False) -> int:
    """The dense entries of the target's task vector in float32; with `by_block`, those of its largest block."""
    dense: dict[tuple[str, int | None], dict[str, int]] = {}
    for pair in job.plan.pairs:
        if not method.keeps_rank or job.task_vector.spec(pair.source.weight).rank is None:
            block = dense.setdefault((pair.target.stack, pair.target.block), {})
            block[pair.target.weight] = 4 * math.prod(pair.target.weight_shape)
    found = [sum(block.values()) for block in dense.values()]
    return max(found, default=0) if by_block else sum(found)
