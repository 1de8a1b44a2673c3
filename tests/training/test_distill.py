"""Distillation: it learns, keeps the best state, changes nothing given, and continues with the same bits."""

from __future__ import annotations

import copy
import json
import weakref
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from builders.classifiers import WIDER, bert
from builders.folders import Zoo
from builders.runs import Listener, prepare, run
from builders.texts import LARGE, SENTENCES, SMALL, bert_tokenizer, gpt_tokenizer, make, t5_tokenizer, write
from tuneport import transfer
from tuneport.config import DistillConfig
from tuneport.data.answers import with_answers
from tuneport.data.dataset import Dataset
from tuneport.data.formats import read_plain
from tuneport.errors import CheckpointError, DataError, OptionError, TuneportError
from tuneport.io.state import StateFile
from tuneport.measure.objectives import choose_objective
from tuneport.measure.samples import DatasetSamples
from tuneport.models.open import open_model
from tuneport.models.tokenizer import Encoded
from tuneport.pipeline import distill as alone
from tuneport.pipeline import lessons
from tuneport.pipeline import transfer as pipeline
from tuneport.pipeline.arithmetic import extract
from tuneport.pipeline.samples import SCORED
from tuneport.pipeline.transfer import Result
from tuneport.report.summary import distilled_words
from tuneport.task_vectors.low_rank import LowRank, truncate
from tuneport.task_vectors.vector import TaskVector, save_task_vector
from tuneport.training import distill, division, exam
from tuneport.training.exam import Mark
from tuneport.training.loop import Pace, Schedule, run_steps
from tuneport.training.matching import Matching, matching_of
from tuneport.training.student import student_of
from tuneport.types import Events, Sides


@pytest.fixture(scope="module")
def ported(zoo: Zoo) -> Result:
    return transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=30, labels="source")


@pytest.fixture(scope="module")
def classified(zoo: Zoo) -> Result:
    return transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=20)


@pytest.fixture(scope="module")
def refitted(classified: Result) -> Result:
    """A distillation with fitted heads that was not interrupted."""
    return classified.distill(4, learning_rate=1e-3)


@pytest.fixture(scope="module", params=[None, 2])
def whole(ported: Result, request: pytest.FixtureRequest) -> tuple[int | None, Result]:
    """The rank of a LoRA or None for all layers, and a distillation that was not interrupted."""
    return request.param, ported.distill(6, lora=request.param)


@pytest.fixture
def long_exams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out samples are judged as a user's are: one by one if they are ten, and in four views."""
    monkeypatch.setattr(exam, "GROUPS", 10)
    monkeypatch.setattr(exam, "VIEWS", 4)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def curve(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = result.record["distilled"]["curve"]
    return found


def same(one: Result, other: Result) -> bool:
    pairs = ((one.task_vector.dense(name), other.task_vector.dense(name)) for name in one.task_vector)
    return list(one.task_vector) == list(other.task_vector) and all(torch.equal(*pair) for pair in pairs)


def test_the_student_comes_nearer_to_its_teacher(ported: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[exam.Curve] = []

    def watched(*given: Any) -> exam.Curve:
        judged.append(exam.pooled(*given))
        return judged[-1]

    monkeypatch.setattr(distill, "pooled", watched)
    seen: list[Mark] = []
    steps: list[int] = []
    found = ported.distill(12, events=Listener(progress=steps.append, mark=seen.append))
    entry = found.record["distilled"]
    assert (entry["matching"], entry["samples"], entry["held_out"], entry["folds"]) == ("classes", 30, 30, 2)
    assert entry["again"] == entry["best"] > 0
    assert len([step for step in steps if step == 1]) == 2 * 12 + entry["again"]
    assert [mark.step for mark in seen] == 2 * [mark["step"] for mark in entry["curve"]]
    best = next(mark for mark in entry["curve"] if mark["step"] == entry["best"])
    losses = np.array(judged[0].groups)  # of each mark, those of 30 images
    assert [mark["held_out_loss"] for mark in entry["curve"]] == pytest.approx(losses.mean(1).tolist(), rel=1e-5)
    apart = losses[entry["curve"].index(best)] - losses[losses.mean(1).argmin()]
    assert apart.mean() <= 2 * apart.std(ddof=1) / 30**0.5, "none is better beyond chance"
    # the teacher differs from the target by noise that 20 images show well: half the distance is a loose bound
    assert best["held_out_loss"] < 0.5 * entry["curve"][0]["held_out_loss"]
    assert found.scale == 1.0
    assert "distilled" not in ported.record


def test_a_port_is_taught_further_samples_of_a_path(ported: Result, zoo: Zoo) -> None:
    found = ported.distill(2, extra=str(zoo.data)).record["distilled"]
    assert found["extra"] == len(read_plain(zoo.data, "train")) - 30, "own ones are no extra ones"


@pytest.mark.parametrize("option", [{"template": "{text}"}, {"samples": 9}, {"sampler": "class_balanced"}])
def test_options_of_other_samples_are_refused_for_a_port(ported: Result, option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=rf"`{next(iter(option))}` is for `tuneport\.distill`"):
        ported.distill(2, **option)


def test_models_come_back_as_they_were_also_after_an_error(ported: Result) -> None:
    before = [state(model.module) for model in ported.setup.models]

    def stop(_: Mark) -> None:
        raise RuntimeError("stop")

    ported.distill(3)
    with pytest.raises(RuntimeError, match="stop"):
        ported.distill(3, events=Listener(mark=stop))
    for model, old in zip(ported.setup.models, before, strict=True):
        assert all(torch.equal(tensor, old[name]) for name, tensor in model.module.state_dict().items())


def test_a_run_that_does_not_help_leaves_the_start(zoo: Zoo) -> None:
    """A port of a model to itself is the teacher: every step leads away from it."""
    base, tuned, _ = zoo.trio("clip_vision")
    itself = run(prepare(base, tuned, base, zoo.data, signals=SCORED, samples=30), "naive", scale=1.0)
    found = itself.distill(4, learning_rate=1e-2)
    assert found.record["distilled"]["best"] == 0
    assert found.record["distilled"]["curve"][0]["agreement"] == 1.0
    assert found.task_vector is itself.task_vector
    assert found.scale == itself.scale


def test_a_worse_teacher_does_not_spoil_a_language_model(tmp_path: Path) -> None:
    """The student has learnt the texts, its teacher knows nothing: the nearer to it, the worse."""
    texts = Dataset(inputs=list(SENTENCES[:8]), labels=None, classes=())
    teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=320), gpt_tokenizer())
    module, tokenizer = make("gpt2", vocab_size=320), gpt_tokenizer()
    optimizer = torch.optim.Adam(module.parameters(), 1e-2)
    for text in texts.inputs * 4:
        ids = tokenizer(text, return_tensors="pt").input_ids
        module(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    student = write(tmp_path / "student", module, tokenizer)
    found = alone.distill(teacher, student, texts, steps=4, samples=8).record["distilled"]
    losses = {mark["step"]: mark["held_out_loss"] for mark in found["curve"]}
    assert found["matching"] == "tokens"
    assert found["curve"][-1]["loss"] < found["curve"][1]["loss"]  # it did come nearer to its teacher
    assert losses[4] > losses[0]
    assert losses[found["best"]] == min(losses.values())
    words = "none of 4 steps lowered the loss on held-out samples without forgetting neutral text: it is the start"
    assert words in distilled_words(found | {"best": 0})
    assert "held-out samples: it is the start" in distilled_words(found | {"best": 0, "neutral": None})


@pytest.mark.parametrize(
    ("few", "better", "students"), [(division.FEW, True, 3), (division.FEW, False, 3), (0, True, 1)]
)
def test_as_many_steps_are_told_as_were_planned(
    ported: Result, monkeypatch: pytest.MonkeyPatch, few: int, better: bool, students: int
) -> None:
    """Also if the last student takes fewer, or none."""
    monkeypatch.setattr(division, "FEW", few)
    monkeypatch.setattr(exam, "last_is_best", lambda curve, *_: len(curve) == 1 or (better and len(curve) < 4))
    planned: list[float] = []
    told: list[int] = []

    class Steps(Events):
        def plan(self, total: float) -> None:
            planned.append(total)

        def advance(self, count: int) -> None:
            told.append(count)

    entry = ported.distill(4, events=Steps()).record["distilled"]
    assert 0 < entry["best"] < 4 if better else entry["best"] == 0
    assert planned == [students * 4]
    assert sum(told) == students * 4


@pytest.mark.parametrize(("few", "most"), [(division.FEW, 2), (0, 1)])
def test_no_state_is_kept_that_nothing_needs(
    ported: Result, monkeypatch: pytest.MonkeyPatch, few: int, most: int
) -> None:
    """Beside the student there is its best state and, if others are still to begin, the start."""
    monkeypatch.setattr(division, "FEW", few)
    monkeypatch.setattr(exam, "last_is_best", lambda *_: True)
    states: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    state = distill._Run.state

    def watched(run: Any) -> dict[str, Tensor]:
        found = state(run)
        states.append(weakref.ref(next(iter(found.values()))))
        return found

    monkeypatch.setattr(distill._Run, "state", watched)
    count = Listener(mark=lambda _: alive.append(sum(each() is not None for each in states)))
    found = ported.distill(4, events=count).record["distilled"]
    assert found["best"] == 4
    assert max(alive) == most
    assert len(states) > most


def test_what_is_written_is_the_best_state(ported: Result, tmp_path: Path) -> None:
    found = ported.distill(6)
    again = transfer(ported.target, found.save(tmp_path / "out"), ported.target, method="naive")
    for name, change in again.task_vector.items():
        # base + change is rounded once to float32: half an ulp of weights below 4
        assert torch.allclose(change, found.task_vector.dense(name), atol=2.4e-7), name


def test_a_fitted_head_is_where_the_student_begins(zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ported = transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=30)
    monkeypatch.setattr(exam, "last_is_best", lambda *_: True)
    found = ported.distill(12, learning_rate=1e-3)
    assert found.record["distilled"]["matching"] == "classes"
    assert found.record["distilled"]["best"] > 0
    assert ported.target.classifier_parameters <= set(found.task_vector)
    loaded = transformers.ViTForImageClassification.from_pretrained(found.save(tmp_path / "out"))
    pixels = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        one, two = (module.eval()(pixel_values=pixels).logits for module in (loaded, found.apply()))
    # the same float32 weights, in two modules
    assert torch.allclose(one, two, atol=1e-5)


class TestFittedHeads:
    """Of few samples each half judges students whose head the other half has fitted; all fit the head that is kept."""

    def test_no_sample_judges_a_head_that_it_has_fitted(
        self, classified: Result, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fitted: list[set[int]] = []
        judged: list[set[int]] = []
        fit, judge = pipeline.fit_head, exam.Exam.judge
        drawn = classified.setup.calibration.samples
        assert isinstance(drawn, DatasetSamples)

        def watched_fit(target: Any, module: Any, samples: DatasetSamples) -> Any:
            fitted.append({int(np.flatnonzero(drawn.indices == index)[0]) for index in samples.indices})
            return fit(target, module, samples)

        def watched_exam(self: exam.Exam, student: nn.Module) -> Any:
            judged.append(set(self.samples.indices.tolist()))
            return judge(self, student)

        monkeypatch.setattr(pipeline, "fit_head", watched_fit)
        monkeypatch.setattr(exam.Exam, "judge", watched_exam)
        classified.distill(1)
        halves = [set(range(10)), set(range(10, 20))]
        assert fitted == [*halves, halves[0] | halves[1]]
        assert [judged[0], judged[-1]] == halves[::-1]

    @pytest.mark.parametrize("after", [3, 6])
    def test_a_killed_run_continues_with_the_same_bits(
        self, classified: Result, refitted: Result, tmp_path: Path, after: int
    ) -> None:
        saved, steps = StateFile(tmp_path / "state.safetensors", "these", 0.0), 0

        def kill(count: int) -> None:
            nonlocal steps
            steps += count
            if steps > after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            classified.distill(4, learning_rate=1e-3, events=Listener(progress=kill), saved=saved)
        found = classified.distill(4, learning_rate=1e-3, saved=saved)
        assert same(found, refitted)
        assert curve(found) == curve(refitted)


class TestStudent:
    @pytest.fixture
    def samples(self, tmp_path: Path) -> DatasetSamples:
        """Two GPT-2s of one tokenizer, with dropout."""
        words, rates = gpt_tokenizer(), {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=320), words)
        student = write(tmp_path / "student", make("gpt2", LARGE, vocab_size=320, **rates), words)
        texts = Dataset(inputs=list(SENTENCES[:16]), labels=None, classes=())
        models = Sides(open_model(teacher), open_model(student))
        return DatasetSamples(models, texts, np.arange(16), None, 16, choose_objective(texts, models))

    def test_it_learns_without_dropout(self, samples: DatasetSamples) -> None:
        """Also if it is given in training mode: its weights and its curve are those of a student without dropout."""
        learnt = []
        for rate in (0.3, 0.0):
            student = student_of(samples.models.target, TaskVector({})).module.train()
            for part in student.modules():
                if isinstance(part, nn.Dropout):
                    part.p = rate
            found = distill.distill(samples, student, DistillConfig(steps=4))
            learnt.append((state(student), found["curve"]))
        assert learnt[0][1] == learnt[1][1]
        assert all(torch.equal(tensor, learnt[1][0][name]) for name, tensor in learnt[0][0].items())

    def test_embeddings_and_vocabulary_heads_stay(self, samples: DatasetSamples) -> None:
        target = samples.models.target
        student = student_of(target, TaskVector({})).module
        distill.distill(samples, student, DistillConfig(steps=4))
        before = target.module.state_dict()
        stay = {name for name, tensor in student.state_dict().items() if torch.equal(tensor, before[name])}
        assert stay == {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}

    @pytest.mark.usefixtures("long_exams")
    def test_each_view_of_a_held_out_sample_is_another_one(self, ported: Result) -> None:
        seen: list[Tensor] = []
        module = ported.setup.models.source.module
        with module.register_forward_pre_hook(lambda *call: seen.append(call[-1]["pixel_values"]), with_kwargs=True):
            ported.distill(1)
        views = torch.cat(seen[:5])  # of 14 held-out images: as they are, and four views
        assert len(views) == 70
        assert not any(torch.equal(one, two) for one, two in combinations(views, 2))


class TestEverySampleCounts:
    """A last pass of one sample, and texts without a token to predict."""

    @pytest.mark.parametrize(
        ("kind", "count"),
        [("regression", 330), ("regression", 108), ("encoder", 650), ("encoder of pairs", 650)],
        ids=lambda value: str(value),
    )
    def test_a_sample_is_not_left_alone_in_a_pass(self, tmp_path: Path, kind: str, count: int) -> None:
        """One of 33 held-out, of 97 taught or of 65 held-out texts was: its variance, or its neighbours, are none."""
        folders = []
        for name, size in (("teacher", SMALL), ("student", WIDER)):
            regression = {"num_labels": 1, "problem_type": "regression"}
            module = bert("BertForSequenceClassification", size, **regression) if kind == "regression" else None
            folders.append(write(tmp_path / name, module or bert("BertModel", size), bert_tokenizer()))
        words = " ".join(SENTENCES).split()
        texts = [" ".join(words[start % 60 : start % 60 + 4 + start % 5]) for start in range(count)]
        pairs = [*zip(texts, reversed(texts), strict=True)]
        data = Dataset(inputs=pairs if kind == "encoder of pairs" else texts, labels=None, classes=())
        found = alone.distill(*folders, data, steps=4, samples=count).record["distilled"]
        assert found["matching"] == ("numbers" if kind == "regression" else "similarities")
        assert all(np.isfinite(mark["held_out_loss"]) and np.isfinite(mark["agreement"]) for mark in found["curve"])
        assert found["best"] > 0, "four steps lower the loss"

    @pytest.mark.parametrize("rows", [300, 320])
    def test_texts_without_a_token_to_predict_are_left_out(self, tmp_path: Path, rows: int) -> None:
        """Four of 16 texts have one token, which GPT-2 does not predict: they would be a pass of their own."""
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=rows), gpt_tokenizer(rows))
        student = write(tmp_path / "student", make("gpt2", vocab_size=320), gpt_tokenizer(320))
        texts = [text[:9] for text in SENTENCES[:8]] + [text[:12] for text in SENTENCES[:4]] + list("abcd")

        def taught(name: str, inputs: list[str]) -> dict[str, Any]:
            data = Dataset(inputs=inputs, labels=None, classes=())
            alone.distill(teacher, student, data, steps=3, samples=len(inputs)).save(tmp_path / name)
            return json.loads((tmp_path / name / "tuneport.json").read_text())["distilled"]

        found = taught("out", texts)
        assert (found["samples"], found["held_out"], found["left_out"], found["again"]) == (12, 12, 4, 3)
        assert all(np.isfinite(mark["held_out_loss"]) and np.isfinite(mark["agreement"]) for mark in found["curve"])
        assert "; 4 samples had nothing to compare" in distilled_words(found)
        with pytest.raises(DataError, match="can be compared on 4 of 8 samples, and a distillation needs at least 8"):
            taught("none", texts[-8:])
        with pytest.raises(DataError, match="can be compared on 0 of 9 samples"):
            alone.distill(teacher, student, Dataset(list("abcd") * 10, None, ()), steps=3, samples=9)

    @pytest.mark.usefixtures("long_exams")
    def test_texts_without_a_token_to_classify_are_left_out(self, tmp_path: Path) -> None:
        """Words of letters that BERT does not read: all of a text, or all that some of its views keep."""
        kind, none = "BertForTokenClassification", "\u200b"
        folders = [
            write(tmp_path / name, bert(kind, size, num_labels=3), bert_tokenizer())
            for name, size in (("teacher", SMALL), ("student", WIDER))
        ]
        texts = [*SENTENCES[:4], *[f"{none} {word}" for word in SENTENCES[4].split()[:8]], none, f"{none} {none}"]
        found = alone.distill(*folders, Dataset(texts, None, ()), steps=2, samples=len(texts)).record["distilled"]
        assert (found["matching"], found["samples"], found["held_out"], found["left_out"]) == ("classes", 12, 12, 2)
        assert all(np.isfinite(mark["held_out_loss"]) and np.isfinite(mark["agreement"]) for mark in found["curve"])

    def test_every_held_out_sample_has_the_same_weight(self, ported: Result, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ten held-out images are one pass, or one of four images and two of three."""

        def first(pass_size: int) -> dict[str, Any]:
            def compared(samples: DatasetSamples) -> Matching:
                found = replace(matching_of(samples), loss=mse_loss, agreement=mse_loss, asking="plain")
                return replace(found, exam=None, apart=False, pass_size=pass_size)

            monkeypatch.setattr(distill, "matching_of", compared)
            return curve(ported.distill(1))[0]

        together, apart = first(128), first(4)
        for key in ("held_out_loss", "agreement"):
            # float32 means in another order
            assert apart[key] == pytest.approx(together[key], rel=1e-5)

    def test_a_loss_that_is_no_number_is_an_error(self, ported: Result, monkeypatch: pytest.MonkeyPatch) -> None:
        def compared(samples: DatasetSamples) -> Matching:
            return replace(matching_of(samples), exam=lambda _, student: student.sum() * torch.nan)

        monkeypatch.setattr(distill, "matching_of", compared)
        with pytest.raises(TuneportError, match="loss on held-out samples is NaN or infinite after 0 steps: check"):
            ported.distill(2)

    def test_a_first_loss_that_is_no_number_does_not_blame_the_learning_rate(self) -> None:
        def run(bad: int) -> None:
            module, schedule = nn.Linear(2, 1), Schedule(3)

            def loss(step: int, rows: Tensor) -> Tensor:
                return module(torch.ones(len(rows), 2)).mean() * (torch.nan if step == bad else 1.0)

            list(run_steps("the run", module, schedule.optimizer(module), schedule, 4, loss, Pace(stops={3})))

        with pytest.raises(TuneportError, match=r"the loss of the run is NaN or infinite before anything is learnt"):
            run(0)
        with pytest.raises(TuneportError, match=r"diverged: the loss is NaN or infinite at step 2 of 3. Lower `learn"):
            run(1)


class TestResume:
    def conditions(self, path: Path, every: float = 0.0) -> StateFile:
        return StateFile(path / "state.safetensors", "these", every)

    # before a mark, at one, between two, at the end of a student, and in the second
    @pytest.mark.parametrize("after", [1, 4, 5, 6, 11])
    def test_a_killed_run_continues_with_the_same_bits(
        self, ported: Result, whole: tuple[int | None, Result], tmp_path: Path, after: int
    ) -> None:
        (lora, wanted), steps = whole, 0

        def kill(count: int) -> None:
            nonlocal steps
            steps += count
            if steps > after:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ported.distill(6, lora=lora, events=Listener(progress=kill), saved=self.conditions(tmp_path))
        done: list[int] = []
        events = Listener(progress=done.append)
        found = ported.distill(6, lora=lora, events=events, saved=self.conditions(tmp_path))
        students, part = divmod(after, 6)
        assert done[: students + 1] == [6] * students + [part] or done[:2] == [6, 0], "what was saved is not done again"
        assert sum(done) == 3 * 6, "as planned, whatever is not taken"
        assert same(found, wanted)
        assert curve(found) == curve(wanted)

    def test_a_run_that_is_killed_while_it_teaches_all_own_samples(
        self, ported: Result, whole: tuple[int | None, Result], tmp_path: Path
    ) -> None:
        (lora, wanted), steps = whole, 0
        assert wanted.record["distilled"]["again"] > 1

        def kill(count: int) -> None:
            nonlocal steps
            steps += count == 1  # others are not taken
            if steps > 13:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            ported.distill(6, lora=lora, events=Listener(progress=kill), saved=self.conditions(tmp_path))
        done: list[int] = []
        events = Listener(progress=done.append)
        found = ported.distill(6, lora=lora, events=events, saved=self.conditions(tmp_path))
        again = found.record["distilled"]["again"]
        assert done == [6, 6, 6 - again, 1] + [1] * (again - 1)
        assert same(found, wanted)
        assert curve(found) == curve(wanted)

    def test_saving_changes_nothing(self, ported: Result, tmp_path: Path) -> None:
        plain = ported.distill(5)
        assert same(plain, ported.distill(5, saved=self.conditions(tmp_path)))
        assert same(plain, ported.distill(5, saved=self.conditions(tmp_path))), "a finished run, again"

    def test_damage_and_other_conditions_are_errors(self, ported: Result, tmp_path: Path) -> None:
        saved = self.conditions(tmp_path)
        ported.distill(2, saved=saved)
        with pytest.raises(CheckpointError, match='cannot be resumed:  was "these" and is "those"'):
            ported.distill(2, saved=replace(saved, conditions="those"))
        sound = saved.path.read_bytes()
        flipped = sound[:-3] + bytes([sound[-3] ^ 1]) + sound[-2:]
        raised = sound.replace(b'"step": 2', b'"step": 1')
        for content in (flipped, raised):
            assert content != sound
            saved.path.write_bytes(content)
            with pytest.raises(CheckpointError, match="is damaged"):
                ported.distill(2, saved=saved)


class TestLora:
    def test_it_starts_at_the_best_fit_of_the_port(self, ported: Result) -> None:
        found = ported.distill(1, lora=3, learning_rate=1e-30)
        for name, entry in found.task_vector.items():
            assert isinstance(entry, LowRank)
            assert entry.rank == 3
            if name in ported.task_vector:
                expected, _ = truncate(ported.task_vector[name] * ported.scale, 3)
                assert torch.allclose(entry.dense(), expected.dense(), atol=1e-6), name

    def test_it_is_trained_in_float32_in_a_model_of_half_precision(self, ported: Result) -> None:
        target = ported.setup.models.target
        half = target.with_module(copy.deepcopy(target.module).bfloat16())
        module = student_of(half, TaskVector({}), lora=2).module
        found = {(each.requires_grad, each.dtype) for each in module.parameters()}
        assert found == {(True, torch.float32), (False, torch.bfloat16)}

    def test_peft_loads_what_was_trained(self, ported: Result, tmp_path: Path) -> None:
        peft = pytest.importorskip("peft")
        found = ported.distill(4, lora=2)
        assert found.record["distilled"]["best"] > 0
        out = found.save(tmp_path / "adapter", as_="adapter")
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(ported.target.module), out).merge_and_unload()
        pixels = torch.randn(2, 3, 24, 24)
        one, two = (module(pixel_values=pixels).image_embeds for module in (loaded, found.apply()))
        assert torch.allclose(one, two, atol=1e-5)


class TestRefusals:
    def test_too_few_samples(self, zoo: Zoo) -> None:
        few = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=7, labels="source")
        with pytest.raises(DataError, match="needs at least 8 samples, of which some are held out; got 7"):
            few.distill(2)

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"steps": 0}, "`steps` must be at least 1, got 0"),
            ({"learning_rate": 0.0}, "`learning_rate` must be above 0"),
            ({"lora": 0}, "`lora` must be at least 1, got 0"),
            ({"batch_size": 1}, "`batch_size` must be at least 2, got 1"),
        ],
    )
    def test_numbers_that_make_no_sense(self, ported: Result, options: dict[str, Any], words: str) -> None:
        with pytest.raises(TuneportError, match=words):
            ported.distill(**{"steps": 2, **options})


QUESTIONS = [f"{text[:18]}?" for text in SENTENCES[:12]]
WORDS = ("a red stone", "the sea", "nobody at all")


class TestLanguageModelsAndLabels:
    """A label says which answer is right, and only the teacher may say that."""

    @pytest.fixture(params=["chats", "choices of two tokenizers", "seq2seq"])
    def taught(self, request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Dataset]:
        """A teacher, a student, and labelled questions."""
        labels = np.arange(12) % 3
        data = Dataset(inputs=QUESTIONS, labels=labels, classes=WORDS)
        if request.param == "seq2seq":
            teacher = write(tmp_path / "teacher", make("t5"), t5_tokenizer())
            return teacher, write(tmp_path / "student", make("t5", LARGE), t5_tokenizer()), data
        rows = 300 if request.param == "choices of two tokenizers" else 320
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=rows), gpt_tokenizer(rows))
        student = write(tmp_path / "student", make("gpt2", LARGE, vocab_size=320), gpt_tokenizer(320))
        if request.param == "choices of two tokenizers":
            each = [list(WORDS[: 2 + number % 2]) for number in range(12)]
            data = replace(data, choices=each, classes=(), labels=np.arange(12) % 2)
        if request.param == "chats":
            chats = [
                [{"role": "user", "content": text}, {"role": "assistant", "content": WORDS[label]}]
                for text, label in zip(QUESTIONS, labels, strict=True)
            ]
            data = replace(data, inputs=chats)
        return teacher, student, data

    def test_labels_are_not_looked_at(self, taught: tuple[Path, Path, Dataset], tmp_path: Path) -> None:
        """The same questions with other right answers give the same student."""
        teacher, student, data = taught
        assert data.labels is not None
        found = []
        for number, labels in enumerate((data.labels, np.roll(data.labels, 1))):
            given = replace(data, labels=labels)
            if data.has_chats:  # the answer in a chat is the label's
                given = with_answers(given, [WORDS[label] for label in labels])
                given = replace(given, labels=labels)
            result = alone.distill(teacher, student, given, steps=2, samples=12)
            result.save(tmp_path / str(number))
            entry = result.record["distilled"]
            found.append(((tmp_path / str(number) / "model.safetensors").read_bytes(), entry["curve"]))
        assert found[0] == found[1]
        assert (entry["matching"], entry["left_out"]) == ("answers", 0)

    def test_the_student_learns_which_answer_the_teacher_gives(self, tmp_path: Path) -> None:
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=320), gpt_tokenizer(320))
        student = write(tmp_path / "student", make("gpt2", LARGE, vocab_size=320), gpt_tokenizer(320))
        data = Dataset(inputs=QUESTIONS, labels=np.zeros(12, dtype=np.int64), classes=tuple("abc"))
        found = alone.distill(teacher, student, data, steps=10, samples=12).record["distilled"]
        curve = found["curve"]
        assert found["best"] > 0
        # the random student differs from its teacher by some nats: ten steps take a third of that easily
        assert min(mark["held_out_loss"] for mark in curve) < 0.67 * curve[0]["held_out_loss"]

    def test_a_question_is_asked_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that are taught, and those that judge at every mark."""
        asked: list[int] = []

        def watched(samples: DatasetSamples) -> Matching:
            found = matching_of(samples)

            def ask(module: nn.Module, encoded: Encoded) -> Any:
                asked.append(len(encoded.counts))
                return found.ask.source(module, encoded)

            return replace(found, ask=Sides(ask, found.ask.target))

        monkeypatch.setattr(distill, "matching_of", watched)
        monkeypatch.setattr(lessons, "MOST_VIEWED", 0)
        monkeypatch.setattr(division, "FEW", 0)
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=320), gpt_tokenizer(320))
        data = Dataset(inputs=QUESTIONS, labels=np.zeros(12, dtype=np.int64), classes=tuple("abc"))
        found = alone.distill(teacher, teacher, data, steps=3, samples=12).record["distilled"]
        assert len(found["curve"]) == 4
        assert sum(asked) == 12

    def test_a_question_with_one_answer_has_nothing_to_compare(self, tmp_path: Path) -> None:
        teacher = write(tmp_path / "teacher", make("gpt2", vocab_size=320), gpt_tokenizer(320))
        data = Dataset(inputs=QUESTIONS, labels=np.zeros(12, dtype=np.int64), classes=("the sea",))
        with pytest.raises(DataError, match=r"compared on 0 of 12 samples.* and a question two answers"):
            alone.distill(teacher, teacher, data, steps=2, samples=12)


class TestAlone:
    def test_labels_are_not_looked_at(self, zoo: Zoo, tmp_path: Path) -> None:
        """The same images with other labels, and without any, give the same student."""
        data = read_plain(zoo.data, "train")
        assert data.labels is not None
        found = []
        for number, labels in enumerate((data.labels, np.roll(data.labels, 1), None)):
            given = replace(data, labels=labels)
            result = alone.distill(zoo["clip_vision-tuned"], zoo["clip_vision-target"], given, steps=3, samples=12)
            result.save(tmp_path / str(number))
            found.append((tmp_path / str(number) / "model.safetensors").read_bytes())
        assert found[0] == found[1] == found[2]

    def test_a_base_with_a_task_vector_teaches_as_the_fine_tune(self, zoo: Zoo, tmp_path: Path) -> None:
        base, tuned, target = zoo.trio("clip_vision")
        save_task_vector(tmp_path / "tau.safetensors", extract(base, tuned), {})
        one = alone.distill(tuned, target, zoo.data, steps=3, samples=12)
        two = alone.distill(tmp_path / "tau.safetensors", target, zoo.data, base, steps=3, samples=12)
        for mark, other in zip(curve(one), curve(two), strict=True):
            # base + (tuned - base) is rounded in the last place of float32
            assert mark["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-3)
        with pytest.raises(TuneportError, match="teaches together with its base: pass `source`"):
            alone.distill(tmp_path / "tau.safetensors", target, zoo.data, steps=3)


def test_the_learning_rate_follows_the_width(ported: Result) -> None:
    width = 24  # of the target's layers, most of which read the residual stream
    assert ported.distill(1).record["distilled"]["learning_rate"] == pytest.approx(0.12 / width)
    assert ported.distill(1, lora=1).record["distilled"]["learning_rate"] == pytest.approx(0.6 / width)


def test_a_lora_that_is_taught_longer_has_a_lower_rate(ported: Result) -> None:
    target = ported.setup.models.target
    some, more, whole = (
        division.schedule_of(DistillConfig.of(steps=steps, lora=lora), target, 128, 1)
        for steps, lora in ((300, 1), (1200, 1), (1200, None))
    )
    assert (more.learning_rate, more.clip) == (some.learning_rate / 2, some.clip)
    assert whole.learning_rate == pytest.approx(some.learning_rate / 5)
    assert whole.clip is None


def test_passages_are_read_once_and_other_samples_ten_times(ported: Result) -> None:
    target, counts = ported.setup.models.target, (100, 2000, 16000)
    for passages, steps in ((False, [300, 1250, 2000]), (True, [300, 300, 1000])):
        runs = [division.schedule_of(DistillConfig(), target, 16, count, passages=passages) for count in counts]
        assert [run.steps for run in runs] == steps


@pytest.mark.usefixtures("long_exams")
def test_a_batch_is_the_size_that_is_given_and_held_out_samples_are_answered_once(ported: Result) -> None:
    asked: list[int] = []  # images in each pass of the teacher
    teacher = ported.setup.models.source.module
    watched = teacher.register_forward_hook(lambda *call: asked.append(len(call[-1].image_embeds)))
    with watched:
        found = ported.distill(4, batch_size=5).record["distilled"]
    assert len(found["curve"]) == 5
    # of each half 14 or 16 images as they are and in four views, then what the other half teaches; then all teach
    assert found["again"] == 4
    assert asked == [14] * 5 + [5] * 4 + [16] * 5 + [5] * 4 + [5] * 4
    assert found["batch_size"] == 5


def test_a_tenth_of_the_steps_warms_up(ported: Result) -> None:
    assert [division.warm_up(steps) for steps in (1, 9, 30, 60, 100, 300)] == [0, 3, 10, 10, 10, 30]
    schedule = division.schedule_of(DistillConfig(steps=300), ported.setup.models.target, 128, 1)
    rates = [schedule.rate(step) / schedule.learning_rate for step in range(300)]
    assert rates[:3] == pytest.approx([1 / 30, 2 / 30, 3 / 30])
    assert rates[28] < rates[29] == 1.0 > rates[31]
