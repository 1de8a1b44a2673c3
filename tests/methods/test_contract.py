"""Every registered method keeps the law of `Method`, on every kind of model pair."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from builders.toy import ToyViT, finetuned, plan, problem
from tuneport.errors import MethodError
from tuneport.maps.statistics import Statistics
from tuneport.methods import METHODS, BilinearAlignment, Method, Problem, Transfer, get_method
from tuneport.methods.base import check_method, target_shapes
from tuneport.pairing import Kept
from tuneport.task_vectors.low_rank import LowRank
from tuneport.task_vectors.vector import TaskVector

SCENARIOS: dict[str, tuple[dict, dict]] = {
    "same": ({}, {}),
    "wider": ({}, {"width": 16, "hidden": 28, "head_width": 6}),
    "narrower": ({}, {"width": 8, "hidden": 14, "head_width": 3}),
    "deeper": ({}, {"depth": 5}),
    "shallower": ({"depth": 4}, {"depth": 1}),
    "more tokens": ({}, {"patch": 2}),
    "larger images": ({}, {"size": 12}),
    "fused source": ({"fused": True}, {"width": 16}),
    "fused target": ({}, {"fused": True, "head_width": 5}),
    "both fused": ({"fused": True}, {"fused": True, "depth": 3}),
    "fused source, same shapes": ({"fused": True}, {}),
    "fused target, same shapes": ({}, {"fused": True}),
}
# Methods that change no coordinates serve these only: all layers, or all tensors, of the same shape.
SAME_LAYERS = ("same", "fused source, same shapes", "fused target, same shapes", "larger images")
SERVED = {"gradfix": SAME_LAYERS, "gradfix_mean": SAME_LAYERS, "transfusion": SAME_LAYERS[:3]}


def posed(scenario: str, method: str, count: int = 64) -> Problem:
    return measured(scenario, get_method(method).signals, count)


@functools.cache
def measured(scenario: str, signals: frozenset[str], count: int) -> Problem:
    source_sizes, target_sizes = SCENARIOS[scenario]
    source, target = ToyViT(**source_sizes, seed=1), ToyViT(**target_sizes, seed=2)
    moved = finetuned(source)
    with torch.no_grad():  # loose tensors move too, for the methods that carry them
        moved.class_embedding.add_(0.1)
        moved.position_embedding.add_(0.2)
    return problem(source, moved, target, signals, count=count)


# The methods of one signal are one class with other fields: each has a third of the scenarios, together they have all.
ONE_SIGNAL = ("gradient_only", "input_only", "output_only")
grid = pytest.mark.parametrize(
    ("scenario", "method"),
    [
        (scenario, method)
        for place, scenario in enumerate(SCENARIOS)
        for method in METHODS
        if method not in ONE_SIGNAL or ONE_SIGNAL.index(method) == place % len(ONE_SIGNAL)
    ],
)


@grid
def test_every_method_keeps_the_law(scenario: str, method: str) -> None:
    given = posed(scenario, method)
    if scenario not in SERVED.get(method, SCENARIOS):
        for refuse in (lambda: METHODS[method].check(given.plan), lambda: METHODS[method].transfer(given)):
            with pytest.raises(MethodError, match=rf"^{method} needs two models of one architecture; "):
                refuse()
        return
    answer = check_method(METHODS[method], given)
    target = ToyViT(**SCENARIOS[scenario][1])
    shapes = {name: tuple(parameter.shape) for name, parameter in target.named_parameters()}
    kept = {entry.tensor for entry in (*given.plan.kept, *answer.kept)}
    assert set(answer.task_vector) | kept == set(shapes)
    for name in answer.task_vector:
        assert tuple(answer.task_vector[name].shape) == shapes[name]
        assert bool(answer.task_vector[name].any()), name  # every layer ran, so every layer moved
    assert [record.target for record in answer.records] == [pair.target.name for pair in given.plan.pairs]


@pytest.mark.parametrize("method", METHODS)
def test_the_law_holds_for_undetermined_directions(method: str) -> None:
    """With few samples and a partial isometry, the recorded ranks are small."""
    given, chosen = posed("same" if method in SERVED else "narrower", method, 4), METHODS[method]
    partial = replace(chosen, completion="none") if isinstance(chosen, BilinearAlignment) else chosen
    answer = check_method(partial, given)
    found = [rank for record in answer.records for rank in (record.rank_in, record.rank_out) if rank is not None]
    assert bool(found) == bool(chosen.signals - {"weight_gradient"})
    assert min(found, default=0) <= 4


@pytest.mark.parametrize("scenario", ["same", "wider", "deeper"])
@pytest.mark.parametrize("method", ["bico", "theseus", "input_only", "output_only", "gradient_only", "naive"])
def test_isometries_keep_the_norm(scenario: str, method: str) -> None:
    """If the target is at least as wide on both sides, R R^T = I on both sides, so norms are kept."""
    records = METHODS[method].transfer(posed(scenario, method)).records
    assert records
    for record in records:
        assert record.norm_target == pytest.approx(record.norm_source, rel=1e-5), record.target


@pytest.mark.parametrize("method", ["bico", "theseus"])
def test_narrower_targets_never_gain_norm(method: str) -> None:
    records = METHODS[method].transfer(posed("narrower", method)).records
    assert records
    for record in records:
        assert record.norm_target <= record.norm_source * (1 + 1e-6)


@pytest.mark.parametrize("method", ["bico", "theseus", "gradient_only"])
@pytest.mark.parametrize("scenario", ["wider", "fused target"])
def test_updates_equal_the_formula_with_numpy_maps(scenario: str, method: str) -> None:
    """tau_B = R_out^T tau_A R_in and b_B = b_A R_out, with maps from NumPy's SVD of the sums."""
    given, chosen = posed(scenario, method), METHODS[method]
    answer = chosen.transfer(given)

    def polar(layer: str, signal: str) -> torch.Tensor:
        U, _, Vh = np.linalg.svd(given.statistics.covariances[layer, signal].matrix.numpy(), full_matrices=False)
        return torch.from_numpy(U @ Vh)

    checked = 0
    for pair in given.plan.pairs:
        record = next(record for record in answer.records if record.target == pair.target.name)
        full = (min(pair.source.in_features, pair.target.in_features),)
        if pair.input_map is not None or pair.output_map is not None or record.rank_in not in full:
            continue
        if record.rank_out != min(pair.source.out_features, pair.target.out_features):
            continue
        R_in, R_out = polar(pair.target.name, chosen.in_signal), polar(pair.target.name, chosen.out_signal)
        tau = pair.source.matrix(given.task_vector[pair.source.weight]).double()
        expected = R_out.T @ tau @ R_in
        found = pair.target.matrix(answer.task_vector[pair.target.weight]).double()
        assert torch.allclose(found, expected, atol=1e-6), pair.target.name
        if pair.target.bias is not None:
            bias = pair.source.vector(given.task_vector[pair.source.bias]).double() @ R_out
            assert torch.allclose(pair.target.vector(answer.task_vector[pair.target.bias]).double(), bias, atol=1e-6)
        checked += 1
    assert checked >= 5


def test_naive_pads_and_crops() -> None:
    given = posed("wider", "naive")
    answer = METHODS["naive"].transfer(given)
    tau, found = given.task_vector["blocks.0.fc1.weight"], answer.task_vector["blocks.0.fc1.weight"]
    assert torch.equal(found[:20, :12], tau)
    assert not found[20:].any()
    assert not found[:, 12:].any()
    assert torch.equal(answer.task_vector["class_embedding"][:12], given.task_vector["class_embedding"])
    given = posed("narrower", "naive")
    found = METHODS["naive"].transfer(given).task_vector
    assert torch.equal(found["blocks.0.fc1.weight"], given.task_vector["blocks.0.fc1.weight"][:14, :8])
    assert torch.equal(found["position_embedding"], given.task_vector["position_embedding"][:, :8])


def test_a_patch_embedding_of_another_size_is_resized_not_aligned() -> None:
    given = posed("more tokens", "bico")
    answer = METHODS["bico"].transfer(given)
    record = answer.records[[record.target for record in answer.records].index("patch_embedding.weight")]
    assert record.rank_in is None
    assert record.rank_out is not None


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].signals])
def test_layers_without_statistics_are_kept_with_a_reason(method: str) -> None:
    """Without statistics, all pairs are kept except those with two fixed maps."""
    source = ToyViT()
    empty = Problem(plan(source, source), TaskVector.between(source.state_dict(), finetuned(source).state_dict()))
    answer = check_method(METHODS[method], empty)
    reasons = {entry.tensor: entry.reason for entry in answer.kept}
    assert reasons["blocks.0.fc1.weight"] == reasons["blocks.0.fc1.bias"]
    assert "did not run on the calibration data" in reasons["blocks.0.fc1.weight"]
    assert "blocks.0.fc1.weight" not in answer.task_vector


def test_a_layer_with_a_zero_signal_is_kept_with_a_reason() -> None:
    given = posed("same", "bico")
    key = ("blocks.1.fc1.weight", "output_gradient")
    covariance = given.statistics.covariances[key]
    zero = type(covariance)(*covariance.matrix.shape)
    statistics = Statistics({**given.statistics.covariances, key: zero}, samples=given.statistics.samples)
    answer = check_method(METHODS["bico"], replace(given, statistics=statistics))
    assert Kept("blocks.1.fc1.weight", "the output gradient at this layer is zero") in answer.kept
    assert "blocks.1.fc1.weight" not in answer.task_vector


@pytest.mark.parametrize("method", METHODS)
def test_low_rank_task_vectors_move_like_dense_ones(method: str) -> None:
    given = posed("same" if method in SERVED else "wider", method)
    low = LowRank(torch.randn(20, 3), torch.randn(3, 12))
    name = "blocks.0.fc1.weight"
    vectors = {**given.task_vector, name: low}
    dense = METHODS[method].transfer(replace(given, task_vector={**vectors, name: low.dense()}))
    moved = check_method(METHODS[method], replace(given, task_vector=vectors))
    assert torch.allclose(moved.task_vector.dense(name), dense.task_vector.dense(name), atol=1e-5)


def test_target_shapes_equal_those_of_the_model() -> None:
    for options in ({}, {"fused": True}):
        target = ToyViT(**options)
        given = Problem(plan(ToyViT(), target), {})
        assert target_shapes(given) == {name: tuple(part.shape) for name, part in target.named_parameters()}


def test_unknown_methods_are_named_with_the_nearest() -> None:
    with pytest.raises(MethodError, match=r"unknown method 'bicco'\. Did you mean 'bico'\? Known: bico, "):
        get_method("bicco")
    assert all(method.summary for method in METHODS.values())
    assert len(set(METHODS.values())) == len(METHODS)


# --- the check itself must be able to fail


@dataclass(frozen=True)
class Spoiled(Method):
    """The naive method with one planted fault."""

    wrong: str

    @property
    def signals(self) -> frozenset[str]:
        return ["input"] if self.wrong == "signals" else frozenset()  # type: ignore[return-value]

    def transfer(self, problem: Problem) -> Transfer:
        answer = METHODS["naive"].transfer(problem)
        entries, records, kept = dict(answer.task_vector), list(answer.records), list(answer.kept)
        name = "blocks.0.fc1.weight"
        if self.wrong == "name":
            entries["nowhere"] = entries[name]
        elif self.wrong == "shape":
            entries[name] = entries[name].T.contiguous()
        elif self.wrong == "dtype":
            entries[name] = entries[name].double()
        elif self.wrong == "finite":
            entries[name] = entries[name] / 0
        elif self.wrong == "missing":
            del entries["blocks.0.fc1.bias"]
        elif self.wrong == "unrecorded":
            del entries[name]
            records = [record for record in records if record.target != name]
        elif self.wrong == "random":
            entries[name] = entries[name] * torch.rand(())
            records = [replace(r, norm_target=float(entries[name].norm())) if r.target == name else r for r in records]
        elif self.wrong == "zero":
            entries["blocks.0.fc1.bias"] = entries["blocks.0.fc1.bias"] + 1
        elif self.wrong == "norm":
            records = [replace(record, norm_target=2 * record.norm_target) for record in records]
        elif self.wrong == "twice":
            records.append(records[0])
        elif self.wrong == "source":
            records[0] = replace(records[0], source="elsewhere")
        elif self.wrong == "reason":
            kept.append(Kept("class_embedding", ""))
        elif self.wrong == "answer":
            return entries  # type: ignore[return-value]
        elif self.wrong == "changes":
            problem.task_vector["position_embedding"].add_(1)  # type: ignore[union-attr]
            entries["position_embedding"] = entries["position_embedding"] * 0
        return Transfer(TaskVector(entries), tuple(records), tuple(kept))


BREACHES = {
    "signals": r"signals must be a frozenset of names, got \['input'\]",
    "answer": r"transfer must return a Transfer, got dict",
    "name": r"nowhere is no target tensor of the plan",
    "shape": r"blocks\.0\.fc1\.weight must have shape \(20, 12\), got \(12, 20\)",
    "dtype": r"blocks\.0\.fc1\.weight must be float32, got torch\.float64",
    "finite": r"blocks\.0\.fc1\.weight holds NaN or Inf",
    "missing": r"neither in the task vector nor in kept: blocks\.0\.fc1\.bias",
    "unrecorded": r"blocks\.0\.fc1\.weight has neither a record nor a place in kept",
    "random": r"the same problem gave other (bits|records)",
    "zero": r"a zero task vector must stay zero, but blocks\.0\.fc1\.bias does not",
    "norm": r"norm_target of .* is .*, but the layer's norm is",
    "twice": r"a target layer has two records",
    "source": r"names source elsewhere, the plan proj",
    "reason": r"class_embedding is kept without a reason",
    "changes": r"transfer must not change the problem; changed: \['task vector of position_embedding'\]",
}


@pytest.mark.parametrize("wrong", BREACHES)
def test_check_method_reports_each_breach(wrong: str) -> None:
    source = ToyViT()
    vectors = dict(TaskVector.between(source.state_dict(), finetuned(source).state_dict()))
    given = Problem(plan(source, ToyViT(seed=4)), vectors)
    check_method(Spoiled("nothing"), given)
    with pytest.raises(AssertionError, match=BREACHES[wrong]):
        check_method(Spoiled(wrong), given)
