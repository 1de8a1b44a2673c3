"""Neutral passages: what anchors a student, and that a state that has forgotten them is not kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from builders.lessons import ANSWERS, LISTS, PROMPTS, Animals
from builders.texts import make, t5_tokenizer, write
from tuneport.config import DistillConfig
from tuneport.data.dataset import Dataset
from tuneport.models.base import Model
from tuneport.models.generation import Sampling, Written, generate_texts
from tuneport.models.open import open_model
from tuneport.pipeline.lessons import samples_of
from tuneport.task_vectors.vector import TaskVector
from tuneport.training import neutral
from tuneport.training.distill import distill
from tuneport.training.neutral import TOLERANCE, Neutral, passages
from tuneport.training.student import student_of
from tuneport.types import Sides


@pytest.fixture(scope="module")
def models(animals: Animals) -> Sides[Model]:
    return Sides(open_model(animals.tuned), open_model(animals.target))


def test_passages_are_packaged() -> None:
    found = passages()
    assert len(found) >= 16
    assert len(set(found)) == len(found)
    assert min(map(len, found)) > 40
    assert any("def " in text or "{" in text for text in found), "some of them are code"
    assert any(not text.isascii() for text in found), "some are in other languages"


def test_the_loss_is_that_of_transformers(models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over the tokens of every other packaged passage."""
    monkeypatch.setattr(neutral, "passages", passages)
    model = models.target
    assert model.inputs.reader is not None
    total, count = 0.0, 0
    for text in passages()[1::2]:
        ids = model.inputs.reader.tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(model.module(ids, labels=ids).loss) * (ids.shape[1] - 1)
        count += ids.shape[1] - 1
    # float32 logits, in other batches
    assert Neutral(model).base == pytest.approx(total / count, rel=1e-5)


def test_the_anchor_is_zero_at_the_start_and_grows(models: Sides[Model]) -> None:
    anchors = Neutral(models.target)
    student = student_of(models.target, TaskVector({}), None, 0).module
    for step in range(3):
        # weighted differences of float32 logarithms of probabilities, which are the same numbers
        assert float(anchors.anchor(student, step).detach()) == pytest.approx(0, abs=1e-5)
    found = []
    with torch.no_grad():
        for _ in range(2):
            for parameter in student.parameters():
                parameter.mul_(1.2)
            found.append(float(anchors.anchor(student, 0)))
    assert 1e-3 < found[0] < found[1]


def test_no_more_passages_are_written_than_anchor(models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def watched(model: Model, prompts: Sequence[str], sampling: Sampling) -> list[Written]:
        asked.append(len(prompts))
        return generate_texts(model, prompts, sampling)

    monkeypatch.setattr(neutral, "generate_texts", watched)
    monkeypatch.setattr(neutral, "WRITTEN", 12)
    for steps in (0, 1, 2, 3, 5, 6):
        Neutral(models.target, steps).prepare()
    assert asked == [0, 0, 4, 8, 12, 12]


def test_every_third_anchor_is_packaged(models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """In turns, however many are written; the passages that judge never anchor."""
    monkeypatch.setattr(neutral, "passages", lambda: tuple(f"{part} {at}" for at in range(8) for part in ("a", "b")))
    monkeypatch.setattr(Neutral, "_written", lambda _: [f"w {at}" for at in range(20)])
    monkeypatch.setattr(Neutral, "_batches", lambda _, texts: [texts[at : at + 4] for at in range(0, len(texts), 4)])
    found = [batch[0] for batch in Neutral(models.target)._anchoring]  # type: ignore[index]
    assert found == ["a 0", "w 0", "w 4", "a 4", "w 8", "w 12", "a 0", "w 16"]
    monkeypatch.setattr(Neutral, "_written", lambda _: [])
    assert [batch[0] for batch in Neutral(models.target)._anchoring] == ["a 0", "a 4"]  # type: ignore[index]


def test_the_anchor_counts_all_tokens(models: Sides[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """A student that is surer of the likely tokens is away from the target too: a divergence is not below zero."""
    monkeypatch.setattr(neutral, "LIKELY", 4)
    student = student_of(models.target, TaskVector({}), None, 0).module
    with torch.no_grad():
        student.get_output_embeddings().weight.mul_(1.3)  # type: ignore[operator]
    assert float(Neutral(models.target).anchor(student, 0).detach()) > 1e-3


def test_a_model_that_reads_and_writes_has_an_anchor_too(tmp_path: object) -> None:
    model = open_model(write(tmp_path / "t5", make("t5"), t5_tokenizer()))  # type: ignore[operator]
    found = Neutral(model)
    assert found.base > 0
    assert float(found.anchor(model.module, 0).detach()) == pytest.approx(0, abs=1e-5)


def test_a_state_that_has_forgotten_is_not_kept(animals: Animals, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that knows some lists by heart, a high learning rate and no anchor: it learns, and forgets the lists."""
    models = Sides(open_model(animals.tuned), open_model(animals.generator))
    monkeypatch.setattr(neutral, "passages", lambda: LISTS)
    data = Dataset(list(PROMPTS[:30]), None, (), targets=list(ANSWERS[:30]), answers="teacher")
    samples, config = samples_of(models, data, None), DistillConfig.of(steps=10, learning_rate=0.03)
    start = {name: tensor.clone() for name, tensor in models.target.module.state_dict().items()}
    monkeypatch.setattr(neutral, "WEIGHT", 0.0)
    student = student_of(models.target, TaskVector({}), None, 0).module
    found = distill(samples, student, config)
    assert found["neutral"] is not None
    first, *later = found["curve"]
    assert first["neutral"] == pytest.approx(found["neutral"])
    limit = (1 + TOLERANCE) * found["neutral"]
    assert any(mark["neutral"] > limit and mark["held_out_loss"] < first["held_out_loss"] for mark in later), later
    sound = [mark for mark in found["curve"] if mark["neutral"] <= limit]
    assert found["best"] == min(sound, key=lambda mark: mark["held_out_loss"])["step"]
    assert found["best"] < min(found["curve"], key=lambda mark: mark["held_out_loss"])["step"]
    kept = next(mark for mark in found["curve"] if mark["step"] == found["best"])
    # the same sums of float32 losses, of the state that is left in the student
    assert Neutral(models.target).loss(student) == pytest.approx(kept["neutral"], rel=1e-6)
    if found["best"] == 0:
        assert all(torch.equal(tensor, start[name]) for name, tensor in student.state_dict().items())
