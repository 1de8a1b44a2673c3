"""The scale of a transfer, chosen on calibration samples by forward passes only.

Maps from one half of the samples are judged on the other half. Zero is always a candidate. Scales are compared by their
loss at the best sharpness (inverse temperature) of each: a zero-shot head is often far too soft or too sharp, and then
a change that only sharpens it lowers the plain loss. Accuracy has no such bias, but its standard error is ten points
with 20 samples, while the losses of one sample at two scales differ little. Where a language model has answers to
choose from, their likelihoods are its class scores: the loss of the right answer alone also falls where a change
teaches the form of the answers and loses which one is right. A language model that was not trained for the task may
prefer some answers by far and still be often right, which no sharpness shows: there, a scale with fewer right answers
than at zero is not chosen, and only evidence leads away from zero: a change whose loss was lower by less than two
standard errors did harm.

The rule `auto` takes the least loss, and otherwise needs evidence only beyond 1. `safe` needs evidence for every step
above the smallest scale: a quarter of a change has a quarter of its use, and a sixteenth of the harm that grows with
the square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..data.choices import each_answer, fewer_choices
from ..data.dataset import UNLABELLED, with_prompts
from ..io.tensors import describe
from ..job import Drawn, Job, Samples
from ..measure.batches import PairedBatch
from ..measure.objectives import HeadLoss, TokenLoss, batch_for, questions_at_once
from ..measure.signals import frozen
from ..methods import Transfer
from ..task_vectors.lora_write import AdapterForm
from ..task_vectors.low_rank import as_dense
from ..task_vectors.vector import TaskVector
from ..types import ScaleRule
from .adapter import whole_modules
from .heads import fitted

SCALES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
# of language models: between real ones a quarter can be too much, and none has gained beyond 1
TOKEN_SCALES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0)
MOST_ANSWERS = 8  # that a sample is judged by: each of them takes time
UNLIKELY = -1e6  # the score of an answer that other samples have, and of a token after the end of a text
SHARPEST = 20.0  # the head's sharpness is fitted between 1 / SHARPEST and SHARPEST times its own
# the standard errors by which a larger scale must be better: up to 1, beyond 1
RULES: dict[ScaleRule, tuple[float, float]] = {"auto": (0.0, 2.0), "safe": (2.0, 3.0)}
FROM_ZERO = 2.0  # the same for any scale above zero, where a language model has answers to choose from


@dataclass(frozen=True)
class Score:
    """The mean loss of a model on some samples, and with classes also the share that is right.

    With classes the loss is that at the best `sharpness`, a factor of the scores of the head, and `losses` has the loss
    of each sample. `by_likelihood` says that the classes are answers of a language model.
    """

    loss: float
    accuracy: float | None = None
    sharpness: float | None = None
    losses: Tensor | None = field(default=None, compare=False, repr=False)
    by_likelihood: bool = False


@dataclass(frozen=True)
class ScaleChoice:
    """The chosen scale, the score of every candidate, the number of samples that judged, and the rule."""

    scale: float
    scores: Mapping[float, Score]
    samples: int
    held_out: bool
    rule: ScaleRule = "auto"


def score_of_classes(scores: Tensor, labels: Tensor) -> Score:
    """The score of samples by their class scores (N, classes), or by those of their tokens (N, T, classes).

    The loss of a sample is then the sum over its tokens, in units in which their mean over all samples is that of a
    token; tokens without a label do not count.

    >>> found = score_of_classes(torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.1, 0.0]]), torch.tensor([0, 1, 1]))
    >>> found.accuracy, found.sharpness
    (0.6666666666666666, 6.931)
    """
    flat, wanted = scores.double().flatten(0, -2), labels.flatten()
    known = wanted != UNLABELLED
    right = float((flat.argmax(-1) == wanted)[known].double().mean())
    sharpness = _best_sharpness(flat[known], wanted[known])
    losses = F.cross_entropy(sharpness * flat, wanted, ignore_index=UNLABELLED, reduction="none")
    losses = losses.view(len(labels), -1).sum(1) * (len(labels) / int(known.sum()))
    return Score(float(losses.mean()), right, float(f"{sharpness:.4g}"), losses)


def _best_sharpness(scores: Tensor, labels: Tensor) -> float:
    """The factor of the scores with the least loss, by bisection: the loss is convex in it."""
    if not bool(scores.isfinite().all()):
        return 1.0
    wanted = scores.gather(1, labels[:, None])[:, 0].mean()
    low, high = math.log(1 / SHARPEST), math.log(SHARPEST)
    for _ in range(40):
        middle = (low + high) / 2
        shares = (math.exp(middle) * scores).softmax(-1)
        rising = float((shares * scores).sum(-1).mean() - wanted) > 0
        low, high = (low, middle) if rising else (middle, high)
    return math.exp((low + high) / 2)


def choose_scale(
    score: Callable[[float], Score],
    *,
    samples: int,
    held_out: bool,
    candidates: Sequence[float] = SCALES,
    rule: ScaleRule = "auto",
) -> ScaleChoice:
    """The candidate with the least loss, from the smallest up; a larger one must be better by as much as the rule asks.

    The standard error is that of the mean difference over samples; without the losses of samples it counts as zero.
    `safe` never chooses more than `auto`, and no more than the smallest scale without held-out samples.

    >>> losses = {0.0: 2.0, 0.5: 1.5, 1.0: 1.8}
    >>> choose_scale(lambda s: Score(losses[s]), samples=8, held_out=True, candidates=(0.0, 0.5, 1.0)).scale
    0.5
    """
    scores = {scale: score(scale) for scale in sorted({0.0, *candidates})}
    smallest = min((scale for scale in scores if scale > 0), default=0.0)
    best = _upwards(scores, smallest, "auto")
    if rule == "safe":
        most = best if held_out else min(best, smallest)
        best = _upwards({scale: found for scale, found in scores.items() if scale <= most}, smallest, rule)
    return ScaleChoice(best, scores, samples, held_out, rule)


def _upwards(scores: Mapping[float, Score], smallest: float, rule: ScaleRule) -> float:
    """The last scale, from zero up, that is better than the one before it by as much as the rule asks for."""
    best = 0.0
    for scale, found in scores.items():
        errors = 0.0 if scale <= smallest else RULES[rule][scale > 1]
        if found.by_likelihood and best == 0.0:
            errors = max(errors, FROM_ZERO)
        asked = errors * _error(found, scores[best]) if errors else 0.0
        lost = found.by_likelihood and (found.accuracy or 0.0) < (scores[0.0].accuracy or 0.0)
        if math.isfinite(found.loss) and found.loss + asked < scores[best].loss and not lost:
            best = scale
    return best


def _error(one: Score, other: Score) -> float:
    """The standard error of the difference of two mean losses of the same samples; infinite for one sample."""
    if one.losses is None or other.losses is None:
        return 0.0
    if len(one.losses) < 2:
        return math.inf
    return float((one.losses - other.losses).std()) / math.sqrt(len(one.losses))


class Scaled:
    """A module whose weights are `base + scale * delta`, set in place for each scale and restored at the end.

    Low-rank deltas are multiplied one tensor at a time. `exact` holds the weights by name before they were rounded to
    the dtype that the module runs in: a change smaller than the last digit would be lost on a rounded weight. The sum
    is rounded to the dtype of `exact`, in which it would be written, and the delta as in an adapter of the `form`.
    """

    def __init__(
        self,
        module: nn.Module,
        delta: TaskVector,
        exact: Mapping[str, Tensor] | None = None,
        form: AdapterForm | None = None,
    ) -> None:
        self.module = module
        self._exact = exact or {}
        self._form = form
        self._parts = [
            (name, parameter, parameter.detach().clone(), delta[name].to(parameter.device))
            for name, parameter in module.named_parameters()
            if name in delta
        ]

    def set(self, scale: float) -> None:
        """Give the module the weights of this scale."""
        with torch.no_grad():
            for name, parameter, own, delta in self._parts:
                change = as_dense(delta * scale if self._form is None else self._form.rounded(delta * scale))
                base = self._base(name, own)
                new = base + change.to(torch.promote_types(base.dtype, change.dtype))
                parameter.copy_(new.to(describe(self._exact, name).dtype) if name in self._exact else new)

    def _base(self, name: str, own: Tensor) -> Tensor:
        """The exact weight, read when it is needed, if it has more digits."""
        if name in self._exact:
            exact = describe(self._exact, name)
            if exact.shape == tuple(own.shape) and torch.finfo(exact.dtype).eps < torch.finfo(own.dtype).eps:
                return self._exact[name].to(own.device)
        return own

    def __enter__(self) -> Scaled:
        return self

    def __exit__(self, *error: object) -> None:
        with torch.no_grad():
            for _, parameter, own, _ in self._parts:
                parameter.copy_(own)


def scaled_as_written(job: Job, vector: TaskVector) -> Scaled:
    """The target with a task vector as it will be written: of an adapter, what it holds."""
    target = job.target
    if job.form is not None:
        vector = job.form.cut(vector, target.module, whole_modules(target, vector, job.fits_head)).vector
    return Scaled(target.module, vector, target.stored_parameters(), job.form)


def choose_on_halves(sides: tuple[Job, Job], moved: Iterable[Transfer], rule: ScaleRule = "auto") -> ScaleChoice:
    """Choose the scale of a transfer by two halves of the samples, each judging the maps of the other.

    What will be written is judged.

    Args:
        sides: the job on each half, as `Job.halves` gives it.
        moved: the transfer from each half; a generator solves the second after the first is judged.
        rule: how the scale is chosen.
    """
    held_out = sides[0] is not sides[1]
    answers: dict[float, list[Answers]] = {scale: [] for scale in scales_of(sides[0])}
    for done, maker, judge in zip(moved, sides, reversed(sides), strict=False):
        questions = questions_of(judge, judge.samples)
        with scaled_as_written(judge, done.task_vector) as scaled:
            for scale, seen in answers.items():
                scaled.set(scale)
                with fitted(judge, scaled.module, maker.samples):
                    seen += answers_of(judge, scaled.module, questions)
        if not held_out:
            break
    samples = sum(len(side.samples) for side in (sides if held_out else sides[:1]))
    return choose_scale(
        lambda scale: score_of(sides[0], answers[scale]),
        samples=samples,
        held_out=held_out,
        candidates=tuple(answers),
        rule=rule,
    )


def scales_of(job: Job) -> tuple[float, ...]:
    """The candidates for the scale of a job."""
    return TOKEN_SCALES if job.losses is not None and isinstance(job.losses.target, TokenLoss) else SCALES


def judged_by_loss(job: Job) -> bool:
    """Whether the samples have no classes, and each of them has a loss: that of its tokens, or of its numbers."""
    loss = None if job.losses is None else job.losses.target
    if isinstance(loss, TokenLoss):
        return not answers_per_sample(job)
    return isinstance(loss, HeadLoss) and not job.target.labels_samples


def answers_per_sample(job: Job) -> int:
    """The most answers that a sample of a language model is judged by; 0 if it has none to choose from."""
    loss = None if job.losses is None else job.losses.target
    if not isinstance(loss, TokenLoss) or not isinstance(job.samples, Drawn) or job.samples.dataset.labels is None:
        return 0
    count = len(job.samples.dataset.label_texts or job.samples.dataset.classes)
    return min(count, MOST_ANSWERS) if count > 1 else 0


class Question(NamedTuple):
    """A batch of the target's inputs; with answers to choose from, a row for each, their counts, and the right ones."""

    batch: Any
    counts: Sequence[int] = ()
    right: Tensor | None = None


def questions_of(job: Job, samples: Samples) -> list[Question]:
    """What the target is asked about samples to judge a scale."""
    most = answers_per_sample(job)
    if not most or not isinstance(samples, Drawn):
        return [Question(batch.target if isinstance(batch, PairedBatch) else batch) for batch in samples]
    found, data, size = [], fewer_choices(samples.chosen, most), questions_at_once(job.target, samples.size, most)
    for start in range(0, len(data), size):
        part = data.subset(np.arange(start, min(start + size, len(data))))
        asked, counts = each_answer(part)
        batch = batch_for(job.target, samples.objective.encode(job.target, with_prompts(asked)))
        found.append(Question(batch, counts, torch.as_tensor(part.labels)))
    return found


# of a batch: class scores and labels, of samples or of tokens, or the loss of each sample
Answers = tuple[Tensor, Tensor | None]


def answers_of(job: Job, module: nn.Module, questions: Sequence[Question]) -> list[Answers]:
    """The answers of the target, which `module` is."""
    assert job.losses is not None
    loss, found = job.losses.target, list[Answers]()
    with frozen(module), torch.no_grad():
        for batch, counts, right in questions:
            if isinstance(loss, TokenLoss) and right is not None:
                losses = pad_sequence(loss.each(module, batch, counts).split(list(counts)), True, -UNLIKELY)
                found.append((-losses, right))
            elif isinstance(loss, TokenLoss) or (isinstance(loss, HeadLoss) and job.target.regresses):
                found.append((loss.each(module, batch), None))
            elif job.heads is not None:
                found.append((job.heads.target.scores(job.target, module, batch[0]).cpu(), batch[1].cpu()))
            else:  # the mean of the batch for each of its samples
                size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
                mean = float(loss(module, batch)) / size
                found.append((torch.full((size,), mean, dtype=torch.float64), None))
    return found


def score_of(job: Job, answers: Sequence[Answers]) -> Score:
    """The score of answers in a job."""
    labels = [label for _, label in answers if label is not None]
    if labels:
        found = score_of_classes(_together([value for value, _ in answers], UNLIKELY), _together(labels, UNLABELLED))
        return replace(found, by_likelihood=answers_per_sample(job) > 0)
    values = torch.cat([value for value, _ in answers])
    return Score(float(values.mean()), losses=values if judged_by_loss(job) else None)


def _together(batches: Sequence[Tensor], fill: float) -> Tensor:
    """Batches of scores, or of labels, as one; where they have fewer tokens or answers, they are filled up."""
    shape = torch.tensor([batch.shape for batch in batches]).amax(0).tolist()[1:]
    joined = batches[0].new_full((sum(map(len, batches)), *shape), fill)
    for start, batch in zip(accumulate(map(len, batches), initial=0), batches, strict=False):
        joined[(slice(start, start + len(batch)), *map(slice, batch.shape[1:]))] = batch
    return joined
