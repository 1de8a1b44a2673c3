"""GradFix: keep the entries of the task vector whose sign agrees with a descent step of the target.

The target's per-sample gradients vote on each weight's sign; entries that the vote contradicts become zero.
Coordinates are not changed, so source and target must have the same shapes. A masked matrix is not low-rank:
low-rank updates come out dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..pairing import Kept, Plan
from ..task_vectors.low_rank import as_dense
from ..types import Signal
from .base import LayerRecord, Method, Problem, Transfer
from .entries import Entries, check_same_shapes


@dataclass(frozen=True)
class GradFix(Method):
    """Mask by the majority of per-sample gradient signs, or by the sign of the mean gradient."""

    vote: Literal["majority", "mean"] = "majority"
    summary: str = ""

    by_layer = True

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({"weight_gradient"})

    def check(self, plan: Plan) -> None:
        check_same_shapes(plan, "gradfix")

    def transfer(self, problem: Problem) -> Transfer:
        self.check(problem.plan)
        entries = Entries()
        records, kept = [], []
        for pair in problem.plan.pairs:
            gradient = problem.statistics.weight_gradients.get(pair.target.name)
            if gradient is None:
                names = [name for name in (pair.target.name, pair.target.bias) if name is not None]
                kept += [Kept(name, "its layer did not run on the calibration data") for name in names]
                continue
            weight, bias = (
                (gradient.votes, gradient.bias_votes)
                if self.vote == "majority"
                else (gradient.total, gradient.bias_total)
            )
            tau = pair.source.matrix(as_dense(problem.task_vector[pair.source.weight]))
            moved = _masked(tau, weight)
            entries.put(pair.target, moved)
            if pair.target.bias is not None and pair.source.bias is not None:
                tau_bias = pair.source.vector(as_dense(problem.task_vector[pair.source.bias]))
                entries.put_bias(pair.target, _masked(tau_bias, bias))
            records.append(
                LayerRecord(
                    target=pair.target.name,
                    source=pair.source.name,
                    norm_source=float(tau.norm()),
                    norm_target=float(moved.norm()),
                )
            )
        return Transfer(entries.task_vector(), tuple(records), tuple(kept))


def _masked(tau: Tensor, gradient: Tensor) -> Tensor:
    """tau where its sign equals the sign of minus the gradient, zero elsewhere."""
    agrees = tau.sign() == -gradient.sign().to(device=tau.device, dtype=tau.dtype)
    return torch.where(agrees, tau, 0.0)
