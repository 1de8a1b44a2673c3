"""The middle of a transfer: measure the layers, group by group, and move what the fine-tune changed in them.

Each of several processes measures its share of the samples and solves its share of the layers. The division into groups
changes the result by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from ..errors import TuneportError
from ..io.state import StateFile
from ..maps.statistics import Statistics
from ..measure.capture import Request, measure_pairs, move_batch
from ..measure.fitted_heads import measuring
from ..measure.samples import Measurement, Samples, samples_at_once
from ..measure.signals import INPUT, WEIGHT_GRADIENT
from ..measure.tokens import TokenLimit
from ..methods import Method, Problem, Transfer
from ..models.change import Change
from ..models.offload import pinned, placed, to_temporary_file
from ..pairing import blocks_of
from ..processes import agreed, ranks
from ..runtime.distributed import gather_transfer, reduce_statistics, share_of
from ..runtime.passes import Costs, Passes, groups_of, parts_of
from ..runtime.resume import Work, fingerprint, load_statistics, save_statistics
from ..task_vectors.vector import TaskVector
from ..types import Events, Progress, ScaleRule, Sides, ignore
from .scale import Judge, ScaleChoice, choose_on_halves


@dataclass(frozen=True, eq=False)
class Solution:
    """What was moved."""

    transfer: Transfer
    scale: float
    choice: ScaleChoice | None
    counted: Statistics  # samples and passes, without sums
    measuring: float  # seconds


def solve(
    measurement: Measurement,
    change: Change,
    method: Method,
    scale: float | ScaleRule,
    judge: Judge,
    *,
    passes: Passes,
    work: Work | None,
    events: Events,
) -> Solution:
    """Measure both models and carry the task vector over; a rule chooses the scale on the samples.

    `work` keeps what is measured, and gives back what an earlier run has measured.

    Raises:
        TuneportError: if a scale is to be chosen on models that are not whole in memory.
    """
    rule = scale if isinstance(scale, str) else None
    if rule is not None and (measurement.target.weights.offloaded or passes.placements is not None):
        raise TuneportError(
            "a scale is chosen on whole models, and these are larger than the memory budget: pass a number as `scale`, "
            "or a larger `memory_budget`."
        )
    solver = _Solver(change, method, work, events, Costs.of(measurement))
    sides = (measurement, measurement) if rule is None else measurement.halves()
    halves = sides[:1] if sides[0] is sides[1] else sides  # one where there are too few samples to divide
    names = ("all",) if rule is None else ("first", "second")
    groups = list(zip(*(groups_of(half, passes) for half in halves), strict=True))
    of_halves: list[list[Transfer]] = [[] for _ in halves]
    of_all, counted, choice = list[Transfer](), Statistics(), None
    cost = solver.costs.answer.target
    choose = rule and partial(choose_on_halves, judge, sides, rule=rule, events=events, cost=cost)
    source, target = passes.placements or (None, None)
    with pinned(measurement.models.source.module, source), pinned(measurement.target.module, target):
        for index, group in enumerate(groups):
            stages = (_stage(name, index, [each[0] for each in groups]) for name in names)
            parts = list(map(solver.measure, group, stages))
            whole = reduce(add, parts)
            counted = _count(counted, whole)
            if choose and len(groups) == 1:  # the second half is solved if the first leaves open which scale is best
                choice = choose(solver.joined([solver.move(group[0], part)]) for part in parts)
            elif choose:
                for done, moved in zip(of_halves, [solver.move(group[0], part) for part in parts], strict=True):
                    done.append(moved)
            of_all += solver.move_whole(group[0], whole, passes.result_in_files)
            del parts, whole  # before the next group is measured
    if choose and choice is None:
        choice = choose(map(solver.joined, of_halves))
    strength = choice.scale if choice is not None else float(scale)
    return Solution(solver.joined(of_all), strength, choice, counted, solver.seconds)


@dataclass
class _Solver:
    """Measures and moves for one method, and sums up the seconds of measuring."""

    change: Change
    method: Method
    work: Work | None
    events: Events
    costs: Costs
    seconds: float = 0.0

    def measure(self, measurement: Measurement, stage: str) -> Statistics:
        started, count = time.perf_counter(), len(measurement.samples)
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

    def move(self, measurement: Measurement, statistics: Statistics) -> Transfer:
        pairs = measurement.plan.pairs
        self.events.step(f"solving {len(pairs)} layers", self.costs.solve(pairs), len(pairs))
        problem = problem_of(measurement, self.change.vector, statistics)
        return gather_transfer(replace(problem, on_layer=lambda _: self.events.advance(1)), self.method)

    def move_whole(self, measurement: Measurement, statistics: Statistics, in_files: bool) -> list[Transfer]:
        """As `move`, or block by block with dense entries in files; several processes own blocks of a group."""
        if not in_files:
            return [self.move(measurement, statistics)]
        parts = [measurement] if ranks().size > 1 else parts_of(measurement, blocks_of(measurement.plan.pairs))
        return [_in_files(self.move(part, statistics)) for part in parts]

    def joined(self, moved: Sequence[Transfer]) -> Transfer:
        """All groups, with the rows of added tokens, unless the method moved the tables themselves."""
        joined, rows = Transfer.join(moved), dict(self.change.added.vector)
        return replace(joined, task_vector=TaskVector(rows | dict(joined.task_vector))) if rows else joined


def problem_of(measurement: Measurement, vector: TaskVector, statistics: Statistics) -> Problem:
    """What a method solves."""
    return Problem(
        measurement.plan,
        vector,
        statistics,
        source_weights=measurement.models.source.parameters(),
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
    """Run both models on the samples and sum up the signals: those of the measurement unless others are given.

    With `views` the inputs of augmented samples are measured too, which are not saved. Of several processes, each gets
    the sums of the layers that it owns, or without `by_layer` the first gets all. `work` saves the statistics under the
    name of the `stage`, and continues what an earlier run has saved there.
    """
    wanted = frozenset(measurement.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    here = ranks()
    stage = stage if here.size == 1 else f"{stage}-{here.rank}-of-{here.size}"
    state = None if work is None else work.state(stage)
    owned: dict[str, Any] = {"by_layer": by_layer, "device": measurement.runs_on}
    with measuring(measurement.target, measurement.samples):
        share = share_of(measurement.samples)
        found = agreed(lambda: _measured(measurement, share, wanted, progress, state))
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
    state: StateFile | None = None,
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
    earlier = None if state is None else load_statistics(state, measurement.runs_on)
    if earlier is not None:
        progress(earlier.samples)
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
        most_samples=samples_at_once(measurement.models) if target is None else None,
        # the gradient of a weight that is fetched when it is used is not known
        loose=[pair.target.name for pair in plan.loose] if WEIGHT_GRADIENT in signals and target is None else (),
    )

    def keep(statistics: Statistics) -> None:
        if state is not None and state.due:
            save_statistics(state, statistics)

    modules = Sides(*(model.module for model in measurement.models))
    with placed(modules.source, source), placed(modules.target, target):
        batches = left if target is None else (move_batch(batch, target.device) for batch in left)
        return measure_pairs(
            modules, plan.pairs, batches, losses, request, progress=progress, start=earlier, on_batch=keep
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
