"""Entries of a task vector: a dense difference of one tensor, or a low-rank difference stored as its two factors.

A LowRank entry stays low-rank when it is scaled, added to another or truncated to a smaller rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import TuneportError
from ..io.tensors import pieces


@dataclass(frozen=True, eq=False)
class LowRank:
    """The matrix `out_factor @ in_factor`, stored as its factors: (d_out, r) and (r, d_in).

    A convolution kernel is a matrix over unfolded patches: its `in_factor` is (r, channels, height, width).
    """

    out_factor: torch.Tensor
    in_factor: torch.Tensor

    def __post_init__(self) -> None:
        out, in_ = tuple(self.out_factor.shape), tuple(self.in_factor.shape)
        if len(out) != 2 or len(in_) < 2 or out[1] != in_[0]:
            raise TuneportError(f"low-rank factors must be (d_out, r) and (r, d_in), got {out} and {in_}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the product, (d_out, d_in) or (d_out, channels, height, width)."""
        return self.out_factor.shape[0], *self.in_factor.shape[1:]

    @property
    def rank(self) -> int:
        """Number of columns of `out_factor`: an upper bound of the rank of the product."""
        return self.out_factor.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the product: at least float32, since half precision would round it."""
        widest = torch.promote_types(self.out_factor.dtype, self.in_factor.dtype)
        return torch.promote_types(widest, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.out_factor.device

    def to(self, *args: Any) -> LowRank:
        """Move or cast both factors, with the arguments of `Tensor.to`."""
        return LowRank(self.out_factor.to(*args), self.in_factor.to(*args))

    def dense(self) -> torch.Tensor:
        product = self.out_factor.to(self.dtype) @ self.in_factor.to(self.dtype).flatten(1)
        return product.reshape(self.shape)

    def norm(self) -> float:
        """Return the Frobenius norm: ||B A||^2 = sum of (B^T B) * (A A^T), both r x r, in float64."""
        B, A = self.out_factor.double(), self.in_factor.double().flatten(1)
        return math.sqrt(max(0.0, float(((B.T @ B) * (A @ A.T)).sum())))

    def __mul__(self, factor: float) -> LowRank:
        return LowRank(self.out_factor.to(self.dtype) * factor, self.in_factor)

    __rmul__ = __mul__


Entry = torch.Tensor | LowRank


def as_dense(entry: Entry) -> torch.Tensor:
    return entry.dense() if isinstance(entry, LowRank) else entry


def norm_of(entry: Entry) -> float:
    """The Frobenius norm of an entry, accumulated in float64."""
    if isinstance(entry, LowRank):
        return entry.norm()
    wide = torch.promote_types(entry.dtype, torch.float64)
    parts = [torch.linalg.vector_norm(piece.to(wide)) for piece in pieces(entry)]
    return float(torch.linalg.vector_norm(torch.stack(parts)))


def add_entries(one: Entry, other: Entry) -> Entry:
    """The sum of two entries; two low-rank entries are added by concatenating their factors."""
    if isinstance(one, LowRank) and isinstance(other, LowRank):
        out, in_ = one.out_factor, one.in_factor
        return LowRank(
            torch.cat([out, other.out_factor.to(out.device)], dim=1),
            torch.cat([in_, other.in_factor.to(in_.device)], dim=0),
        )
    first = as_dense(one)
    return first + as_dense(other).to(first.device)


def truncate(entry: Entry, rank: int | None = None, energy: float | None = None) -> tuple[LowRank, float]:
    """The nearest matrix of rank at most `rank`, or of the least rank that keeps a share `energy` of |tau|^2.

    Returns its factors and the lost share of |tau|^2. By Eckart and Young no other matrix of that rank is nearer.
    A low-rank entry is returned unchanged if its rank is low enough; it never becomes dense.

    >>> low, lost = truncate(torch.diag(torch.tensor([2.0, 1.0])), rank=1)
    >>> low.rank, round(lost, 6)
    (1, 0.2)
    """
    if isinstance(entry, LowRank):
        if energy is None and (rank is None or entry.rank <= rank):
            return entry, 0.0
        left, R_left = torch.linalg.qr(entry.out_factor.double())
        right, R_right = torch.linalg.qr(entry.in_factor.double().flatten(1).T)
        U, S, Vh = thin_svd(R_left @ R_right.T)
        U, Vh = left @ U, Vh @ right.T
    elif rank is None and energy is None:
        raise TuneportError("the update is not low-rank: pass `rank=R` or `energy=0.95` (1 is exact) for an adapter.")
    else:
        U, S, Vh = thin_svd(entry.double().flatten(1))
    shares = S.square().cumsum(0)
    total = float(shares[-1])
    if energy is not None:
        cut = float(S[0]) * max(U.shape[0], Vh.shape[1]) * torch.finfo(torch.float64).eps
        count = min(int((shares < energy * total).sum()) + 1, int((cut < S).sum()))
    else:
        assert rank is not None
        count = min(rank, len(S))
    count = max(count, 1)
    root = S[:count].sqrt()
    factors = LowRank((U[:, :count] * root).float(), (root[:, None] * Vh[:count]).float().reshape(-1, *entry.shape[1:]))
    return factors, max(0.0, 1.0 - float(shares[count - 1]) / total) if total > 0 else 0.0


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD, repeated on the CPU if it does not converge (seen on GPUs)."""
    try:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        U, S, Vh = (part.to(matrix.device) for part in torch.linalg.svd(matrix.cpu(), full_matrices=False))
    return U, S, Vh
