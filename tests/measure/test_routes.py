"""Routes of an upgrade are held against the old model sample by sample, and chosen on evidence alone."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from builders.folders import HEAD_CLASSES, Zoo, write_head
from tuneport.data.dataset import Dataset
from tuneport.data.formats import read_plain
from tuneport.measure.accuracy import BySample, Evaluation
from tuneport.measure.unseen import RouteJudge, RouteScore
from tuneport.models.heads import choose_head
from tuneport.models.open import open_model
from tuneport.report.decision import decision, disagreements
from tuneport.types import Sides

COUNT = 60
OLD = np.arange(COUNT) % 3  # what the old model answers
CLASSES = ("cat", "dog", "owl")


@pytest.fixture
def judge() -> RouteJudge:
    data = Dataset([f"text {place}" for place in range(COUNT)], OLD.copy(), CLASSES)
    return RouteJudge(data, data, None, None, answers=OLD, right=np.ones(COUNT, dtype=bool))


def row(name: str, wrong: int, note: str = "", to: int | None = None) -> RouteScore:
    """A model that answers the first `wrong` samples otherwise: with the next class, or with this one."""
    predicted = OLD.copy()
    predicted[:wrong] = (OLD[:wrong] + 1) % 3 if to is None else to
    found = Evaluation(0.0, COUNT, "likelihood", by_sample=BySample(predicted, OLD, CLASSES))
    agreement = 100.0 * float(np.mean(predicted == OLD))
    return RouteScore(name, agreement, agreement, int(np.sum(predicted != OLD)), found=found, own=found, note=note)


class TestChoose:
    def test_the_nearest_route_is_taken(self, judge: RouteJudge) -> None:
        rows = [row("old", 0), row("target", 40), row("copy", 20), row("port", 5), row("distill", 10)]
        assert judge.choose(rows) == "port"

    def test_of_equals_the_last_is_taken(self, judge: RouteJudge) -> None:
        rows = [row("old", 0), row("target", 40), row("copy", 5), row("port", 5), row("distill", 6)]
        assert judge.choose(rows) == "port"
        assert judge.choose(rows[:4]) == "port"
        assert judge.choose(rows[:3]) == "copy"

    @pytest.mark.parametrize(("wrong", "chosen"), [(38, None), (40, None), (32, "port"), (50, None)])
    def test_a_gain_must_be_clear(self, judge: RouteJudge, wrong: int, chosen: str | None) -> None:
        """Two samples of 60 may be chance, and eight of eight are not."""
        assert judge.choose([row("old", 0), row("target", 40), row("port", wrong)]) == chosen

    @pytest.mark.parametrize(("wrong", "chosen"), [(38, "port"), (40, "port"), (32, "port"), (50, None)])
    def test_beside_a_bare_target_a_route_must_not_be_clearly_worse(
        self, judge: RouteJudge, wrong: int, chosen: str | None
    ) -> None:
        rows = [row("old", 0), row("target", 40), row("port", wrong)]
        judge = replace(judge, bare=True)
        assert judge.choose(rows) == chosen
        words = "the target with a fitted head" if chosen else "every route is clearly worse than the target with a"
        assert words in decision(judge, rows, chosen)

    def test_a_route_with_a_note_is_not_taken(self, judge: RouteJudge) -> None:
        rows = [row("old", 0), row("target", 40), row("port", 0, "forgets"), row("distill", 20)]
        assert judge.choose(rows) == "distill"
        assert judge.choose(rows[:3]) is None

    def test_an_agreement_has_an_interval(self) -> None:
        """Wilson's, of 57 of 60; the old model agrees with itself for certain."""
        assert row("copy", 3).row()["interval"] == pytest.approx([86.3, 98.3], abs=0.05)
        assert row("old", 0).row()["interval"] is None

    @pytest.mark.parametrize(("wrong", "ends"), [(0, True), (3, False), (5, False), (20, False)])
    def test_only_a_certain_agreement_ends_the_search(self, judge: RouteJudge, wrong: int, ends: bool) -> None:
        """57 of 60 are 95 %, and below 90 % within what chance allows."""
        assert judge.agrees(row("copy", wrong)) is ends


@pytest.mark.parametrize(("accuracy", "score", "flips"), [(2.0, 1.5, None), (6.0, 6.0, 1)])
def test_answers_that_the_old_model_hardly_hits_are_measured_in_bits(
    monkeypatch: pytest.MonkeyPatch, accuracy: float, score: float, flips: int | None
) -> None:
    data = Dataset(["a", "b"], None, (), targets=["1", "2"])
    judge, ones = RouteJudge(data, data, None, None), np.ones(2, dtype=np.int64)
    own = Evaluation(accuracy, 2, "perplexity", bits_per_character=1.5, by_sample=BySample(ones, ones))
    monkeypatch.setattr(RouteJudge, "_ask", lambda *_: own)
    answered = {model: replace(own, by_sample=BySample(np.array([1, model]), ones)) for model in (0, 1)}
    monkeypatch.setattr(RouteJudge, "_own", lambda _, model, __: answered[model])
    model: Any = 1
    assert judge.ask_old(model).score == score
    worse: Any = 0
    found = judge.score("port", worse)
    assert (found.score, found.flips) == (score, flips)


def test_flips_are_what_was_right_and_is_wrong_now(judge: RouteJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old model has the first 40 right, the new one all but the first 30: its gains are no flips."""
    judge.right = np.arange(COUNT) < 40
    found = row("port", 30).found
    monkeypatch.setattr(RouteJudge, "_ask", lambda *_: found)
    model: Any = None
    assert judge.score("port", model).flips == 30


class TestWords:
    def test_lost_answers_are_named(self, judge: RouteJudge) -> None:
        """All owls become cats, and one dog; dogs are still answered."""
        new = row("port", 0)
        assert new.found is not None
        predicted = np.where(OLD == 2, 0, OLD)
        predicted[1] = 0
        new = replace(new, found=replace(new.found, by_sample=replace(new.found.by_sample, predicted=predicted)))
        rows = [row("old", 0), row("target", 40), new]
        said = decision(judge, rows, "port")
        assert said.endswith("; no held-out sample is answered owl any more (the old model: 20)")
        assert "any more" not in decision(judge, [*rows[:2], row("port", 9)], "port")

    def test_a_route_that_is_nearer_and_still_far_is_not_recommended(self, judge: RouteJudge) -> None:
        rows = [row("old", 0), row("target", 60), row("port", 31), row("distill", 30)]
        assert decision(judge, rows, "port").startswith("the best route is port, but its model is still far")
        assert decision(judge, rows, "distill").startswith("use the new model by the route distill: ")

    def test_an_answer_that_the_old_model_hardly_gives_is_not_called_lost(self, judge: RouteJudge) -> None:
        judge.answers = np.where(np.arange(COUNT) < 2, 2, 0)
        new = row("port", COUNT, to=0)
        assert "any more" not in decision(judge, [row("old", 0), row("target", 40), new], "port")
        judge.answers = np.where(np.arange(COUNT) < 3, 2, 0)
        assert "answered owl any more (the old model: 3)" in decision(
            judge, [row("old", 0), row("target", 40), new], "port"
        )

    def test_what_differs_is_shown(self, judge: RouteJudge) -> None:
        found = disagreements(judge, [row("old", 0), row("target", 40), row("port", 2)], "port")
        assert [(one["old"], one["new"], one["label"], one["text"]) for one in found] == [
            ("cat", "dog", "cat", "text 0"),
            ("dog", "owl", "dog", "text 1"),
        ]


@pytest.mark.parametrize("order", [[2, 3, 0, 1], [3, 2, 0]])
def test_classes_of_two_heads_may_be_in_another_order(zoo: Zoo, tmp_path: Path, order: list[int]) -> None:
    """One model under two heads with the same classes answers the same; a head may lack a class."""
    base = zoo["clip_vision-base"]
    other = Path(shutil.copytree(base, tmp_path / "other"))
    place = other / "heads" / "animals.safetensors"
    embeds = load_file(place)["class_embeds"][order].contiguous()
    write_head(place, 0, tuple(HEAD_CLASSES[number] for number in order), embeds=embeds)
    data, models = read_plain(zoo.data, "test"), [open_model(folder) for folder in (base, other)]
    judge = RouteJudge(data, data, Sides(*(choose_head(model, None, data) for model in models)), None)
    old, new = judge.ask_old(models[0]), judge.score("copy", models[1])
    assert old.found is not None
    assert old.found.by_sample.predicted is not None
    lacking = [number for number in range(len(HEAD_CLASSES)) if number not in order]
    kept = ~np.isin(old.found.by_sample.predicted, lacking)
    assert kept.any()
    assert new.agreement == pytest.approx(100 * kept.mean(), abs=1e-3)
    rows = [old, old, new]
    for one in disagreements(judge, rows, "copy"):
        assert one["old"] in [HEAD_CLASSES[number] for number in lacking]
    if not lacking:
        assert new.score == old.score
