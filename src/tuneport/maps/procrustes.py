"""The mathematics of a coordinate change: streamed cross-covariances and orthogonal Procrustes maps.

Torch only: no models, no files. Statistics are sums over tokens, so memory does not grow with the data.
Signals may come in any floating dtype; sums and solves are float64 unless told otherwise (products of half-precision
signals: `products`). Every map says how much of it the data determine (rank) and how well it fits (residual).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..errors import MethodError, TuneportError
from ..types import Completion
from .certificate import Certificate
from .completion import CoordinateMap, complete, complete_thin
from .covariance import CrossCovariance, rank_cut
from .polar import Polar, polar, polar_of_factors, polar_together, together_bytes
from .statistics import Key, Statistics

COMPLETIONS: tuple[Completion, ...] = ("none", "svd")
HELD = 2**28  # bytes of solved maps that a MapSolver remembers


@dataclass(frozen=True, eq=False)
class Alignment:
    """An orthogonal map from source to target coordinates, with its evidence.

    `map` is R (d_A, d_B) as factors, `matrix` R itself: `x_A R` stands in target coordinates. `rank` directions
    are determined by the data, the rest comes from the completion. `residual` is sqrt(1 - s^2) with
    s = <X_A R, X_B> / (|X_A| |X_B|) in [0, 1], over all tokens and features: 0 when one orthogonal map and one
    scale explain everything, 1 when nothing does; None where only C was given. `route` and `certificate` say how
    the map was found and how well it holds; `singular_values` of C are there where that route finds them.
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
        """R itself (d_A, d_B), made when first looked at; `map` applies it without."""
        return self.map.dense()


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
    whole = float(streamed.whole) if streamed is not None else None
    if rtol is None:
        size = 0.0 if few else float(C[0].norm())  # of few tokens, all directions are seen
        rtol = rank_cut(torch.float64, C[0].dtype, max(C[0].shape))
        rtol = rtol if streamed is None or whole is None else streamed.cut(size, whole)
    most = streamed.most if streamed is not None else None
    found = polar_of_factors(*few, rtol) if few else polar(C[0].double(), rtol, most=most)
    return _alignment(found, whole, completion, thin=few is not None)


def procrustes_together(
    covariances: Sequence[CrossCovariance], completion: Completion = "svd", budget: int | None = None
) -> list[Alignment]:
    """`procrustes` of each; on an accelerator, those of one shape in batches that suit `budget` bytes of memory."""
    alignments: dict[int, Alignment] = {}
    together: list[int] = []
    for index, covariance in enumerate(covariances):
        if covariance.device.type == "cpu" or covariance.few_tokens() is not None:
            alignments[index] = procrustes(covariance, completion=completion)
        else:
            together.append(index)
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
            alignments[index] = _alignment(solved, sizes[index][1], completion)
    return [alignments[index] for index in range(len(covariances))]


_NOT_FINITE = "the cross-covariance holds NaN or Inf: check the models and the calibration data"


def _alignment(found: Polar, whole: float | None, completion: Completion, thin: bool = False) -> Alignment:
    """`whole` is |X_A| |X_B|, where it is known."""
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

    Solved maps are remembered; when they take more than `held_bytes`, the oldest are dropped. `budget` is the memory
    of the device in bytes, None for all that it has.
    """

    def __init__(self, statistics: Statistics, completion: Completion = "svd", budget: int | None = None) -> None:
        self._statistics, self._completion, self._budget = statistics, completion, budget
        self._solved: dict[int, Alignment] = {}  # by the id of the covariance

    def solve(self, keys: Iterable[Key]) -> dict[Key, Alignment]:
        """The maps of these layers and signals."""
        asked = {key: self._statistics.covariances[key] for key in keys}
        unsolved = {id(found): found for found in asked.values() if id(found) not in self._solved}
        if unsolved:
            found = procrustes_together(list(unsolved.values()), self._completion, self._budget)
            wanted = {id(covariance) for covariance in asked.values()}
            held = sum(alignment.map.nbytes for alignment in (*self._solved.values(), *found))
            room = held_bytes(next(iter(unsolved.values())).device, self._budget)
            for earlier in [known for known in self._solved if known not in wanted]:
                if held > room:
                    held -= self._solved.pop(earlier).map.nbytes
            self._solved.update(zip(unsolved, found, strict=True))
        return {key: self._solved[id(covariance)] for key, covariance in asked.items()}

    def solve_groups(self, groups: Sequence[Sequence[Key]]) -> Iterator[dict[Key, Alignment]]:
        """The maps of each group (block) in turn, solved group by group on a CPU.

        On an accelerator, as many groups as may be held are solved together, in batches of similar size.
        """
        start = 0
        for count in self._batches(groups):
            batch = groups[start : start + count]
            maps = self.solve(key for keys in batch for key in keys)
            yield from ({key: maps[key] for key in keys} for keys in batch)
            start += count

    def _batches(self, groups: Sequence[Sequence[Key]]) -> Iterator[int]:
        """The number of groups in each batch."""
        sizes, room = [], 0
        for keys in groups:
            distinct = {id(found): found for found in (self._statistics.covariances[key] for key in keys)}
            sizes.append(sum(8 * found.shape[0] * found.shape[1] for found in distinct.values()))
            device = next((found.device for found in distinct.values()), None)
            if device is not None and device.type != "cpu":
                room = held_bytes(device, self._budget)
        share = sum(sizes) / max(-(-sum(sizes) // room), 1) if room else 0.0
        count, held = 0, 0
        for size in sizes:
            if count and held + size > share:
                yield count
                count, held = 0, 0
            count, held = count + 1, held + size
        if count:
            yield count


def held_bytes(device: torch.device, budget: int | None = None) -> int:
    """The bytes of maps that a MapSolver remembers, those of the last call not counted: more on accelerators."""
    return HELD if device.type == "cpu" else max(HELD, together_bytes(device, budget))
