"""Whether held-out samples show that teaching helps: few judge students of the other half, and decide together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from builders.lessons import ANSWERS, PROMPTS, Animals
from tuneport.config import DistillConfig
from tuneport.data.dataset import Dataset
from tuneport.models.base import Model
from tuneport.models.open import open_model
from tuneport.pipeline.lessons import samples_of
from tuneport.task_vectors.vector import TaskVector
from tuneport.training import division
from tuneport.training.distill import _Run, distill
from tuneport.training.exam import Curve, Exam, Mark, pooled
from tuneport.training.neutral import Neutral
from tuneport.training.student import student_of
from tuneport.types import Sides

COUNT, STEPS = 20, 2
SHOWN_BY_ALL = [2.1, -1.1] * 10  # mean 0.5; the standard error is 1.6 / sqrt(9) of ten, 1.6 / sqrt(19) of all
SHOWN_BY_LAST_HALF = [-2.2] * 10 + [2.0] * 10


@pytest.fixture(scope="module")
def models(animals: Animals) -> Sides[Model]:
    return Sides(open_model(animals.tuned), open_model(animals.target))


def curve_of(*groups: list[float], neutral: tuple[float, ...] = (), limit: float | None = None) -> Curve:
    losses = neutral or (None,) * len(groups)
    marks = [
        Mark(10 * number, None if not number else 1.0 * number, float(np.mean(group)), 0.25, loss)
        for number, (group, loss) in enumerate(zip(groups, losses, strict=True))
    ]
    return Curve(marks, [*groups], limit)


class TestCurve:
    def test_twenty_samples_show_what_ten_do_not(self) -> None:
        gains = np.array(SHOWN_BY_ALL)
        halves = [curve_of([4.0] * 10, (4 - part).tolist()) for part in np.split(gains, 2)]
        assert [half.better for half in halves] == [[0], [0]]
        assert pooled(halves, [10, 10]).better == [0, 10]

    def test_a_half_that_gains_does_not_outvote_one_that_loses_more(self) -> None:
        gains = np.array(SHOWN_BY_LAST_HALF)
        halves = [curve_of([4.0] * 10, (4 - part).tolist()) for part in np.split(gains, 2)]
        assert [half.better for half in halves] == [[0], [0, 10]]
        assert pooled(halves, [10, 10]).better == [0]

    def test_every_sample_has_the_same_weight(self) -> None:
        one, other = curve_of([1.0, 2.0, 6.0]), curve_of([10.0])
        both = pooled([one, other], [3, 1])
        assert both.marks[0].held_out_loss == pytest.approx((1 + 2 + 6 + 10) / 4)
        assert both.groups == [[1.0, 2.0, 6.0, 10.0]]

    def test_one_curve_is_itself(self) -> None:
        one = curve_of([1.0, 2.0], [1.0, 1.0])
        assert pooled([one], [2]) is one

    def test_what_one_student_forgets_is_forgotten(self) -> None:
        flat, low = [4.0, 4.0], [1.0, 1.1]
        halves = [curve_of(flat, low, low, neutral=(1.0, loss, 1.0), limit=1.05) for loss in (1.0, 1.1)]
        both = pooled(halves, [2, 2])
        assert [mark.neutral for mark in both.marks] == [1.0, 1.1, 1.0]
        assert both.better == [0, 20]

    def test_training_losses_are_averaged(self) -> None:
        one = curve_of([1.0], [1.0])
        assert [mark.loss for mark in pooled([one, one], [1, 1]).marks] == [None, 1.0]

    def test_it_survives_json(self) -> None:
        one = curve_of([1.0, 2.0], [0.5, 0.25], neutral=(1.0, 1.1), limit=1.05)
        found = Curve.of_json(one.to_json())
        assert (found.marks, found.groups, found.limit) == (one.marks, one.groups, one.limit)


class TestPlanted:
    """A real distillation whose held-out samples say by how much each of them gains."""

    @staticmethod
    def taught(
        models: Sides[Model], gains: list[float], monkeypatch: pytest.MonkeyPatch
    ) -> tuple[dict[str, Any], bool]:
        """The entry, and whether the student is the start."""
        asked: dict[int, int] = {}

        def judge(self: Exam, _: nn.Module) -> tuple[float, float, list[float]]:
            done = asked[id(self)] = asked.get(id(self), -1) + 1  # marks of this exam before
            losses = (4 - (done > 0) * np.array(gains)[self.samples.indices]).tolist()
            return float(np.mean(losses)), 0.5, losses

        monkeypatch.setattr(Exam, "judge", judge)
        data = Dataset(list(PROMPTS[:COUNT]), None, (), targets=list(ANSWERS[:COUNT]), answers="teacher")
        student = student_of(models.target, TaskVector({}), None, 0).module
        before: dict[str, Tensor] = {name: each.detach().clone() for name, each in student.named_parameters()}
        found = distill(samples_of(models, data, None), student, DistillConfig.of(steps=STEPS, learning_rate=1e-4))
        return found, all(torch.equal(each, before[name]) for name, each in student.named_parameters())

    def test_all_few_samples_judge(self, models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
        found, is_start = self.taught(models, SHOWN_BY_ALL, monkeypatch)
        assert (found["folds"], found["held_out"], found["samples"]) == (2, COUNT, COUNT)
        assert (found["best"], found["again"]) == (STEPS, STEPS)
        assert not is_start
        monkeypatch.setattr(division, "FEW", 0)  # ten are held out, and cannot show it
        found, is_start = self.taught(models, SHOWN_BY_ALL, monkeypatch)
        assert (found["folds"], found["held_out"], found["samples"]) == (1, 10, 10)
        assert (found["best"], found["again"]) == (0, 0)
        assert is_start

    def test_the_start_stays_where_teaching_harms(self, models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
        """Though the last ten alone, who would judge if they were held out, gain."""
        found, is_start = self.taught(models, SHOWN_BY_LAST_HALF, monkeypatch)
        assert (found["folds"], found["best"], found["again"]) == (2, 0, 0)
        assert is_start
        monkeypatch.setattr(division, "FEW", 0)
        found, is_start = self.taught(models, SHOWN_BY_LAST_HALF, monkeypatch)
        assert found["best"] == STEPS
        assert not is_start

    @pytest.mark.parametrize("kept", [0, 1, 2])
    def test_a_last_student_that_forgets_is_kept_as_it_was_before(
        self, models: Sides[Model], monkeypatch: pytest.MonkeyPatch, kept: int
    ) -> None:
        """Both students of the halves remember; the last one does after its first states only."""
        remembered: list[int] = []

        def neutral_loss(run: _Run) -> float:
            if run.count < 3:
                return 1.0
            remembered.append(len(remembered) + 1)
            return 1.0 if len(remembered) <= kept else 2.0

        monkeypatch.setattr(Neutral, "loss", lambda *_: 1.0)
        monkeypatch.setattr(_Run, "_neutral_loss", neutral_loss)
        monkeypatch.setattr("tuneport.training.exam.ERRORS", 1e9)  # no later state is worse
        found, is_start = self.taught(models, SHOWN_BY_ALL, monkeypatch)
        assert remembered == [1, 2]
        assert (found["best"], found["again"]) == (kept, kept)
        assert is_start == (kept == 0)
