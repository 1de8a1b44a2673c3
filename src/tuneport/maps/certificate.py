"""A polar factor and its certificate, from a few seeded random probes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

ORTHOGONALITY = 1e-6  # limits of a certificate that holds
STATIONARITY = 1e-6
PROBES = 8
ROUNDING = 100 * torch.finfo(torch.float64).eps  # the error of the largest direction of C


@dataclass(frozen=True)
class Certificate:
    """Evidence that R = U V^T is the polar factor of C: root mean squares over random probes.

    `orthogonality` is that of U^T U - I and V^T V - I. `stationarity` is that of S^-1/2 (U^T C V - S) S^-1/2: zero if
    R^T C is symmetric and positive on the determined directions, and a bound on the error of the map between them.
    """

    orthogonality: float
    stationarity: float
    limit: float  # of the stationarity, from the rounding of C in its smallest determined direction

    @property
    def holds(self) -> bool:
        return self.orthogonality <= ORTHOGONALITY and self.stationarity <= self.limit


@dataclass(frozen=True, eq=False)
class Factors:
    """R = `left @ right.T`; one factor may be None for the identity."""

    left: Tensor | None  # (d_A, p)
    right: Tensor | None  # (d_B, p)

    @property
    def T(self) -> Self:  # noqa: N802 - as of a tensor
        return replace(self, left=self.right, right=self.left)

    def dense(self) -> Tensor:
        """R itself (d_A, d_B)."""
        if self.left is None:
            assert self.right is not None
            return self.right.T
        return self.left if self.right is None else self.left @ self.right.T


@dataclass(frozen=True, eq=False)
class Polar(Factors):
    """The determined part of a polar factor, with its evidence.

    `total` is the sum of the singular values above the cut, `<R, C>`. `null` spans the null directions of the shorter
    side, (min(d_A, d_B), min - rank); it is empty where they are filled, or not computed.
    """

    null: Tensor
    rank: int
    total: float
    route: str
    certificate: Certificate


def certify(C: Tensor, U: Tensor, V: Tensor, values: Tensor) -> Certificate:
    """Probe U V^T for a diagonal U^T C V, `values`, by a few products with thin matrices."""
    if U.shape[1] == 0:
        return Certificate(0.0, 0.0, STATIONARITY)
    probe = gaussian(U.shape[1], PROBES, C.device)
    root = values.sqrt()[:, None]
    stationarity = U.T @ (C @ (V @ (probe / root))) / root - probe
    defects = [(side.T @ (side @ probe) - probe).square().mean() for side in (U, V)]
    limit = ROUNDING * values[0] / values[-1]
    numbers = torch.stack([*defects, stationarity.square().mean(), limit]).tolist()
    return Certificate(max(numbers[0], numbers[1]) ** 0.5, numbers[2] ** 0.5, STATIONARITY + numbers[3])


def gaussian(rows: int, columns: int, device: torch.device) -> Tensor:
    """A seeded random matrix, the same on every device; drawn in float32, which is faster."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator).to(device, torch.float64)
