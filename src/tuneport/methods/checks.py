"""The law of `Method` as a function, without a test framework: authors of methods run it on their own problems."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..task_vectors.low_rank import as_dense
from ..task_vectors.vector import TaskVector
from .base import Method, Problem, Transfer


def check_method(method: Method, problem: Problem) -> Transfer:
    """Raise AssertionError at the first breach of the law of `Method` on one problem; return the answer of the method.

    Also, tensors that `Method.kept` names are kept, records name layers of the plan with the norms of the moved
    matrices, and the problem is not changed. The statistics of the problem must have `method.signals`.
    """
    signals = method.signals
    named = isinstance(signals, frozenset) and all(isinstance(signal, str) for signal in signals)
    assert named, f"signals must be a frozenset of names, got {signals!r}"
    method.check(problem.plan)
    before = _snapshot(problem)
    answer = method.transfer(problem)
    assert isinstance(answer, Transfer), f"transfer must return a Transfer, got {type(answer).__name__}"
    _check_entries(answer.task_vector, problem)
    _check_complete(answer, problem)
    forgotten = sorted({item.tensor for item in method.kept(problem.plan)} - {item.tensor for item in answer.kept})
    assert not forgotten, f"named by Method.kept, but not kept: {', '.join(forgotten)}"
    _check_records(answer, problem)
    _check_same(answer, method.transfer(problem))
    nothing = {name: as_dense(entry) * 0 for name, entry in problem.task_vector.items()}
    for name, entry in method.transfer(replace(problem, task_vector=nothing)).task_vector.items():
        assert not bool(as_dense(entry).any()), f"a zero task vector must stay zero, but {name} does not"
    after = _snapshot(problem)
    changed = sorted(before.keys() ^ after.keys())
    changed += [name for name in before if name in after and not torch.equal(before[name], after[name])]
    assert not changed, f"transfer must not change the problem; changed: {changed}"
    return answer


def target_shapes(problem: Problem) -> dict[str, tuple[int, ...]]:
    """The stored shapes of a plan's target tensors, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for pair in problem.plan.pairs:
        shapes[pair.target.weight] = pair.target.weight_shape
        if pair.target.bias is not None:
            shapes[pair.target.bias] = (pair.target.stored_rows,)
    return shapes | {pair.target.name: pair.target.shape for pair in problem.plan.loose}


def _check_entries(task_vector: TaskVector, problem: Problem) -> None:
    shapes = target_shapes(problem)
    for name, entry in task_vector.items():
        assert name in shapes, f"{name} is no target tensor of the plan; known: {', '.join(sorted(shapes))}"
        assert tuple(entry.shape) == shapes[name], f"{name} must have shape {shapes[name]}, got {tuple(entry.shape)}"
        assert entry.dtype == torch.float32, f"{name} must be float32, got {entry.dtype}"
        assert bool(torch.isfinite(as_dense(entry)).all()), f"{name} holds NaN or Inf"


def _check_complete(answer: Transfer, problem: Problem) -> None:
    for entry in (*problem.plan.kept, *answer.kept):
        assert entry.reason, f"{entry.tensor} is kept without a reason"
    kept = {entry.tensor for entry in (*problem.plan.kept, *answer.kept)}
    recorded = {record.target for record in answer.records}
    for layer in (pair.target for pair in problem.plan.pairs):
        if layer.name not in recorded:
            assert {layer.name, layer.weight} & kept, f"{layer.name} has neither a record nor a place in kept"
        else:
            there = layer.weight in answer.task_vector
            assert there, f"{layer.name} has a record but {layer.weight} is not in the task vector"
    fused = {pair.target.weight for pair in problem.plan.pairs if pair.target.name in kept}  # kept part by part
    missing = sorted(target_shapes(problem).keys() - answer.task_vector.keys() - kept - fused)
    assert not missing, f"neither in the task vector nor in kept: {', '.join(missing)}"


def _check_records(answer: Transfer, problem: Problem) -> None:
    pairs = {pair.target.name: pair for pair in problem.plan.pairs}
    names = [record.target for record in answer.records]
    assert len(set(names)) == len(names), "a target layer has two records"
    for record in answer.records:
        assert record.target in pairs, f"the record of {record.target} names no target layer of the plan"
        pair = pairs[record.target]
        named = f"the record of {record.target} names source {record.source}, the plan {pair.source.name}"
        assert record.source == pair.source.name, named
        for which, value, layer, entries in (
            ("norm_source", record.norm_source, pair.source, problem.task_vector),
            ("norm_target", record.norm_target, pair.target, answer.task_vector),
        ):
            norm = float(layer.matrix(as_dense(entries[layer.weight])).double().norm())
            differ = f"{which} of {record.target} is {value:g}, but the layer's norm is {norm:g}"
            assert abs(value - norm) <= 1e-4 * norm + 1e-12, differ


def _check_same(one: Transfer, other: Transfer) -> None:
    assert list(one.task_vector) == list(other.task_vector), "the same problem gave other names"
    for name in one.task_vector:
        same = torch.equal(as_dense(one.task_vector[name]), as_dense(other.task_vector[name]))
        assert same, f"the same problem gave other bits at {name}"
    assert one.records == other.records, "the same problem gave other records"
    assert one.kept == other.kept, "the same problem kept other tensors"


def _snapshot(problem: Problem) -> dict[str, Tensor]:
    """Copies of every tensor of a problem, by a description of it."""
    tensors = {f"task vector of {name}": as_dense(entry) for name, entry in problem.task_vector.items()}
    sums = problem.statistics.covariances
    tensors |= {f"covariance of {layer} ({signal})": found.matrix for (layer, signal), found in sums.items()}
    for layer, gradient in problem.statistics.weight_gradients.items():
        tensors |= {f"weight gradient of {layer}: {name}": tensor for name, tensor in gradient.state()[1].items()}
    for side, weights in (("source", problem.source_weights), ("target", problem.target_weights)):
        tensors |= {f"{side} weight {name}": weight for name, weight in weights.items()}
    for pair in problem.plan.pairs:
        for side, fixed in (("input", pair.input_map), ("output", pair.output_map)):
            if fixed is not None:
                tensors[f"{side} map of {pair.target.name}"] = fixed
    return {name: tensor.clone() for name, tensor in tensors.items()}
