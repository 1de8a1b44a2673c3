"""Fit a transfer into memory: where models and result are, which layers are measured in which run, the peak.

If statistics exceed the budget, layers are measured in groups, one after the other. If models exceed it, their blocks
stay off the device (in RAM for a GPU, in files for a CPU) and are fetched when they run. The results do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import TuneportError
from ..io.sizes import format_bytes, free_memory
from ..maps.statistics import CrossCovariance
from ..measure.samples import Measurement
from ..measure.signals import NEEDS_BACKWARD
from ..methods import Method, name_of
from ..models.offload import Placement, block_paths, sizes
from ..pairing import LayerPair, Plan, blocks_of
from ..processes import from_all
from ..task_vectors.vector import TaskVector
from ..types import Sides, Signal
from .forecast import Forecast, NeedsValuesError

SLACK = 0.08  # of a GPU's budget, for its libraries and for errors of the forecast
MILLION = 1e6
COPIES = 3  # sums of a signal that are held while a scale is chosen: of both halves, and of all samples


@dataclass(frozen=True, eq=False)
class Passes:
    """Groups of pairs, one run over the calibration data each, and their memory."""

    groups: tuple[tuple[LayerPair, ...], ...]
    fixed_bytes: int = 0  # of models and result, on the device all the time
    peak_bytes: int = 0  # the most on the device, with what the largest group needs
    placements: Sides[Placement] | None = None  # if the models are not on the device they run on
    home_bytes: int = 0  # what then stays off the device
    fetched_bytes: int = 0  # what is fetched in all runs together
    result_in_files: bool = False  # the result is written to temporary files, block by block


def groups_of(measurement: Measurement, passes: Passes) -> list[Measurement]:
    """A measurement for each group."""
    limits = replace(measurement.limits, placements=passes.placements)
    return parts_of(replace(measurement, limits=limits), passes.groups)


def parts_of(measurement: Measurement, groups: Iterable[Sequence[LayerPair]]) -> list[Measurement]:
    """A measurement for each group of pairs; tensors outside layers are part of the first."""
    plan = measurement.plan
    parts = (replace(plan, pairs=tuple(pairs), loose=() if i else plan.loose) for i, pairs in enumerate(groups))
    return [replace(measurement, plan=part) for part in parts]


def passes_of(measurement: Measurement, vector: TaskVector, method: Method, *, chooses_scale: bool) -> Passes:
    """Divide the layers so that they fit into the memory budget; without one, so that their sums fit into memory.

    `chooses_scale` says whether the samples choose the scale.
    """
    if measurement.limits.memory_budget is not None:
        return plan_passes(measurement, vector, method, measurement.limits.memory_budget)
    if not method.by_layer:
        return Passes((measurement.plan.pairs,))
    return passes_that_fit(measurement, COPIES if chooses_scale else 1)


def passes_that_fit(measurement: Measurement, copies: int) -> Passes:
    """Groups of consecutive layers whose sums, `copies` of each signal, take at most half of the free memory.

    The other half is for signals, maps and the work on them. The limit is a power of two: a run that continues after
    a kill divides the layers as before, unless the free memory has crossed it. Then it measures anew.
    """
    pairs, device, left = measurement.plan.pairs, measurement.runs_on, free_memory()
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        left = torch.cuda.mem_get_info(device)[0] + cached
    left = min(from_all(left))  # all processes divide the layers in the same way

    def size(some: Iterable[LayerPair]) -> int:
        return sum_bytes(measurement, some, copies)

    if size(pairs) <= left / 4:
        return Passes((pairs,))
    groups = grouped(pairs, size, 2 ** int(math.log2(left / 2)) if left > 2 else 0)
    return Passes(tuple(map(tuple, groups)))


def sum_bytes(measurement: Measurement, pairs: Iterable[LayerPair], copies: int) -> int:
    """The bytes of so many sums of the signals of pairs: matrices, or the few tokens of a limit, which they share."""
    total, most = 0, measurement.limits.max_tokens
    for pair in pairs:
        for signal in pair.wanted(measurement.signals):
            n, m = pair.widths(signal)
            tokens = None if most is None else 4 * most * (n + m)
            kept = tokens is not None and CrossCovariance.keeps_tokens(tokens, (n, m))
            total += tokens if kept and tokens is not None else copies * 8 * n * m
    return total


def grouped(
    pairs: Iterable[LayerPair], size: Callable[[Sequence[LayerPair]], int], most: float
) -> list[list[LayerPair]]:
    """Pairs in groups of at most this size: as many blocks as fit, or weights of a block that does not fit."""
    groups: list[list[LayerPair]] = []
    for block in blocks_of(pairs):
        for unit in [block] if size(block) <= most else by_weight(block):
            if groups and size([*groups[-1], *unit]) <= most:
                groups[-1].extend(unit)
            else:
                groups.append(unit)
    return groups


def by_weight(pairs: Iterable[LayerPair]) -> list[list[LayerPair]]:
    """Pairs by target weight, the smallest possible groups: the parts of a fused weight stay together."""
    found: dict[str, list[LayerPair]] = {}
    for pair in pairs:
        found.setdefault(pair.target.weight, []).append(pair)
    return list(found.values())


def plan_passes(
    measurement: Measurement, vector: TaskVector, method: Method, budget: int | None, forecast: Forecast | None = None
) -> Passes:
    """Divide the layers so that the predicted peak stays within `budget` bytes; None: all layers at once.

    A `forecast` of the same models and batches, if there is one, is used again.
    """
    offloaded = budget is not None and measurement.needs_placement
    try:
        forecast = forecast or Forecast.of(measurement)
    except NeedsValuesError:
        if offloaded:
            raise
        forecast = Forecast.of(measurement, on_meta=False)
    forecast = replace(forecast, measurement=measurement, samples=len(measurement.samples) or forecast.samples)
    if offloaded and not measurement.signals:  # the models never run
        pairs = measurement.plan.pairs
        result = result_bytes(measurement.plan, vector, method)
        return Passes((pairs,), result, result + forecast.solving_bytes(pairs))
    return _Division(measurement, vector, method, forecast, budget).passes()


class _Division:
    """How layers are divided; `_placements` is None if the models are on the device they run on."""

    def __init__(
        self, measurement: Measurement, vector: TaskVector, method: Method, forecast: Forecast, budget: int | None
    ) -> None:
        self._measurement, self._method, self._budget, self._forecast = measurement, method, budget, forecast
        self._device = measurement.runs_on
        slack = 0.0 if self._device.type == "cpu" else SLACK
        self._limit = math.inf if budget is None else int(budget * (1 - slack))
        self._paths = [block_paths(model.architecture.layers) for model in measurement.models]
        found = [sizes(model.module, paths) for model, paths in zip(measurement.models, self._paths, strict=True)]
        self._blocks = [blocks for _, blocks in found]
        self._models = sum(rest + sum(blocks.values()) for rest, blocks in found)
        self._placements: Sides[Placement] | None = None
        self._result = result = result_bytes(measurement.plan, vector, method)  # on the device to the end
        self._one_block = self._returned = 0
        self._in_files = False
        if budget is not None and measurement.needs_placement:
            self._placements = self._placed(((), ()))
            weights = (pair.source.weight for pair in measurement.plan.pairs)
            smallest = min(weights, key=lambda name: math.prod(vector.spec(name).shape))
            home = vector[smallest].device.type  # the result is where the source's task vector is
            on_device = (home if home != "meta" else "cpu") == self._device.type
            left = self._limit // 4 if on_device else min(from_all(free_memory())) - self._models
            self._in_files = method.by_layer and result > left
            self._result = result if on_device and not self._in_files else 0
            if on_device and self._in_files:
                self._one_block = result_bytes(measurement.plan, vector, method, by_block=True)
            self._returned = 0 if on_device else result

    def passes(self) -> Passes:
        pairs = self._measurement.plan.pairs
        if self._peak(pairs) > self._limit and self._placements is not None:
            self._placements = self._placed(self._paths, self._paths)
            if (peak := self._peak(pairs)) <= self._limit:
                self._placements = self._placed(self._paths, self._without_resident(self._limit - peak))
        groups = [pairs] if self._peak(pairs) <= self._limit else self._divided()
        passes = Passes(tuple(groups), self._fixed, self._highest(groups))
        if self._placements is None:
            return passes
        times = 2 if NEEDS_BACKWARD & self._measurement.signals else 1
        batches = -(-self._forecast.samples // self._forecast.size)
        return replace(
            passes,
            placements=self._placements,
            home_bytes=self._models + self._returned,
            fetched_bytes=len(groups) * (self._models + (times * batches - 1) * self._coming),
            result_in_files=self._in_files,
        )

    def _placed(self, blocks: Sequence[Sequence[str]], fetched: Sequence[Sequence[str]] = ((), ())) -> Sides[Placement]:
        homes = [model.parameters() if model.weights.offloaded else None for model in self._measurement.models]
        sides = zip(map(tuple, blocks), map(frozenset, fetched), homes, strict=True)
        return Sides(*(Placement(self._device, *side) for side in sides))

    def _without_resident(self, spare: float) -> list[list[str]]:
        """The blocks to fetch if as many as fit into the spare bytes stay on the device."""
        fetched = [list(paths) for paths in self._paths]
        for side in (1, 0):
            for path, size in self._blocks[side].items():
                if size <= spare:
                    spare -= size
                    fetched[side].remove(path)
        return fetched

    @property
    def _coming(self) -> int:
        """The bytes of the blocks that are fetched."""
        sides = zip(self._blocks, self._placements or (), strict=False)
        return sum(blocks[path] for blocks, placement in sides for path in placement.fetched)

    @property
    def _fixed(self) -> int:
        """The bytes that are on the device all the time while models run."""
        return self._models - self._coming + self._result

    def _solving(self, pairs: Sequence[LayerPair]) -> int:
        """The peak while maps are solved, without statistics; offloaded models are gone by then."""
        held = self._fixed if self._placements is None else self._result + self._one_block
        return held + self._forecast.solving_bytes(pairs)

    def _live(self, pairs: Sequence[LayerPair]) -> int:
        """The most that one batch needs."""
        placements = self._placements
        if placements is not None:  # as if every block were fetched: at most one block too much
            placements = Sides(*(replace(each, fetched=frozenset(each.blocks)) for each in placements))
        return self._forecast.peak(pairs, placements)

    def _peak(self, pairs: Sequence[LayerPair]) -> int:
        """The peak of measuring and solving these pairs."""
        return self._forecast.statistics_bytes(pairs) + max(self._fixed + self._live(pairs), self._solving(pairs))

    def _bound(self, group: Sequence[LayerPair]) -> int:
        """An upper bound on a group's bytes beyond the fixed ones, which needs no run of the forecast."""
        pairs = self._measurement.plan.pairs
        measuring = max(map(self._live, (pairs[:1], pairs[-1:]))) + self._forecast.signal_bytes(group)
        return self._forecast.statistics_bytes(group) + max(measuring, self._solving(group) - self._fixed)

    def _highest(self, groups: Sequence[Sequence[LayerPair]]) -> int:
        """The highest peak of all groups: the bound tells which two can have it."""
        return max(map(self._peak, sorted(groups, key=self._bound)[-2:] if len(groups) > 2 else groups))

    def _divided(self) -> list[tuple[LayerPair, ...]]:
        """Groups whose peaks stay within the budget: by the bound, and smaller if the forecast of a group is higher."""
        pairs, fixed = self._measurement.plan.pairs, self._fixed
        limit = spare = int(self._limit) - fixed
        largest = max(map(self._bound, by_weight(pairs)))
        for _ in range(8):
            if largest > spare:
                break
            groups = [tuple(group) for group in grouped(pairs, self._bound, spare)]
            over = self._highest(groups) - int(self._limit)
            if over <= 0:
                if len(groups) == 1 or self._method.by_layer:
                    return groups
                raise TuneportError(
                    f"method {name_of(self._method)} moves all layers at once: give a `memory_budget` of "
                    f"{format_bytes(self._peak(pairs))}, or use a method that moves layers one by one, such as bico."
                )
            spare -= over
        assert self._budget is not None
        least = (fixed + largest + max(limit - spare, 0)) / self._limit * self._budget
        held = "the models and the result" if self._placements is None else "the tensors outside the blocks"
        raise TuneportError(
            f"a `memory_budget` of {format_bytes(self._budget)} is too small: {held} take {format_bytes(fixed)}, and "
            f"the largest layer {format_bytes(largest)}. Give at least {format_bytes(least)}, a smaller `batch_size`, "
            "or fewer `max_tokens`."
        )


def result_bytes(plan: Plan, vector: TaskVector, method: Method, by_block: bool = False) -> int:
    """The dense entries of the target's task vector in float32; with `by_block`, those of its largest block."""
    dense: dict[tuple[str, int | None], dict[str, int]] = {}
    for pair in plan.pairs:
        if not method.keeps_rank or vector.spec(pair.source.weight).rank is None:
            block = dense.setdefault((pair.target.stack, pair.target.block), {})
            block[pair.target.weight] = 4 * math.prod(pair.target.weight_shape)
    found = [sum(block.values()) for block in dense.values()]
    return max(found, default=0) if by_block else sum(found)


@dataclass(frozen=True)
class Costs:
    """What the steps of a transfer cost beside one another: millions of operations in layers; float64 counts twice."""

    answer: Sides[float]  # of a forward pass of each model over one sample
    tokens: float  # of a sample in the target
    signals: frozenset[Signal]  # that are summed up

    @classmethod
    def of(cls, measurement: Measurement) -> Costs:
        """The costs of a measurement."""
        tokens = measurement.samples.tokens
        products = [
            sum(layer.in_features * layer.out_features for layer in model.architecture.layers)
            for model in measurement.models
        ]
        answer = Sides(*(2 * count * size / MILLION for count, size in zip(tokens, products, strict=True)))
        return cls(answer, tokens.target, measurement.signals)

    def measure(self, pairs: Sequence[LayerPair]) -> float:
        """Of one sample, for some pairs of layers: both models forward and back, and the sums."""
        sums = sum(math.prod(pair.widths(signal)) for pair in pairs for signal in pair.wanted(self.signals))
        return (3 if NEEDS_BACKWARD & self.signals else 1) * sum(self.answer) + 4 * self.tokens * sums / MILLION

    def solve(self, pairs: Sequence[LayerPair]) -> float:
        """Of all maps of some pairs: half a Gram matrix, its eigenvectors, and the other side's vectors."""
        widths = (sorted(pair.widths(signal)) for pair in pairs for signal in pair.wanted(self.signals))
        return sum(2 * (3 * n * n * m + 9 * n**3) for n, m in widths) / MILLION
