"""The contract of a transfer method: a Problem in, a Transfer out.

A method is a frozen dataclass that sees tensors and statistics, never models or files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..maps.statistics import Statistics
from ..pairing import Kept, LayerPair, Plan
from ..task_vectors.low_rank import LowRank
from ..task_vectors.vector import TaskVector
from ..types import Signal


@dataclass(frozen=True, eq=False)
class Problem:
    """The input of a method: the plan, the source's task vector by parameter name, the statistics.

    The weights of both base models are for methods that match weights; `memory_budget` is that of the solving device.
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

    `rank` belongs to an update that moved as factors, the other ranks and spectra (`spectrum_of`) to the two maps.
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
    """The target's task vector, a record per layer, and the tensors that are kept, with reasons."""

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
    uses_augmented_inputs: bool = False  # augmented samples are measured too (`tuneport.data.views`)

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
        """Move the source's task vector to the target."""
