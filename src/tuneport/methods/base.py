"""The contract of a transfer method: a Problem in, a Transfer out.

A method is a frozen dataclass that sees tensors and statistics, never models or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import MethodError, first_of
from ..layers import Layer
from ..maps.statistics import Statistics
from ..pairing import Kept, LayerPair, Plan
from ..task_vectors.low_rank import Entry, LowRank, as_dense
from ..task_vectors.vector import TaskVector
from ..types import Signal


@dataclass(frozen=True, eq=False)
class Problem:
    """The input of a method: plan, task vector by parameter name, statistics, base weights, the device's budget.

    A method that moves layers one after the other may tell `on_layer` of each.
    """

    plan: Plan
    task_vector: Mapping[str, Tensor | LowRank]
    statistics: Statistics = field(default_factory=Statistics)
    source_weights: Mapping[str, Tensor] = field(default_factory=dict)
    target_weights: Mapping[str, Tensor] = field(default_factory=dict)
    memory_budget: int | None = None
    on_layer: Callable[[LayerPair], None] = lambda _: None

    def __repr__(self) -> str:
        return f"Problem({self.plan!r}, {self.statistics!r})"


@dataclass(frozen=True)
class LayerRecord:
    """The evidence for one target layer; None where no alignment was solved.

    `rank` belongs to an update that moved as factors, the other ranks to the two maps.
    """

    target: str
    source: str
    rank_in: int | None = None
    rank_out: int | None = None
    residual_in: float | None = None
    residual_out: float | None = None
    norm_source: float = 0.0
    norm_target: float = 0.0
    rank: int | None = None


@dataclass(frozen=True, eq=False)
class Transfer:
    """What a method answers: the target's task vector, a record per layer, and the tensors kept, with reasons."""

    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    kept: tuple[Kept, ...] = ()

    def __repr__(self) -> str:
        return f"Transfer({len(self.records)} layers, {len(self.kept)} kept, {self.task_vector!r})"

    @classmethod
    def join(cls, parts: Iterable[Transfer]) -> Transfer:
        """Join the transfers of several groups of layers, in their order."""
        parts = tuple(parts)
        if len(parts) == 1:
            return parts[0]
        entries = {name: entry for part in parts for name, entry in part.task_vector.items()}
        records = tuple(record for part in parts for record in part.records)
        return cls(TaskVector(entries), records, tuple(item for part in parts for item in part.kept))


class Method(ABC):
    """Moves a task vector from the source to the target.

    Contract (`check_method` asserts it): `transfer` returns entries with the target's names and shapes, float32 and
    finite; the same problem gives the same bits; every target tensor is either in the task vector or in `kept`; a zero
    task vector gives a zero task vector.
    """

    summary: str = ""
    moves_loose: bool = False  # tensors outside linear layers are moved as well
    keeps_rank: bool = False  # a low-rank update stays low-rank, as its factors: no dense update, no SVD
    by_layer: bool = False  # each pair is moved by itself, so that a transfer may be made in groups of layers
    uses_augmented_inputs: bool = False  # augmented samples are measured too (`tuneport.data.samplers`)

    @property
    @abstractmethod
    def signals(self) -> frozenset[Signal]:
        """The names of the signals that must be measured."""

    def check(self, plan: Plan) -> None:  # noqa: B027 - most methods serve every plan
        """Refuse, before anything is measured, a plan that the method cannot serve (MethodError)."""

    def kept(self, plan: Plan) -> tuple[Kept, ...]:
        """The target tensors of a plan that the method does not change, with reasons, before anything is measured."""
        del plan
        return ()

    @abstractmethod
    def transfer(self, problem: Problem) -> Transfer:
        """Move the source's task vector to the target: the one step of `tuneport.transfer` in which methods differ."""


NOT_RUN = "its layer did not run on the calibration data"


def matrix_of(layer: Layer, entry: Entry) -> Entry:
    """The (out, in) matrix of a layer inside the entry of its stored weight; factors stay factors."""
    if not isinstance(entry, LowRank):
        return layer.matrix(entry)
    out, in_ = (entry.in_factor.T, entry.out_factor.T) if layer.transposed else (entry.out_factor, entry.in_factor)
    return LowRank(layer.vector(out), in_.flatten(1))


def record_of(pair: LayerPair, tau: Entry, moved: Entry, **evidence: Any) -> LayerRecord:
    """The record of one moved layer; a dense norm is taken in the precision of the matrix."""
    norms = [entry.norm() if isinstance(entry, LowRank) else float(entry.norm()) for entry in (tau, moved)]
    rank = moved.rank if isinstance(moved, LowRank) else None
    evidence |= {"norm_source": norms[0], "norm_target": norms[1], "rank": rank}
    return LayerRecord(pair.target.name, pair.source.name, **evidence)


def bias_of(pair: LayerPair, task_vector: Mapping[str, Entry]) -> Tensor | None:
    """The change of the source layer's bias, if both layers have one."""
    if pair.target.bias is None or pair.source.bias is None:
        return None
    return pair.source.vector(as_dense(task_vector[pair.source.bias]))


class Entries:
    """The target's task vector while it is built layer by layer, in float32.

    Layers may share a fused weight. Their factors are joined without a product: one input factor, one block of columns.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry | list[tuple[Layer, LowRank]]] = {}

    def put(self, layer: Layer, matrix: Entry) -> None:
        """Take a layer's (out, in) matrix."""
        held = self._entries.setdefault(layer.weight, [])
        if isinstance(held, list) and isinstance(matrix, LowRank):
            held.append((layer, matrix.to(torch.float32)))
            return
        if isinstance(held, list):  # a weight with a dense part is dense
            self._entries[layer.weight] = torch.zeros(layer.weight_shape, device=matrix.device)
            for part, factors in held:
                self.put(part, factors)
        self._store(layer, layer.weight, layer.weight_shape, as_dense(matrix))

    def put_bias(self, layer: Layer, bias: Tensor) -> None:
        """Take a layer's (out,) bias."""
        assert layer.bias is not None
        self._store(layer, layer.bias, (layer.stored_rows,), bias)

    def put_loose(self, name: str, entry: Entry) -> None:
        """Take a whole tensor."""
        self._entries[name] = entry.to(torch.float32)

    def task_vector(self) -> TaskVector:
        """The entries, each with the stored shape of its tensor."""
        entries = self._entries.items()
        return TaskVector({name: _join_factors(part) if isinstance(part, list) else part for name, part in entries})

    def _store(self, layer: Layer, name: str, shape: tuple[int, ...], values: Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = torch.zeros(shape, device=values.device)
        into = self._entries[name]
        assert isinstance(into, Tensor)
        layer.store(values.float(), into)


def _join_factors(parts: list[tuple[Layer, LowRank]]) -> LowRank:
    """The factors of a stored weight from those of its layers."""
    first = parts[0][0]
    inputs: list[Tensor] = []
    blocks: list[Tensor] = []  # for each input factor, the out_factor of the whole weight
    rows = first.stored_rows
    for layer, part in parts:
        index = next((i for i, known in enumerate(inputs) if torch.equal(known, part.in_factor)), len(inputs))
        if index == len(inputs):
            inputs.append(part.in_factor)
            blocks.append(part.out_factor.new_zeros(rows, part.rank))
        layer.store_rows(part.out_factor, blocks[index])
    out, in_ = torch.cat(blocks, dim=1), torch.cat(inputs)
    if first.transposed:
        return LowRank(in_.T.contiguous(), out.T.contiguous())
    return LowRank(out, in_.reshape(-1, *first.weight_shape[1:]))


def check_same_shapes(plan: Plan, method: str) -> None:
    """Refuse a plan whose layers differ in shape or depth, for methods that cannot change coordinates."""
    shapes = {
        pair.target.name: [(layer.out_features, layer.in_features) for layer in (pair.target, pair.source)]
        for pair in plan.pairs
    }
    differing = [f"{name} {target} from {source}" for name, (target, source) in shapes.items() if target != source]
    if differing or list(plan.source_blocks.values()) != list(plan.target_blocks.values()):
        depths = f"blocks {dict(plan.source_blocks)} and {dict(plan.target_blocks)}"
        raise MethodError(
            f"{method} needs two models of one architecture; {first_of(differing, 3) or depths}. "
            "Use bico, theseus or naive across shapes."
        )


def check_method(method: Method, problem: Problem) -> Transfer:
    """Raise AssertionError at the first breach of the law of `Method` on one problem; return the answer of the method.

    Also, what `Method.kept` names is kept, records have the norms of the moved matrices, the problem is not changed.
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
