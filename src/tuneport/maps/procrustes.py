"""Orthogonal Procrustes maps from cross-covariances, with their rank and residual."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from ..errors import MethodError, TuneportError
from ..types import Completion
from .certificate import Factors, Polar
from .halley import largest_values
from .polar import null_of, polar, polar_of_factors, polar_together, thin_factors, together_bytes
from .statistics import CrossCovariance, Key, Statistics, rank_cut

BLIND = 1e-8  # singular values of the projected identity up to this count as zero
CLEAR = 1e-4  # the least square of one that 1 minus its complement resolves: the map error is eps / CLEAR


@dataclass(frozen=True, eq=False)
class CoordinateMap(Factors):
    """A map from source to target coordinates: its factors, plus the identity, zero-padded or cropped at the end."""

    identity: bool = False  # whether it is added

    @property
    def shape(self) -> tuple[int, int]:
        left, right = self.left, self.right
        if left is None:
            assert right is not None
            return right.shape[1], right.shape[0]
        return left.shape[0], left.shape[1] if right is None else right.shape[0]

    def dense(self) -> Tensor:
        R = super().dense()
        return R + torch.eye(*R.shape, device=R.device, dtype=torch.float64) if self.identity else R

    def carry(self, tensor: Tensor, axis: int) -> Tensor:
        """`R^T tensor` along axis 0 or `tensor R` along the last, on the map's device and in its dtype."""
        left, right = self.left, self.right
        some = right if left is None else left
        assert some is not None
        moved = tensor = tensor.to(device=some.device, dtype=some.dtype)
        if left is not None:
            moved = left.T @ moved if axis == 0 else moved @ left
        if right is not None:
            moved = right @ moved if axis == 0 else moved @ right.T
        if self.identity:
            common = min(moved.shape[axis], tensor.shape[axis])
            moved.narrow(axis, 0, common).add_(tensor.narrow(axis, 0, common))
        return moved


def complete(found: Polar) -> CoordinateMap:
    """Fill the determined part up to an isometry: between the two null spaces, the one nearest to the identity.

    With N the null basis of the shorter side, the identity between the null spaces is N F, F = N^T E (I - V V^T), and
    its polar factor N times that of F. Directions that F leaves open are paired in order.
    """
    U, V, N = found.left, found.right, found.null
    if V is None or (U is not None and len(U) > len(V)):
        return complete(found.T).T
    n, m = V.shape[1] if U is None else len(U), len(V)
    if found.rank == 0:
        return CoordinateMap(V.new_zeros(n, 0), V.new_zeros(m, 0), identity=True)
    if found.rank == n or (U is None and not N.shape[1]):
        return CoordinateMap(U, V)
    if U is not None and 2 * found.rank <= n:
        short = _complete_few(U, V)
        if short is not None:
            return short
    if U is not None and not N.shape[1]:
        N = null_of(U)
    seen_left, seen_right = _nearest(torch.nn.functional.pad(N.T, (0, m - n)), V)
    left, right = N @ seen_left, seen_right
    blind = N.shape[1] - left.shape[1]
    if blind:
        mapped = torch.cat([V, right], dim=1)
        right = torch.cat([right, _pivoted([(mapped, -1.0)], blind, of_identity=True)], dim=1)
        left = torch.cat([left, _pivoted([(N, 1.0), (left, -1.0)], blind)], dim=1)
    if U is None:
        return CoordinateMap(None, V + right @ left.T)
    return CoordinateMap(torch.cat([U, left], dim=1), torch.cat([V, right], dim=1))


def _complete_few(U: Tensor, V: Tensor) -> CoordinateMap | None:
    """`complete` for ranks up to half the width, without a null basis; None if the identity leaves directions open.

    The identity between the null spaces is M = P E (I - V V^T), P = I - U U^T. With W = P V_1 (V_1: the rows of V that
    E reaches), M M^T = P - W W^T, so that W^T W = Q diag(l) Q^T, of the size of the rank, holds its spectrum: M is 1
    except for s = sqrt(1 - l). Its polar factor is M + W Q / (s (1 + s)) Q^T W^T M. A small s suffers from the
    rounding of l; these directions, W Q / sqrt(l), are solved separately.
    """
    n, m = len(U), len(V)
    W = V[:n] - U @ (U.T @ V[:n])
    values, Q = torch.linalg.eigh(W.T @ W)
    rest = (1.0 - values).clamp_min(0.0)
    clear = rest > CLEAR
    s = rest[clear].sqrt()
    seen = W @ Q[:, clear]
    right = -(V @ Q[:, clear]) / s
    right[:n] += seen / (s * (1.0 + s))
    lefts, rights = [U, seen], [V.clone(), right]
    rights[0][:n] -= U
    if not bool(clear.all()):
        H = W @ (Q[:, ~clear] / values[~clear].sqrt())
        seen_left, seen_right = _nearest(torch.nn.functional.pad(H.T, (0, m - n)), V)
        if seen_left.shape[1] < H.shape[1]:
            return None
        right = seen_right @ seen_left.T
        right[:n] -= H
        lefts.append(H)
        rights.append(right)
    return CoordinateMap(torch.cat(lefts, dim=1), torch.cat(rights, dim=1), identity=True)


def _nearest(F: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the polar factor of F outside span(V), on its singular values above BLIND."""
    F = F - (F @ V) @ V.T
    size = float(largest_values(F[None])) if len(F) else 0.0
    if size <= BLIND:
        return F.new_zeros(len(F), 0), V.new_zeros(len(V), 0)
    return thin_factors(polar(F, BLIND / size))


def _pivoted(terms: list[tuple[Tensor, float]], count: int, *, of_identity: bool = False) -> Tensor:
    """The first columns of a pivoted Cholesky factorisation of a projector, which is never formed.

    The projector is the sum of sign * B B^T over all terms, plus the identity if asked. The pivot is the first index
    near the largest: among equal ones, rounding would choose. So the columns depend on the span of B only.
    """
    first = terms[0][0]
    weight = first.new_full((len(first),), float(of_identity))
    for basis, sign in terms:
        weight += sign * basis.square().sum(1)
    columns = first.new_zeros(len(first), count)
    for index in range(count):
        pivot = int((weight > 0.55 * weight.max()).nonzero()[0])
        column = first.new_zeros(len(first))
        column[pivot] = float(of_identity)
        for basis, sign in terms:
            column += sign * (basis @ basis[pivot])
        column -= columns @ columns[pivot]
        columns[:, index] = column / column[pivot].sqrt()
        weight = weight - columns[:, index].square()
    return columns


COMPLETIONS: tuple[Completion, ...] = get_args(Completion)
HELD = 2**28  # bytes of sums that an accelerator solves together, at least
_NOT_FINITE = "the cross-covariance holds NaN or Inf: check the models and the calibration data"


@dataclass(frozen=True, eq=False)
class Alignment:
    """An orthogonal map R (d_A, d_B) from source to target coordinates, `x_A R`, with its evidence.

    The data determine `rank` directions, the completion the rest. `residual` is sqrt(1 - s^2) with s = <X_A R, X_B> /
    (|X_A| |X_B|) in [0, 1]; None if only C was given. `route` names the solver.
    """

    map: CoordinateMap
    rank: int
    residual: float | None
    route: str

    def __repr__(self) -> str:
        residual = "" if self.residual is None else f", residual {self.residual:.3g}"
        return f"Alignment({self.map.shape[0]} x {self.map.shape[1]}, rank {self.rank}{residual}, by {self.route})"

    @cached_property
    def matrix(self) -> Tensor:
        """R itself (d_A, d_B), computed at the first access; `map` applies R without forming it."""
        return self.map.dense()


def procrustes(
    covariance: CrossCovariance | Tensor, *, completion: Completion = "svd", rtol: float | None = None
) -> Alignment:
    """Solve orthogonal Procrustes, `argmin_R ||X_A R - X_B||_F` (eqs. 6 and 7), from `C = X_A^T X_B`.

    R = U V^T of the thin SVD. d_A <= d_B gives R R^T = I; d_A > d_B gives R^T R = I. Below full rank U V^T is not
    unique: `completion="none"` keeps the determined part only, the partial isometry U_r V_r^T; `completion="svd"` adds
    the isometry between the two null spaces that is nearest to the identity.

    >>> rotation = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> points = torch.tensor([[1.0, 2.0], [3.0, 1.0], [0.5, 4.0]], dtype=torch.float64)
    >>> torch.allclose(procrustes(points.T @ (points @ rotation)).matrix, rotation)
    True
    """
    if completion not in COMPLETIONS:
        raise MethodError(f"The 'completion' of procrustes must be one of {COMPLETIONS}, got {completion!r} instead.")
    streamed = covariance if isinstance(covariance, CrossCovariance) else None
    few = streamed.few_tokens() if streamed is not None else None
    C = few or (covariance.matrix if isinstance(covariance, CrossCovariance) else covariance,)
    if C[0].ndim != 2:
        raise TuneportError(f"a cross-covariance must be a matrix, got shape {tuple(C[0].shape)}")
    if not all(bool(torch.isfinite(part).all()) for part in C):
        raise TuneportError(_NOT_FINITE)
    if streamed is None:
        cut = rank_cut(torch.float64, C[0].dtype, max(C[0].shape)) if rtol is None else rtol
        return _align(polar(C[0].double(), cut), None, completion)
    whole = float(streamed.whole)
    if rtol is None:
        rtol = streamed.cut(0.0 if few else float(C[0].norm()), whole)  # few tokens have no noise to cut
    found = polar_of_factors(*few, rtol) if few else polar(C[0].double(), rtol, most=streamed.most)
    return _align(found, whole, completion)


def procrustes_together(
    covariances: Sequence[CrossCovariance], completion: Completion = "svd", budget: int | None = None
) -> list[Alignment]:
    """`procrustes` of each; an accelerator solves those of one shape in batches (see `polar_together`)."""
    alignments = {
        index: procrustes(covariance, completion=completion)
        for index, covariance in enumerate(covariances)
        if covariance.device.type == "cpu" or covariance.few_tokens() is not None
    }
    together = [index for index in range(len(covariances)) if index not in alignments]
    numbers = [torch.stack([covariances[i].matrix.norm().double(), covariances[i].whole]) for i in together]
    sizes = dict(zip(together, torch.stack(numbers).tolist() if numbers else [], strict=True))  # one synchronisation
    if not all(math.isfinite(size) for size, _ in sizes.values()):
        raise TuneportError(_NOT_FINITE)
    equal: dict[tuple[tuple[int, int], float], list[int]] = {}
    for index, (size, whole) in sizes.items():
        equal.setdefault((covariances[index].shape, covariances[index].cut(size, whole)), []).append(index)
    for (_, cut), indices in equal.items():
        matrices = [covariances[i].matrix.double() for i in indices]
        found = polar_together(matrices, cut, fill=completion == "svd", budget=budget)
        for index, solved in zip(indices, found, strict=True):
            alignments[index] = _align(solved, sizes[index][1], completion)
    return [alignments[index] for index in range(len(covariances))]


def _align(found: Polar, whole: float | None, completion: Completion) -> Alignment:
    """Complete a polar factor; `whole` is |X_A| |X_B|, if known."""
    mapping = CoordinateMap(found.left, found.right) if completion == "none" else complete(found)
    residual = None
    if whole is not None:
        cosine = min(found.total / whole, 1.0) if whole > 0 else 0.0
        residual = (1.0 - cosine**2) ** 0.5
    return Alignment(mapping, found.rank, residual, found.route)


def solve_maps(
    statistics: Statistics, keys: Iterable[Key], completion: Completion = "svd", budget: int | None = None
) -> dict[Key, Alignment]:
    """The maps of these layers and signals; those with one sum share a map. `budget` limits a device's memory."""
    asked = {key: statistics.covariances[key] for key in keys}
    distinct = list(dict.fromkeys(asked.values()))
    found = dict(zip(distinct, procrustes_together(distinct, completion, budget), strict=True))
    return {key: found[covariance] for key, covariance in asked.items()}


def solve_groups(
    statistics: Statistics,
    groups: Sequence[Sequence[Key]],
    completion: Completion = "svd",
    budget: int | None = None,
) -> Iterator[dict[Key, Alignment]]:
    """Yield the maps of each group (block): one at a time on a CPU, as many as may be held on an accelerator."""
    distinct = [{statistics.covariances[key] for key in keys} for keys in groups]
    sizes = [sum(8 * math.prod(covariance.shape) for covariance in group) for group in distinct]
    device = next((covariance.device for group in distinct for covariance in group), torch.device("cpu"))
    most = held_bytes(device, budget)
    share = sum(sizes) / -(-sum(sizes) // most) if most else 0.0
    start, held = 0, 0.0
    for stop, size in enumerate([*sizes, math.inf]):
        if stop > start and held + size > share:
            maps = solve_maps(statistics, [key for keys in groups[start:stop] for key in keys], completion, budget)
            yield from ({key: maps[key] for key in keys} for keys in groups[start:stop])
            start, held = stop, 0.0
        held += size


def held_bytes(device: torch.device, budget: int | None = None) -> int:
    """The bytes of the sums whose maps an accelerator solves together; a CPU solves one group at a time."""
    return 0 if device.type == "cpu" else max(HELD, together_bytes(device, budget))
