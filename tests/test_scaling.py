"""The strength of a transfer: chosen so that it never does worse than nothing, and weights always put back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tuneport.scaling import FEWEST, SCALES, Scaled, Score, choose_scale, first_half, merits_of, pooled
from tuneport.task_vector import TaskVector

scores = st.builds(
    Score,
    loss=st.floats(0, 10, allow_nan=False),
    accuracy=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
)


@given(st.lists(scores, min_size=len(SCALES), max_size=len(SCALES)))
def test_the_choice_has_the_greatest_merit(found: list[Score]) -> None:
    by_scale = dict(zip(SCALES, found, strict=True))
    choice = choose_scale(by_scale.__getitem__, samples=8, held_out=True)
    merits = merits_of(by_scale, 8)
    assert merits[choice.scale] == max(merits.values())
    assert dict(choice.scores) == by_scale
    assert (choice.samples, choice.held_out) == (8, True)


@given(st.lists(st.floats(0, 10), min_size=len(SCALES), max_size=len(SCALES)), st.integers(1, 1000))
def test_nothing_is_changed_where_neither_accuracy_nor_loss_gains(rises: list[float], samples: int) -> None:
    found = {scale: Score(1 + (rise if scale else 0.0), 0.5) for scale, rise in zip(SCALES, rises, strict=True)}
    assert choose_scale(found.__getitem__, samples=samples, held_out=True).scale == 0.0


def test_zero_is_picked_when_nothing_helps() -> None:
    assert choose_scale(lambda scale: Score(1 + scale, 0.5), samples=4, held_out=False).scale == 0.0
    assert choose_scale(lambda _: Score(1.0, 0.5), samples=4, held_out=False).scale == 0.0  # no gain either


def test_a_single_lucky_scale_is_not_believed() -> None:
    """Accuracy counts with that of its neighbours: 3.0 alone gets everything right, 0.5 to 1.5 are good together."""
    right = {0.25: 0.6, 0.5: 0.7, 1.0: 0.75, 1.5: 0.7, 3.0: 0.9}
    found = {scale: Score(1.0, right.get(scale, 0.5)) for scale in SCALES}
    assert choose_scale(found.__getitem__, samples=20, held_out=True).scale == 1.0


def test_scales_beyond_one_must_bring_more_the_fewer_samples_there_are() -> None:
    found = {scale: Score(1.0, 0.5 + 0.05 * min(scale, 2.0)) for scale in SCALES}
    assert choose_scale(found.__getitem__, samples=10_000, held_out=True).scale == 3.0  # between two that are right
    assert choose_scale(found.__getitem__, samples=20, held_out=True).scale == 1.0


def test_the_halves_are_judged_together() -> None:
    assert pooled([(Score(1.0, 0.5), 3), (Score(3.0, 1.0), 1)]) == Score(1.5, 0.625)
    assert pooled([(Score(1.0), 3), (Score(3.0), 1)]) == Score(1.5)


def test_zero_is_a_candidate_even_if_it_is_not_given() -> None:
    seen: list[float] = []

    def score(scale: float) -> Score:
        seen.append(scale)
        return Score(scale)

    assert choose_scale(score, samples=1, held_out=False, candidates=(1.0, 1.0, 2.0)).scale == 0.0
    assert seen == [0.0, 1.0, 2.0]  # each once


def test_without_classes_the_loss_decides() -> None:
    losses = dict.fromkeys(SCALES, 3.0) | {1.5: 1.0}
    assert choose_scale(lambda scale: Score(losses[scale]), samples=8, held_out=True).scale == 1.5


def test_a_loss_that_is_no_number_is_not_chosen() -> None:
    """A transfer that blows up gives NaN: its accuracy is that of a coin, its loss compares with nothing."""
    found = {scale: Score(2.0 - scale, 0.5) if scale <= 1 else Score(float("inf"), 0.1) for scale in SCALES}
    assert choose_scale(found.__getitem__, samples=8, held_out=True).scale == 1.0


@given(st.integers(1, 2000))
def test_the_halves_are_halves_or_the_whole(count: int) -> None:
    half = first_half(count)
    assert half == count < FEWEST or half - (count - half) in (0, 1)


def toy() -> tuple[nn.Module, dict[str, torch.Tensor], TaskVector]:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return module, before, TaskVector({"0.weight": torch.ones(2, 3), "1.bias": torch.full((2,), 2.0)})


def test_scaled_weights_do_not_drift() -> None:
    module, before, delta = toy()
    with Scaled(module, delta) as scaled:
        for scale in (3.0, 0.1, 0.7, 0.5):
            scaled.set(scale)
            assert torch.equal(module[0].weight, before["0.weight"] + scale * torch.ones(2, 3))
            assert torch.equal(module[1].bias, before["1.bias"] + scale * torch.full((2,), 2.0))
            assert torch.equal(module[0].bias, before["0.bias"])
        assert scaled.module is module
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_scaled_weights_are_restored_after_an_exception() -> None:
    module, before, delta = toy()

    def fail() -> None:
        with Scaled(module, delta) as scaled:
            scaled.set(2.0)
            raise RuntimeError("a failing evaluation")

    with pytest.raises(RuntimeError, match="failing evaluation"):
        fail()
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_float16_module_is_scaled_in_its_own_dtype() -> None:
    module, _, delta = toy()
    module = module.half()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with Scaled(module, delta) as scaled:
        scaled.set(1.0)
        assert module[0].weight.dtype == torch.float16
        assert not torch.equal(module[0].weight, before["0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
