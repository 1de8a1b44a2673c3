"""Cross-LoRA: from the singular vectors of the source's base weights to those of the target's, without data.

With `W_A = U_A S_A V_A^T` and `W_B = U_B S_B V_B^T`, both cut at rank r, the linear map of least norm that takes U_A to
U_B is `P_out = U_B U_A^T` (`argmin ||P U_A - U_B||_F`), the one for inputs `P_in = V_B V_A^T`. An update moves as
`P_out tau P_in^T`: its part inside the source's directions, written in the target's. A low-rank update keeps its rank.

The sign of a pair of singular vectors is arbitrary. Here the largest entry of the left one is positive, which units in
another order do not change. So a target with permuted units is matched, and a rotated one only up to these signs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..maps.procrustes import CoordinateMap
from ..pairing import keep_layers
from ..types import Signal
from .base import Entries, Method, Problem, Transfer
from .bilinear import Map, move

CUT = 1e-10  # squares of singular values up to this, relative to the largest, count as zero


@dataclass(frozen=True)
class CrossLora(Method):
    """Move updates between the leading singular directions of the two base weights; `rank` is the most of these."""

    rank: int = 320
    summary: str = ""

    keeps_rank = True
    by_layer = True
    signals = frozenset[Signal]()

    def transfer(self, problem: Problem) -> Transfer:
        entries = Entries()
        records, kept = [], []
        for pair in problem.plan.pairs:
            sides = ((pair.source, problem.source_weights), (pair.target, problem.target_weights))
            weights = (layer.matrix(held[layer.weight].detach()).double() for layer, held in sides)
            (U_A, V_A), (U_B, V_B) = (leading_directions(weight, self.rank) for weight in weights)
            rank = min(U_A.shape[1], U_B.shape[1])
            if not rank:
                kept += keep_layers([pair.target], "a base weight of this layer is zero")
                continue
            R_in: Map = pair.input_map  # set where both models share a space
            R_out: Map = pair.output_map
            if R_in is None:
                R_in = CoordinateMap(V_A[:, :rank], V_B[:, :rank].to(V_A.device))
            if R_out is None:
                R_out = CoordinateMap(U_A[:, :rank], U_B[:, :rank].to(U_A.device))
            records.append(move(pair, problem.task_vector, R_out, R_in, entries))
        return Transfer(entries.task_vector(), tuple(records), tuple(kept))


def leading_directions(W: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return at most `rank` singular vectors of W, (m, r) and (n, r), by the eigenvectors of the smaller Gram matrix.

    >>> left, right = leading_directions(torch.diag(torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64)), 3)
    >>> left.T.tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    tall = W.shape[0] > W.shape[1]
    short = W.T if tall else W
    squares, found = torch.linalg.eigh(short @ short.T)
    squares, found = squares.flip(0)[:rank], found.flip(1)[:, :rank]
    count = int((squares > CUT * squares[0].clamp(min=0)).sum()) if len(squares) else 0
    found = found[:, :count]
    other = short.T @ found / squares[:count].sqrt()
    left, right = (other, found) if tall else (found, other)
    signs = left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    return left * signs, right * signs
