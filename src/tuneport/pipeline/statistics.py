"""The statistics of a job: measured where its models run, on its samples and on what its method rehearses.

`capture.measure_pairs` knows modules and batches; here the limits of a job come in: tokens, memory, processes, and
what an
earlier run has measured already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from ..job import Job, PairedBatches, runs_on, views_of
from ..maps.statistics import Statistics
from ..measure.batches import count_samples, nested_to, samples_at_once
from ..measure.capture import measure_pairs
from ..measure.signals import INPUT
from ..measure.tokens import TokenLimit
from ..methods import Problem
from ..models.offload import placed
from ..runtime.distributed import reduce_statistics, share_of
from ..runtime.resume import Work
from ..types import Progress


def problem_of(job: Job, statistics: Statistics) -> Problem:
    """What the job's method, or any other on the same job, is to solve."""
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
    progress: Progress | None = None,
    work: Work | None = None,
    stage: str = "all",
) -> Statistics:
    """The statistics that a job's method needs (or the given signals, to serve several methods at once).

    With `work`, they are saved under the name of the `stage` from time to time, and begin with what it holds. A method
    that rehearses sees changed views of the samples too (`tuneport.data.views`), which are not saved.
    """
    wanted = frozenset(job.method.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    if job.max_tokens is not None and not job.samples:
        job = replace(job, batches=(batches := list(job.batches)), samples=count_samples(batches))
    earlier = work.load(stage, runs_on(job)) if work is not None else None
    if earlier is not None and progress is not None:
        progress(earlier.samples)
    keeper = work.keeper(stage) if work is not None else None
    statistics = _measured(job, wanted, progress, earlier, keeper)
    more = views_of(job) if job.method.rehearses and INPUT in wanted else None
    if more is not None:
        statistics = statistics.extend(_measured(more, frozenset({INPUT})))
    return reduce_statistics(statistics, job.plan)


def _measured(
    job: Job,
    signals: frozenset[str],
    progress: Progress | None = None,
    earlier: Statistics | None = None,
    keeper: Callable[[Statistics], None] | None = None,
) -> Statistics:
    """This process's share of the statistics."""
    assert job.source_loss is not None
    assert job.target_loss is not None
    limit = _token_limit(job)
    mine, before = share_of(job)
    ours, theirs = job.placements or (None, None)
    if theirs is None:
        for model in (job.source, job.target):
            model.require_in_memory("measuring without a plan", "give a larger one, or run a transfer")
    left = _batches_after(mine.batches, earlier)
    with placed(job.source.module, ours), placed(job.target.module, theirs):
        return measure_pairs(
            job.source.module,
            job.target.module,
            job.plan.pairs,
            left if theirs is None else (nested_to(batch, theirs.device) for batch in left),
            signals=signals,
            source_loss=job.source_loss,
            target_loss=job.target_loss,
            match=job.match,
            progress=progress,
            start=earlier,
            on_batch=keeper,
            limit=replace(limit, offset=before) if limit is not None else None,
            most_samples=samples_at_once(job.target.device) if theirs is None else None,  # each part would fetch anew
        )


def _token_limit(job: Job) -> TokenLimit | None:
    """The limit of a job whose samples are counted."""
    if job.max_tokens is None:
        return None
    seed = job.record.get("options", {}).get("seed", 0)
    return TokenLimit(job.max_tokens, job.samples, seed, first=job.target.layout is not None)


def _batches_after(batches: Iterable[Any], earlier: Statistics | None) -> Iterable[Any]:
    """The batches that were not measured yet, cut where they were cut before."""
    if earlier is None:
        return batches
    done = earlier.passes["forward"]
    if isinstance(batches, PairedBatches):
        return replace(batches, indices=batches.indices[done * batches.size :])
    return islice(batches, done, None)
