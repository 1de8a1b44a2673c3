"""Passes of a decoder that are recorded once and played again."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.builders.loras import llama
from tuneport.data.dataset import UNLABELLED
from tuneport.models.families.huggingface_generation import answer_logits
from tuneport.training.captured import STEP, Played, captured
from tuneport.training.loop import Pace, Schedule, run_steps


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


class Kept(Played):
    """Gives gradients as a graph does: at the same place each time it is played."""

    def record(self, inputs: dict[str, Tensor]) -> Any:
        names, trained = tuple(inputs), [each for each in self.body.parameters() if each.requires_grad]
        places = [torch.zeros_like(each) for each in trained]

        def run(*values: Tensor) -> Tensor:
            found: Tensor = self.eager(**dict(zip(names, values, strict=True)), use_cache=False).last_hidden_state
            return found

        class Graph(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *given: Tensor) -> Tensor:
                ctx.inputs = given[: len(names)]
                with torch.no_grad():
                    return run(*ctx.inputs)

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Any:
                with torch.enable_grad():
                    found = torch.autograd.grad(run(*ctx.inputs), trained, *grads, allow_unused=True)
                for place, value in zip(places, found, strict=True):
                    place.copy_(torch.zeros_like(place) if value is None else value)
                return *[None] * len(names), *(place.detach() for place in places)

        return lambda *values: Graph.apply(*values, *trained)


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


def test_gradients_at_one_place_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneport.training.captured.Played", Kept)
    (losses, weights), (others, moved) = learn(lambda _: nullcontext()), learn(partial(captured, devices=("cpu",)))
    assert losses == pytest.approx(others, rel=1e-5)
    for one, two in zip(weights, moved, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_student_learns_the_same_from_graphs() -> None:
    (losses, weights), (others, moved) = learn(lambda _: nullcontext(), "cuda"), learn(captured, "cuda")
    assert losses == pytest.approx(others, rel=1e-3)
    for one, two in zip(weights, moved, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=2e-3)
