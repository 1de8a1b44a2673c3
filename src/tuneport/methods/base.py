"""The contract of a transfer method: a Problem in, a Transfer out.

A method is a frozen dataclass that sees tensors and statistics, never models or files. `signals` says what
must be measured, so that nothing is captured in vain; `transfer` is pure and deterministic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..alignment import Completion, Statistics
from ..pairing import Kept, Plan
from ..task_vector import LowRank, TaskVector


@dataclass(frozen=True, eq=False)
class Problem:
    """Everything a method may look at: the plan, the source's task vector by parameter name, the statistics."""

    plan: Plan
    task_vector: Mapping[str, Tensor | LowRank]
    statistics: Statistics = field(default_factory=Statistics)
    completion: Completion = "svd"


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
    @abstractmethod
    def signals(self) -> frozenset[str]:
        """The names of the signals that must be measured."""

    @abstractmethod
    def transfer(self, problem: Problem) -> Transfer:
        """Carry the source's task vector over to the target."""
