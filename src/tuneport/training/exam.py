"""What held-out samples say of a student: how far its answers are from the teacher's, and whether it has improved.

A state is better than the start if the held-out loss falls by more than a standard error, that of the mean over groups
of samples. Of few own samples each is a group, and all judge: those of each half a student that the other half taught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..measure.samples import DatasetSamples
from ..models.base import Model
from ..models.tokenizer import Encoded
from ..processes import divided
from ..types import Sides
from .augment import Reader
from .loop import passes
from .matching import Matching

VIEWS = 4  # augmented copies of each held-out sample
GROUPS = 10  # of held-out samples, whose losses show how sure their mean is
ERRORS = 2.0  # standard errors by which a later state may seem worse than the best


@dataclass(frozen=True)
class Mark:
    """A point of the curve: the mean training loss since the last, loss and agreement on held-out samples.

    `neutral` is the loss on neutral passages, in nats per token.
    """

    step: int
    loss: float | None
    held_out_loss: float
    agreement: float
    neutral: float | None = None


def precision(model: Model) -> AbstractContextManager[Any]:
    """Half-precision models compute in their dtype, while what is trained stays in float32."""
    dtype, kind = next(model.module.parameters()).dtype, model.device.type
    half = dtype in (torch.float16, torch.bfloat16)
    return torch.autocast(kind, dtype, enabled=half, cache_enabled=kind != "cuda")  # a graph keeps no cache


def answers_of(
    models: Sides[Model], matching: Matching, student: nn.Module, batch: Sides[Encoded], wanted: Any = None
) -> tuple[Any, Any]:
    """Of the teacher, unless they are known, and of the student."""
    with precision(models.target):
        if wanted is None:
            with torch.no_grad():
                wanted = matching.ask.source(models.source.module, batch.source)
        return wanted, matching.ask.target(student, batch.target)


@dataclass(frozen=True, eq=False)
class Exam:
    """Held-out samples that judge a student, in groups or one by one; the teacher answers them once where it can."""

    models: Sides[Model]
    matching: Matching
    samples: DatasetSamples
    seed: int
    one_by_one: bool = False
    _known: dict[int, Any] = field(default_factory=dict)  # answers of the teacher to batches

    def judge(self, student: nn.Module) -> tuple[float, float, list[float]]:
        """Loss, agreement, and the losses of the groups; none if all samples are judged together."""
        with torch.no_grad():
            work = partial(self._judged, student)
            judged = [*chain(*divided([*enumerate(self._batches())], lambda item: work(item[0], *item[1])))]
        counts = sum(count for count, _, _ in judged)
        loss = float(sum(count * value for count, value, _ in judged) / counts)
        agreement = float(sum(count * value for count, _, value in judged) / counts)
        rounds = 1 + VIEWS * (self.matching.asking == "augmented")
        views = np.reshape([float(value) for _, value, _ in judged], (rounds, -1))
        return loss, agreement, views.mean(0).tolist() if self.matching.apart else []

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.samples, VIEWS, self.seed)

    def _judged(
        self, student: nn.Module, number: int, sizes: Sequence[int], read: Callable[[], Sides[Encoded]]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Of each group of a held-out batch: the count of samples, their loss and agreement."""
        matching, known = self.matching, self._known
        answers = answers_of(self.models, matching, student, read(), known.get(number))
        if matching.asking != "plain":  # the scores of a sample are few, unlike those of its tokens
            known[number] = answers[0]
        groups = [
            (size, [_rows(side, end - size, end) if len(sizes) > 1 else side for side in answers])  # pairs have 2 rows
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        loss = matching.exam or matching.loss
        return [(size, loss(*group).cpu(), matching.agreement(*group).cpu()) for size, group in groups]

    def _batches(self) -> Iterator[tuple[list[int], Callable[[], Sides[Encoded]]]]:
        """The held-out samples and, where the teacher can judge them, the same views of them each time.

        Each batch comes with the sizes of the groups that it holds.
        """
        size, exam, count = self.matching.pass_size, self._reader, len(self.samples)
        most = count if self.one_by_one else GROUPS
        groups = passes(torch.arange(count), min(size, math.ceil(count / most)) if self.matching.apart else size)
        many = max(size // len(groups[0]), 1)
        rows = [groups[at : at + many] for at in range(0, len(groups), many)]

        def view(copy: int, part: Tensor) -> Sides[Encoded]:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(exam.seed * 1_000_003 + copy * count + int(part[0]))
                return exam.view(part.numpy(), copy)

        yield from (([*map(len, part)], partial(exam.plain, torch.cat(part).numpy())) for part in rows)
        for copy, part in product(range(VIEWS if self.matching.asking == "augmented" else 0), rows):
            yield [*map(len, part)], partial(view, copy, torch.cat(part))


def _rows(answers: Any, begin: int, end: int) -> Any:
    """The answers to some of the samples of a batch."""
    if isinstance(answers, tuple):
        return tuple(_rows(each, begin, end) for each in answers)
    return answers[begin:end] if isinstance(answers, Tensor) else answers


@dataclass(frozen=True, eq=False)
class Curve:
    """The states of a student along its steps, the first being the start, as held-out samples judge them.

    A state whose loss on neutral passages is above the `limit` has forgotten them.
    """

    marks: list[Mark] = field(default_factory=list)
    groups: list[list[float]] = field(default_factory=list)  # of each mark, the losses of groups of samples
    limit: float | None = None

    def is_sound(self, neutral: float | None) -> bool:
        """Whether a student with this loss on neutral passages has kept what it knew of them."""
        return self.limit is None or neutral is None or neutral <= self.limit

    @property
    def last_is_best(self) -> bool:
        return last_is_best(self.marks, self.groups, [self.is_sound(mark.neutral) for mark in self.marks])

    @property
    def better(self) -> list[int]:
        """The steps whose states were the best when they were the last; the start is the first of them."""
        counts = range(1, len(self.marks) + 1)
        parts = (Curve(self.marks[:count], self.groups[:count], self.limit) for count in counts)
        return [part.marks[-1].step for part in parts if part.last_is_best]

    def to_json(self) -> dict[str, Any]:
        return {"marks": [asdict(mark) for mark in self.marks], "groups": self.groups, "limit": self.limit}

    @staticmethod
    def of_json(found: dict[str, Any]) -> Curve:
        return Curve([Mark(**mark) for mark in found["marks"]], found["groups"], found["limit"])


def pooled(curves: Sequence[Curve], counts: Sequence[int]) -> Curve:
    """One curve of all held-out samples from the curves of the students that they judge, given their numbers.

    Training losses are averaged, and of losses on neutral passages the highest counts.
    """

    def together(marks: Sequence[Mark]) -> Mark:
        losses = [mark.loss for mark in marks if mark.loss is not None]
        neutral = [mark.neutral for mark in marks if mark.neutral is not None]
        held_out, agreement = (
            float(np.average([getattr(mark, name) for mark in marks], weights=counts))
            for name in ("held_out_loss", "agreement")
        )
        taught = sum(losses) / len(losses) if losses else None
        return Mark(marks[0].step, taught, held_out, agreement, max(neutral, default=None))

    if len(curves) == 1:
        return curves[0]
    marks = [together(marks) for marks in zip(*(curve.marks for curve in curves), strict=True)]
    groups = [[*chain(*parts)] for parts in zip(*(curve.groups for curve in curves), strict=True)]
    return Curve(marks, groups, curves[0].limit)


def last_is_best(curve: Sequence[Mark], groups: Sequence[Sequence[float]], sound: Sequence[bool]) -> bool:
    """Whether the last state is better than the start by a standard error, and none better than it beyond chance.

    Args:
        curve: the states so far; the first one is the start.
        groups: of each state, the losses of groups of held-out samples; empty if they are judged together.
        sound: of each state, whether it has kept what it knew of neutral passages.
    """
    first, last = curve[0], curve[-1]
    if last is first:
        return True
    if not sound[-1] or not first.held_out_loss - last.held_out_loss > _error(groups[0], groups[-1]):
        return False
    kept = [number for number in range(len(curve)) if sound[number] or not number]
    lowest = min(kept, key=lambda number: curve[number].held_out_loss)
    return last.held_out_loss - curve[lowest].held_out_loss <= ERRORS * _error(groups[-1], groups[lowest])


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """The standard error of the difference of two states' mean losses, given those of the same groups."""
    apart = np.subtract(one, other)
    return float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
