"""The weighted Halley iteration for the polar factors of many matrices of one shape at once.

Each step maps a singular value s to s (a + b s^2) / (1 + c s^2), by matrix products only, without waiting for the
host. Large weights cost digits (c eps), so c is capped: a few heavy steps first lift all values above the cut so far
that the Gram matrix resolves them. Then the directions below the cut are removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .certificate import PROBES, ROUNDING, STATIONARITY, Certificate, Polar, gaussian
from .symmetric import inverse, inverse_root, lower_product, orthonormal, symmetric_product

QDWH, LIFT = "qdwh", "lift"  # routes: by inverse iteration, by a projector
NULLS = 8  # inverse iteration finds fewer null directions than this
_HEAVIEST = 1e6  # the largest weight c
_MARGIN = 1.05  # above the estimate of the largest singular value, which is a lower bound
_SURE = 1.2  # times the cut: from here on a value counts as determined; below a third of the cut, as null
_NEAR = 0.98  # from here to 1, the polynomial is exact enough
_BLIND = 1e-3  # the least singular value of the projected identity that determines how to fill a null direction
_TINY = 1e-300

Weights = tuple[float, float, float]
Tail = tuple[tuple[Weights, ...], tuple[float, ...]]  # the last steps, by one Gram matrix G, and a polynomial in 1 - G
Nulls = Literal["none", "few", "any", "both"]


def iterate(C: Tensor, cut: float, *, nulls: Nulls = "few", fill: bool = False) -> list[Polar | None]:
    """Polar factors of float64 matrices (B, n, m), n <= m, on the singular values above `cut` times the largest.

    `nulls` says how null directions are removed. "few": inverse iteration, for fewer than NULLS of them. "any": a
    projector, the sign of a Gram matrix minus the cut; it fails for a value within 1e-4 of the cut. "both": "few", then
    "any" for the others. "none": full rank is assumed. `fill` maps null directions as near to the identity as possible.
    """
    steps, size = _steps(cut), largest_values(C)
    X = C / (_MARGIN * size[:, None, None])
    for weights in steps.heavy:
        X = _step_matrix(X, weights) @ X
    if nulls == "none":
        return _certify(C, cut, size, _finish(X, steps.tail), None, fill)
    if nulls == "any":
        return _split(C, X, size, cut, steps, fill)
    null, unclear = _null_directions(X, steps)
    results: list[Polar | None] = [None] * len(C)
    for clear in (True, False) if nulls == "both" else (True,):
        indices = (unclear != clear).nonzero()[:, 0]
        if not len(indices):
            continue
        parts = (C, X, null, size)
        here, lifted, known, largest = parts if len(indices) == len(C) else (part[indices] for part in parts)
        if clear:
            lifted.baddbmm_(known, known.mT @ lifted, alpha=-1)  # a copy, or all of X, which is not used again
            found = _certify(here, cut, largest, _finish(lifted, steps.tail), known, fill)
        else:
            found = _split(here, lifted, largest, cut, steps, fill)
        for index, one in zip(indices.tolist(), found, strict=True):
            results[index] = one
    return results


def _split(C: Tensor, X: Tensor, size: Tensor, cut: float, steps: Steps, fill: bool) -> list[Polar | None]:
    below = _projector_below(symmetric_product(X, X), steps.lifted**2)
    X = _finish((below @ X).neg_().add_(X), steps.tail)
    X = (below @ X).neg_().add_(X)
    found = _certify(C, cut, size, X, below, fill)
    return [None if one is None else replace(one, route=LIFT) for one in found]


def largest_values(C: Tensor, among: Tensor | None = None) -> Tensor:
    """Close lower bounds of the largest singular values (B,), by power steps; `among` spans the left directions."""
    block = gaussian(C.shape[-2], PROBES, C.device)
    for _ in range(9):
        block = block / block.norm(dim=-2, keepdim=True).clamp_min(_TINY)
        block = block if among is None else among @ (among.mT @ block)
        found = C.mT @ block
        block = C @ found
    largest: Tensor = found.norm(dim=-2).amax(-1)
    return largest


class Steps(NamedTuple):
    """The weights of all steps for one rank cut."""

    heavy: tuple[Weights, ...]
    lifted: float  # the image of a singular value at the cut after the heavy steps
    tail: Tail


@lru_cache(maxsize=64)
def _steps(cut: float) -> Steps:
    heavy, lifted = _heavy_steps(cut / _MARGIN, _value)
    return Steps(heavy, lifted, _tail(0.9 * lifted))


@lru_cache(maxsize=64)
def _heavy_steps(low: float, image: Callable[[Weights, float], float]) -> tuple[tuple[Weights, ...], float]:
    """Steps with capped weights, which keep small values in order and below all others; and the image of `low`."""
    heavy = []
    while low < 1e-3:
        heavy.append(_weights_of(min(2 * _HEAVIEST**0.5, 0.02 / low)))
        low = image(heavy[-1], low)
    return tuple(heavy), low


@lru_cache(maxsize=64)
def _tail(low: float) -> Tail:
    """From singular values in [low, 1] to 1.

    The polynomial of order four is (1 - x)^-1/2 for x in [0, 1 - low^2]: to 10^-10 for _NEAR, and to 10^-12 above.
    """
    steps = []
    while low < _NEAR:
        steps.append(step_weights(low))
        low = _least_value(steps[-1], low)
    width = 1 - min(low, 0.99) ** 2  # a narrower interval gives large errors outside it
    angles = torch.arange(1, 10, 2, dtype=torch.float64) * math.pi / 10
    spots = (1 - angles.cos()) / 2  # Chebyshev nodes
    found = torch.linalg.solve(torch.linalg.vander(spots), (1 - width * spots).rsqrt())
    return tuple(steps), tuple(float(value) / width**order for order, value in enumerate(found))


def step_weights(low: float) -> Weights:
    """The best weights for singular values in [low, 1]."""
    d = (4 * (1 - low**2) / low**4) ** (1 / 3)
    return _weights_of((1 + d) ** 0.5 + 0.5 * (8 - 4 * d + 8 * (2 - low**2) / (low**2 * (1 + d) ** 0.5)) ** 0.5)


def _weights_of(a: float) -> Weights:
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _value(weights: Weights, at: float) -> float:
    a, b, c = weights
    return at * (a + b * at**2) / (1 + c * at**2)


def _least_value(weights: Weights, low: float) -> float:
    """The least image of values in [low, 1] under a step."""
    spots = torch.logspace(math.log10(low), 0, 512, dtype=torch.float64)
    return min(_value(weights, float(spot)) for spot in spots)


def _step_matrix(X: Tensor, weights: Weights) -> Tensor:
    """The step matrix W of X <- W X."""
    a, b, c = weights
    return _add_identity(_resolvent(lower_product(X, X), c).mul_(a - b / c), b / c)


def _resolvent(gram: Tensor, c: float) -> Tensor:
    """(1 + c G)^-1; overwrites G."""
    return inverse(_add_identity(gram.mul_(c), 1.0))


def _add_identity(matrices: Tensor, times: float) -> Tensor:
    matrices.diagonal(dim1=-2, dim2=-1).add_(times)
    return matrices


def _finish(X: Tensor, tail: Tail) -> Tensor:
    """The polar factor of X, whose singular values are in the range of the tail; null directions stay null."""
    return _root_of_inverse(symmetric_product(X, X), tail) @ X


def _root_of_inverse(gram: Tensor, tail: Tail) -> Tensor:
    """G^-1/2, by the iteration on G: a step with matrix W turns G into W^2 G, and W G needs no product.

    Overwrites G. All matrices commute, so all products are symmetric. A polynomial does the last step.
    """
    steps, (k0, k1, k2, k3, k4) = tail
    total = None
    for a, b, c in steps:
        turn = _resolvent(gram.clone(), c)
        gram = _add_identity(gram.mul_(b / c).sub_(turn, alpha=(a - b / c) / c), (a - b / c) / c)  # W G
        _add_identity(turn.mul_(a - b / c), b / c)
        gram = symmetric_product(turn, gram)
        total = turn if total is None else symmetric_product(turn, total)
        del turn  # frees its memory
    rest = _add_identity(gram.neg_(), 1.0)
    square = symmetric_product(rest, rest)
    upper = (rest * k3).add_(square, alpha=k4)
    last = symmetric_product(square, upper).add_(square, alpha=k2).add_(rest, alpha=k1)
    _add_identity(last, k0)
    return last if total is None else symmetric_product(last, total)


def _projector_below(gram: Tensor, limit: float) -> Tensor:
    """The projector onto the eigenvectors with eigenvalues below `limit`, for eigenvalues in [0, 1]."""
    sign = _add_identity(gram.neg_(), limit)
    heavy, low = _heavy_steps(1e-4 * limit, _least_value)  # eigenvalues nearer to the limit have no sign
    for weights in heavy:
        sign = _step_matrix(sign, weights) @ sign
    sign = _finish(sign, _tail(low))
    sign = torch.baddbmm(sign, symmetric_product(sign, sign), sign, beta=1.5, alpha=-0.5)  # an error e becomes e^2
    return _add_identity((sign + sign.mT).div_(4), 0.5)


def _null_directions(X: Tensor, steps: Steps) -> tuple[Tensor, Tensor]:
    """Left null directions, zero-padded, and which failed; Rayleigh quotients are upper bounds: never too many."""
    shift = 1e4 / steps.lifted**2
    near = _resolvent(lower_product(X, X), shift)
    block = near @ gaussian(X.shape[-2], min(NULLS, X.shape[-2]), X.device)
    found = orthonormal(near @ orthonormal(block, 2), 2)
    for _ in range(3):
        seen = X.mT @ found
        squares, turn = small_eigh(seen.mT @ seen)
        found, seen = found @ turn, seen @ turn
        residual = X @ seen - found * squares[:, None]
        found = orthonormal(found - shift * (near @ residual), 2)
    seen = X.mT @ found
    squares, turn = small_eigh(seen.mT @ seen)
    found, limit = found @ turn, steps.lifted**2
    unclear = ((squares > limit / 9) & (squares < limit * _SURE**2)).any(-1) | ~squares.isfinite().all(-1)
    null = squares < limit
    return found * null[:, None], unclear | null.all(-1)


def _certify(C: Tensor, cut: float, size: Tensor, X: Tensor, null: Tensor | None, fill: bool) -> list[Polar | None]:
    """Certify and fill all matrices at once; the host waits only here. `null` spans the null directions, if any."""
    n = C.shape[-2]
    probe = gaussian(n, PROBES, C.device)
    stationarity, spread, total, bad = _stationarity(C, X, null, size, cut, probe)
    seen = X @ (X.mT @ probe) - probe
    ranks = torch.full_like(size, n)
    if null is None:
        orthogonality = _size(seen)
    else:
        ranks -= null.square().sum((-2, -1)).round()
        orthogonality = _size(seen + null @ (null.mT @ probe))
        bad = bad | (largest_values(C, null) > _SURE * cut * size)
        if fill:
            X, blind = _fill(X, null)
            orthogonality = torch.maximum(orthogonality, _size(X @ (X.mT @ probe) - probe))
            bad = bad | blind
    bad = bad | (size == 0) | ~total.isfinite()
    numbers = torch.stack([bad.double(), ranks, total, orthogonality, stationarity, ROUNDING * spread]).T
    results: list[Polar | None] = []
    for index, (refused, rank, value, defect, residual, limit) in enumerate(numbers.tolist()):
        if refused:
            results.append(None)
            continue
        there = X.new_zeros(n, 0)
        if null is not None and not fill and rank < n:
            there = torch.linalg.qr(null[index] @ gaussian(null.shape[-1], n - int(rank), C.device)).Q
        matrix = X[index] if len(C) == 1 else X[index].clone()  # a view would keep the whole batch alive
        certificate = Certificate(defect, residual, STATIONARITY + limit)
        results.append(Polar(None, matrix.T, there, int(rank), value, QDWH, certificate))
    return results


def _size(residual: Tensor) -> Tensor:
    return residual.square().mean((-2, -1)).sqrt()


def _stationarity(
    C: Tensor, X: Tensor, null: Tensor | None, size: Tensor, cut: float, probe: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The size of S^-1/2 (H - H^T) S^-1/2 / 2 for H = C X^T, with a Cholesky factor of H in place of the root.

    The null directions are added to H and the cut is subtracted: without a factor, a value is below the cut. Also the
    spread of H, its trace, and which matrices have no factor.
    """
    lifted = lower_product(C, X)
    diagonal = lifted.diagonal(dim1=-2, dim2=-1)
    spread, total = diagonal.amax(-1), diagonal.sum(-1)
    if null is not None:
        lifted += (null * size[:, None, None]) @ null.mT
    diagonal.sub_((cut * size)[:, None])
    root, bad = inverse_root(lifted)
    turned = root.mT @ probe
    residual = root @ (C @ (X.mT @ turned) - X @ (C.mT @ turned)) / 2
    spread = spread * root.diagonal(dim1=-2, dim2=-1).square().amax(-1)
    return _size(residual), spread, total, bad


def _fill(X: Tensor, null: Tensor) -> tuple[Tensor, Tensor]:
    """Map the null directions of X as near to the identity as possible; also where the identity says too little."""
    rows, columns = X.shape[-2:]
    if null.shape[-1] < rows:
        there = null.square().sum(-2) > 0.5
        F = torch.nn.functional.pad(null.mT, (0, columns - rows))
        F = F - (F @ X.mT) @ X
        squares, turn = small_eigh(F @ F.mT + torch.diag_embed((~there).double()))
        root = turn @ (squares.clamp_min(_TINY).rsqrt()[..., None] * turn.mT)
        return X + null @ (root @ F), (squares < _BLIND**2).any(-1)
    F = torch.nn.functional.pad(symmetric_product(null, null), (0, columns - rows))
    F.baddbmm_(F @ X.mT, X, alpha=-1).add_(X)
    return _finish(F, _tail(_BLIND)), torch.zeros(len(X), dtype=torch.bool, device=X.device)


def small_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of small matrices; NaN for a matrix that is not finite."""
    broken = ~matrix.isfinite().all(dim=(-2, -1), keepdim=True)
    values, vectors = torch.linalg.eigh(torch.where(broken, torch.zeros_like(matrix), matrix))
    return torch.where(broken[..., 0], torch.nan, values), vectors
