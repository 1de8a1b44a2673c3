"""The similarity of two models, and a verdict on their transfer from a trial on held-out samples.

The trial transfers in memory: it scores the target on each fold of the calibration samples, with and without an update
whose maps come from the other folds, at the scale that a transfer would take: a number, or what the other folds choose.
Similarity has not predicted gains (benchmarks/results/verdict.md), so without a fine-tune the verdict is "uncertain".
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import numpy as np
from torch.nn import functional as F

from tuneport.errors import DataError
from tuneport.job import Drawn, Job
from tuneport.maps.statistics import Statistics
from tuneport.measure.chance import LEVEL, direction, tail
from tuneport.measure.objectives import ContrastiveLoss
from tuneport.methods import Method, Transfer, get_method
from tuneport.pairing import LayerPair
from tuneport.pipeline.heads import fitted, measuring
from tuneport.pipeline.labels import measurable
from tuneport.pipeline.scale import (
    Answers,
    answers_of,
    answers_per_sample,
    choose_scale,
    judged_by_loss,
    questions_of,
    scaled_as_written,
    scales_of,
    score_of,
)
from tuneport.pipeline.statistics import measure_in_parts, problem_of
from tuneport.pipeline.transfer import scale_for
from tuneport.runtime.passes import jobs_that_fit, sum_bytes
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import Progress, ScaleRule

from .likeness import COMPARED, LayerSimilarity, compare_layers

FOLDS = 4
LEAST_SAMPLES = 2 * FOLDS
LIKELY, UNCERTAIN, UNLIKELY = "likely to help", "uncertain", "unlikely to help"
LEAST_TURNED = 2  # samples that turn right minus those that turn wrong: one more is chance
NUMBERS = (
    "cka",
    "cka_debiased",
    "cosine_before",
    "cosine_after",
    "cosine_held_out",
    "residual",
)  # of a LayerSimilarity

Score = tuple[float, bool | None]  # the loss, and whether the class is right if there are classes


@dataclass(frozen=True)
class Trial:
    """The target with and without the update, on calibration samples that neither the maps nor the scale have seen.

    `scales` are those of the folds; `rule` chose them, unless the scale was given. `seconds` are those of measuring.
    `loss_falls` is the share of samples whose loss falls. `turned_right` and `turned_wrong` count samples whose class
    becomes right or wrong; they and the accuracies (percent) are None if there are no classes. `loss_error` is the
    standard error of the change of the mean loss, for language models, whose loss is their quality.
    """

    samples: int
    loss_before: float
    loss_after: float
    loss_falls: float
    accuracy_before: float | None = None
    accuracy_after: float | None = None
    turned_right: int | None = None
    turned_wrong: int | None = None
    loss_error: float | None = None
    scales: tuple[float, ...] = (1.0,)
    rule: ScaleRule | None = None
    seconds: float = 0.0

    @property
    def gain(self) -> float | None:
        """The change of accuracy in points."""
        if self.accuracy_before is None or self.accuracy_after is None:
            return None
        return self.accuracy_after - self.accuracy_before


@dataclass(frozen=True)
class Verdict:
    """One of three verdicts, with its reasons."""

    verdict: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Preflight:
    """The similarity of two models, the trial of their transfer, and the verdict."""

    similarity: tuple[LayerSimilarity, ...]
    trial: Trial | None
    verdict: Verdict


def compare(
    job: Job,
    method: str | Method = "bico",
    *,
    scale: float | ScaleRule | None = None,
    trial: bool = True,
    progress: Progress | None = None,
) -> Preflight:
    """Compare the two models of a job layer by layer, and try its transfer on held-out calibration samples.

    The job is prepared for the signals of the method and those that are `COMPARED`. The `scale` is that of `transfer`.
    With `trial=False` only similarity is measured. Nothing is written, and both models are restored.
    """
    held_out, *_ = _folds(job)
    job = measurable(job)
    assert job.losses is not None
    similarity: list[LayerSimilarity] = []
    others = job.samples.take(slice(held_out.stop, None))
    with measuring(job.on(others)):
        for group in jobs_that_fit(job, COMPARED, _similarity_bytes):
            similarity += compare_layers(
                job.source.module,
                job.target.module,
                group.plan.pairs,
                others,
                held_out=job.samples.take(held_out),
                source_loss=job.losses.source,
                target_loss=job.losses.target,
                completion=job.completion,
                match=job.match,
                progress=progress,
            )
    tried = try_transfer(job, method, scale=scale, progress=progress) if trial else None
    return Preflight(tuple(similarity), tried, judge(tried, similarity))


def try_transfer(
    job: Job,
    method: str | Method = "bico",
    *,
    scale: float | ScaleRule | None = None,
    progress: Progress | None = None,
) -> Trial:
    """Score the target on every fold of the samples, with maps and a scale from the other folds (cross-fitting)."""
    method, strength = get_method(method), scale_for(job, scale)
    job = measurable(job.for_(method))
    folds = _folds(job)
    assert job.losses is not None
    tokens = judged_by_loss(job)
    candidates = scales_of(job) if isinstance(strength, str) else (0.0, strength)
    fits = _CrossFit(job, method, folds, progress)
    answers: list[dict[float, list[Answers]]] = []
    for fold, vector in zip(folds, fits.vectors(), strict=True):
        samples = job.samples.take(fold)
        # a loss of one sample is its own, unless it compares samples
        compares = isinstance(job.losses.target, ContrastiveLoss)
        single = job.heads is None and not (tokens or compares or answers_per_sample(job))
        questions = questions_of(job, replace(samples, size=1 if single else samples.size))
        others = job.samples.take(np.delete(np.arange(len(job.samples)), fold))
        answers.append({})
        with scaled_as_written(job, vector) as scaled:
            for candidate in candidates:
                scaled.set(candidate)
                with fitted(job, scaled.module, others):
                    answers[-1][candidate] = answers_of(job, scaled.module, questions)
    scales = tuple(_scale(job, answers[:number] + answers[number + 1 :], strength) for number in range(len(folds)))
    before, after = (
        [score for found, at in zip(answers, taken, strict=True) for score in _scores(found[at])]
        for taken in ([0.0] * len(folds), scales)
    )
    found, rule = _compared(before, after, tokens), strength if isinstance(strength, str) else None
    return replace(found, scales=scales, rule=rule, seconds=round(fits.seconds, 3))


@dataclass
class _CrossFit:
    """What a method moves for each fold, by maps from the other folds; `seconds` are those of measuring."""

    job: Job
    method: Method
    folds: Sequence[slice]
    progress: Progress | None
    seconds: float = 0.0

    def vectors(self) -> Iterator[TaskVector]:
        """The task vector of each fold; if its layers do not fit into memory together, group by group."""
        groups = [self.job]
        if self.method.by_layer:
            groups = jobs_that_fit(self.job, self.job.signals, sum_bytes(self.job, FOLDS + 1))
        *first, last = groups
        kept = [list(self._transfers(group)) for group in first]
        for number, moved in enumerate(self._transfers(last)):
            yield Transfer.join([*(done[number] for done in kept), moved]).task_vector

    def _transfers(self, job: Job) -> Iterator[Transfer]:
        started = time.perf_counter()
        cuts = [fold.stop for fold in self.folds]
        sums = measure_in_parts(job, cuts, views=self.method.rehearses, progress=self.progress)
        self.seconds += time.perf_counter() - started
        for number in range(len(sums)):
            rest = reduce(add, (part for index, part in enumerate(sums) if index != number), Statistics())
            yield self.method.transfer(problem_of(job, rest))


def _similarity_bytes(pair: LayerPair, signal: str) -> int:
    """The sums for CKA within and between both sides, the sum for the map, and the map."""
    n, m = pair.widths(signal)
    return 8 * (3 * n * m + n * n + m * m)


def judge(trial: Trial | None, similarity: Iterable[LayerSimilarity] = ()) -> Verdict:
    """The verdict of a trial; the similarity is only named among the reasons.

    >>> judge(Trial(100, 2.0, 1.8, 0.9, 40.0, 46.0, 8, 2)).verdict
    'likely to help'
    >>> judge(Trial(40, 2.0, 1.8, 0.9, 40.0, 42.5, 2, 1)).verdict
    'uncertain'
    >>> judge(None).verdict
    'uncertain'
    """
    means = []
    for signal, values in summary(similarity).items():
        if "cka" in values:
            text = f"{signal.replace('_', ' ')}s: CKA {values['cka']:.2f}"
            if "cosine_held_out" in values:
                text += f", cosine {values['cosine_held_out']:.2f} on held-out samples after alignment"
            means.append(f"{text} (means over layers)")
    if trial is None:
        reason = "no fine-tune was given to try: similarity of the bases alone has not predicted gains"
        return Verdict(UNCERTAIN, (reason, *means))
    low, high = min(trial.scales), max(trial.scales)
    at = f"scale {low:g}" if low == high else f"scales of {low:g} to {high:g}"
    at += "" if trial.rule is None else f", chosen by {trial.rule} on the other samples"
    if not high:
        return Verdict(UNLIKELY, (f"at {at}, the target stays as it is", *means))
    falls = f"at {at}, the loss falls on {100 * trial.loss_falls:.0f} % of {trial.samples} held-out calibration samples"
    if trial.gain is None:
        if trial.loss_error is not None:
            return _judge_loss(trial, falls, means)
        word = UNLIKELY if trial.loss_falls < 0.5 else UNCERTAIN
        return Verdict(word, (falls, "there are no classes to count, and a falling loss alone proves little", *means))
    counted = (
        f"{trial.turned_right} of them turn right and {trial.turned_wrong} turn wrong: "
        f"{trial.accuracy_before:.1f} % before, {trial.accuracy_after:.1f} % after"
    )
    right, wrong = trial.turned_right or 0, trial.turned_wrong or 0
    often = tail(trial.samples, round(trial.loss_falls * trial.samples), 0.5) < LEVEL
    word = UNCERTAIN
    if direction(right, wrong) < 0 or trial.loss_falls < 0.5:
        word = UNLIKELY
    elif direction(right, wrong) > 0 or (right - wrong >= LEAST_TURNED and often):
        word = LIKELY
    return Verdict(word, (falls, counted, *means))


def _judge_loss(trial: Trial, falls: str, means: Sequence[str]) -> Verdict:
    """The verdict on a language model: two standard errors of the mean loss are evidence."""
    assert trial.loss_error is not None
    change = trial.loss_after - trial.loss_before
    word = UNCERTAIN
    if not change < 0:
        word = UNLIKELY
    elif change < -2 * trial.loss_error:
        word = LIKELY
    rates = f"{trial.loss_before:.1f} before, {trial.loss_after:.1f} after"
    error = f"the standard error of the change is {trial.loss_error:.2g}"
    return Verdict(word, (falls, f"their mean loss in nats a text is {rates}; {error}", *means))


def summary(similarity: Iterable[LayerSimilarity]) -> dict[str, dict[str, float]]:
    """The mean over layers of each finite number, by signal."""
    found: dict[str, dict[str, list[float]]] = {}
    for item in similarity:
        for name in NUMBERS:
            number = getattr(item, name)
            if number is not None and math.isfinite(number):
                found.setdefault(item.signal, {}).setdefault(name, []).append(number)
    return {
        signal: {name: statistics.fmean(numbers) for name, numbers in values.items()}
        for signal, values in sorted(found.items())
    }


def _folds(job: Job) -> list[slice]:
    """The slice of the samples that each fold is."""
    for model in job.models:
        model.require_in_memory("a comparison", "give a larger one, or leave the comparison out")
    if not isinstance(job.samples, Drawn):
        raise DataError("a comparison draws its own samples: pass a data set or a path, not batches.")
    if len(job.samples) < LEAST_SAMPLES:
        raise DataError(f"a comparison needs at least {LEAST_SAMPLES} samples, got {len(job.samples)}.")
    parts = np.array_split(np.arange(len(job.samples)), FOLDS)
    return [slice(int(part[0]), int(part[-1]) + 1) for part in parts]


def _scale(job: Job, folds: Sequence[Mapping[float, list[Answers]]], strength: float | ScaleRule) -> float:
    """The scale that was given, or that the answers of some folds choose."""
    if not isinstance(strength, str):
        return strength
    answers = {scale: [answer for found in folds for answer in found[scale]] for scale in folds[0]}
    count = sum(len(values) for values, _ in answers[0.0])
    found = {scale: score_of(job, given) for scale, given in answers.items()}
    return choose_scale(found.__getitem__, samples=count, held_out=True, candidates=tuple(found), rule=strength).scale


def _scores(answers: Iterable[Answers]) -> Iterator[Score]:
    """The score of each sample; without a head, of each batch."""
    for values, labels in answers:
        if labels is None:
            yield from ((loss, None) for loss in values.tolist())
        elif labels.ndim == 2:  # of tokens
            losses = F.cross_entropy(values.transpose(1, 2), labels, reduction="none").sum(1)
            yield from ((loss, None) for loss in losses.tolist())
        else:
            losses = F.cross_entropy(values, labels, reduction="none")
            yield from zip(losses.tolist(), (values.argmax(-1) == labels).tolist(), strict=True)


def _compared(before: list[Score], after: list[Score], tokens: bool) -> Trial:
    losses = [[loss for loss, _ in side] for side in (before, after)]
    falls = [new < old for old, new in zip(*losses, strict=True)]
    found = Trial(len(before), statistics.fmean(losses[0]), statistics.fmean(losses[1]), statistics.fmean(falls))
    right = [[right for _, right in side if right is not None] for side in (before, after)]
    if tokens:
        changes = [new - old for old, new in zip(*losses, strict=True)]
        return replace(found, loss_error=statistics.stdev(changes) / math.sqrt(len(changes)))
    if not right[0]:
        return found
    turned = Counter(new - old for old, new in zip(*right, strict=True))
    old, new = (100 * statistics.fmean(side) for side in right)
    return replace(found, accuracy_before=old, accuracy_after=new, turned_right=turned[1], turned_wrong=turned[-1])
