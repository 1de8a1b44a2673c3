"""Passes that are recorded once and played again: of decoders, and the answers of towers and encoders."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from builders.folders import Zoo
from builders.loras import llama
from builders.texts import SENTENCES, bert_tokenizer, make, write
from tuneport import transfer
from tuneport.data.dataset import UNLABELLED
from tuneport.measure.objectives import batch_for
from tuneport.models.base import Model
from tuneport.models.families.huggingface_generation import answer_logits
from tuneport.models.open import open_model
from tuneport.models.tokenizer import Encoded
from tuneport.training import distill, division
from tuneport.training.captured import STEP, Answers, Played, captured, captured_answers
from tuneport.training.loop import Pace, Schedule, run_steps
from tuneport.types import Sides


class Recorded(Played):
    """Notes the shapes that would be recorded, and runs them as they are."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__(body)
        self.recorded: list[tuple[int, ...]] = []

    def record(self, inputs: dict[str, Tensor]) -> Any:
        shape = inputs["input_ids"].shape
        self.recorded.append(tuple(shape))
        assert shape[1] % STEP == 0
        names = tuple(inputs)
        return lambda *values: self.eager(**dict(zip(names, values, strict=True)), use_cache=False).last_hidden_state


def batch(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows * length)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return {"input_ids": torch.randint(2, 30, (rows, length), generator=generator), "attention_mask": mask}


def test_a_shape_is_recorded_once_and_padding_changes_nothing() -> None:
    model = llama().double()
    played = Recorded(model.base_model)
    wanted = {length: model(**batch(3, length)).logits for length in (5, 9, 20)}
    model.base_model.forward = played
    for _ in range(2):
        for length, scores in wanted.items():
            torch.testing.assert_close(model(**batch(3, length)).logits, scores, rtol=1e-10, atol=1e-10)
    assert played.recorded == [(3, STEP), (3, 2 * STEP)]


def test_answers_to_one_question_are_played_too() -> None:
    model = llama().double()
    asked = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 10, 0], [11, 12, 13, 14, 0]])
    labels = asked.where(torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, 1, 0], [0, 0, 0, 1, 0]]) > 0, UNLABELLED)
    given = {"input_ids": asked, "attention_mask": (asked > 0).long()}
    wanted = answer_logits(model, given, labels, (2, 1))
    model.base_model.forward = played = Recorded(model.base_model)
    found = answer_logits(model, given, labels, (2, 1))
    assert wanted is not None
    assert found is not None
    assert torch.equal(found[0], wanted[0])
    assert played.recorded == [(2, STEP)]


def test_other_inputs_and_passes_without_gradients_are_not_played() -> None:
    model = llama()
    played = Recorded(model.base_model)
    model.base_model.forward = played
    with torch.no_grad():
        model(**batch(2, 8))
    model(**batch(2, 8), past_key_values=transformers.DynamicCache())
    model(inputs_embeds=torch.zeros(2, 8, 16))
    assert not played.recorded


def test_a_decoder_that_cannot_be_recorded_is_run_as_it_is() -> None:
    class Broken(Played):
        def record(self, inputs: dict[str, Tensor]) -> Any:
            raise RuntimeError(f"operation not permitted when stream is capturing: {list(inputs)}")

    model = llama()
    wanted = model(**batch(2, 8)).logits
    model.base_model.forward = played = Broken(model.base_model)
    for _ in range(2):
        assert torch.equal(model(**batch(2, 8)).logits, wanted)
    assert played.most == 0


def test_nothing_is_changed_on_a_cpu_and_all_comes_back() -> None:
    model = llama()
    with captured(model):
        assert "forward" not in vars(model.base_model)
    assert "forward" not in vars(model.base_model)


def played_on_a_cpu(module: nn.Module, passed: Any, inputs: tuple[Tensor, ...]) -> Any:
    """Reads its inputs at one place and gives gradients at one place, as a graph does each time it is played."""
    trained = [each for each in module.parameters() if each.requires_grad and torch.is_grad_enabled()]
    places = [torch.zeros_like(each) for each in trained]

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, *given: Tensor) -> Tensor:
            assert len(given) == len(inputs) + len(trained)
            for place, value in zip(inputs, given[: len(inputs)], strict=True):
                assert place.shape == value.shape
                place.copy_(value)
            with torch.no_grad():
                found: Tensor = passed(*inputs)
            return found

        @staticmethod
        def backward(_: Any, *grads: Tensor) -> Any:
            with torch.enable_grad():
                found = torch.autograd.grad(passed(*inputs), trained, *grads, allow_unused=True)
            for place, value in zip(places, found, strict=True):
                place.copy_(torch.zeros_like(place) if value is None else value)
            return *[None] * len(inputs), *(place.detach() for place in places)

    return lambda *values: Graph.apply(*values, *trained)


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What is recorded is played on a CPU; the shapes of what is."""
    shapes: list[tuple[int, ...]] = []

    def record(module: nn.Module, passed: Any, inputs: tuple[Tensor, ...], _: Any) -> Any:
        shapes.append(tuple(inputs[0].shape))
        return played_on_a_cpu(module, passed, inputs)

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr("tuneport.training.captured._recorded", record)
    return shapes


def learn(way: Any, device: str = "cpu") -> tuple[list[float], list[Tensor]]:
    """Several passes a step, of several shapes: gradients are sums, whoever gives them."""
    torch.manual_seed(0)
    model: nn.Module = llama().to(device).eval()

    def loss(step: int, rows: Tensor) -> Tensor:
        given = {key: value.to(device) for key, value in batch(len(rows), 8 + 8 * (step % 3)).items()}
        given["input_ids"] = (given["input_ids"] + int(rows[0])) % 30
        scores = model(**given).logits
        return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), given["input_ids"][:, 1:].flatten())

    schedule = Schedule(24, 8, 1e-3)
    with way(model):
        steps = run_steps("a test", model, schedule.optimizer(model), schedule, 8, loss, Pace(pass_size=4))
        losses = [float(value) for _, value in steps]
    return losses, [each.detach().cpu() for each in model.parameters()]


def test_gradients_at_one_place_are_summed(on_a_cpu: list[tuple[int, ...]]) -> None:
    (losses, weights), (others, moved) = learn(lambda _: nullcontext()), learn(partial(captured, devices=("cpu",)))
    assert losses == pytest.approx(others, rel=1e-5)
    for one, two in zip(weights, moved, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)
    assert on_a_cpu


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_student_learns_the_same_from_graphs() -> None:
    (losses, weights), (others, moved) = learn(lambda _: nullcontext(), "cuda"), learn(captured, "cuda")
    assert losses == pytest.approx(others, rel=1e-3)
    for one, two in zip(weights, moved, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)


# --- the answers of towers and encoders


def images(seed: int = 0, count: int = 4) -> Encoded:
    generator = torch.Generator().manual_seed(seed)
    return Encoded({"pixel_values": torch.rand(count, 3, 16, 16, generator=generator)}, None, ())


def features_of(model: Model, module: nn.Module, encoded: Encoded) -> Tensor:
    assert model.outputs.features is not None
    found: Tensor = model.outputs.features(module, batch_for(model, encoded)[0])
    return found


def test_answers_are_recorded_when_a_shape_comes_back(zoo: Zoo, on_a_cpu: list[tuple[int, ...]]) -> None:
    model = open_model(zoo.trio("clip_vision")[0])
    with captured_answers(*both(model), devices=("cpu",)) as (_, ask), torch.no_grad():
        for seed in range(3):
            wanted = features_of(model, model.module, images(seed))
            assert torch.equal(ask(model.module, images(seed)), wanted)
            assert len(on_a_cpu) == (seed > 0)
        ask(model.module, images(count=3))
        assert len(on_a_cpu) == 1, "another shape"
        kept = ask(model.module, images(1))
        assert not torch.equal(ask(model.module, images(2)), kept), "an answer is not overwritten by the next"
        with torch.enable_grad():
            for _ in range(2):
                ask(model.module, images())
        assert len(on_a_cpu) == 2, "a pass with gradients"
        torch.set_float32_matmul_precision("high")
        try:
            for _ in range(2):
                ask(model.module, images())
        finally:
            torch.set_float32_matmul_precision("highest")
        assert len(on_a_cpu) == 3, "another precision"


def both(model: Model) -> tuple[Sides[Any], Sides[Model]]:
    return Sides(partial(features_of, model), partial(features_of, model)), Sides(model, model)


def test_texts_of_several_lengths_share_a_recording(tmp_path: Path, on_a_cpu: list[tuple[int, ...]]) -> None:
    model = open_model(write(tmp_path / "bert", make("bert"), bert_tokenizer()))
    assert model.inputs.reader is not None
    parts = [model.inputs.reader.encode(list(SENTENCES[at : at + 2])) for at in range(0, 8, 2)]
    with captured_answers(*both(model), devices=("cpu",)) as (_, ask), torch.no_grad():
        for part in parts * 2:
            encoded = Encoded(dict(part), None, ())
            # sums of a padded row have another order
            torch.testing.assert_close(ask(model.module, encoded), features_of(model, model.module, encoded))
    assert {len(shape) for shape in on_a_cpu} == {2}
    assert all(shape[1] % STEP == 0 or shape[1] == model.inputs.reader.limit for shape in on_a_cpu)
    assert len(on_a_cpu) == len(set(on_a_cpu)) < len(parts)


def test_answers_of_a_model_that_cannot_be_recorded_are_asked_as_they_are(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Answers, "record", broken)
    model = open_model(zoo.trio("clip_vision")[0])
    ask = Answers(partial(features_of, model), model)
    for _ in range(3):
        assert torch.equal(ask(model.module, images()), features_of(model, model.module, images()))
    assert ask.most == 0


@pytest.mark.parametrize("few", [0, division.FEW])
def test_a_tower_learns_the_same_from_recorded_answers(
    zoo: Zoo, on_a_cpu: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    """Also if several students learn one after the other."""
    monkeypatch.setattr(division, "FEW", few)
    ported = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=30, labels="source")
    wanted = ported.distill(12)
    assert not on_a_cpu
    monkeypatch.setattr(distill, "captured_answers", partial(captured_answers, devices=("cpu",)))
    found = ported.distill(12)
    assert on_a_cpu
    assert found.record["distilled"]["curve"] == wanted.record["distilled"]["curve"]
    assert all(
        torch.equal(found.task_vector.dense(name), wanted.task_vector.dense(name)) for name in wanted.task_vector
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_tower_learns_the_same_from_graphs(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    ported = transfer(*zoo.trio("clip_vision"), zoo.data, scale=1, samples=60, labels="source", device="cuda")
    recorded: list[Any] = []
    record = Answers.record
    monkeypatch.setattr(Answers, "record", lambda *given: recorded.append(record(*given)) or recorded[-1])
    found = ported.distill(30).record["distilled"]["curve"]
    assert recorded
    monkeypatch.setattr(distill, "captured_answers", partial(captured_answers, devices=()))
    wanted = ported.distill(30).record["distilled"]["curve"]
    for one, other in zip(found, wanted, strict=True):
        assert one["held_out_loss"] == pytest.approx(other["held_out_loss"], rel=1e-3, abs=1e-5)
