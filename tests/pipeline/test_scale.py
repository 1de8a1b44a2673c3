"""The strength of a transfer: chosen so that it never does worse than nothing, and weights always put back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from builders.runs import Case, prepare, run
from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.measure.samples import FEWEST, first_half
from tuneport.models.weights import Scaled
from tuneport.pipeline.scale import SCALES, TOKEN_SCALES, Score, around_least, choose_scale, score_of_classes
from tuneport.runtime.passes import Passes
from tuneport.task_vectors.vector import TaskVector
from tuneport.types import ScaleRule

losses = st.lists(st.floats(0, 10, allow_nan=False), min_size=len(SCALES), max_size=len(SCALES))


@given(losses)
def test_the_choice_has_the_least_loss(found: list[float]) -> None:
    by_scale = {scale: Score(loss, 0.5) for scale, loss in zip(SCALES, found, strict=True)}
    choice = choose_scale(by_scale.__getitem__, samples=8, held_out=True)
    assert by_scale[choice.scale].loss == min(found)
    assert dict(choice.scores) == by_scale
    assert (choice.samples, choice.held_out) == (8, True)


@given(losses)
def test_nothing_is_changed_where_the_loss_does_not_fall(rises: list[float]) -> None:
    found = {scale: Score(1 + (rise if scale else 0.0), 0.5) for scale, rise in zip(SCALES, rises, strict=True)}
    assert choose_scale(found.__getitem__, samples=4, held_out=False).scale == 0.0


def answers(seed: int, samples: int = 40, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (samples,), generator=generator)
    noise = torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    return noise + 1.5 * nn.functional.one_hot(labels, classes), labels


@given(st.floats(0.2, 5.0), st.integers(0, 20))
def test_how_bold_a_head_is_does_not_count(factor: float, seed: int) -> None:
    scores, labels = answers(seed)
    plain, bold = score_of_classes(scores, labels), score_of_classes(factor * scores, labels)
    assert bold.loss == pytest.approx(plain.loss, rel=1e-6)
    assert bold.accuracy == plain.accuracy
    assert plain.sharpness is not None
    assert bold.sharpness == pytest.approx(plain.sharpness / factor, rel=2e-3)


def test_the_sharpness_is_the_best_of_all() -> None:
    scores, labels = answers(0)
    found = score_of_classes(scores, labels)
    others = [nn.functional.cross_entropy(t * scores, labels) for t in torch.logspace(-1.3, 1.3, 300).tolist()]
    assert found.loss <= float(min(others)) + 1e-12
    assert found.losses is not None
    assert found.loss == pytest.approx(float(found.losses.mean()))


def test_a_change_that_only_makes_bolder_is_not_taken_for_an_improvement() -> None:
    """The head is too soft: sharper answers have a lower loss as they are, although fewer of them are right."""
    scores, labels = answers(1)
    soft = 0.05 * scores
    worse = 0.5 * scores
    worse[:4] = worse[:4].roll(1, dims=1)
    plain = [nn.functional.cross_entropy(one, labels) for one in (soft, worse)]
    assert plain[1] < plain[0]
    found = {0.0: score_of_classes(soft, labels), 1.0: score_of_classes(worse, labels)}
    assert choose_scale(found.__getitem__, samples=40, held_out=True, candidates=(0.0, 1.0)).scale == 0.0


def test_a_head_that_is_always_right_is_as_sharp_as_may_be() -> None:
    labels = torch.tensor([0, 1, 0])
    found = score_of_classes(2.0 * nn.functional.one_hot(labels, 2) - 1, labels)
    assert (found.accuracy, found.sharpness) == (1.0, 20.0)
    assert score_of_classes(torch.full((3, 2), float("nan")), labels).loss != 0  # no number, and no endless search


def test_a_scale_beyond_one_must_be_better_by_two_standard_errors() -> None:
    wide = torch.linspace(-1, 1, 50, dtype=torch.float64)

    def of(losses: torch.Tensor) -> Score:
        return Score(float(losses.mean()), losses=losses)

    def by(gain: float, spread: float) -> float:
        found = {0.0: of(wide + 4), 1.0: of(wide + 3)}
        found[2.0] = of(wide + 3 - gain + spread * wide.flip(0))
        return choose_scale(found.__getitem__, samples=50, held_out=True, candidates=(0.0, 1.0, 2.0)).scale

    error = float(wide.std()) / 50**0.5
    assert by(0.01, 0.0) == 2.0
    assert by(1.9 * error, 1.0) == 1.0
    assert by(2.1 * error, 1.0) == 2.0


@pytest.mark.parametrize(("above", "asked"), [(0.5, 2.0), (1.0, 2.0), (1.5, 3.0)])
def test_safe_goes_beyond_the_smallest_scale_on_evidence_only(above: float, asked: float) -> None:
    wide = torch.linspace(-1, 1, 50, dtype=torch.float64)
    error = float(wide.std()) / 50**0.5

    def by(gain: float, rule: ScaleRule = "safe", held_out: bool = True) -> float:
        losses = {0.0: wide + 4, 0.25: wide + 3.9 + 0.9 * wide, above: wide + 3.9 - gain + 0.9 * wide + wide.flip(0)}
        found = {scale: Score(float(values.mean()), losses=values) for scale, values in losses.items()}
        given = {"candidates": (0.0, 0.25, above), "held_out": held_out, "rule": rule}
        return choose_scale(found.__getitem__, samples=50, **given).scale

    assert by((asked - 0.1) * error) == 0.25  # itself chosen without evidence: its loss need only be lower
    assert by((asked + 0.1) * error) == above
    assert by(9 * error, held_out=False) == 0.25  # of samples that judge their own maps, no evidence counts
    assert by((asked - 0.1) * error, "auto") == (above if above <= 1 else {2.0: 0.25, 3.0: above}[asked])


def test_safe_leaves_the_target_alone_where_a_quarter_is_worse() -> None:
    found = {scale: Score(2.0 + scale, losses=torch.full((8,), 2.0 + scale)) for scale in SCALES}
    choice = choose_scale(found.__getitem__, samples=8, held_out=True, rule="safe")
    assert (choice.scale, choice.rule) == (0.0, "safe")


@pytest.mark.parametrize(("rule", "wanted"), [("auto", 1.0), ("safe", 0.25)])
def test_one_sample_is_no_evidence_for_a_scale_beyond_one(rule: ScaleRule, wanted: float) -> None:
    losses = {0.0: 2.0, 0.25: 1.9, 1.0: 1.5, 4.0: 0.5}
    scores = {scale: Score(loss, losses=torch.tensor([loss])) for scale, loss in losses.items()}
    choice = choose_scale(scores.__getitem__, samples=1, held_out=False, candidates=tuple(losses), rule=rule)
    assert choice.scale == wanted


def test_zero_is_a_candidate_even_if_it_is_not_given() -> None:
    seen: list[float] = []

    def score(scale: float) -> Score:
        seen.append(scale)
        return Score(scale)

    assert choose_scale(score, samples=1, held_out=False, candidates=(1.0, 1.0, 2.0)).scale == 0.0
    assert seen == [0.0, 1.0, 2.0]  # each once


def test_without_classes_the_loss_decides() -> None:
    found = dict.fromkeys(SCALES, 3.0) | {1.5: 1.0}
    assert choose_scale(lambda scale: Score(found[scale]), samples=8, held_out=True).scale == 1.5


def test_a_loss_that_is_no_number_is_not_chosen() -> None:
    """A transfer that blows up gives NaN: its accuracy is that of a coin, its loss compares with nothing."""
    found = {scale: Score(2.0 - scale, 0.5) if scale <= 1 else Score(float("nan"), 0.1) for scale in SCALES}
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


def test_a_change_too_small_for_half_precision_counts_when_it_is_scaled() -> None:
    module = nn.Linear(1, 1, bias=False).half()
    with torch.no_grad():
        module.weight.zero_()
    with Scaled(module, TaskVector({"weight": torch.full((1, 1), 2e-8)})) as scaled:
        scaled.set(4.0)
        assert float(module.weight.detach()) == float(torch.tensor(8e-8).half()) > 0


def test_a_float16_module_is_scaled_in_its_own_dtype() -> None:
    module, _, delta = toy()
    module = module.half()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with Scaled(module, delta) as scaled:
        scaled.set(1.0)
        assert module[0].weight.dtype == torch.float16
        assert not torch.equal(module[0].weight, before["0.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.parametrize("groups", [1, 2])
def test_each_half_judges_the_maps_of_the_other(groups: int) -> None:
    """The loss of every candidate is that of a transfer from one half, applied and scored on the other half by hand."""
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    tuned, pairs, given = finetuned(source), plan(source, target).pairs, batches(count=32, batch=8)

    def job(samples: list) -> Case:
        return prepare(source, tuned, target, samples, loss=loss, pairs=pairs, signals="bico")

    passes = Passes((pairs[:5], pairs[5:])) if groups == 2 else None
    choice = run(job(given), "bico", scale="auto", passes=passes).record["scale_choice"]
    ported = [run(job(half), "bico") for half in (given[:2], given[2:])]
    for scale in (0.25, 1.0, 4.0):
        modules = [result.apply(scale) for result in ported]
        with torch.no_grad():
            by_other, by_own = (
                sum(float(loss(module, batch)) for module, half in zip(modules, halves, strict=True) for batch in half)
                for halves in ((given[2:], given[:2]), (given[:2], given[2:]))
            )
        (found,) = (item["loss"] for item in choice["candidates"] if item["scale"] == scale)
        # both run the same float32 weights on the same batches
        assert found == pytest.approx(by_other / 32, rel=1e-6)
        assert found != pytest.approx(by_own / 32, rel=1e-4)
    assert (choice["held_out"], choice["samples"]) == (True, 32)


@pytest.mark.parametrize("least", range(8))
def test_few_candidates_find_the_least_where_the_loss_falls_and_then_rises(least: int) -> None:
    candidates, asked = TOKEN_SCALES, []

    def falling_then_rising(scale: float) -> float:
        asked.append(scale)
        return abs(candidates.index(scale) - least)

    found = around_least(falling_then_rising, candidates)
    wanted = {0, least, max(least - 1, 0), min(least + 1, 7)}
    assert found == tuple(candidates[place] for place in sorted(wanted))
    assert set(found) <= set(asked)
    assert len(asked) == len(set(asked)) <= 5 + max(least - 4, 0)


def test_a_search_passes_over_what_is_no_number_and_keeps_the_smallest() -> None:
    losses = {0.0: 3.0, 0.05: 2.9, 0.1: 2.0, 0.25: 1.5, 0.5: math.nan, 1.0: math.inf, 1.5: math.nan, 2.0: math.nan}
    found = around_least(losses.__getitem__, TOKEN_SCALES, smallest=True)
    assert found == (0.0, 0.05, 0.1, 0.25, 0.5)
