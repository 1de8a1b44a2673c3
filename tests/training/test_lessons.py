"""What is taught beside own samples, what judges, and how cached texts are put together."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from builders.classifiers import write_classifier
from builders.lessons import ANSWERS, PROMPTS, SOUNDS, Animals
from builders.texts import LARGE, SENTENCES, SMALL, gpt_tokenizer, make, t5_tokenizer, write
from tuneport import transfer
from tuneport.config import DistillConfig
from tuneport.data.dataset import Dataset
from tuneport.errors import DataError
from tuneport.io.state import StateFile
from tuneport.measure.samples import DatasetSamples
from tuneport.models.base import Model
from tuneport.models.open import open_model
from tuneport.pipeline.lessons import samples_of
from tuneport.task_vectors.vector import TaskVector
from tuneport.training.augment import Reader, _encode
from tuneport.training.distill import distill
from tuneport.training.division import OWN, OWN_OF_WRITTEN, Extra, divide
from tuneport.training.exam import Mark, last_is_best
from tuneport.training.loop import Schedule
from tuneport.training.matching import matching_of, unlabelled
from tuneport.training.student import student_of
from tuneport.types import Sides

TAUGHT = Dataset(list(PROMPTS), None, (), targets=list(ANSWERS), answers="teacher")


@pytest.fixture(scope="module")
def models(animals: Animals) -> Sides[Model]:
    return Sides(open_model(animals.tuned), open_model(animals.target))


@pytest.fixture(scope="module")
def students(
    models: Sides[Model], tmp_path_factory: pytest.TempPathFactory
) -> dict[int | None, list[dict[str, Tensor]]]:
    """What both students have learnt of ten texts, and with another text at either end of the draw."""

    def trained(place: int | None) -> list[dict[str, Tensor]]:
        inputs = list(PROMPTS[:10])
        if place is not None:
            inputs[place] = PROMPTS[40]
        data = replace(TAUGHT.subset(np.arange(10)), inputs=inputs)
        module = student_of(models.target, TaskVector({}), None, 0).module
        file = tmp_path_factory.mktemp("students") / "state.safetensors"
        kept: list[dict[str, Tensor]] = []

        class Saved(StateFile):
            def save(self, tensors: Any, values: Any) -> None:
                super().save(tensors, values)
                if values["student"] < 2 and values["step"] == 3:
                    kept.append(load_file(self.path))

        config = DistillConfig.of(steps=3)
        more: Any = {"extra": extra(12), "saved": Saved(file, "same", 0)}
        distill(samples_of(models, data, None), module, config, **more)
        return [{name: each for name, each in state.items() if name.startswith("now.")} for state in kept]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tuneport.training.exam.last_is_best", lambda curve, *_: len(curve) == 1)
        return {place: trained(place) for place in (None, 0, 9)}


def own(models: Sides[Model], count: int) -> DatasetSamples:
    return samples_of(models, TAUGHT.subset(np.arange(count)), None)


def extra(count: int, **more: Any) -> Extra:
    return Extra(TAUGHT.subset(np.arange(len(TAUGHT) - count, len(TAUGHT))), **more)


class TestWhichStateIsKept:
    """States with four groups of held-out samples; each state is given by their losses."""

    @staticmethod
    def kept(*groups: tuple[float, ...], neutral: tuple[float, ...] = ()) -> list[bool]:
        forgotten = neutral or (1.0,) * len(groups)
        curve = [
            Mark(10 * number, None, sum(group) / len(group), 0.0, loss)
            for number, (group, loss) in enumerate(zip(groups, forgotten, strict=True))
        ]
        return [
            last_is_best(curve[:count], groups[:count], [loss <= 1.05 for loss in forgotten[:count]])
            for count in range(1, len(curve) + 1)
        ]

    def test_the_last_of_states_that_differ_by_chance(self) -> None:
        assert self.kept((4.0, 4.0, 4.0, 4.0), (1.0, 2.0, 1.0, 2.0), (2.0, 1.0, 1.5, 1.9)) == [True, True, True]

    def test_a_state_that_is_worse_on_all_samples_is_not_kept(self) -> None:
        assert self.kept((4.0, 4.0, 4.0, 4.0), (1.0, 2.0, 1.0, 2.0), (1.4, 2.5, 1.5, 2.4)) == [True, True, False]

    def test_the_start_stays_unless_a_state_is_better(self) -> None:
        assert self.kept((4.0, 4.0, 4.0, 4.0), (3.0, 5.0, 3.0, 5.1)) == [True, False]

    def test_the_start_stays_if_a_state_is_better_by_chance(self) -> None:
        assert self.kept((4.0, 4.0, 4.0, 4.0), (1.0, 5.5, 1.0, 5.5)) == [True, False]

    def test_a_state_that_has_forgotten_neither_is_kept_nor_counts(self) -> None:
        groups = (4.0, 4.0, 4.0, 4.0), (1.0, 1.0, 1.0, 1.0), (2.0, 2.1, 2.0, 2.1)
        assert self.kept(*groups, neutral=(1.0, 1.06, 1.0)) == [True, False, True]
        assert self.kept(*groups, neutral=(1.0, 1.04, 1.0)) == [True, True, False]

    def test_samples_that_are_judged_together_keep_the_lowest(self) -> None:
        curve = [Mark(step, None, loss, 0.0) for step, loss in ((0, 3.0), (10, 1.0), (20, 1.1))]
        assert not last_is_best(curve, [[], [], []], [True] * 3)
        assert last_is_best(curve[:2], [[], []], [True] * 2)


class TestExtra:
    @pytest.mark.parametrize("like_own", [False, True])
    @pytest.mark.parametrize(("count", "more"), [(8, 12), (12, 100), (20, 500), (49, 60), (50, 60), (300, 40)])
    def test_own_samples_are_a_fixed_share_at_least(self, models: Any, count: int, more: int, like_own: bool) -> None:
        texts = [*map(str, range(count + more))]
        samples = samples_of(models, Dataset(texts, None, (), targets=texts), None)
        wanted = Extra(Dataset(["a"] * more, None, ()), like_own)
        folds, all_own = divide(samples, count, wanted)
        assert (all_own is not None) == (len(folds) == 2) == (count < 50 and not like_own)
        if all_own is not None:
            assert set(all_own.indices.tolist()) == set(range(count + more))
            assert (all_own.indices < count).mean() >= 1 / OWN
            judges = [set(fold.held_out.indices.tolist()) for fold in folds]
            assert not judges[0] & judges[1]
            assert judges[0] | judges[1] == set(range(count))
            assert abs(len(judges[0]) - len(judges[1])) <= 2
        for held_out, taught in folds:
            assert (taught.indices < count).mean() >= 1 / (OWN_OF_WRITTEN if like_own else OWN)
            assert not set(held_out.indices.tolist()) & set(taught.indices.tolist())
            assert set(held_out.indices.tolist()) | set(taught.indices.tolist()) == set(range(count + more))
            written_judge = like_own and count < 50
            assert ((held_out.indices < count) != written_judge).all()

    @pytest.mark.parametrize("count", [20, 200])
    def test_own_passages_are_taught_twice_as_often_as_written_ones(self, models: Any, count: int) -> None:
        samples = samples_of(models, Dataset([*map(str, range(count + 1000))], None, ()), None)
        (fold,), _ = divide(samples, count, Extra(Dataset(["a"] * 1000, None, ()), like_own=True))
        places, times = np.unique(fold.taught.indices, return_counts=True)
        assert set(times[places < count]) == {2}
        assert set(times[places >= count]) == {1}
        alone, _ = divide(samples.take(slice(60)), 60, None)
        assert len(np.unique(alone[0].taught.indices)) == len(alone[0].taught)

    @pytest.mark.parametrize("chats", [False, True])
    @pytest.mark.parametrize("prompts", [5, 7, 21, 55, 75])
    def test_two_answers_of_a_prompt_judge_the_same_student(self, models: Any, prompts: int, chats: bool) -> None:
        pairs: list[Any] = [text for text in map(str, range(prompts)) for _ in range(2)]
        if chats:
            asked = [{"role": "user", "content": text} for text in pairs]
            pairs = [[one, {"role": "assistant", "content": str(row)}] for row, one in enumerate(asked)]
        samples = samples_of(models, Dataset(pairs, None, (), targets=None if chats else pairs), None)
        for held_out, taught in divide(samples, 2 * prompts, None).folds:
            judge, learn = (set((part.indices // 2).tolist()) for part in (held_out, taught))
            assert not judge & learn
            assert judge | learn == set(range(prompts))

    @pytest.mark.parametrize("count", [40, 120])
    def test_repeated_samples_do_not_judge_what_they_teach(self, models: Any, count: int) -> None:
        texts = [f"text {place % (count * 3 // 4)}" for place in range(count)]
        folds, _ = divide(samples_of(models, Dataset(texts, None, ()), None), count, None)
        for held_out, taught in folds:
            assert not set(held_out.chosen.inputs) & set(taught.chosen.inputs)
        with pytest.raises(DataError, match="8 samples that differ"):
            divide(samples_of(models, Dataset(["one text"] * count, None, ()), None), count, None)

    @pytest.mark.parametrize("count", [10, 100])
    def test_views_of_samples_that_judge_are_not_taught(self, models: Any, count: int) -> None:
        places = np.random.default_rng(0).integers(0, count, 3 * count)
        samples = samples_of(models, Dataset([*map(str, range(4 * count))], None, ()), None)
        folds, _ = divide(samples, count, Extra(Dataset(["a"] * 3 * count, None, ()), views_of=places))
        for held_out, taught in folds:
            views = taught.indices[taught.indices >= count] - count
            assert not set(places[views].tolist()) & set(held_out.indices.tolist())
            assert len(views) == sum(place not in held_out.indices for place in places)

    def test_few_own_samples_are_all_taught_beside_others_like_them(self, models: Sides[Model]) -> None:
        student = student_of(models.target, TaskVector({}), None, 0).module
        config = DistillConfig.of(steps=1)
        found = distill(own(models, 10), student, config, extra=extra(40, like_own=True))
        assert (found["samples"], found["extra"], found["held_out"]) == (10, 30, 10)
        found = distill(own(models, 10), student, config, extra=extra(40))
        assert (found["samples"], found["extra"], found["held_out"], found["again"]) == (10, 40, 10, 1)

    @pytest.mark.parametrize("beside", [False, True])
    def test_few_own_samples_are_all_taught_in_the_end(
        self, models: Sides[Model], monkeypatch: pytest.MonkeyPatch, beside: bool
    ) -> None:
        """If the state has improved; a sample that judges changes what is written then, and else does not."""

        def trained(better: bool, place: int | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
            monkeypatch.setattr("tuneport.training.exam.last_is_best", lambda curve, *_: better or len(curve) == 1)
            inputs = list(PROMPTS[:10])
            if place is not None:
                inputs[place] = PROMPTS[40]
            data = replace(TAUGHT.subset(np.arange(10)), inputs=inputs)
            student = student_of(models.target, TaskVector({}), None, 0).module
            config, more = DistillConfig.of(steps=3), extra(12) if beside else None
            found = distill(samples_of(models, data, None), student, config, extra=more)
            return found, {name: each.detach().clone() for name, each in student.named_parameters()}

        (plain, weights), (_, others) = trained(True, None), trained(True, 9)
        assert (plain["best"], plain["again"], plain["samples"], plain["held_out"]) == (3, 3, 10, 10)
        assert not all(torch.equal(weights[name], others[name]) for name in weights)
        (kept, weights), (_, others) = trained(False, None), trained(False, 9)
        assert (kept["best"], kept["again"], kept["samples"], kept["held_out"]) == (0, 0, 10, 10)
        assert all(torch.equal(weights[name], others[name]) for name in weights)

    @pytest.mark.parametrize(("student", "judges", "teaches"), [(0, 9, 0), (1, 0, 9)])
    def test_samples_that_judge_are_not_taught(
        self, students: dict[int | None, list[dict[str, Tensor]]], student: int, judges: int, teaches: int
    ) -> None:
        """Another text in one half leaves the weights of one student as they are, and changes those of the other."""
        plain, judging, taught = (students[place][student] for place in (None, judges, teaches))
        assert all(torch.equal(plain[name], judging[name]) for name in plain)
        assert not all(torch.equal(plain[name], taught[name]) for name in plain)


class TestCached:
    """Texts are encoded once and padded as a batch needs it: the losses are those of texts that are encoded afresh."""

    ROWS = np.array([5, 0, 3])

    @pytest.fixture(params=["gpt2", "llama", "t5"])
    def pair(self, request: pytest.FixtureRequest, tmp_path: Path) -> Sides[Model]:
        words = t5_tokenizer() if request.param == "t5" else gpt_tokenizer()
        folders = [
            write(tmp_path / str(size.seed), make(request.param, size, vocab_size=len(words)), words)
            for size in (SMALL, LARGE)
        ]
        return Sides(*map(open_model, folders))

    @pytest.mark.parametrize("choices", [False, True])
    def test_losses_are_the_same(self, pair: Sides[Model], choices: bool) -> None:
        starts, ends = ([text[:cut] for text in SENTENCES[:6]] for cut in (12, 25))
        ends = [end[12 : 14 + 2 * place] for place, end in enumerate(ends)]
        data = Dataset(starts, None, (), targets=ends, answers="teacher")
        if choices:
            each = [[end, "the sea", "nobody at all"][: 2 + place % 2] for place, end in enumerate(ends)]
            data = Dataset(starts, np.zeros(6, dtype=np.int64), (), choices=each)
        samples = unlabelled(samples_of(pair, data, None))
        matching = matching_of(samples)
        cached = Reader(samples, 1, 0).plain(self.ROWS)
        fresh = _encode(samples.take(self.ROWS))
        for model, one, two in zip(pair, cached, fresh, strict=True):
            mask = one.inputs["attention_mask"].bool()
            assert one.counts == (two.counts or (1,) * len(self.ROWS))
            assert torch.equal(mask, two.inputs["attention_mask"].bool()[:, : mask.shape[1]])
            width = mask.shape[1]
            assert torch.equal(one.inputs["input_ids"][mask], two.inputs["input_ids"][:, :width][mask]), model.name
            assert one.labels is not None
            assert two.labels is not None
            assert one.labels[one.labels != -100].tolist() == two.labels[two.labels != -100].tolist()
        with torch.no_grad():
            answers = [
                [ask(model.module, side) for ask, model, side in zip(matching.ask, pair, sides, strict=True)]
                for sides in (cached, fresh)
            ]
            losses = [float(matching.loss(*each)) for each in answers]
        # float32 sums of some ten tokens; padding, which adds zeros, changes their order at most
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_loss_of_texts_is_that_of_transformers(models: Sides[Model]) -> None:
    """The mean over all tokens of the answers and their ends, in one batch of several lengths."""
    samples = own(models, 5)
    matching = matching_of(samples)
    assert matching.name == "texts"
    module, tokenizer = models.target.module, models.target.inputs.reader.tokenizer  # type: ignore[union-attr]
    total, count = 0.0, 0
    for prompt, answer in zip(PROMPTS[:5], ANSWERS[:5], strict=True):
        start = tokenizer(prompt)["input_ids"]
        end = [*tokenizer(f" {answer}")["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            loss = module(torch.tensor([start + end]), labels=torch.tensor([[-100] * len(start) + end])).loss
        total, count = total + float(loss) * len(end), count + len(end)
    with torch.no_grad():
        found = matching.ask.target(module, _encode(samples).target)
    # float32 logits, summed in another order
    assert float(matching.loss(None, found)) == pytest.approx(total / count, rel=1e-5)
    assert len(set(map(len, SOUNDS.values()))) > 1


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [Schedule(10, learning_rate=1.0, warmup=4).rate(step) for step in range(10)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(one > other for one, other in pairwise(rates[4:]))
    assert rates[7] == pytest.approx(0.5)


def test_samples_of_a_port_that_judge_are_not_the_shortest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are measured in the order of their lengths, and taught in another."""
    source, tuned, target, _ = write_classifier(tmp_path)
    data = Dataset(["word " * (1 + place % 30) + str(place) for place in range(60)], None, ())
    ported = transfer(source, tuned, target, data, scale=1.0, samples=60)
    judged: list[Any] = []

    def seen(*given: Any) -> Any:
        judged.append(divide(*given))
        return judged[-1]

    monkeypatch.setattr("tuneport.training.distill.divide", seen)
    ported.distill(1)
    (held_out, taught), *_ = judged[0].folds
    lengths = [[len(text) for text in part.chosen.inputs] for part in (held_out, taught)]
    assert len(lengths[0]) == 10
    assert len(lengths[1]) == 50
    assert max(lengths[0]) > np.median(lengths[1])
