"""Fit a transfer into a memory budget: where models and result are, which layers are measured in which pass, the peak.

If statistics exceed the budget, layers are measured in groups, one after the other. If models exceed it, their blocks
stay off the device (in RAM for a GPU, in files for a CPU) and are fetched when they run. The results do not change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..errors import TuneportError
from ..io.sizes import format_bytes, free_memory
from ..measure.samples import Measurement
from ..measure.signals import NEEDS_BACKWARD
from ..methods import Method, name_of
from ..models.offload import Placement, block_paths, sizes
from ..pairing import LayerPair, Plan
from ..processes import from_all
from ..task_vectors.vector import TaskVector
from ..types import Sides
from .forecast import Forecast, NeedsValuesError
from .passes import Passes, by_weight, grouped, passes_that_fit

SLACK = 0.08  # of a GPU's budget, for its libraries and for errors of the forecast
COPIES = 3  # sums of a signal that are held while a scale is chosen: of both halves, and of all samples


def passes_of(measurement: Measurement, vector: TaskVector, method: Method, *, chooses_scale: bool) -> Passes | None:
    """Divide the layers so that they fit into the memory budget; without one, so that their sums fit into memory.

    None is one pass over all layers. `chooses_scale` says whether the samples choose the scale.
    """
    if measurement.limits.memory_budget is not None:
        return plan_passes(measurement, vector, method, measurement.limits.memory_budget)
    return passes_that_fit(measurement, COPIES if chooses_scale else 1) if method.by_layer else None


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
        return Passes((pairs,), result_bytes(measurement.plan, vector, method), (forecast.solving_bytes(pairs),))
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
            self._placements = self._placed(recomputed=False)
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
            self._placements = self._placed(fetched=self._paths)
            if self._peak(pairs) <= self._limit:
                self._placements = self._placed(fetched=self._without_resident(self._limit - self._peak(pairs)))
        groups = [pairs] if self._peak(pairs) <= self._limit else self._divided()
        highest = self._highest(groups) - self._fixed()
        group_bytes = [min(self._bound(group), highest) for group in groups] if len(groups) > 1 else [highest]
        passes = Passes(tuple(groups), self._fixed(), tuple(group_bytes))
        if self._placements is None:
            return passes
        coming, times = self._coming(), 2 if NEEDS_BACKWARD & self._measurement.signals else 1
        batches = -(-self._forecast.samples // self._forecast.size)
        return replace(
            passes,
            placements=self._placements,
            home_bytes=self._models + self._returned,
            fetched_bytes=len(groups) * (self._models - coming + times * batches * coming),
            result_in_files=self._in_files,
        )

    def _placed(self, *, recomputed: bool = True, fetched: Sequence[Sequence[str]] = ((), ())) -> Sides[Placement]:
        homes = [model.parameters() if model.weights.offloaded else None for model in self._measurement.models]
        blocks = self._paths if recomputed else ((), ())
        sides = zip(blocks, map(frozenset, fetched), homes, strict=True)
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

    def _coming(self) -> int:
        """The bytes of the blocks that are fetched."""
        sides = zip(self._blocks, self._placements or (), strict=False)
        return sum(blocks[path] for blocks, placement in sides for path in placement.fetched)

    def _fixed(self) -> int:
        """The bytes that are on the device all the time while models run."""
        return self._models - self._coming() + self._result

    def _solving(self, pairs: Sequence[LayerPair]) -> int:
        """The peak while maps are solved, without statistics; offloaded models are gone by then."""
        held = self._fixed() if self._placements is None else self._result + self._one_block
        return held + self._forecast.solving_bytes(pairs)

    def _live(self, pairs: Sequence[LayerPair]) -> int:
        """The most that one batch needs."""
        placements = self._placements
        if placements is not None:  # as if every block were fetched: at most one block too much
            placements = Sides(*(replace(each, fetched=frozenset(each.blocks)) for each in placements))
        return self._forecast.peak(pairs, placements)

    def _peak(self, pairs: Sequence[LayerPair]) -> int:
        """The peak of measuring and solving these pairs."""
        measuring = self._fixed() + self._live(pairs)
        return self._forecast.statistics_bytes(pairs) + max(measuring, self._solving(pairs))

    def _bound(self, group: Sequence[LayerPair]) -> int:
        """An upper bound on a group's bytes beyond the fixed ones, which needs no run of the forecast."""
        pairs = self._measurement.plan.pairs
        measuring = max(map(self._live, (pairs[:1], pairs[-1:]))) + self._forecast.signal_bytes(group)
        return self._forecast.statistics_bytes(group) + max(measuring, self._solving(group) - self._fixed())

    def _highest(self, groups: Sequence[Sequence[LayerPair]]) -> int:
        """The highest peak of all groups: the bound tells which two can have it."""
        largest = sorted(groups, key=self._bound)[-2:] if len(groups) > 2 else groups
        return max(map(self._peak, largest))

    def _divided(self) -> list[tuple[LayerPair, ...]]:
        """Groups whose peaks stay within the budget: by the bound, and smaller if the forecast of a group is higher."""
        pairs, fixed = self._measurement.plan.pairs, self._fixed()
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
