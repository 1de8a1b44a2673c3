"""The contract of a transfer method: a Problem in, a Transfer out.

A method is a frozen dataclass that sees tensors and statistics, never models or files. `signals` says what
must be measured, so that nothing is captured in vain; `transfer` is pure and deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ..maps.statistics import Statistics
from ..pairing import Kept, Plan
from ..task_vectors.low_rank import LowRank
from ..task_vectors.vector import TaskVector
from ..types import Completion, Signal


@dataclass(frozen=True, eq=False)
class Problem:
    """The input of a method: the plan, the source's task vector by parameter name, the statistics.

    The weights of the two base models, by parameter name, are for methods that match weights, not signals.
    `memory_budget` is the memory in bytes of the device that solves maps, None for all that it has.
    """

    plan: Plan
    task_vector: Mapping[str, Tensor | LowRank]
    statistics: Statistics = field(default_factory=Statistics)
    completion: Completion = "svd"
    source_weights: Mapping[str, Tensor] = field(default_factory=dict)
    target_weights: Mapping[str, Tensor] = field(default_factory=dict)
    memory_budget: int | None = None


@dataclass(frozen=True)
class LayerRecord:
    """What happened to one target layer. Ranks and residuals are None where no alignment was solved.

    `rank_in` and `rank_out` are those of the two maps; `rank` is that of the update, where it moved as factors.
    `spectrum_in` and `spectrum_out` are singular values of the two cross-covariances (see `spectrum_of`).
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
    spectrum_in: tuple[float, ...] | None = None
    spectrum_out: tuple[float, ...] | None = None


@dataclass(frozen=True, eq=False)
class Transfer:
    """The answer with its evidence: the target's task vector, a record per layer, and what stayed, with reasons."""

    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    kept: tuple[Kept, ...] = ()

    @classmethod
    def join(cls, parts: Iterable[Transfer]) -> Transfer:
        """The transfers of several groups of layers as one, in their order."""
        parts = tuple(parts)
        if len(parts) == 1:
            return parts[0]
        entries = {name: entry for part in parts for name, entry in part.task_vector.items()}
        records = tuple(record for part in parts for record in part.records)
        return cls(TaskVector(entries), records, tuple(item for part in parts for item in part.kept))


class Method(ABC):
    """How a task vector crosses over.

    Law (run by tests/methods/test_contract.py for every registered method): `transfer` returns entries with
    the target's names and shapes, float32 and finite; the same problem gives the same bits; every target
    tensor is either in the task vector or in `kept`; a zero task vector gives a zero task vector.
    """

    summary: str = ""
    moves_loose: bool = False  # tensors outside linear layers are moved too
    keeps_rank: bool = False  # a low-rank update comes out as its factors: no dense update, no SVD
    by_layer: bool = False  # each pair is moved by itself, so that a transfer can be made in groups of pairs
    rehearses: bool = False  # augmented samples are measured too (`tuneport.data.views`)
    usual_scale: float | Literal["auto"] = 1.0  # the scale unless another is given; the paper's is 1

    @property
    @abstractmethod
    def signals(self) -> frozenset[Signal]:
        """The names of the signals that must be measured."""

    def check(self, plan: Plan) -> None:  # noqa: B027 - most methods serve every plan
        """Refuse, before anything is measured, a plan that the method cannot serve (MethodError)."""

    def kept(self, plan: Plan) -> tuple[Kept, ...]:
        """What of a plan's pairs the method leaves to the target, with reasons, before anything is measured."""
        del plan
        return ()

    @abstractmethod
    def transfer(self, problem: Problem) -> Transfer:
        """Carry the source's task vector over to the target."""
