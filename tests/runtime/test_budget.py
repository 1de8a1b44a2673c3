"""Memory budgets divide the layers into groups, change no result, and are refused if too small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from builders.runs import Case, measured, passes_for, planned, prepare, run
from builders.toy import ToyViT, batches, finetuned, loss, plan
from tuneport.errors import TuneportError
from tuneport.measure.samples import UserBatches
from tuneport.methods import METHODS
from tuneport.pipeline import solve
from tuneport.pipeline.solve import measure
from tuneport.runtime import forecast, passes
from tuneport.runtime.forecast import Forecast, LiveBytes


def at_most(samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run so many samples at once."""
    for module in (forecast, solve):
        monkeypatch.setattr(module, "samples_at_once", lambda _: samples)


@pytest.fixture(autouse=True)
def _in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches run in two parts, as with wide models."""
    at_most(8, monkeypatch)


def job(method: str = "bico", budget: int | None = None, **options) -> Case:
    torch.manual_seed(0)
    source, target = ToyViT(), ToyViT(width=40, depth=3)
    return prepare(
        source,
        finetuned(source),
        target,
        batches(count=48, batch=16),
        signals=method,
        pairs=plan(source, target).pairs,
        memory_budget=budget,
        **{"loss": loss, **options},
    )


@pytest.mark.parametrize(("scale", "method"), [(1.0, "theseus"), ("auto", "bico")])
def test_groups_give_the_same_bits(scale, method: str) -> None:
    whole = run(job(method), method, scale=scale)
    forecast = Forecast.of(job(method).measurement)
    least = planned(job(method), None, method=method, forecast=forecast)
    budget = least.fixed_bytes + (least.peak_bytes - least.fixed_bytes) * 3 // 4
    small = job(method, budget)
    groups = planned(small, budget, method=method, forecast=forecast).groups
    assert len(groups) > 1
    assert [pair.target.name for group in groups for pair in group] == [pair.target.name for pair in small.plan.pairs]
    divided = run(small, method, scale=scale)
    assert list(divided.task_vector) == list(whole.task_vector)
    for name in whole.task_vector:
        assert torch.equal(divided.task_vector.dense(name), whole.task_vector.dense(name))
    assert divided.records == whole.records
    assert divided.scale == whole.scale
    assert divided.record["samples"] == whole.record["samples"]
    assert divided.record["passes"]["forward"] == len(groups) * whole.record["passes"]["forward"]


@pytest.mark.parametrize("scale", [1.0, "auto"])
def test_without_a_budget_the_free_memory_divides_the_layers(scale, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(job(), scale=scale)
    assert len(passes_for(job(), scale=scale).groups) == 1
    monkeypatch.setattr(passes, "free_memory", lambda: 250_000)
    divided = run(job(), scale=scale)
    groups = passes_for(job(), scale=scale).groups
    copies = passes.COPIES if scale == "auto" else 1
    sizes = [passes.sum_bytes(job().measurement, group, copies) for group in groups]
    assert len(groups) > 1
    assert max(sizes) <= 2**16  # the power of two below half of it
    assert divided.record["passes"]["forward"] == len(groups) * whole.record["passes"]["forward"]
    for name in whole.task_vector:
        assert torch.equal(divided.task_vector.dense(name), whole.task_vector.dense(name))
    assert divided.scale == whole.scale
    monkeypatch.setattr(passes, "free_memory", lambda: 260_000)  # a little more: the same groups
    assert [len(group) for group in passes_for(job(), scale=scale).groups] == list(map(len, groups))


def test_what_cannot_be_divided_is_measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "free_memory", lambda: 0)
    assert len(passes_for(job(), scale=1.0).groups) > 1
    assert len(passes_for(job("naive"), scale=1.0).groups) == 1


def test_a_limit_of_tokens_makes_sums_smaller() -> None:
    pair = job().plan.pairs[0]
    dense, kept = (passes.sum_bytes(job(max_tokens=limit).measurement, [pair], 3) for limit in (None, 4))
    widths = [pair.widths(signal) for signal in METHODS["bico"].signals]
    assert (dense, kept) == (sum(3 * 8 * n * m for n, m in widths), sum(4 * 4 * (n + m) for n, m in widths))
    assert pair.widths("output_gradient") == (pair.source.out_features, pair.target.out_features)
    assert pair.widths("weight_gradient") == (pair.target.out_features, pair.target.in_features)


@pytest.mark.parametrize("method", ["bico", "theseus"])
def test_the_peak_is_the_expected_one(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the bytes of tensors, counted while the job runs; small batches, so that solving needs most."""
    at_most(2, monkeypatch)
    found = job(method)
    expected = planned(found, None, method=method)
    models = sum(4 * p.numel() for m in (found.source, found.target) for p in m.module.parameters())
    live = LiveBytes()
    with live:
        run(found, method, scale=1.0)
    assert abs((live.peak + models) / expected.peak_bytes - 1) < 0.1


def test_models_that_read_values_are_planned_by_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def curious(module: nn.Module, batch: Any) -> Tensor:
        return loss(module, batch) / float(batch[0].square().mean())

    usual, odd = planned(job(), None), planned(job(loss=curious), None)
    assert odd.fixed_bytes == usual.fixed_bytes
    assert abs(odd.peak_bytes / usual.peak_bytes - 1) < 0.1
    ran = []
    monkeypatch.setattr("builders.toy.ToyViT.forward", lambda *_: ran.append(1))
    planned(job("naive"), None, method="naive")
    assert not ran, "a method without signals runs no model"


def test_a_token_limit_lowers_the_expected_peak() -> None:
    assert planned(job(max_tokens=2), None).peak_bytes < planned(job(), None).peak_bytes


def test_a_budget_below_one_layer_is_refused_with_the_least_sufficient_one() -> None:
    with pytest.raises(
        TuneportError, match=r"a `memory_budget` of 9.77 KiB is too small: the models and the result take"
    ):
        planned(job(), 10_000)


def test_limits_below_one_are_refused_before_any_work() -> None:
    with pytest.raises(TuneportError, match="`max_tokens` must be at least 1, got 0"):
        job(max_tokens=0)
    with pytest.raises(TuneportError, match="`memory_budget` must be a size such as 8GiB or 500MB, got 0"):
        job(budget=0)


def test_max_tokens_count_over_the_whole_measurement() -> None:
    few = measured(job(max_tokens=30))
    assert {covariance.tokens for covariance in few.covariances.values()} == {30}
    assert few.samples == 48
    fit, rest = job(max_tokens=30).on(UserBatches(batches(count=48, batch=4))).measurement.halves()
    assert fit is not rest
    both = measure(fit) + measure(rest)
    assert {covariance.tokens for covariance in both.covariances.values()} <= {28, 29, 30}
