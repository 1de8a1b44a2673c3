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
from .certificate import Certificate, Polar
from .completion import CoordinateMap, complete, complete_thin
from .covariance import CrossCovariance, rank_cut
from .polar import polar, polar_of_factors, polar_together, together_bytes
from .statistics import Key, Statistics

COMPLETIONS: tuple[Completion, ...] = get_args(Completion)
HELD = 2**28  # bytes of solved maps that a MapSolver caches
_NOT_FINITE = "the cross-covariance holds NaN or Inf: check the models and the calibration data"


@dataclass(frozen=True, eq=False)
class Alignment:
    """An orthogonal map R (d_A, d_B) from source to target coordinates, `x_A R`, with its evidence.

    The data determine `rank` directions, the completion the rest. `residual` is sqrt(1 - s^2) with s = <X_A R, X_B> /
    (|X_A| |X_B|) in [0, 1]; None if only C was given. `route` names the solver; some do not compute `singular_values`.
    """

    map: CoordinateMap
    rank: int
    residual: float | None
    singular_values: Tensor | None
    route: str
    certificate: Certificate

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
    return _align(found, whole, completion, thin=few is not None)


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


def _align(found: Polar, whole: float | None, completion: Completion, thin: bool = False) -> Alignment:
    """Complete a polar factor; `whole` is |X_A| |X_B|, if known."""
    if completion == "none":
        mapping = CoordinateMap(found.left, found.right)
    else:
        mapping = complete_thin(found) if thin else complete(found)
    residual = None
    if whole is not None:
        cosine = min(found.total / whole, 1.0) if whole > 0 else 0.0
        residual = (1.0 - cosine**2) ** 0.5
    return Alignment(mapping, found.rank, residual, found.singular_values, found.route, found.certificate)


class MapSolver:
    """Solves the maps of statistics, each one once, and several together where that is faster.

    Solved maps are cached; above `held_bytes`, the oldest are dropped. `budget` limits the memory of the device.
    """

    def __init__(self, statistics: Statistics, completion: Completion = "svd", budget: int | None = None) -> None:
        self._statistics, self._completion, self._budget = statistics, completion, budget
        self._solved: dict[CrossCovariance, Alignment] = {}

    def solve(self, keys: Iterable[Key]) -> dict[Key, Alignment]:
        """The maps of these layers and signals."""
        asked = {key: self._statistics.covariances[key] for key in keys}
        wanted = dict.fromkeys(asked.values())
        unsolved = [covariance for covariance in wanted if covariance not in self._solved]
        if unsolved:
            found = procrustes_together(unsolved, self._completion, self._budget)
            held = sum(alignment.map.nbytes for alignment in (*self._solved.values(), *found))
            limit = held_bytes(unsolved[0].device, self._budget)
            for earlier in [known for known in self._solved if known not in wanted]:
                if held > limit:
                    held -= self._solved.pop(earlier).map.nbytes
            self._solved.update(zip(unsolved, found, strict=True))
        return {key: self._solved[covariance] for key, covariance in asked.items()}

    def solve_groups(self, groups: Sequence[Sequence[Key]]) -> Iterator[dict[Key, Alignment]]:
        """Yield the maps of each group (block) in turn.

        A CPU solves one group at a time, an accelerator as many as may be held, in batches of similar size.
        """
        distinct = [{self._statistics.covariances[key] for key in keys} for keys in groups]
        sizes = [sum(8 * math.prod(covariance.shape) for covariance in group) for group in distinct]
        device = next((covariance.device for group in distinct for covariance in group), torch.device("cpu"))
        share = 0.0
        if device.type != "cpu":
            share = sum(sizes) / -(-sum(sizes) // held_bytes(device, self._budget))
        start, held = 0, 0.0
        for stop, size in enumerate([*sizes, math.inf]):
            if stop > start and held + size > share:
                maps = self.solve(key for keys in groups[start:stop] for key in keys)
                yield from ({key: maps[key] for key in keys} for keys in groups[start:stop])
                start, held = stop, 0.0
            held += size


def held_bytes(device: torch.device, budget: int | None = None) -> int:
    """The bytes of maps that a MapSolver caches, without those of the last call: more on accelerators."""
    return HELD if device.type == "cpu" else max(HELD, together_bytes(device, budget))
