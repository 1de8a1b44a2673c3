"""Evidence that a matrix is the polar factor it claims to be, from a few seeded random probes. Torch only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ORTHOGONALITY = 1e-6  # the limits
STATIONARITY = 1e-6
PROBES = 8


@dataclass(frozen=True)
class Certificate:
    """Evidence that R = U V^T is the polar factor of C, root mean squares over random probes.

    `orthogonality` is that of U^T U - I and V^T V - I. `stationarity` is that of
    S^-1/2 (U^T C V - S) S^-1/2: zero where R^T C is symmetric and positive on the determined directions, and a
    bound on the error of the map between them.
    """

    orthogonality: float
    stationarity: float
    limit: float  # of the stationarity: what rounding of C itself allows in its smallest determined direction

    @property
    def holds(self) -> bool:
        return self.orthogonality <= ORTHOGONALITY and self.stationarity <= self.limit


def certify(C: Tensor, U: Tensor, V: Tensor, values: Tensor) -> Certificate:
    """Probe U V^T where U^T C V is diagonal, `values`; costs a few products with thin matrices."""
    if U.shape[1] == 0:
        return Certificate(0.0, 0.0, STATIONARITY)
    probe = gaussian(U.shape[1], PROBES, C.device)
    root = values.sqrt()[:, None]
    stationarity = U.T @ (C @ (V @ (probe / root))) / root - probe
    defects = [(side.T @ (side @ probe) - probe).square().mean() for side in (U, V)]
    limit = rounding(C.dtype) * values[0] / values[-1]
    numbers = torch.stack([*defects, stationarity.square().mean(), limit]).tolist()
    return Certificate(max(numbers[0], numbers[1]) ** 0.5, numbers[2] ** 0.5, STATIONARITY + numbers[3])


def rounding(dtype: torch.dtype) -> float:
    """The error of a direction as large as C itself, by rounding of C."""
    return 100 * torch.finfo(dtype).eps


def gaussian(rows: int, columns: int, device: torch.device) -> Tensor:
    """Seeded, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device)
