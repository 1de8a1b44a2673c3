"""One cell of a comparison: all methods, budgets and scale rules on one task with one draw of the samples.

The largest draw is measured once; smaller budgets are its beginnings, whose sums are added up. The test split is
only for the final accuracies, and what does not depend on the draw is measured once per task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..data.dataset import Dataset, align_labels
from ..data.samplers import SAMPLERS, select
from ..data.tasks import read_data
from ..job import Drawn, Job, first_half
from ..maps.statistics import Statistics
from ..measure.accuracy import compute_features, linear_probe
from ..methods import Method, Transfer, get_method
from ..models.base import Model
from ..models.heads import Head, choose_head
from ..models.open import open_model
from ..pipeline.prepare import SCORED, prepare
from ..pipeline.scale import RULES, Scaled, choose_on_halves
from ..pipeline.statistics import measure_in_parts, problem_of
from ..task_vectors.vector import TaskVector
from ..training.finetune import Schedule, batch_reader, finetune
from ..types import Signal
from .schema import Comparison
from .tables import Row

Scorer = Callable[[nn.Module], float]


@dataclass(frozen=True, eq=False)
class Judge:
    """A task's test split, ready to be scored with one model's head; small sets are prepared once."""

    model: Model
    head: Head
    labels: Tensor
    batch_of: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]

    def accuracy(self, module: nn.Module) -> float:
        right = 0
        with torch.inference_mode():
            for rows in torch.arange(len(self.labels)).split(256):
                batch, labels = self.batch_of(rows)
                right += int((self.head.scores(self.model, module, batch).argmax(-1) == labels).sum())
        return 100.0 * right / len(self.labels)


def _judge(comparison: Comparison, model: Model, task: str) -> Judge:
    test = _test_split(comparison, task)
    head = choose_head(model, comparison.heads.get(task), test)
    aligned = align_labels(test, head.classes)
    return Judge(model, head, torch.as_tensor(aligned.labels), batch_reader(model, aligned))


def _test_split(comparison: Comparison, task: str) -> Dataset:
    """The test split, or a seeded part of it where the recipe asks for fewer samples."""
    test = read_data(comparison.data[task], "test")
    if comparison.test_samples is None or comparison.test_samples >= len(test):
        return test
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
    return test.subset(order[: comparison.test_samples].numpy())


def run_cell(
    comparison: Comparison,
    models: Sequence[Model],
    task: str,
    sampler: str,
    seed: int,
    captures: dict[str, int],
    judges: dict[str, Any],
) -> Iterator[Row]:
    """All rows of one (task, sampler, seed), from one pass over the largest set of samples."""
    source, target = models
    methods = {name: get_method(name) for name in comparison.methods}
    signals = frozenset().union(*(method.signals for method in methods.values()))
    if judges.get("task") != task:  # what is kept is of one task at a time
        judges.clear()
        judges["task"] = task
    job, budgets = _largest_job(comparison, source, target, (task, sampler, seed), signals, judges)
    blank = Row(task, "", "-", 0, seed, 0.0)
    probing = comparison.protocol == "linear-probe"
    head: Head | None = None
    if probing:
        judges.setdefault("test", _test_split(comparison, task))
        yield from _probed_rows(comparison, models, judges, blank)
    else:
        if "judge" not in judges:
            judges["judge"] = _judge(comparison, target, task)
        head = judges["judge"].head
        yield from _fixed_rows(comparison, source, judges, blank)
    measured = _Measured(job, signals, sorted({cut for n in budgets.values() for cut in (first_half(n), n)}))
    captures["captures"] += 1 if signals else 0
    for name in ("forward", "backward"):
        captures[name] += measured.between(0, measured.cuts[-1]).passes.get(name, 0)
    lasting: dict[tuple[str, int], Transfer] = {}  # of methods that read no data: the same at every budget

    def solver(name: str) -> Callable[[Statistics], Transfer]:
        """A method at one budget; what it has solved once is not solved again, and goes when the budget is done."""
        reads = methods[name].signals
        solved: dict[tuple[str, int], Transfer] = {} if reads else lasting

        def solve(found: Statistics) -> Transfer:
            key = (name, id(found) if reads else 0)
            if key not in solved:
                solved[key] = methods[name].transfer(problem_of(job, found))
            return solved[key]

        return solve

    for budget, count in budgets.items():
        chosen = job.on(job.samples.take(slice(count)))
        score = _probe(chosen, target, judges["test"]) if probing else judges["judge"].accuracy
        blank = replace(blank, budget=budget, sampler=sampler)
        if probing:
            own = _probe(chosen, source, judges["test"])
            yield replace(blank, method="source", accuracy=own(source.module))
            yield replace(blank, method="target", accuracy=score(target.module))
        warm: TaskVector | None = None
        for name in methods:
            found = measured.of(methods[name], count)
            for row, vector in _method_rows(comparison, chosen, solver(name), found, score):
                yield replace(row, task=task, method=name, budget=budget, seed=seed, sampler=sampler)
                if name == comparison.warm_start and row.scale_rule == comparison.scales[0]:
                    warm = (row.scale or 0.0) * vector
        if head is not None:
            yield from _finetuning_rows(comparison, chosen, head, blank, warm, score)


class _Measured:
    """The statistics of any part of a cell's samples, from one pass over all of them.

    Methods that rehearse see more than those, so they have passes of their own.
    """

    def __init__(self, job: Job, signals: frozenset[Signal], cuts: Sequence[int]) -> None:
        self._job, self.cuts = job, cuts
        self._sums = dict(zip(pairwise((0, *cuts)), measure_in_parts(job, cuts, signals=signals), strict=True))
        self._rehearsed: dict[tuple[str, int], tuple[Statistics, Statistics, Statistics]] = {}

    def between(self, start: int, stop: int) -> Statistics:
        """Of the samples from `start` to `stop`, both among the cuts."""
        key = (start, stop)
        if key not in self._sums:
            inner = next(cut for cut in reversed(self.cuts) if start < cut < stop)
            self._sums[key] = self.between(start, inner) + self.between(inner, stop)
        return self._sums[key]

    def of(self, method: Method, count: int) -> tuple[Statistics, Statistics, Statistics]:
        """Of the two halves of the first `count` samples, and of all of them, as a method sees them."""
        half = first_half(count)
        if not method.rehearses:
            first, whole = self.between(0, half), self.between(0, count)
            return first, self.between(half, count) if half < count else first, whole
        key = (repr(method), count)
        if key not in self._rehearsed:
            cuts = [half, count] if half < count else [half]
            parts = measure_in_parts(self._job, cuts, signals=method.signals, views=True)
            self._rehearsed[key] = (parts[0], parts[-1], sum(parts, Statistics()))
        return self._rehearsed[key]


def _fixed_rows(comparison: Comparison, source: Model, judges: dict[str, Any], blank: Row) -> Iterator[Row]:
    """The target as it is, and the fine-tuned models; measured once per task."""
    task, judge = blank.task, judges["judge"]
    if "fixed" not in judges:
        rows = [replace(blank, method="target", accuracy=judge.accuracy(judge.model.module))]
        if task in comparison.reference:
            tuned = open_model(comparison.reference[task], device=judge.model.device)
            rows.append(replace(blank, method="fine-tuned target", accuracy=judge.accuracy(tuned.module)))
        elif task in comparison.stated:
            rows.append(
                replace(blank, method="fine-tuned target", accuracy=float(comparison.stated[task]), stated=True)
            )
        if comparison.source_rows:
            own = _judge(comparison, source, task)
            tuned = open_model(comparison.finetuned[task], device=source.device)
            rows.append(replace(blank, method="fine-tuned source", accuracy=own.accuracy(tuned.module)))
        judges["fixed"] = rows
    yield from (replace(row, seed=blank.seed) for row in judges["fixed"])


def _probed_rows(comparison: Comparison, models: Sequence[Model], judges: dict[str, Any], blank: Row) -> Iterator[Row]:
    """The fine-tuned models under a probe that learns from the whole training split; measured once per task."""
    task, (source, target) = blank.task, models
    if "fixed" not in judges:
        rows = []
        tuned = {"fine-tuned source": (source, comparison.finetuned[task])} if comparison.source_rows else {}
        if task in comparison.reference:
            tuned["fine-tuned target"] = (target, comparison.reference[task])
        elif task in comparison.stated:
            stated = float(comparison.stated[task])
            rows.append(replace(blank, method="fine-tuned target", accuracy=stated, stated=True))
        train = read_data(comparison.data[task], "train") if tuned else None
        for name, (base, path) in tuned.items():
            assert train is not None
            model = base.with_module(open_model(path, device=base.device).module)
            rows.append(replace(blank, method=name, accuracy=linear_probe(model, train, judges["test"]).accuracy))
        judges["fixed"] = rows
    yield from (replace(row, seed=blank.seed) for row in judges["fixed"])


def _chosen(job: Job) -> Dataset:
    assert isinstance(job.samples, Drawn)
    return job.samples.chosen


def _probe(job: Job, model: Model, test: Dataset) -> Scorer:
    """Accuracy of a linear probe that is trained on the samples that made the maps, and no others."""
    train = _chosen(job)
    return lambda module: linear_probe(model.with_module(module), train, test).accuracy


def prepare_task(
    comparison: Comparison, models: Sequence[Model], task: str, signals: str | Iterable[Signal], **drawn: Any
) -> Job:
    """The job of one task of a comparison; `drawn` are the options that say which samples are drawn."""
    source, target = models
    return prepare(
        source,
        comparison.finetuned[task],
        target,
        comparison.data[task],
        signals=signals,
        head=comparison.heads.get(task),
        exclude=comparison.exclude,
        batch_size=comparison.batch_size,
        **drawn,
    )


def _largest_job(
    comparison: Comparison,
    source: Model,
    target: Model,
    cell: tuple[str, str, int],
    signals: frozenset[Signal],
    kept: dict[str, Any],
) -> tuple[Job, dict[int, int]]:
    """A job over the largest budget, and how many of its (nested) samples each budget takes.

    Features of the whole training split, which some samplers look at, are computed once per task.
    """
    task, sampler, seed = cell
    shots = bool(comparison.shots)
    budgets = comparison.budgets
    drawn: dict[str, Any] = {
        "samples": None if shots else budgets[-1],
        "shots": budgets[-1] if shots else None,
        "seed": seed,
    }
    looks = SAMPLERS[sampler].needs_features
    first = "class_balanced" if looks else sampler
    job = prepare_task(comparison, (source, target), task, signals | SCORED, sampler=first, **drawn)
    if looks:
        assert isinstance(job.samples, Drawn)
        if "features" not in kept:
            kept["features"] = compute_features(target, job.samples.dataset)
        chosen = select(job.samples.dataset, sampler=sampler, features=lambda _: kept["features"], **drawn)
        job = replace(job, samples=replace(job.samples, indices=chosen))
    for name in comparison.methods:
        get_method(name).check(job.plan)
    per_budget = len(job.samples) // budgets[-1] if shots else 1
    return job, {budget: budget * per_budget for budget in budgets}


def _method_rows(
    comparison: Comparison,
    job: Job,
    solve: Callable[[Statistics], Transfer],
    found: tuple[Statistics, Statistics, Statistics],
    accuracy: Scorer,
) -> Iterator[tuple[Row, TaskVector]]:
    """A method at every scale rule."""
    *parts, whole = found
    for rule in comparison.scales:
        before = after = None
        if rule in RULES:
            choice = choose_on_halves(job.halves(), map(solve, parts), rule)
            moved = solve(whole)
            scale = choice.scale
            before, after = choice.scores[0.0].accuracy, choice.scores[scale].accuracy
        else:
            moved, scale = solve(whole), float(rule)
        with Scaled(job.target.module, moved.task_vector) as scaled:
            scaled.set(scale)
            share = accuracy(scaled.module)
        yield Row("", "", rule, 0, 0, share, scale, before, after), moved.task_vector


def _finetuning_rows(
    comparison: Comparison,
    job: Job,
    head: Head,
    blank: Row,
    warm: TaskVector | None,
    accuracy: Scorer,
) -> Iterator[Row]:
    """Few-shot fine-tuning of the target on the same samples, from its own weights and from the ported ones."""
    samples = _chosen(job)
    for steps in comparison.steps:
        size = len(samples) if comparison.full_batch else Schedule.batch_size
        schedule = Schedule(steps, size, comparison.learning_rate, seed=blank.seed)
        for words, vector in (("fine-tuning", None), (f"fine-tuning from {comparison.warm_start}", warm)):
            if words != "fine-tuning" and vector is None:
                continue
            with Scaled(job.target.module, vector if vector is not None else TaskVector({})) as start:
                start.set(1.0)
                *_, (_, module) = finetune(job.target, head, samples, schedule)
            yield replace(blank, method=f"{words}, {steps} steps", accuracy=accuracy(module))
