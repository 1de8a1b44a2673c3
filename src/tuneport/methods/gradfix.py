"""GradFix: keep the entries of the task vector whose sign agrees with a descent step of the target.

The target's per-sample gradients vote on the sign of each number, in linear layers and in all other tensors. A masked
low-rank update becomes dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..pairing import Plan, keep_layers
from ..task_vectors.low_rank import as_dense
from ..types import Signal
from .base import NOT_RUN, Entries, Method, Problem, Transfer, bias_of, check_same_shapes, record_of


@dataclass(frozen=True)
class GradFix(Method):
    """Mask by the majority of per-sample gradient signs, or by the sign of the mean gradient."""

    vote: Literal["majority", "mean"] = "majority"
    summary: str = ""

    by_layer = True
    moves_loose = True
    signals = frozenset[Signal]({"weight_gradient"})

    @property
    def _sum(self) -> str:
        return "votes" if self.vote == "majority" else "total"

    def check(self, plan: Plan) -> None:
        check_same_shapes(plan, "gradfix" if self.vote == "majority" else "gradfix_mean")

    def transfer(self, problem: Problem) -> Transfer:
        self.check(problem.plan)
        entries = Entries()
        records, kept = [], []
        for pair in problem.plan.pairs:
            gradient = problem.statistics.weight_gradients.get(pair.target.name)
            if gradient is None:
                kept += keep_layers([pair.target], NOT_RUN)
                continue
            tau = pair.source.matrix(as_dense(problem.task_vector[pair.source.weight]))
            moved = _mask(tau, getattr(gradient, self._sum))
            entries.put(pair.target, moved)
            bias = bias_of(pair, problem.task_vector)
            if bias is not None:
                entries.put_bias(pair.target, _mask(bias, getattr(gradient, f"bias_{self._sum}")))
            records.append(record_of(pair, tau, moved))
        for loose in problem.plan.loose:
            gradient = problem.statistics.weight_gradients.get(loose.target.name)
            if gradient is None or loose.source.shape != loose.target.shape:
                continue  # the plan says why the target keeps it
            tau = as_dense(problem.task_vector[loose.source.name])
            entries.put_loose(loose.target.name, _mask(tau, getattr(gradient, self._sum).reshape(tau.shape)))
        return Transfer(entries.task_vector(), tuple(records), tuple(kept))


def _mask(tau: Tensor, gradient: Tensor) -> Tensor:
    """tau where its sign equals the sign of minus the gradient, zero elsewhere."""
    agrees = tau.sign() == -gradient.sign().to(device=tau.device, dtype=tau.dtype)
    return torch.where(agrees, tau, 0.0)
