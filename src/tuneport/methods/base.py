"""The contract of a transfer method: a Problem in, a Transfer out.

A method is a frozen dataclass that sees tensors and statistics, never models or files. `signals` says what
must be measured, so that nothing is captured in vain; `transfer` is pure and deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..alignment import Completion, Statistics
from ..errors import MethodError, first_of
from ..layers import Layer
from ..pairing import Kept, Plan
from ..task_vector import LowRank, TaskVector


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a method may look at: the plan, the source's task vector by parameter name, the statistics.

    The weights of the two base models, by parameter name, are for methods that match weights, not signals.
    """

    plan: Plan
    task_vector: Mapping[str, Tensor | LowRank]
    statistics: Statistics = field(default_factory=Statistics)
    completion: Completion = "svd"
    source_weights: Mapping[str, Tensor] = field(default_factory=dict)
    target_weights: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerRecord:
    """What happened to one target layer. Ranks and residuals are None where no alignment was solved."""

    target: str
    source: str
    rank_in: int | None = None
    rank_out: int | None = None
    residual_in: float | None = None
    residual_out: float | None = None
    norm_source: float = 0.0
    norm_target: float = 0.0


@dataclass(frozen=True, eq=False)
class Transfer:
    """The answer with its evidence: the target's task vector, a record per layer, and what stayed, with reasons."""

    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    kept: tuple[Kept, ...] = ()


class Method(ABC):
    """How a task vector crosses over.

    Law (run by tests/test_method_contract.py for every registered method): `transfer` returns entries with
    the target's names and shapes, float32 and finite; the same problem gives the same bits; every target
    tensor is either in the task vector or in `kept`; a zero task vector gives a zero task vector.
    """

    summary: str = ""

    @property
    def moves_loose(self) -> bool:
        """Whether tensors outside linear layers are moved as well."""
        return False

    @property
    @abstractmethod
    def signals(self) -> frozenset[str]:
        """The names of the signals that must be measured."""

    def check(self, plan: Plan) -> None:  # noqa: B027 - most methods serve every plan
        """Refuse, before anything is measured, a plan that the method cannot serve (MethodError)."""

    @abstractmethod
    def transfer(self, problem: Problem) -> Transfer:
        """Carry the source's task vector over to the target."""


def store(entries: dict[str, Tensor], layer: Layer, name: str, values: Tensor) -> None:
    """Write a layer's (out, in) matrix or (out,) bias into the float32 entry of its stored tensor."""
    if name not in entries:
        rows = layer.weight_shape[1 if layer.transposed else 0]
        shape = layer.weight_shape if name == layer.weight else (rows,)
        entries[name] = torch.zeros(shape, dtype=torch.float32, device=values.device)
    layer.store(values.to(torch.float32), entries[name])


def check_same_shapes(plan: Plan, method: str) -> None:
    """Refuse a plan whose layers differ in shape or depth, for methods that cannot change coordinates."""
    differing = [
        f"{pair.target.name} ({pair.target.out_features}, {pair.target.in_features}) from "
        f"({pair.source.out_features}, {pair.source.in_features})"
        for pair in plan.pairs
        if (pair.source.out_features, pair.source.in_features) != (pair.target.out_features, pair.target.in_features)
    ]
    if differing or list(plan.source_blocks.values()) != list(plan.target_blocks.values()):
        depths = f"blocks {dict(plan.source_blocks)} and {dict(plan.target_blocks)}"
        raise MethodError(
            f"{method} needs two models of one architecture; {first_of(differing, 3) or depths}. "
            "Use bico, theseus or naive across shapes."
        )
