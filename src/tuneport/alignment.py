"""The mathematics of a coordinate change: streamed cross-covariances and orthogonal Procrustes maps.

Torch only: no models, no files. Statistics are sums over tokens, so memory does not grow with the data.
Signals may come in any floating dtype; sums and solves are float64 unless told otherwise. Every map says
how much of it the data determine (rank) and how well it fits (residual).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from .errors import MethodError, TuneportError

Completion = Literal["none", "svd"]
COMPLETIONS: tuple[Completion, ...] = ("none", "svd")


class CrossCovariance:
    """Streaming `C = X_A^T X_B` over paired tokens (the matrix of eqs. 6 and 7), uncentred.

    >>> covariance = CrossCovariance(2, 3)
    >>> covariance.update(torch.ones(5, 2), torch.ones(5, 3))
    >>> covariance.matrix.shape, covariance.tokens, covariance.matrix[0, 0].item()
    (torch.Size([2, 3]), 5, 5.0)
    """

    def __init__(
        self,
        source_width: int,
        target_width: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.matrix = torch.zeros(source_width, target_width, device=device, dtype=dtype)
        self.source_energy = torch.zeros((), device=device, dtype=torch.float64)
        self.target_energy = torch.zeros((), device=device, dtype=torch.float64)
        self.tokens = 0
        self.signal_dtype = torch.float64

    def update(self, source: Tensor, target: Tensor) -> None:
        """Add the tokens of one batch: source (M, d_A) and target (M, d_B), row i of both the same token."""
        wanted = f"(M, {self.matrix.shape[0]}) and (M, {self.matrix.shape[1]})"
        if source.shape[1:] != self.matrix.shape[:1] or target.shape[1:] != self.matrix.shape[1:]:
            raise TuneportError(f"signals must be {wanted}, got {tuple(source.shape)} and {tuple(target.shape)}")
        if len(source) != len(target):
            raise TuneportError(f"signals must be paired token by token, got {len(source)} and {len(target)} tokens")
        self.signal_dtype = _coarser(self.signal_dtype, _coarser(source.dtype, target.dtype))
        source = source.to(device=self.matrix.device, dtype=self.matrix.dtype)
        target = target.to(device=self.matrix.device, dtype=self.matrix.dtype)
        self.matrix.addmm_(source.T, target)
        self.source_energy += source.square().sum()
        self.target_energy += target.square().sum()
        self.tokens += len(source)

    def __add__(self, other: CrossCovariance) -> CrossCovariance:
        """The statistic of both sets of tokens together."""
        total = CrossCovariance(*self.matrix.shape, device=self.matrix.device, dtype=self.matrix.dtype)
        total.matrix = self.matrix + other.matrix
        total.source_energy = self.source_energy + other.source_energy
        total.target_energy = self.target_energy + other.target_energy
        total.tokens = self.tokens + other.tokens
        total.signal_dtype = _coarser(self.signal_dtype, other.signal_dtype)
        return total


@dataclass(frozen=True, eq=False)
class Alignment:
    """An orthogonal map from source to target coordinates, with its evidence.

    `matrix` is R (d_A, d_B): `x_A R` stands in target coordinates. `rank` directions are determined by the
    data, the rest comes from the completion. `residual` is sqrt(1 - s^2) with s = <X_A R, X_B> / (|X_A| |X_B|)
    in [0, 1], over all tokens and features: 0 when one orthogonal map and one scale explain everything, 1 when
    nothing does; None where only C was given.
    """

    matrix: Tensor
    rank: int
    residual: float | None
    singular_values: Tensor


def rank_cut(signal_dtype: torch.dtype, sum_dtype: torch.dtype, width: int) -> float:
    """The share of the largest singular value of C below which a direction counts as undetermined.

    Two floors: rounding of the sum (width * eps of its dtype), and rounding of the signals. A direction with
    relative amplitude a in both signals shows as a^2 in C, and is trustworthy while a stays above the signals'
    own error. Models amplify rounding by cancellation (a LayerNorm's backward pass leaves 1e-5, some 200 eps of
    float32, in a direction that is exactly zero), hence (256 eps)^2. Half-precision signals are rounded once,
    from sums in float32: (4 eps)^2.
    """
    eps = torch.finfo(signal_dtype).eps
    return max(width * torch.finfo(sum_dtype).eps, ((256 if eps < 1e-6 else 4) * eps) ** 2)


def procrustes(
    covariance: CrossCovariance | Tensor, *, completion: Completion = "svd", rtol: float | None = None
) -> Alignment:
    """Solve orthogonal Procrustes, `argmin_R ||X_A R - X_B||_F` (eqs. 6 and 7), from `C = X_A^T X_B`.

    R = U V^T of the thin SVD. d_A <= d_B gives R R^T = I; d_A > d_B gives R^T R = I. Below full rank U V^T
    is not unique: `completion="none"` keeps the determined part only (the partial isometry U_r V_r^T);
    `completion="svd"` fills the rest, as a thin SVD does, with an isometry between the two null spaces, and
    picks among them the one nearest to the identity, so that the result depends neither on the order of the
    rows nor on the linear-algebra library.

    >>> rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> points = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 4.0]], dtype=torch.float64)
    >>> procrustes(points.T @ (points @ rotation)).matrix.round(decimals=6).tolist()
    [[0.0, 1.0], [-1.0, 0.0]]
    """
    if completion not in COMPLETIONS:
        raise MethodError(f"The 'completion' of procrustes must be one of {COMPLETIONS}, got {completion!r} instead.")
    streamed = isinstance(covariance, CrossCovariance)
    C = covariance.matrix if isinstance(covariance, CrossCovariance) else covariance
    if C.ndim != 2:
        raise TuneportError(f"a cross-covariance must be a matrix, got shape {tuple(C.shape)}")
    if not bool(torch.isfinite(C).all()):
        raise TuneportError("the cross-covariance holds NaN or Inf: check the models and the calibration data")
    if rtol is None:
        signal_dtype = covariance.signal_dtype if isinstance(covariance, CrossCovariance) else torch.float64
        rtol = rank_cut(signal_dtype, C.dtype, max(C.shape))
    tokens = covariance.tokens if isinstance(covariance, CrossCovariance) else None
    U, S, Vh = _svd_of_sum(C.double(), tokens)
    rank = int((rtol * S[0] < S).sum()) if len(S) and S[0] > 0 else 0
    R = U[:, :rank] @ Vh[:rank]
    if completion == "svd" and rank < min(C.shape):
        R = R + _null_isometry(U[:, :rank], Vh[:rank], min(C.shape) - rank)
    residual = None
    if streamed:
        assert isinstance(covariance, CrossCovariance)
        energy = float(covariance.source_energy * covariance.target_energy) ** 0.5
        cosine = min(float(S[:rank].sum()) / energy, 1.0) if energy > 0 else 0.0
        residual = (1.0 - cosine**2) ** 0.5
    return Alignment(matrix=R, rank=rank, residual=residual, singular_values=S)


def rectangular_identity(rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """The map that "no alignment" means: the identity, zero-padded or cropped at the end of each axis."""
    return torch.eye(rows, columns, device=device, dtype=torch.float64)


def _null_isometry(U: Tensor, Vh: Tensor, missing: int) -> Tensor:
    """The isometry between the complements of span(U) and span(V) that is nearest to the identity."""
    E = rectangular_identity(U.shape[0], Vh.shape[1], U.device)
    E = E - U @ (U.T @ E)
    E = E - (E @ Vh.T) @ Vh
    left, S, right = thin_svd(E)
    good = int((S[:missing] > 1e-8).sum())
    filled = left[:, :good] @ right[:good]
    if good < missing:  # the identity itself is blind here: pair the remaining directions in order
        left_rest = _complement(torch.cat([U, left[:, :good]], dim=1), missing - good)
        right_rest = _complement(torch.cat([Vh.T, right[:good].T], dim=1), missing - good)
        filled = filled + left_rest @ right_rest.T
    return filled


def _complement(basis: Tensor, count: int) -> Tensor:
    """`count` orthonormal columns orthogonal to `basis`, which depend on its span only, not on its columns.

    A pivoted Cholesky factorisation of the projector on the complement; the pivot is the first index near
    the largest, since among equals rounding would choose.
    """
    rest = torch.eye(len(basis), device=basis.device, dtype=basis.dtype) - basis @ basis.T
    columns = basis.new_zeros(len(basis), count)
    for index in range(count):
        weight = rest.diagonal()
        pivot = int((weight > 0.55 * weight.max()).nonzero()[0])
        columns[:, index] = rest[:, pivot] / weight[pivot].sqrt()
        rest = rest - torch.outer(columns[:, index], columns[:, index])
    return columns


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD; on a failure to converge (seen on accelerators) once more on the CPU."""
    try:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        U, S, Vh = (part.to(matrix.device) for part in torch.linalg.svd(matrix.cpu(), full_matrices=False))
    return U, S, Vh


def _svd_of_sum(C: Tensor, tokens: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD of a sum over tokens, whose rank is at most their number: with few tokens, inside the range of C.

    A product with a few more random (seeded) columns than C can have rank spans its range to rounding, so the
    small problem has the same singular values and vectors.
    """
    if tokens is None or 3 * tokens + 48 > min(C.shape):
        return thin_svd(C)
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(C.shape[1], tokens + 16, generator=generator, dtype=torch.float64).to(C.device)
    Q = torch.linalg.qr(C @ probe).Q
    U, S, Vh = thin_svd(Q.T @ C)
    return Q @ U, S, Vh


def _coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return first if torch.finfo(first).eps >= torch.finfo(second).eps else second


class WeightGradient:
    """Per-sample gradients of one layer's weight and bias, summed and as sums of their signs (votes)."""

    def __init__(self, shape: tuple[int, int], *, device: torch.device | str | None = None) -> None:
        self.total = torch.zeros(shape, device=device, dtype=torch.float64)
        self.votes = torch.zeros(shape, device=device, dtype=torch.int32)
        self.bias_total = torch.zeros(shape[:1], device=device, dtype=torch.float64)
        self.bias_votes = torch.zeros(shape[:1], device=device, dtype=torch.int32)
        self.samples = 0

    def update(self, inputs: Tensor, gradients: Tensor, chunk: int = 16) -> None:
        """Add samples: layer inputs (N, T, d_in) and output gradients (N, T, d_out)."""
        for x, g in zip(inputs.split(chunk), gradients.split(chunk), strict=True):
            weight, bias = torch.einsum("nto,nti->noi", g, x), g.sum(1)
            self.total += weight.sum(0).to(self.total.dtype)
            self.votes += weight.sign().sum(0).to(self.votes.dtype)
            self.bias_total += bias.sum(0).to(self.total.dtype)
            self.bias_votes += bias.sign().sum(0).to(self.votes.dtype)
        self.samples += len(inputs)

    def __add__(self, other: WeightGradient) -> WeightGradient:
        """The statistic of both sets of samples together."""
        total = WeightGradient((self.total.shape[0], self.total.shape[1]), device=self.total.device)
        for name in ("total", "votes", "bias_total", "bias_votes", "samples"):
            setattr(total, name, getattr(self, name) + getattr(other, name))
        return total


@dataclass(frozen=True, eq=False)
class Statistics:
    """What was measured: cross-covariances by (target layer, signal), weight gradients by target layer.

    Layers that read the same tensor (q, k, v) hold the same CrossCovariance object, and `align` solves it
    once. `passes` counts the forward and backward passes per model.
    """

    covariances: Mapping[tuple[str, str], CrossCovariance] = field(default_factory=dict)
    weight_gradients: Mapping[str, WeightGradient] = field(default_factory=dict)
    samples: int = 0
    passes: Mapping[str, int] = field(default_factory=dict)
    _solved: dict[tuple[int, Completion], Alignment] = field(default_factory=dict, repr=False)

    def __contains__(self, key: object) -> bool:
        return key in self.covariances

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self.covariances)

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both sets of samples together; what was shared stays shared."""
        if not other.passes:
            return self
        if not self.passes:
            return other
        if set(self.covariances) != set(other.covariances):
            raise TuneportError("statistics of different layers or signals cannot be added.")
        sums: dict[tuple[int, int], CrossCovariance] = {}
        covariances = {}
        for key, ours in self.covariances.items():
            theirs = other.covariances[key]
            pair = (id(ours), id(theirs))
            if pair not in sums:
                sums[pair] = ours + theirs
            covariances[key] = sums[pair]
        gradients = {name: ours + other.weight_gradients[name] for name, ours in self.weight_gradients.items()}
        passes = {name: count + other.passes[name] for name, count in self.passes.items()}
        return Statistics(covariances, gradients, self.samples + other.samples, passes)

    def align(self, layer: str, signal: str, completion: Completion = "svd") -> Alignment:
        """The Procrustes map of one signal at one target layer, solved once and remembered."""
        covariance = self.covariances[layer, signal]
        key = (id(covariance), completion)
        if key not in self._solved:
            self._solved[key] = procrustes(covariance, completion=completion)
        return self._solved[key]
