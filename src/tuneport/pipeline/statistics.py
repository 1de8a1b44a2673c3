"""The statistics of a job: its models run on its samples, and on augmented ones where its method asks for them.

`capture.measure_pairs` knows modules and batches. The limits of a job are applied here: tokens, memory, processes, and
what an earlier run has measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ..job import Job
from ..maps.statistics import Statistics
from ..measure.batches import move_batch
from ..measure.capture import measure_pairs
from ..measure.signals import INPUT, WEIGHT_GRADIENT
from ..measure.tokens import TokenLimit
from ..methods import Problem
from ..models.offload import placed
from ..runtime.distributed import reduce_statistics, share_of
from ..runtime.resume import Work
from ..types import Progress
from .heads import measuring


def problem_of(job: Job, statistics: Statistics) -> Problem:
    """What a method solves on a job."""
    return Problem(
        job.plan,
        job.task_vector,
        statistics,
        job.completion,
        source_weights=job.source.parameters(),
        target_weights=job.target.parameters(),
        memory_budget=job.memory_budget,
    )


def measure_job(
    job: Job,
    *,
    signals: Iterable[str] | None = None,
    views: bool = False,
    progress: Progress | None = None,
    work: Work | None = None,
    stage: str = "all",
) -> Statistics:
    """The statistics of a job's signals, or of the given ones.

    `work` saves them under the name of the `stage`, and continues what an earlier run has saved there. With
    `views`, the inputs of augmented samples are measured too (`tuneport.data.views`), and not saved.
    """
    wanted = frozenset(job.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    if job.max_tokens is not None:
        job = replace(job, samples=job.samples.listed())
    earlier = work.load(stage, job.runs_on) if work is not None else None
    if earlier is not None and progress is not None:
        progress(earlier.samples)
    keeper = work.keeper(stage) if work is not None else None
    with measuring(job):
        statistics = _measured(job, wanted, progress, earlier, keeper)
    more = job.samples.views(job.seed) if views and INPUT in wanted else None
    if more is not None:
        statistics = statistics.extend(_measured(job.on(more), frozenset({INPUT})))
    return reduce_statistics(statistics, job.plan)


def measure_in_parts(
    job: Job,
    cuts: Sequence[int],
    *,
    signals: Iterable[str] | None = None,
    views: bool = False,
    progress: Progress | None = None,
) -> list[Statistics]:
    """The statistics of consecutive parts of the samples, each up to a cut; their sum is that of all up to the last."""
    parts = [job.samples.take(slice(start, stop)) for start, stop in zip((0, *cuts), cuts, strict=False)]
    return [measure_job(job.on(part), signals=signals, views=views, progress=progress) for part in parts]


def _measured(
    job: Job,
    signals: frozenset[str],
    progress: Progress | None = None,
    earlier: Statistics | None = None,
    keeper: Callable[[Statistics], None] | None = None,
) -> Statistics:
    """This process's share of the statistics."""
    assert job.losses is not None
    if job.placements is None:
        for model in job.models:
            model.require_in_memory("measuring without a plan", "give a larger one, or run a transfer")
    mine, before = share_of(job.samples)
    left = mine if earlier is None else mine.take_batches(earlier.passes["forward"])
    source, target = job.placements or (None, None)
    limit = None
    if job.max_tokens is not None:
        first = job.target.layout is not None
        limit = TokenLimit(job.max_tokens, len(job.samples), job.seed, first=first, offset=before)
    with placed(job.source.module, source), placed(job.target.module, target):
        return measure_pairs(
            job.source.module,
            job.target.module,
            job.plan.pairs,
            left if target is None else (move_batch(batch, target.device) for batch in left),
            signals=signals,
            source_loss=job.losses.source,
            target_loss=job.losses.target,
            match=job.match,
            progress=progress,
            start=earlier,
            on_batch=keeper,
            limit=limit,
            # each part of a batch would fetch the weights again
            most_samples=job.samples_at_once if target is None else None,
            # the gradient of a weight that is fetched when it is used is not known
            loose=[pair.target.name for pair in job.plan.loose]
            if WEIGHT_GRADIENT in signals and target is None
            else (),
        )
