"""How strongly to apply a transfer: a scale chosen on calibration samples, by forward passes only.

The samples are parted into two halves; maps made from one half are judged on the other, so no sample judges a map
that it has made. Zero is always a candidate: an automatic transfer may leave the target as it is.

Scales are compared by their loss at the sharpness (inverse temperature) that suits each best. A zero-shot head is often
far too soft or too sharp; then any change that makes it bolder lowers the plain loss, even one that ruins the
answers. Accuracy has no such bias, but with 20 samples its standard error is ten points, while the losses of the same
samples at two scales differ little from sample to sample.

Two rules choose. `auto` takes the least loss, and asks for evidence only beyond 1. `safe` asks for it at every step
above the smallest scale: a quarter of a change has a quarter of its use and a sixteenth of the harm that grows with
the square, so that little can go wrong there, and more must be earned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..io.tensors import describe
from ..job import Job
from ..measure.batches import PairedBatch
from ..measure.signals import frozen
from ..methods import Transfer
from ..task_vectors.low_rank import Entry, LowRank
from ..task_vectors.vector import TaskVector
from ..types import ScaleRule

SCALES = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
SHARPEST = 20.0  # the head's sharpness is fitted between 1 / SHARPEST and SHARPEST times its own
RULES: dict[
    ScaleRule, tuple[float, float]
] = {  # standard errors by which a larger scale must be better: up to 1, beyond 1
    "auto": (0.0, 2.0),
    "safe": (2.0, 3.0),
}


@dataclass(frozen=True)
class Score:
    """What a model does on some samples: the mean loss, and the share it gets right where there are classes.

    There, the loss is that at the best `sharpness`, a factor of the head's scores, and `losses` are each sample's own.
    """

    loss: float
    accuracy: float | None = None
    sharpness: float | None = None
    losses: Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class ScaleChoice:
    """The chosen scale, the rule, the score of every candidate, and how many samples it was chosen on."""

    scale: float
    scores: Mapping[float, Score]
    samples: int
    held_out: bool
    rule: ScaleRule = "auto"


def score_of_classes(scores: Tensor, labels: Tensor) -> Score:
    """The score of samples by their class scores (N, classes).

    >>> found = score_of_classes(torch.tensor([[0.1, 0.0], [0.0, 0.1], [0.1, 0.0]]), torch.tensor([0, 1, 1]))
    >>> found.accuracy, found.sharpness
    (0.6666666666666666, 6.931)
    """
    scores = scores.double()
    right = float((scores.argmax(-1) == labels).double().mean())
    sharpness = _best_sharpness(scores, labels)
    losses = F.cross_entropy(sharpness * scores, labels, reduction="none")
    return Score(float(losses.mean()), right, float(f"{sharpness:.4g}"), losses)


def _best_sharpness(scores: Tensor, labels: Tensor) -> float:
    """The factor of the scores with the least loss, by halving: the loss is convex in it."""
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
    """The candidate with the least loss, from the smallest up; a larger one must be as much better as the rule says.

    Scales beyond 1 extrapolate, and maps of few samples do so badly. The standard error is that of the mean difference,
    sample by sample; where the samples' losses are not known, the losses decide alone. `safe` never goes further than
    `auto`, and stops at the smallest scale where the samples that judge have made the maps.

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
        asked = errors * _error(found, scores[best]) if errors else 0.0
        if math.isfinite(found.loss) and found.loss + asked < scores[best].loss:
            best = scale
    return best


def _error(one: Score, other: Score) -> float:
    """The standard error of the difference of two mean losses of the same samples; of one sample nothing is sure."""
    if one.losses is None or other.losses is None:
        return 0.0
    if len(one.losses) < 2:
        return math.inf
    return float((one.losses - other.losses).std()) / math.sqrt(len(one.losses))


class Scaled:
    """A module whose weights are `base + scale * delta`, set in place for each scale and restored at the end.

    Low-rank deltas are held as their factors and multiplied one tensor at a time. `exact` holds the module's weights
    by name before they were rounded to what it runs in: a change that is smaller than the last digit of such a weight
    would be lost on the rounded one, and on the exact one it tips the rounding as often as it is large.
    """

    def __init__(self, module: nn.Module, delta: TaskVector, exact: Mapping[str, Tensor] | None = None) -> None:
        self.module = module
        self._exact = exact or {}
        self._parts = [
            (name, parameter, parameter.detach().clone(), _beside(delta[name], parameter))
            for name, parameter in module.named_parameters()
            if name in delta
        ]

    def set(self, scale: float) -> None:
        """Give the module the weights of this scale."""
        with torch.no_grad():
            for name, parameter, own, delta in self._parts:
                change = delta.dense() if isinstance(delta, LowRank) else delta
                base = self._base(name, own)
                parameter.copy_(base + scale * change.to(torch.promote_types(base.dtype, change.dtype)))

    def _base(self, name: str, own: Tensor) -> Tensor:
        """The exact weight, read when it is needed, where there is one that says more."""
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


def _beside(entry: Entry, parameter: Tensor) -> Entry:
    """An entry on the device of its parameter, in its own dtype: rounded to half precision, a small change would go."""
    return entry.to(parameter.device)


def choose_on_halves(sides: tuple[Job, Job], moved: Iterable[Transfer], rule: ScaleRule = "auto") -> ScaleChoice:
    """Choose the scale of a transfer by two halves of the samples, each judging the maps of the other.

    Args:
        sides: the job on each half, as `Job.halves` gives it.
        moved: the transfer from each half; a generator solves the second after the first is judged.
    """
    held_out = sides[0] is not sides[1]
    answers: dict[float, list[Answers]] = {scale: [] for scale in SCALES}
    for done, judge in zip(moved, reversed(sides), strict=False):
        batches = [batch.target if isinstance(batch, PairedBatch) else batch for batch in judge.samples]
        with Scaled(judge.target.module, done.task_vector, judge.target.stored_parameters()) as scaled:
            for scale, seen in answers.items():
                seen += _answers(judge, scaled, scale, batches)
        if not held_out:
            break
    samples = sum(len(side.samples) for side in (sides if held_out else sides[:1]))
    return choose_scale(lambda scale: _score(answers[scale]), samples=samples, held_out=held_out, rule=rule)


Answers = tuple[Tensor, Tensor | None]  # of a batch: class scores and labels, or its mean loss for each sample


def _answers(job: Job, scaled: Scaled, scale: float, batches: Sequence[Any]) -> list[Answers]:
    """What the target says at one scale, forward passes only."""
    scaled.set(scale)
    assert job.losses is not None
    found: list[Answers] = []
    with frozen(scaled.module), torch.no_grad():
        for batch in batches:
            if job.heads is not None:
                found.append((job.heads.target.scores(job.target, scaled.module, batch[0]).cpu(), batch[1].cpu()))
            else:
                size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
                loss = float(job.losses.target(scaled.module, batch)) / size
                found.append((torch.full((size,), loss, dtype=torch.float64), None))
    return found


def _score(answers: Sequence[Answers]) -> Score:
    values = torch.cat([value for value, _ in answers])
    labels = [label for _, label in answers if label is not None]
    return score_of_classes(values, torch.cat(labels)) if labels else Score(float(values.mean()))
