"""The middle of a transfer: measure a job's layers, group by group, and move what the fine-tune changed in them.

The statistics of a group are freed before the next group is measured. Each of several processes measures its share of
the samples and solves its share of the layers. Groups and processes change the result by rounding only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from ..errors import TuneportError
from ..job import Job
from ..maps.statistics import Statistics
from ..methods import Method, Transfer
from ..models.offload import pinned, to_temporary_file
from ..runtime.distributed import gather_transfer, ranks
from ..runtime.passes import Passes, jobs_by_block, jobs_of
from ..runtime.resume import Work, fingerprint
from ..task_vectors.vector import TaskVector
from ..types import Progress, Say, ScaleRule
from .scale import ScaleChoice, choose_on_halves
from .statistics import measure_job, problem_of


@dataclass(frozen=True, eq=False)
class Moved:
    """What was moved, the scale and how it was chosen, the samples and passes, and the seconds of measuring."""

    transfer: Transfer
    scale: float
    choice: ScaleChoice | None
    counted: Statistics  # without sums
    measuring: float


def move(
    job: Job,
    method: Method,
    scale: float | ScaleRule,
    *,
    passes: Passes | None = None,
    progress: Progress | None = None,
    work: Work | None = None,
    step: Say | None = None,
) -> Moved:
    """Measure both models and carry the task vector over; a rule chooses the scale on the samples."""
    meter = _Meter(method, progress, work, step or (lambda _: None))
    if not isinstance(scale, str):
        moved, counted = _move(job, passes, meter)
        return Moved(moved, scale, None, counted, meter.seconds)
    if job.target.offloaded or (passes is not None and passes.placements is not None):
        raise TuneportError(
            "a scale is chosen on whole models, and these are larger than the memory budget: pass a number as `scale`, "
            "or a larger `memory_budget`."
        )
    moved, choice, counted = _move_auto(scale, job.halves(), passes, meter)
    return Moved(moved, choice.scale, choice, counted, meter.seconds)


@dataclass
class _Meter:
    """Measures for a method and solves, and sums up the seconds of measuring."""

    method: Method
    progress: Progress | None
    work: Work | None
    step: Say
    seconds: float = 0.0

    def measure(self, job: Job, stage: str) -> Statistics:
        started = time.perf_counter()
        self.step("measuring")
        statistics = measure_job(job, views=self.method.rehearses, progress=self.progress, work=self.work, stage=stage)
        if (device := job.runs_on).type == "cuda":
            torch.cuda.synchronize(device)
        self.seconds += time.perf_counter() - started
        return statistics

    def solve(self, job: Job, statistics: Statistics) -> Transfer:
        self.step(f"solving {len(job.plan.pairs)} layers")
        problem, transfer = problem_of(job, statistics), self.method.transfer
        return gather_transfer(problem, transfer) if self.method.by_layer else transfer(problem)


def _move(job: Job, passes: Passes | None, meter: _Meter) -> tuple[Transfer, Statistics]:
    """Measure and move, group by group; also the count of samples and passes, without sums."""
    moved, counted = [], Statistics()
    source, target = (passes.placements if passes is not None else None) or (None, None)
    with pinned(job.source.module, source), pinned(job.target.module, target):
        for index, group in enumerate(groups := jobs_of(job, passes)):
            statistics = meter.measure(group, _stage("all", index, groups))
            if passes is not None and passes.result_in_files and ranks().size == 1:
                moved += [_in_files(meter.solve(block, statistics)) for block in jobs_by_block(group)]
            else:
                moved.append(meter.solve(group, statistics))
            counted = _count(counted, statistics)
            del statistics  # before the next group is measured
    return _with_rows(job, Transfer.join(moved)), counted


def _with_rows(job: Job, moved: Transfer) -> Transfer:
    """A transfer with the rows of added tokens, unless the method moved the tables themselves."""
    rows = dict(job.added.vector) if job.added is not None else {}
    return replace(moved, task_vector=TaskVector(rows | dict(moved.task_vector))) if rows else moved


def _in_files(moved: Transfer) -> Transfer:
    """A transfer with its dense entries in temporary files."""
    entries = dict(moved.task_vector)
    entries |= {name: to_temporary_file(entry) for name, entry in entries.items() if isinstance(entry, Tensor)}
    return replace(moved, task_vector=TaskVector(entries))


def _move_auto(
    rule: ScaleRule, sides: tuple[Job, Job], passes: Passes | None, meter: _Meter
) -> tuple[Transfer, ScaleChoice, Statistics]:
    """As `_move`, with the scale chosen by the two halves of the samples."""
    groups = [jobs_of(side, passes) for side in sides[: 2 if sides[0] is not sides[1] else 1]]
    moved: list[list[Transfer]] = [[] for _ in groups]
    whole, counted = [], Statistics()
    for index, jobs in enumerate(zip(*groups, strict=True)):
        named = zip(jobs, ("first", "second"), strict=False)
        parts = [meter.measure(job, _stage(name, index, groups[0])) for job, name in named]
        found = reduce(add, parts)
        counted = _count(counted, found)
        if len(groups[0]) == 1:
            halves = (_with_rows(sides[0], meter.solve(sides[0], part)) for part in parts)
            choice = choose_on_halves(sides, halves, rule)
            return _with_rows(sides[0], meter.solve(sides[0], found)), choice, counted
        for done, part in zip(moved, parts, strict=True):
            done.append(meter.solve(jobs[0], part))
        whole.append(meter.solve(jobs[0], found) if len(parts) > 1 else moved[0][-1])
        del parts, found  # before the next group is measured
    halves = (_with_rows(sides[0], Transfer.join(done)) for done in moved)
    return _with_rows(sides[0], Transfer.join(whole)), choose_on_halves(sides, halves, rule), counted


def _stage(name: str, index: int, groups: Sequence[Job]) -> str:
    """A name for what is measured of a group; another division into groups gives other names."""
    if len(groups) == 1:
        return name
    layers = fingerprint({"layers": [pair.target.name for pair in groups[index].plan.pairs]})
    return f"{name}-{index}-{layers[:12]}"


def _count(counted: Statistics, more: Statistics) -> Statistics:
    """The passes of both and the samples of one: groups see the same samples."""
    passes = {name: counted.passes.get(name, 0) + count for name, count in more.passes.items()}
    return Statistics(samples=more.samples, passes=passes)
