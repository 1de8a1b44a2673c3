"""The scale of a transfer, chosen on calibration samples by forward passes only.

Maps from one half of the samples are judged on the other half.

Scales are compared by their loss at the best sharpness (inverse temperature) of each: a zero-shot head is often far too
soft or too sharp, and then a change that only sharpens it lowers the plain loss. Where a language model has answers to
choose from, their likelihoods are its class scores, since the loss of the right answer alone also falls where a change
teaches the form of the answers. There, a scale with fewer right answers than at zero is not chosen, and only evidence
leads away from zero.

The rule `auto` takes the least loss, and otherwise needs evidence only beyond 1. `safe` needs evidence for every step
above the smallest scale: a quarter of a change has a quarter of its use, and a sixteenth of the harm that grows with
the square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from ..data.answers import each_answer, fewer_choices
from ..data.dataset import UNLABELLED, with_prompts
from ..measure.capture import PairedBatch
from ..measure.fitted_heads import fit_head
from ..measure.objectives import HeadLoss, TokenLoss, batch_for, questions_at_once
from ..measure.samples import Calibration, DatasetSamples, Measurement, Samples
from ..measure.signals import frozen
from ..methods import Transfer
from ..models.base import Model
from ..models.weights import changed
from ..outputs import Output, Update
from ..processes import divided
from ..types import Events, Loss, Progress, ScaleRule

SCALES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
TOKEN_SCALES = (0.0, 0.05, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0)  # of language models
MOST_ANSWERS = 8  # that a sample is judged by: each of them takes time
PAD_SCORE = -1e6  # the score of an answer that other samples have, and of a token after the end of a text
SHARPEST = 20.0  # the head's sharpness is fitted between 1 / SHARPEST and SHARPEST times its own
# the standard errors by which a larger scale must be better: up to 1, beyond 1
RULES: dict[ScaleRule, tuple[float, float]] = {"auto": (0.0, 2.0), "safe": (2.0, 3.0)}
CLEAR = 2.0  # the same for the best of the scales, so that half of the samples choose it
SMALL_PART = 0.1  # of the gain over zero
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

    def record(self) -> dict[str, Any]:
        """The entry of the run record."""
        candidates = [
            {"scale": value, "loss": found.loss, "accuracy": found.accuracy, "sharpness": found.sharpness}
            for value, found in self.scores.items()
        ]
        return {"rule": self.rule, "samples": self.samples, "held_out": self.held_out, "candidates": candidates}


def score_of_classes(scores: Tensor, labels: Tensor) -> Score:
    """The score of samples by their class scores (N, classes), or by those of their tokens (N, T, classes).

    The loss of a sample is then the sum over its labelled tokens, in units in which their mean over all samples is that
    of a token.

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


class EvalBatch(NamedTuple):
    """A batch of the target's inputs; with answers to choose from, a row for each, their counts, and the right ones."""

    batch: Any
    counts: Sequence[int] = ()
    right: Tensor | None = None


# of a batch: class scores and labels, of samples or of tokens, or the loss of each sample
Scores = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, eq=False)
class Judge:
    """Scores the target with a change, as it will be written."""

    target: Model
    calibration: Calibration  # the task of the samples
    output: Output  # the format in which the change will be written
    fits_head: bool = False  # whether the target's head is fitted for each scale

    @property
    def loss(self) -> Loss | None:
        return None if self.calibration.losses is None else self.calibration.losses.target

    @property
    def searches(self) -> bool:
        """Whether few of the candidates are judged: each costs passes of a language model."""
        return isinstance(self.loss, TokenLoss)

    @property
    def candidates(self) -> tuple[float, ...]:
        """The scales to choose from."""
        return TOKEN_SCALES if self.searches else SCALES

    @property
    def usually(self) -> int:
        """How many of the candidates a half judges, in a search as a rule."""
        return 5 if self.searches else len(self.candidates)

    @property
    def passes(self) -> int:
        """Forward passes of a sample at a candidate, as a rule: one for each answer to choose from."""
        return 1 if self.target.shares_questions else max(self.answers_per_sample, 1)

    @property
    def answers_per_sample(self) -> int:
        """The most answers that a sample of a language model is judged by; 0 if it has none to choose from."""
        samples = self.calibration.samples
        if not isinstance(self.loss, TokenLoss) or not isinstance(samples, DatasetSamples):
            return 0
        count = len(samples.dataset.words)
        return min(count, MOST_ANSWERS) if samples.dataset.labels is not None and count > 1 else 0

    def batches(self, samples: Samples) -> list[EvalBatch]:
        """What the target is asked about samples."""
        most = self.answers_per_sample
        if not isinstance(samples, DatasetSamples):
            return [EvalBatch(batch.target if isinstance(batch, PairedBatch) else batch) for batch in samples]
        if not most:
            return [EvalBatch(batch_for(samples.models.target, each)) for each in samples.encoded_for(1)]
        found, data, size = [], fewer_choices(samples.chosen, most), questions_at_once(self.target, samples.size, most)
        for start in range(0, len(data), size):
            part = data.subset(np.arange(start, min(start + size, len(data))))
            asked, counts = each_answer(part)
            batch = batch_for(self.target, samples.objective.encode(self.target, with_prompts(asked)))
            found.append(EvalBatch(batch, counts, torch.as_tensor(part.labels)))
        return found

    def score_batches(self, module: nn.Module, batches: Sequence[EvalBatch]) -> list[Scores]:
        """The scores of the target, which `module` is."""
        with frozen(module), torch.no_grad():
            return divided(batches, lambda batch: self._score_batch(module, *batch))

    def _score_batch(self, module: nn.Module, batch: Any, counts: Sequence[int], right: Tensor | None) -> Scores:
        loss, heads = self.loss, self.calibration.heads
        assert loss is not None
        if isinstance(loss, TokenLoss) and right is not None:
            losses = pad_sequence(loss.each(module, batch, counts).cpu().split(list(counts)), True, -PAD_SCORE)
            return -losses, right
        if isinstance(loss, TokenLoss) or (isinstance(loss, HeadLoss) and self.target.regresses):
            return loss.each(module, batch).cpu(), None
        if heads is not None:
            return heads.target.scores(self.target, module, batch[0]).cpu(), batch[1].cpu()
        # the mean of the batch for each of its samples
        size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
        return torch.full((size,), float(loss(module, batch)) / size, dtype=torch.float64), None

    def summarize(self, scores: Sequence[Scores]) -> Score:
        """The score of all batches."""
        labels = [label for _, label in scores if label is not None]
        if labels:
            values = _together([value for value, _ in scores], PAD_SCORE)
            found = score_of_classes(values, _together(labels, UNLABELLED))
            return replace(found, by_likelihood=self.answers_per_sample > 0)
        values = torch.cat([value for value, _ in scores])
        # each sample has a loss of its own: that of its tokens, or of its numbers
        each = self.searches or (isinstance(self.loss, HeadLoss) and not self.target.labels_samples)
        return Score(float(values.mean()), losses=values if each else None)

    @contextmanager
    def scorer(
        self, moved: Transfer, maker: Samples, other: Samples, scores: dict[float, list[Scores]], told: Progress
    ) -> Iterator[Callable[[float], float]]:
        """Context with a function that judges a scale of what `maker` moved on other samples, and adds to `scores`.

        It returns the loss if scales are searched by it.
        """
        with self.output.scaled(Update(self.target, moved.task_vector, fits_head=self.fits_head)) as scaled:
            batches = self.batches(other)
            read = [each.batch[0] for each in self.batches(maker)] if self.fits_head else []

            def score(scale: float) -> float:
                scaled.set(scale)
                head = fit_head(self.target, scaled.module, maker, read) if self.fits_head else {}
                with changed(scaled.module, head):
                    found = self.score_batches(scaled.module, batches)
                scores.setdefault(scale, []).extend(found)
                told(len(other))
                return self.summarize(found).loss if self.searches else math.nan

            yield score


def choose_on_halves(
    judge: Judge,
    sides: tuple[Measurement, Measurement],
    moved: Iterable[Transfer],
    rule: ScaleRule = "auto",
    events: Events | None = None,
    cost: float = 0.0,
) -> ScaleChoice:
    """Choose the scale of a transfer by two halves of the samples, each judging the maps of the other.

    `moved` has the transfer from each half; a generator solves the second after the first is judged. `cost` is that of
    a forward pass of the target over one sample.
    """
    events = events or Events()
    held_out = sides[0] is not sides[1]
    scores: dict[float, list[Scores]] = {}
    judged: Sequence[float] = () if judge.searches else judge.candidates
    asked = 0
    for done, maker, other in zip(moved, sides, reversed(sides), strict=False):
        each = len(other.samples)
        events.step("choosing the scale", cost * judge.passes * each * judge.usually, each * judge.usually)
        with judge.scorer(done, maker.samples, other.samples, scores, events.advance) as score:
            for scale in judged:
                score(scale)
            if not judged:  # the first half says which scales the second judges
                judged = around_least(score, judge.candidates, smallest=rule == "safe")
        asked += each
        by_first = judge.searches and rule == "auto" and is_clear([judge.summarize(scores[each]) for each in judged])
        if by_first or not held_out:
            break
    return choose_scale(
        lambda scale: judge.summarize(scores[scale]), samples=asked, held_out=held_out, candidates=judged, rule=rule
    )


def is_clear(found: Sequence[Score]) -> bool:
    """Whether one half of the samples says enough of scales, the first of which is zero.

    The loss of zero is above the least by two standard errors, and that of any other too, unless the choice between
    them matters little: the difference is a tenth of the gain over zero or less.
    """
    best = min(found, key=lambda each: each.loss)
    small = SMALL_PART * (found[0].loss - best.loss)
    worse = [(each.loss - best.loss, CLEAR * _error(each, best)) for each in found if each is not best]
    return all(loss > error or (place > 0 and loss <= small) for place, (loss, error) in enumerate(worse))


def around_least(
    loss: Callable[[float], float], candidates: Sequence[float], *, smallest: bool = False
) -> tuple[float, ...]:
    """Zero, the candidate with the least loss and its neighbours, found by few of the candidates, which rise from zero.

    Every second one of the first five, then the neighbours of the best until it has both. Where the loss falls and
    then rises, that is the least of all. `smallest` adds the first above zero.

    >>> around_least(lambda scale: abs(scale - 0.3), (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    (0.0, 0.2, 0.3, 0.4)
    """
    known: dict[int, float] = {}
    wanted = list(range(0, min(5, len(candidates)), 2))
    while wanted:
        for place in wanted:
            found = loss(candidates[place])
            known[place] = found if math.isfinite(found) else math.inf
        best = min(known, key=lambda place: (known[place], place))
        near = [place for place in (best - 1, best + 1) if 0 <= place < len(candidates)]
        wanted = [place for place in near if place not in known]
    if smallest and 1 not in known:
        loss(candidates[1])
    return tuple(candidates[place] for place in sorted({0, best, *near, *([1] if smallest else [])}))


def _together(batches: Sequence[Tensor], fill: float) -> Tensor:
    """Batches of scores, or of labels, as one; where they have fewer tokens or answers, they are filled up."""
    shape = torch.tensor([batch.shape for batch in batches]).amax(0).tolist()[1:]
    joined = batches[0].new_full((sum(map(len, batches)), *shape), fill)
    for start, batch in zip(accumulate(map(len, batches), initial=0), batches, strict=False):
        joined[(slice(start, start + len(batch)), *map(slice, batch.shape[1:]))] = batch
    return joined
