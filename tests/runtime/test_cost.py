"""The FLOP count of a plan against the count of torch while the plan runs."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from builders import toy
from builders.folders import Zoo, load
from tuneport.job import Job
from tuneport.methods import METHODS
from tuneport.models.open import open_model
from tuneport.pipeline.port import port
from tuneport.pipeline.prepare import prepare
from tuneport.pipeline.statistics import measure_job, problem_of
from tuneport.pipeline.transfer import transfer
from tuneport.runtime.cost import cost_of
from tuneport.runtime.forecast import Forecast, NeedsValuesError, meta_errors
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector

SAMPLES = 24


def added(matrix: Any, left: Any, right: Any, **_: Any) -> int:
    """FLOPs of `addmm_`, which torch does not count by itself."""
    del matrix
    return 2 * left[0] * left[1] * right[1]


def eager(zoo: Zoo, family: str, **options: Any) -> Job:
    """A job whose models compute attention by plain products, so that torch counts them on any device."""
    source, target = (open_model(zoo[f"{family}-{part}"]) for part in ("base", "target"))
    for model in (source, target):
        model.module.set_attn_implementation("eager")
    return prepare(source, zoo[f"{family}-tuned"], target, zoo.data, samples=SAMPLES, **options)


@pytest.mark.parametrize(
    ("method", "family"),
    [("bico", "vit"), ("bico", "clip_vision"), ("bico", "dinov2"), ("theseus", "vit"), ("gradient_only", "dinov2")],
)
def test_the_count_equals_that_of_torch(zoo: Zoo, family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are summed here: a transfer leaves out tokens without a signal, which a count cannot know."""
    monkeypatch.setattr("tuneport.maps.covariance._drop_zeros", lambda source, target: (source, target))
    job = eager(zoo, family, signals=method)
    cost = cost_of(job)
    found = cost["counted"]
    mapping = {torch.ops.aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        statistics = measure_job(job)
    assert found["forward"] + found["backward"] + found["statistics"] == counter.get_total_flops()
    distinct = {id(sums): sums for sums in statistics.covariances.values()}
    assert cost["statistics_bytes"] == sum(sums.nbytes for sums in distinct.values())
    with FlopCounterMode(display=False) as counter:
        METHODS[method].transfer(problem_of(job, statistics))
    assert found["total"] == sum(value for key, value in found.items() if key != "total")
    assert 0 < found["transport"] <= counter.get_total_flops(), "torch counts some of the solves too"


def test_a_forward_method_has_no_backward_pass(zoo: Zoo) -> None:
    found = cost_of(prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES, signals="theseus"))
    assert found["counted"]["backward"] == 0
    assert found["paper"]["passes"] == 2 * sum(
        found["parameters"][side] * found["tokens"][side] for side in ("source", "target")
    )


def test_the_paper_by_hand(zoo: Zoo) -> None:
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES)
    found = cost_of(job)
    sizes = [sum(p.numel() for p in load(zoo[f"clip_vision-{part}"]).parameters()) for part in ("base", "target")]
    assert list(found["parameters"].values()) == sizes
    tokens = [SAMPLES * 5, SAMPLES * 10]  # 2 x 2 and 3 x 3 patches and a class token
    assert list(found["tokens"].values()) == tokens
    L, M, d_A, d_B = len(job.plan.pairs), tokens[1], 16, 24
    align = 2 * L * (M * d_A * d_B + d_A**2 * d_B) + L * (d_A**2 * d_B + d_A * d_B**2)
    passes = 6 * (sizes[0] * tokens[0] + sizes[1] * tokens[1])
    assert found["paper"] == {
        "passes": passes,
        "alignment": align,
        "total": passes + align,
        "fine_tuning": 2000 * (6 * tokens[1] + 10) * sizes[1],  # an update does not grow with the tokens
    }


def test_nothing_is_measured_for_a_method_without_signals(zoo: Zoo) -> None:
    job = prepare(*zoo.trio("vit"), signals="naive")
    counted = cost_of(job)["counted"]
    assert counted["total"] == counted["transport"] > 0


def test_maps_of_few_tokens_cost_factors_and_no_sums(zoo: Zoo) -> None:
    options: dict[str, Any] = {"samples": SAMPLES, "signals": "theseus"}
    every = cost_of(prepare(*zoo.trio("vit"), zoo.data, **options))["counted"]
    few = prepare(*zoo.trio("vit"), zoo.data, max_tokens=4, **options)
    found = cost_of(few)["counted"]
    shapes = {id(sums): sums.shape for sums in measure_job(few).covariances.values()}.values()
    assert found["statistics"] == 0 < every["statistics"]
    assert found["solves"] == sum(30 * sum(shape) * 4**2 + 100 * 4**3 for shape in shapes)
    assert found["forward"] == every["forward"]


def test_a_weight_gradient_is_summed_and_gives_no_map(zoo: Zoo) -> None:
    base, tuned = zoo["vit-base"], zoo["vit-tuned"]
    found = cost_of(prepare(base, tuned, base, zoo.data, samples=SAMPLES, signals="gradfix"))["counted"]
    assert found["solves"] == 0 < found["statistics"]


def test_low_rank_updates_cost_their_rank(zoo: Zoo) -> None:
    dense = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES)
    stored = dense.source.file_names
    factors = {}
    for pair in dense.plan.pairs:
        layer = pair.source
        if layer.kernel is None:
            factors[stored[layer.weight]] = LowRank(torch.ones(layer.out_features, 2), torch.ones(2, layer.in_features))
    low = prepare(zoo["vit-base"], TaskVector(factors), zoo["vit-target"], zoo.data, samples=SAMPLES)
    expected = sum(
        2 * 2 * (p.source.out_features * p.target.out_features + p.source.in_features * p.target.in_features)
        for p in low.plan.pairs
    )
    assert cost_of(low)["counted"]["transport"] == expected


def test_models_that_read_values_are_not_counted() -> None:
    source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)

    def loss(module: Any, batch: Any) -> torch.Tensor:
        return toy.loss(module, batch) / float(batch[0].square().mean())

    batches = toy.batches(64)
    options = {"loss": loss, "pairs": toy.plan(source, target).pairs}
    job = prepare(source, toy.finetuned(source), target, batches, **options)
    assert cost_of(job, 64)["counted"] is None
    plain = prepare(source, toy.finetuned(source), target, batches, **{**options, "loss": toy.loss})
    assert cost_of(plain, 64)["counted"]["forward"] > 0
    once = prepare(source, toy.finetuned(source), target, iter(batches), **{**options, "loss": toy.loss})
    assert cost_of(once, 64)["counted"] is None, "batches that can be read once are not used up"
    assert len(list(once.samples)) == len(batches)


def test_batches_in_named_tuples() -> None:
    class Batch(NamedTuple):
        pixels: torch.Tensor
        labels: torch.Tensor

    source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)
    options = {"loss": toy.loss, "pairs": toy.plan(source, target).pairs}
    batches = toy.batches(64)
    jobs = [
        prepare(source, toy.finetuned(source), target, given, **options)
        for given in (batches, [Batch(*batch) for batch in batches])
    ]
    plain, named = (cost_of(job, 64)["counted"] for job in jobs)
    assert named is not None
    assert named == plain
    assert isinstance(Forecast.of(jobs[1]).batch.source, Batch)


def test_the_paper_needs_no_run(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(*zoo.trio("clip_vision"), zoo.data, samples=SAMPLES)
    expected = cost_of(job)

    def refuse(*_: Any) -> None:
        raise NotImplementedError("Cannot copy out of meta tensor; no data!")

    monkeypatch.setattr("tuneport.runtime.cost._count", refuse)
    found = cost_of(job)
    assert found["counted"] is None
    assert (found["paper"], found["tokens"]) == (expected["paper"], expected["tokens"])


def test_a_bug_in_the_count_is_not_hidden(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    job = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES)
    monkeypatch.setattr("tuneport.runtime.cost._count", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cost_of(job)


READS = {
    "item": lambda x: x.item(),
    "float": float,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "two devices": lambda x: x + torch.ones(1),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_a_value_of_a_meta_tensor_is_known(read: str) -> None:
    with pytest.raises(NeedsValuesError, match="read values of tensors"), meta_errors():
        READS[read](torch.ones((), device="meta"))


def test_models_keep_their_weights(zoo: Zoo) -> None:
    job = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES)
    before = {name: tensor.clone() for name, tensor in job.target.module.state_dict().items()}
    cost_of(job)
    assert before
    for name, tensor in job.target.module.state_dict().items():
        assert tensor.device.type == "cpu"
        assert torch.equal(tensor, before[name])


def test_the_record_holds_cost_and_time(zoo: Zoo, tmp_path: Any) -> None:
    job = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES)
    record = port(job, tmp_path / "out", scale=1)
    assert record["cost"] == cost_of(job)
    assert set(record["seconds_by_stage"]) == {"measure", "transport"}


def test_layers_that_read_different_tensors_do_not_share_a_sum(zoo: Zoo) -> None:
    job = prepare(*zoo.trio("siglip_vision"), zoo.data, samples=SAMPLES)
    sums = {id(found): found.matrix.shape for found in measure_job(job).covariances.values()}
    assert cost_of(job)["statistics_bytes"] == sum(8 * rows * columns for rows, columns in sums.values())


@pytest.mark.parametrize("limit", [1, 4, None])
def test_few_tokens_are_kept_and_take_less_memory(zoo: Zoo, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneport.maps.covariance._drop_zeros", lambda source, target: (source, target))
    job = prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES, max_tokens=limit)
    sums = {id(found): found for found in measure_job(job).covariances.values()}.values()
    assert any(found.rows is not None for found in sums) == (limit is not None)
    assert cost_of(job)["statistics_bytes"] == sum(found.nbytes for found in sums)


def test_a_transfer_from_python_records_its_cost(zoo: Zoo, tmp_path: Any) -> None:
    transfer(*zoo.trio("vit"), zoo.data, scale=1, samples=SAMPLES).save(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tuneport.json").read_text())
    assert written["cost"] == cost_of(prepare(*zoo.trio("vit"), zoo.data, samples=SAMPLES))
    assert "forward passes, both models" in (tmp_path / "out" / "report.html").read_text()


def test_a_given_loss_is_not_run_to_count() -> None:
    source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)
    calls = []

    def loss(module: Any, batch: Any) -> torch.Tensor:
        calls.append(batch[0].device.type)
        return toy.loss(module, batch)

    batches = toy.batches(64)
    found = transfer(
        source, toy.finetuned(source), target, batches, loss=loss, pairs=toy.plan(source, target).pairs
    ).record
    assert "cost" not in found
    assert calls == ["cpu"] * (2 * len(batches)), "one pass of each model"  # they are narrow: whole batches run at once
