"""One cell of a comparison: all methods, budgets and scale rules on one task with one draw of the samples.

The largest draw is measured once; smaller budgets are its beginnings, whose sums are added up. The test split is
only for the final accuracies, and what does not depend on the draw is measured once per task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from tuneport.config import TransferConfig
from tuneport.data.dataset import Dataset, align_labels
from tuneport.data.tasks import read_data
from tuneport.maps.statistics import Statistics
from tuneport.measure.accuracy import compute_features, linear_probe
from tuneport.measure.samples import DatasetSamples, Measurement, Samples, first_half
from tuneport.methods import Transfer, get_method
from tuneport.models.base import Model
from tuneport.models.heads import Head, choose_head
from tuneport.models.open import open_model
from tuneport.models.weights import Scaled
from tuneport.outputs import ModelOutput
from tuneport.pipeline.samples import SCORED
from tuneport.pipeline.scale import RULES, Judge, choose_on_halves
from tuneport.pipeline.solve import measure, problem_of
from tuneport.pipeline.transfer import Setup, prepare
from tuneport.task_vectors.vector import TaskVector
from tuneport.training.loop import Schedule
from tuneport.types import Signal

from .finetune import batch_reader, finetune
from .samplers import CENTROID, select_by_features
from .schema import Comparison
from .tables import Row

Scorer = Callable[[nn.Module], float]
Halves = tuple[Statistics, Statistics, Statistics]  # of the two halves of some samples, and of all of them


@dataclass(eq=False)
class Task:
    """A task of a comparison with the opened base models, and what all its cells share."""

    comparison: Comparison
    models: Sequence[Model]
    name: str

    @property
    def probing(self) -> bool:
        return self.comparison.protocol == "linear-probe"

    @cached_property
    def test(self) -> Dataset:
        """The test split, or a seeded part of it where the recipe asks for fewer samples."""
        test, count = read_data(self.comparison.data[self.name], "test"), self.comparison.test_samples
        if count is None or count >= len(test):
            return test
        return test.subset(torch.randperm(len(test), generator=torch.Generator().manual_seed(0))[:count].numpy())

    def head(self, model: Model) -> Head:
        return choose_head(model, self.comparison.heads.get(self.name), self.test)

    def scorer(self, model: Model) -> Scorer:
        """Zero-shot accuracy of a module in place of the model's own; small test sets are encoded once."""
        head = self.head(model)
        test = align_labels(self.test, head.classes)
        batch_of = batch_reader(model, test)

        def accuracy(module: nn.Module) -> float:
            right = 0
            with torch.inference_mode():
                for rows in torch.arange(len(test)).split(256):
                    batch, labels = batch_of(rows)
                    right += int((head.scores(model, module, batch).argmax(-1) == labels).sum())
            return 100.0 * right / len(test)

        return accuracy

    def probe(self, model: Model, train: Dataset) -> Scorer:
        """Accuracy of a linear probe that is trained on these samples, and no others."""
        return lambda module: linear_probe(model.with_module(module), train, self.test).accuracy

    @cached_property
    def target_scorer(self) -> Scorer:
        return self.scorer(self.models[1])

    @cached_property
    def fixed(self) -> list[Row]:
        """The rows of the fine-tuned models, and of the target unless each draw has a probe of its own."""
        (source, target), comparison = self.models, self.comparison
        blank = Row(self.name, "fine-tuned target", "-", 0, 0, 0.0)
        rows = [] if self.probing else [replace(blank, method="target", accuracy=self.target_scorer(target.module))]
        if self.name in comparison.reference:
            rows.append(replace(blank, accuracy=self._tuned(target, comparison.reference[self.name])))
        elif self.name in comparison.stated:
            rows.append(replace(blank, accuracy=float(comparison.stated[self.name]), stated=True))
        if comparison.source_rows:
            accuracy = self._tuned(source, comparison.finetuned[self.name])
            rows.append(replace(blank, method="fine-tuned source", accuracy=accuracy))
        return rows

    def _tuned(self, model: Model, path: str) -> float:
        """Accuracy of a fine-tuned model; its probe is trained on the whole training split."""
        module = open_model(path, device=model.device).module
        if self.probing:
            return self.probe(model, read_data(self.comparison.data[self.name], "train"))(module)
        return (self.target_scorer if model is self.models[1] else self.scorer(model))(module)

    def setup(self, sampler: str, seed: int, signals: frozenset[Signal]) -> Setup:
        """A transfer over the largest budget. What a sampler looks at is computed once for all draws."""
        (source, target), comparison = self.models, self.comparison
        drawn = {**comparison.largest, "seed": seed}
        looks = sampler in CENTROID
        config = TransferConfig.of(
            sampler="class_balanced" if looks else sampler,
            head=comparison.heads.get(self.name),
            exclude=tuple(comparison.exclude),
            batch_size=comparison.batch_size,
            scale=1.0,
            **drawn,
        )
        setup = prepare(
            source, comparison.finetuned[self.name], target, comparison.data[self.name], config, signals=signals
        )
        if not looks:
            return setup
        samples = drawn_samples(setup.calibration.samples)
        chosen = select_by_features(samples.dataset, sampler, self._features, **drawn)
        calibration = replace(setup.calibration, samples=replace(samples, indices=chosen))
        return replace(setup, calibration=calibration)

    @cached_property
    def _features(self) -> Tensor:
        return compute_features(self.models[1], read_data(self.comparison.data[self.name], "train"))


def drawn_samples(samples: Samples) -> DatasetSamples:
    assert isinstance(samples, DatasetSamples)
    return samples


def measurement_of(setup: Setup) -> Measurement:
    """What is measured for all methods."""
    return Measurement(setup.models, setup.plan, setup.calibration)


def run_cell(task: Task, sampler: str, seed: int) -> tuple[list[Row], dict[str, int]]:
    """All rows of one (task, sampler, seed), from one pass over the largest set of samples; and the passes."""
    comparison = task.comparison
    methods = {name: get_method(name) for name in comparison.methods}
    signals = frozenset().union(*(method.signals for method in methods.values()))
    setup = task.setup(sampler, seed, signals | SCORED)
    measurement, change = measurement_of(setup), setup.change.vector
    for method in methods.values():
        method.check(setup.plan)
    rows = [replace(row, seed=seed) for row in task.fixed]
    each = len(measurement.samples) // comparison.budgets[-1]  # 1, or the number of classes
    parts = _measured(measurement, [each * budget for budget in comparison.budgets], signals)
    passes = {"captures": int(bool(signals))}
    passes |= {name: sum(part.passes.get(name, 0) for part in parts.values()) for name in ("forward", "backward")}

    def solver(name: str) -> Callable[[Statistics], Transfer]:
        """A method that solves each statistics once."""
        return cache(lambda found: methods[name].transfer(problem_of(measurement, change, found)))

    lasting = {name: solver(name) for name, method in methods.items() if not method.signals}
    nothing = (Statistics(),) * 3
    for budget in comparison.budgets:
        chosen = measurement.with_samples(drawn_samples(measurement.samples).take(slice(each * budget)))
        blank = Row(task.name, "", "-", budget, seed, 0.0, sampler=sampler)
        if task.probing:
            for side, model in zip(("source", "target"), task.models, strict=True):
                score = task.probe(model, drawn_samples(chosen.samples).chosen)
                rows.append(replace(blank, method=side, accuracy=score(model.module)))
        else:
            score = task.target_scorer
        shared = _halves(parts, each * budget)
        warm: TaskVector | None = None
        for name, method in methods.items():
            found = nothing if name in lasting else shared
            if method.uses_augmented_inputs:  # it sees more than the others, in passes of its own
                found = _halves(_measured(measurement, [each * budget], method.signals, views=True), each * budget)
            solve = lasting.get(name) or solver(name)
            own = replace(blank, method=name)
            for row, vector in _method_rows(own, comparison.scales, chosen, solve, found, score):
                rows.append(row)
                if name == comparison.warm_start and row.scale_rule == comparison.scales[0]:
                    warm = (row.scale or 0.0) * vector
        if not task.probing:
            rows += _finetuning_rows(task, chosen, blank, warm)
    return rows, passes


def _measured(
    measurement: Measurement, counts: Iterable[int], signals: Iterable[Signal], *, views: bool = False
) -> dict[int, Statistics]:
    """The statistics of consecutive parts by the place of their end; every count and every half is a sum of them."""
    cuts = sorted({cut for count in counts for cut in (first_half(count), count)})
    parts = [
        drawn_samples(measurement.samples).take(slice(start, stop))
        for start, stop in zip((0, *cuts), cuts, strict=False)
    ]
    found = [measure(measurement.with_samples(part), signals=signals, views=views) for part in parts]
    return dict(zip(cuts, found, strict=True))


def _halves(parts: Mapping[int, Statistics], count: int) -> Halves:
    """The sums over both halves of the first `count` samples and over all; one object where there are too few."""

    def between(start: int, stop: int) -> Statistics:
        return sum((part for cut, part in parts.items() if start < cut <= stop), Statistics())

    half = first_half(count)
    first = between(0, half)
    return (first, first, first) if half == count else (first, between(half, count), between(0, count))


def _method_rows(
    blank: Row,
    scales: Iterable[str],
    measurement: Measurement,
    solve: Callable[[Statistics], Transfer],
    found: Halves,
    accuracy: Scorer,
) -> Iterator[tuple[Row, TaskVector]]:
    """A method at every scale rule."""
    *parts, whole = found
    for rule in scales:
        before = after = None
        if rule in RULES:
            judge = Judge(measurement.target, measurement.calibration, ModelOutput())
            choice = choose_on_halves(judge, measurement.halves(), map(solve, parts), rule)
            scale = choice.scale
            before, after = choice.scores[0.0].accuracy, choice.scores[scale].accuracy
        else:
            scale = float(rule)
        vector = solve(whole).task_vector
        with Scaled(measurement.target.module, vector) as scaled:
            scaled.set(scale)
            share = accuracy(scaled.module)
        row = replace(blank, scale_rule=rule, accuracy=share, scale=scale)
        yield replace(row, held_out_before=before, held_out_after=after), vector


def _finetuning_rows(task: Task, measurement: Measurement, blank: Row, warm: TaskVector | None) -> Iterator[Row]:
    """Few-shot fine-tuning of the target on the same samples, from its own weights and from the ported ones."""
    comparison, samples, target = task.comparison, drawn_samples(measurement.samples).chosen, measurement.target
    starts = {"fine-tuning": TaskVector({})}
    if warm is not None:
        starts[f"fine-tuning from {comparison.warm_start}"] = warm
    for steps in comparison.steps:
        size = len(samples) if comparison.full_batch else Schedule.batch_size
        schedule = Schedule(steps, size, comparison.learning_rate, seed=blank.seed)
        for words, vector in starts.items():
            with Scaled(target.module, vector) as start:
                start.set(1.0)
                *_, (_, module) = finetune(target, task.head(target), samples, schedule)
            yield replace(blank, method=f"{words}, {steps} steps", accuracy=task.target_scorer(module))
