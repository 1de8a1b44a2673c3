"""The middle of a transfer: measure the layers, group by group, and move what the fine-tune changed in them.

The statistics of a group are freed before the next group is measured. Each of several processes measures its share of
the samples and solves its share of the layers. The division into groups changes the result by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ..errors import TuneportError
from ..maps.statistics import Statistics
from ..measure.capture import Request, measure_pairs, move_batch
from ..measure.fitted_heads import measuring
from ..measure.samples import Measurement, Samples
from ..measure.signals import INPUT, WEIGHT_GRADIENT
from ..measure.tokens import TokenLimit
from ..methods import Method, Problem, Transfer
from ..models.change import Change
from ..models.offload import pinned, placed, to_temporary_file
from ..pairing import LayerPair
from ..processes import agreed, ranks
from ..runtime.costs import Costs
from ..runtime.distributed import gather_transfer, reduce_statistics, share_of
from ..runtime.passes import Passes, by_block, groups_of
from ..runtime.resume import Work, fingerprint
from ..task_vectors.vector import TaskVector
from ..types import Events, Progress, ScaleRule, Sides, ignore
from .scale import Judge, ScaleChoice, choose_on_halves


@dataclass(frozen=True, eq=False)
class Solution:
    """What was moved, the scale and how it was chosen, the samples and passes, and the seconds of measuring."""

    transfer: Transfer
    scale: float
    choice: ScaleChoice | None
    counted: Statistics  # without sums
    measuring: float


def solve(
    measurement: Measurement,
    change: Change,
    method: Method,
    scale: float | ScaleRule,
    judge: Judge,
    *,
    passes: Passes | None = None,
    work: Work | None = None,
    events: Events | None = None,
) -> Solution:
    """Measure both models and carry the task vector over; a rule chooses the scale on the samples.

    Args:
        measurement: what is measured, with the signals of the method.
        change: what the fine-tune changed in the source.
        method: moves it.
        scale: a number, or the rule that chooses it.
        judge: scores the target while the scale is chosen.
        passes: which layers are measured together.
        work: keeps what is measured, and gives back what an earlier run has measured.
        events: listens.

    Raises:
        TuneportError: if a scale is to be chosen on models that are not whole in memory.
    """
    solver = _Solver(change, method, work, events or Events(), Costs.of(measurement))
    if not isinstance(scale, str):
        moved, counted = solver.move(measurement, passes)
        return Solution(moved, scale, None, counted, solver.seconds)
    if measurement.target.weights.offloaded or (passes is not None and passes.placements is not None):
        raise TuneportError(
            "a scale is chosen on whole models, and these are larger than the memory budget: pass a number as `scale`, "
            "or a larger `memory_budget`."
        )
    moved, choice, counted = solver.move_and_choose(measurement.halves(), passes, judge, scale)
    return Solution(moved, choice.scale, choice, counted, solver.seconds)


@dataclass
class _Solver:
    """Measures and moves for one method, and sums up the seconds of measuring."""

    change: Change
    method: Method
    work: Work | None
    events: Events
    costs: Costs
    seconds: float = 0.0

    def move(self, measurement: Measurement, passes: Passes | None) -> tuple[Transfer, Statistics]:
        """Measure and move, group by group; also the count of samples and passes, without sums."""
        moved, counted = [], Statistics()
        source, target = (passes.placements if passes is not None else None) or (None, None)
        with pinned(measurement.source.module, source), pinned(measurement.target.module, target):
            for index, group in enumerate(groups := groups_of(measurement, passes)):
                statistics = self._measure(group, _stage("all", index, groups))
                if passes is not None and passes.result_in_files:
                    parts = by_block(group) if ranks().size == 1 else [group]  # processes own blocks of a group
                    moved += [_in_files(self._move(part, statistics)) for part in parts]
                else:
                    moved.append(self._move(group, statistics))
                counted = _count(counted, statistics)
                del statistics  # before the next group is measured
        return self._with_rows(Transfer.join(moved)), counted

    def move_and_choose(
        self, sides: tuple[Measurement, Measurement], passes: Passes | None, judge: Judge, rule: ScaleRule
    ) -> tuple[Transfer, ScaleChoice, Statistics]:
        """As `move`, with the scale chosen by the two halves of the samples."""
        halves = sides[:1] if sides[0] is sides[1] else sides  # one where there are too few samples to divide
        groups = list(zip(*(groups_of(half, passes) for half in halves), strict=True))
        first_groups = [group[0] for group in groups]
        if len(groups) == 1:  # the second half is solved after the first is judged
            parts = self._measure_halves(groups[0], 0, first_groups)
            whole, counted = reduce(add, parts), _count(Statistics(), reduce(add, parts))
            unplanned = (False, judge.searches)  # the second half of a search is solved if it is needed
            solved = (self._with_rows(self._move(sides[0], *each)) for each in zip(parts, unplanned, strict=False))
            choice = choose_on_halves(judge, sides, solved, rule, self.events, self.costs.answer.target)
            return self._with_rows(self._move(sides[0], whole)), choice, counted
        moved: list[list[Transfer]] = [[] for _ in halves]
        of_all, counted = [], Statistics()
        for index, group in enumerate(groups):
            parts = self._measure_halves(group, index, first_groups)
            whole = reduce(add, parts)
            counted = _count(counted, whole)
            for done, part in zip(moved, parts, strict=True):
                done.append(self._move(group[0], part))
            of_all.append(self._move(group[0], whole) if len(parts) > 1 else moved[0][-1])
            del parts, whole  # before the next group is measured
        solved = (self._with_rows(Transfer.join(done)) for done in moved)
        return (
            self._with_rows(Transfer.join(of_all)),
            choose_on_halves(judge, sides, solved, rule, self.events, self.costs.answer.target),
            counted,
        )

    def _measure_halves(
        self, halves: Sequence[Measurement], index: int, groups: Sequence[Measurement]
    ) -> list[Statistics]:
        named = zip(halves, ("first", "second"), strict=False)
        return [self._measure(half, _stage(name, index, groups)) for half, name in named]

    def _measure(self, measurement: Measurement, stage: str) -> Statistics:
        started = time.perf_counter()
        count = len(measurement.samples)
        self.events.step("measuring", count * self.costs.measure(measurement.plan.pairs), count)
        statistics = measure(
            measurement,
            views=self.method.uses_augmented_inputs,
            by_layer=self.method.by_layer,
            progress=self.events.advance,
            work=self.work,
            stage=stage,
        )
        if (device := measurement.runs_on).type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        return statistics

    def _move(self, measurement: Measurement, statistics: Statistics, unplanned: bool = False) -> Transfer:
        pairs = measurement.plan.pairs
        if unplanned:
            self.events.extend(self.costs.solve(pairs))
        name, total = f"solving {len(pairs)} layers", self.costs.solve(pairs)
        self.events.step(name)
        told = [0.0]

        def tell(pair: LayerPair) -> None:
            told.append(self.costs.solve([pair]))
            self.events.step(name, told[-1])

        problem = replace(problem_of(measurement, self.change.vector, statistics), on_layer=tell)
        moved = gather_transfer(problem, self.method)
        if (rest := total - sum(told)) > 1e-9 * total:  # of a method that tells nothing, and of other processes
            self.events.step(name, rest)
        return moved

    def _with_rows(self, moved: Transfer) -> Transfer:
        """A transfer with the rows of added tokens, unless the method moved the tables themselves."""
        rows = dict(self.change.added.vector)
        return replace(moved, task_vector=TaskVector(rows | dict(moved.task_vector))) if rows else moved


def problem_of(measurement: Measurement, vector: TaskVector, statistics: Statistics) -> Problem:
    """What a method solves."""
    return Problem(
        measurement.plan,
        vector,
        statistics,
        source_weights=measurement.source.parameters(),
        target_weights=measurement.target.parameters(),
        memory_budget=measurement.limits.memory_budget,
    )


def measure(
    measurement: Measurement,
    *,
    signals: Iterable[str] | None = None,
    views: bool = False,
    by_layer: bool = True,
    progress: Progress = ignore,
    work: Work | None = None,
    stage: str = "all",
) -> Statistics:
    """Run both models on the samples and sum up the signals.

    Args:
        measurement: models, layers, samples and limits.
        signals: in place of those of the measurement.
        views: also measure the inputs of augmented samples (`tuneport.data.views`), which are not saved.
        by_layer: of several processes, each gets the sums of the layers that it owns; else the first gets all.
        progress: called with the number of samples that were measured since the last call.
        work: saves the statistics under the name of the `stage`, and continues what an earlier run has saved there.
        stage: see `work`.
    """
    wanted = frozenset(measurement.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    here = ranks()
    stage = stage if here.size == 1 else f"{stage}-{here.rank}-of-{here.size}"
    earlier = work.load(stage, measurement.runs_on) if work is not None else None
    if earlier is not None:
        progress(earlier.samples)
    keeper = work.keeper(stage) if work is not None else None
    owned: dict[str, Any] = {"by_layer": by_layer, "device": measurement.runs_on}
    with measuring(measurement.target, measurement.samples):
        share = share_of(measurement.samples)
        found = agreed(lambda: _measured(measurement, share, wanted, progress, earlier, keeper))
    statistics = reduce_statistics(found, measurement.plan, **owned)
    more = measurement.samples.views(measurement.limits.seed) if views and INPUT in wanted else None
    if more is not None:
        augmented, part = measurement.with_samples(more), share_of(more)
        found = agreed(lambda: _measured(augmented, part, frozenset({INPUT})))
        statistics = statistics.extend(reduce_statistics(found, measurement.plan, **owned))
    return statistics


def _measured(
    measurement: Measurement,
    share: tuple[Samples, int],
    signals: frozenset[str],
    progress: Progress = ignore,
    earlier: Statistics | None = None,
    keeper: Callable[[Statistics], None] | None = None,
) -> Statistics:
    """The statistics of this process's share of the samples; none if it has no sample."""
    mine, before = share
    if not len(mine) and len(measurement.samples):
        return Statistics()
    losses, limits, plan = measurement.calibration.losses, measurement.limits, measurement.plan
    assert losses is not None
    if limits.placements is None:
        for model in measurement.models:
            model.require_in_memory("measuring without a plan", "give a larger one, or run a transfer")
    left = mine if earlier is None else mine.take_batches(earlier.passes["forward"])
    source, target = limits.placements or (None, None)
    limit = None
    if limits.max_tokens is not None:
        first = measurement.target.inputs.layout is not None
        limit = TokenLimit(limits.max_tokens, len(measurement.samples), limits.seed, first=first, offset=before)
    request = Request(
        signals,
        measurement.calibration.match,
        limit,
        # each part of a batch would fetch the weights again
        most_samples=measurement.samples_at_once if target is None else None,
        # the gradient of a weight that is fetched when it is used is not known
        loose=[pair.target.name for pair in plan.loose] if WEIGHT_GRADIENT in signals and target is None else (),
    )
    modules = Sides(*(model.module for model in measurement.models))
    with placed(modules.source, source), placed(modules.target, target):
        batches = left if target is None else (move_batch(batch, target.device) for batch in left)
        return measure_pairs(
            modules, plan.pairs, batches, losses, request, progress=progress, start=earlier, on_batch=keeper
        )


def _in_files(moved: Transfer) -> Transfer:
    """A transfer with its dense entries in temporary files."""
    entries = dict(moved.task_vector)
    entries |= {name: to_temporary_file(entry) for name, entry in entries.items() if isinstance(entry, Tensor)}
    return replace(moved, task_vector=TaskVector(entries))


def _stage(name: str, index: int, groups: Sequence[Measurement]) -> str:
    """A name for what is measured of a group; another division into groups gives other names."""
    if len(groups) == 1:
        return name
    layers = fingerprint({"layers": [pair.target.name for pair in groups[index].plan.pairs]})
    return f"{name}-{index}-{layers[:12]}"


def _count(counted: Statistics, more: Statistics) -> Statistics:
    """The passes of both and the samples of one: groups see the same samples."""
    passes = {name: counted.passes.get(name, 0) + count for name, count in more.passes.items()}
    return Statistics(samples=more.samples, passes=passes)
