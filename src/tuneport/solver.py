"""Polar factors of cross-covariances: several routes to one answer, each certified before it is used.

Torch only. A route finds the singular triplets of C above a cut, or enough of them to know the polar factor; the
choice among routes follows shape and device. Squaring C (a Gram matrix) halves the digits, so the Gram route goes
down the spectrum in stages, each of which squares only what is left. A result that fails its certificate is
thrown away for a plain SVD; if that fails too, the solver raises.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .errors import TuneportError

SPAN = 1e-4  # singular values that one Gram matrix resolves, as a share of its largest: the map error is eps / SPAN^2
ORTHOGONALITY = 1e-6  # the certificate's limits, see Certificate
STATIONARITY = 1e-6
SMALL = 64  # up to this width an SVD is as fast as anything
LARGE = 1024  # from this width on, an accelerator's products are so much faster that an iteration wins
BLIND = 1e-8  # a singular value of the projected identity that says nothing
STREAMS = 4  # decompositions that run side by side on a GPU
_PROBES = 8
_TINY = 1e-300
_STEPS = 10  # of the iteration; four to six are the rule
_HEAVIEST = 1e6  # its largest weight c
_CAUTION = 0.5  # on the smallest singular value, which is found from above

T = TypeVar("T")


@dataclass(frozen=True)
class Certificate:
    """Evidence that U V^T is the polar factor, from a few seeded random probes (root mean squares).

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


@dataclass(frozen=True, eq=False)
class Polar:
    """The determined part of a polar factor as thin factors, `left @ right.T`, with its evidence.

    `total` is the sum of the singular values above the cut, `<R, C>`. `singular_values` are all min(d_A, d_B) of C,
    largest first, the first `rank` above the cut, those far below it upper bounds only; None where the route does
    not find them. `null` spans what the shorter side has left, (min(d_A, d_B), min - rank).
    """

    left: Tensor  # (d_A, rank)
    right: Tensor  # (d_B, rank)
    null: Tensor
    total: Tensor
    singular_values: Tensor | None
    route: str
    certificate: Certificate

    @property
    def rank(self) -> int:
        return self.left.shape[1]

    @property
    def T(self) -> Polar:  # noqa: N802 - as of a tensor
        """The polar factor of the transposed problem."""
        return replace(self, left=self.right, right=self.left)


class Found(NamedTuple):
    """What a route finds: factors of the polar factor of C (n, m), n <= m, and what is left of the rows."""

    left: Tensor  # U (n, r)
    right: Tensor  # V (m, r)
    null: Tensor  # (n, n - r)
    core: Tensor  # U^T C V: (r,) where it is diagonal, else (r, r)
    values: Tensor | None  # the singular values of C


def polar(C: Tensor, cut: float, route: str | None = None, *, most: int | None = None) -> Polar:
    """The polar factor of C on the directions whose singular value exceeds `cut` times the largest.

    `route` is one of ROUTES; None chooses. Where it cannot serve, or its result is not certified, the next one of
    ROUTES does. `most` is the largest rank that C can have, where known. C must be float64 and finite.
    Trap: `left` and `right` mean something only together.
    """
    if C.shape[0] > C.shape[1]:
        return polar(C.T, cut, route, most=most).T
    names = list(ROUTES)
    for name in names[names.index(route or _choose(C, cut, most)) :]:
        found = ROUTES[name](C, cut)
        if found is None:
            continue
        certificate = certify(C, found)
        if certificate.holds:
            total = found.core.sum() if found.core.ndim == 1 else found.core.trace()
            return Polar(found.left, found.right, found.null, total, found.values, name, certificate)
    raise TuneportError(
        f"no route gives a certified polar factor of a {tuple(C.shape)} cross-covariance: orthogonality defect "
        f"{certificate.orthogonality:.1e}, stationarity {certificate.stationarity:.1e}. Check the calibration data."
    )


def certify(C: Tensor, found: Found) -> Certificate:
    """Probe the factors of a polar factor; costs a few products with thin matrices, and a Cholesky for a full core."""
    U, V, _, core, _ = found
    if U.shape[1] == 0:
        return Certificate(0.0, 0.0, STATIONARITY)
    probe = _gaussian(U.shape[1], _PROBES, C.device)
    if core.ndim == 1:
        root = core.sqrt()[:, None]
        stationarity = U.T @ (C @ (V @ (probe / root))) / root - probe
        spread = core[0] / core[-1]
    else:  # S^-1/2 (H - H^T) S^-1/2 / 2, with a Cholesky factor of H in place of the root
        root = torch.linalg.cholesky((core + core.T) / 2)
        turned = torch.linalg.solve_triangular(root.T, probe, upper=True)
        stationarity = torch.linalg.solve_triangular(root, (core @ turned - core.T @ turned) / 2, upper=False)
        spread = core.diagonal().max() / root.diagonal().min().square()
    defects = [(side.T @ (side @ probe) - probe).square().mean() for side in (U, V)]
    limit = 100 * torch.finfo(C.dtype).eps * spread
    numbers = torch.stack([*defects, stationarity.square().mean(), limit]).tolist()
    return Certificate(max(numbers[0], numbers[1]) ** 0.5, numbers[2] ** 0.5, STATIONARITY + numbers[3])


def by_qdwh(C: Tensor, cut: float) -> Found | None:
    """The dynamically weighted Halley iteration: products, Cholesky factors and triangular solves only.

    Each step sends a singular value s to s (a + b s^2) / (1 + c s^2), with weights for the interval [l, 1] in which
    they lie; l is found on the way. Large weights cost digits (c eps), so c is capped and very small values take a
    step more. For full rank only: None where some value does not exceed the cut.
    """
    n = len(C)
    largest = _largest(C)
    if largest == 0:
        return None
    X, low, eye = C / (1.05 * largest), 0.0, _eye(n, C)
    for step in range(_STEPS):
        gram = X @ X.T
        low = low or _smallest(gram) * _CAUTION
        if step >= 2 and low < 1e-4:  # two heavy steps lift everything above a cut of 1e-10 that far
            return None
        a, b, c = _weights(low)
        root = torch.linalg.cholesky(gram.mul_(c).add_(eye))
        X = torch.cholesky_solve(X, root).mul_(a - b / c).add_(X, alpha=b / c)
        if low:
            spots = torch.logspace(math.log10(low), 0, 256, dtype=torch.float64)
            low = min(float((spots * (a + b * spots**2) / (1 + c * spots**2)).min()), 1.0)
        if low > 1 - 1e-10:
            break
    core = C @ X.T
    shifted = (core + core.T) / 2 - 2 * cut * largest * eye
    if bool(torch.linalg.cholesky_ex(shifted).info):
        return None
    return Found(eye, X.T, C.new_zeros(n, 0), core, None)


def _weights(low: float) -> tuple[float, float, float]:
    """The weights of a step for singular values in [low, 1], 0 for an unknown low."""
    a = 2 * _HEAVIEST**0.5
    if low > 0:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        a = min(a, (1 + d) ** 0.5 + 0.5 * (8 - 4 * d + 8 * (2 - low**2) / (low**2 * (1 + d) ** 0.5)) ** 0.5)
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _largest(C: Tensor) -> float:
    """The largest singular value, or a little less, by a few power steps with several vectors."""
    block = _gaussian(len(C), _PROBES, C.device)
    for _ in range(8):
        block = C @ (C.T @ (block / block.norm(dim=0).clamp_min(_TINY)))
    return float((C.T @ (block / block.norm(dim=0).clamp_min(_TINY))).norm(dim=0).max())


def _smallest(gram: Tensor) -> float:
    """The smallest singular value behind a Gram matrix, or a little more; 0 where that has rounded it away."""
    root, bad = torch.linalg.cholesky_ex(gram)
    block = _gaussian(len(root), _PROBES, root.device)
    for _ in range(4):
        block = torch.cholesky_solve(block / block.norm(dim=0).clamp_min(_TINY), root)
    square, failed = torch.stack([1.0 / block.norm(dim=0).max(), bad.to(block.dtype)]).tolist()
    return float(square**0.5) if not failed and square > 1e-13 else 0.0


def by_svd(C: Tensor, cut: float) -> Found:
    """The reference: a thin SVD; a small one on the CPU, which is faster at it than any accelerator."""
    U, S, Vh = (part.to(C.device) for part in thin_svd(C.cpu() if len(C) <= SMALL else C))
    rank = int((cut * S[0] < S).sum()) if len(S) and S[0] > 0 else 0
    return Found(U[:, :rank], Vh[:rank].T, U[:, rank:], S[:rank], S)


def by_eigh(C: Tensor, cut: float) -> Found:
    """Eigenvectors of the Gram matrix of the shorter side, in stages down the spectrum.

    A stage takes the singular values within SPAN of its largest, takes them out of C on both sides, and squares
    what is left. So values near the cut come out as exactly as rounding of C allows.
    """
    n, m = C.shape
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    values = [C.new_zeros(0)]
    basis, rest = _eye(n, C), C  # of the rows that are left, and C on them
    tail, floor = C.new_zeros(n), 0.0
    while basis.shape[1]:
        squares, Q = _eigh(rest @ rest.T)
        S, Q = squares.clamp_min(0).sqrt().flip(0), Q.flip(1)
        floor = floor if lefts else cut * float(S[0])
        count = int(((SPAN * S[0]).clamp_min(floor) < S).sum())
        tail = S[count:].clamp_max(floor)
        if count == 0:
            break
        rights.append(rest.T @ Q[:, :count] / S[:count])
        values.append(S[:count])
        rotated = basis @ Q if lefts else Q  # the first basis is the identity
        lefts.append(rotated[:, :count])
        basis = rotated[:, count:]
        rest = basis.T @ C
        for earlier in rights:
            rest = rest - (rest @ earlier) @ earlier.T
        if float(rest.norm()) <= floor:  # so is every singular value of it
            break
    U = torch.cat(lefts, dim=1) if lefts else C.new_zeros(n, 0)
    V = torch.cat(rights, dim=1) if rights else C.new_zeros(m, 0)
    core = torch.cat(values)
    return Found(U, V, basis, core, torch.cat([core, tail]))


ROUTES: dict[str, Callable[[Tensor, float], Found | None]] = {  # from the most special to the most general
    "qdwh": by_qdwh,
    "eigh": by_eigh,
    "svd": by_svd,
}


def _choose(C: Tensor, cut: float, most: int | None) -> str:
    """The route for a shape and a device; a coarse cut (of half-precision signals) as good as never leaves full rank.

    On a CPU one decomposition costs half of what the iteration's products do.
    """
    if len(C) <= SMALL:
        return "svd"
    full = cut < 1e-6 and (most is None or most >= len(C))
    return "qdwh" if C.device.type != "cpu" and full and len(C) >= LARGE else "eigh"


def polar_of_factors(X: Tensor, Y: Tensor, cut: float) -> Polar:
    """The polar factor of `X^T Y` from its M x d factors, M below both widths: two QRs and an M x M problem.

    `null` is empty: with few tokens it would be nearly everything. Complete it with `complete_thin`.
    """
    (Q_A, R_A), (Q_B, R_B) = torch.linalg.qr(X.double().T), torch.linalg.qr(Y.double().T)
    core = R_A @ R_B.T  # (M, M)
    small = polar(core, cut, "svd" if len(core) <= SMALL else None)
    nothing = core.new_zeros(min(X.shape[1], Y.shape[1]), 0)
    return replace(small, left=Q_A @ small.left, right=Q_B @ small.right, null=nothing, route=f"qr+{small.route}")


@dataclass(frozen=True, eq=False)
class CoordinateMap:
    """A map from source to target coordinates as factors: `left @ right.T`, plus the identity where it says so.

    The identity is rectangular, zero-padded or cropped at the end. Apply it; form it only for a look.
    """

    left: Tensor  # (d_A, p)
    right: Tensor  # (d_B, p)
    identity: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[0]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.left, self.right))

    def dense(self) -> Tensor:
        """R itself (d_A, d_B)."""
        R = self.left @ self.right.T
        return R + rectangular_identity(*self.shape, R.device) if self.identity else R

    def carry(self, tensor: Tensor, axis: int) -> Tensor:
        """`R^T tensor` along axis 0 or `tensor R` along the last, on the map's device and in its dtype."""
        tensor = tensor.to(device=self.left.device, dtype=self.left.dtype)
        moved = self.right @ (self.left.T @ tensor) if axis == 0 else (tensor @ self.left) @ self.right.T
        if self.identity:
            common = min(self.shape)
            moved.narrow(axis, 0, common).add_(tensor.narrow(axis, 0, common))
        return moved


def complete(found: Polar) -> CoordinateMap:
    """Fill the determined part up to an isometry: between the two null spaces, the one nearest to the identity.

    With N the null basis of the shorter side, the identity between the null spaces is N F, F = N^T E (I - V V^T),
    and its polar factor is N times that of F. Where F is blind (the identity pairs a direction with nothing),
    directions are paired in order.
    """
    if found.left.shape[0] > found.right.shape[0]:
        turned = complete(found.T)
        return CoordinateMap(turned.right, turned.left, turned.identity)
    U, V = found.left, found.right
    if found.rank in (0, len(U)):
        return CoordinateMap(U, V, identity=found.rank == 0)
    N = found.null if found.null.shape[1] else _null_of(U)
    seen_left, seen_right = _nearest(torch.nn.functional.pad(N.T, (0, len(V) - len(U))), V)
    left, right = torch.cat([U, N @ seen_left], dim=1), torch.cat([V, seen_right], dim=1)
    blind = len(U) - left.shape[1]
    if blind:
        left = torch.cat([left, complement(left, blind)], dim=1)
        right = torch.cat([right, complement(right, blind)], dim=1)
    return CoordinateMap(left, right)


def complete_thin(found: Polar) -> CoordinateMap:
    """`complete` where the rank r is far below both widths: the identity plus a correction of rank 2 r or so.

    Outside W_A = span(U, E V) the completed map is the identity E itself, and what that reaches is orthogonal to
    W_B = span(E^T W_A, V); from W_A to W_B it is a problem of size 2 r x 3 r.
    """
    if found.left.shape[0] > found.right.shape[0]:
        turned = complete_thin(found.T)
        return CoordinateMap(turned.right, turned.left, turned.identity)
    U, V = found.left, found.right
    n, m, r = len(U), len(V), U.shape[1]
    if r == 0 or 3 * r > n:
        return complete(found)
    W_A = _orthonormal(torch.cat([U, V[:n]], dim=1))
    beyond = _orthonormal(V[n:])  # W_B is W_A, padded, beside this in the rows that E does not reach
    p = W_A.shape[1]

    def spread(columns: Tensor) -> Tensor:
        return torch.cat([W_A @ columns[:p], beyond @ columns[p:]])

    u, v = W_A.T @ U, torch.cat([W_A.T @ V[:n], beyond.T @ V[n:]])  # in the coordinates of W_A and W_B
    null = _null_of(u)
    seen_left, seen_right = _nearest(torch.nn.functional.pad(null.T, (0, len(v) - p)), v)
    seen_left = null @ seen_left
    core = u @ v.T + seen_left @ seen_right.T
    core.diagonal().sub_(1.0)  # E itself
    left, right = W_A, spread(core.T)
    blind = p - r - seen_left.shape[1]
    if blind:
        mapped_left, mapped_right = W_A @ torch.cat([u, seen_left], 1), spread(torch.cat([v, seen_right], 1))
        left = torch.cat([left, _pivoted([(W_A, 1.0), (mapped_left, -1.0)], n, blind)], dim=1)
        padded = torch.nn.functional.pad(W_A, (0, 0, 0, m - n))
        free = [(padded, 1.0), (mapped_right, -1.0)]  # I - E^T E + E^T W_A W_A^T E - what is mapped already
        right = torch.cat([right, _pivoted(free, n, blind)], dim=1)
    return CoordinateMap(left, right, identity=True)


def _nearest(F: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the polar factor of F outside span(V), where F says something."""
    F = F - (F @ V) @ V.T
    size = _largest(F) if len(F) else 0.0
    if size <= BLIND:
        return F.new_zeros(len(F), 0), V.new_zeros(len(V), 0)
    found = polar(F, BLIND / size)
    return found.left, found.right


def complement(basis: Tensor, count: int) -> Tensor:
    """`count` orthonormal columns orthogonal to `basis`, which depend on its span only, not on its columns."""
    return _pivoted([(basis, -1.0)], 0, count)


def _pivoted(terms: list[tuple[Tensor, float]], identity_from: int, count: int) -> Tensor:
    """The first columns of a pivoted Cholesky factorisation of a projector, which is never formed.

    The projector is the identity on the rows from `identity_from` on, plus sign * B B^T for each term. The pivot is
    the first index near the largest, since among equals rounding would choose.
    """
    first = terms[0][0]
    weight = first.new_zeros(len(first))
    weight[identity_from:] = 1.0
    for basis, sign in terms:
        weight += sign * basis.square().sum(1)
    columns = first.new_zeros(len(first), count)
    for index in range(count):
        pivot = int((weight > 0.55 * weight.max()).nonzero()[0])
        column = first.new_zeros(len(first))
        if pivot >= identity_from:
            column[pivot] = 1.0
        for basis, sign in terms:
            column += sign * (basis @ basis[pivot])
        column -= columns @ columns[pivot]
        columns[:, index] = column / column[pivot].sqrt()
        weight = weight - columns[:, index].square()
    return columns


def side_by_side(
    tasks: Sequence[Callable[[], T]], device: torch.device | None, tensors: Callable[[T], Iterable[Tensor]]
) -> list[T]:
    """The results of independent tasks. On a CUDA device they run in threads, each with a stream of its own.

    A decomposition leaves most of a large GPU idle, so that several go at once. `tensors` names what of a result is
    used afterwards.
    """
    if device is None or device.type != "cuda" or len(tasks) < 2:
        return [task() for task in tasks]
    _load_linear_algebra(device)
    ready = torch.cuda.current_stream(device)

    def run(task: Callable[[], T]) -> T:
        if getattr(_own, "device", None) != device:
            _own.device, _own.stream = device, torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(_own.stream):
            _own.stream.wait_stream(ready)
            result = task()
            _own.stream.synchronize()
        for tensor in tensors(result):
            tensor.record_stream(ready)
        return result

    return list(_pool().map(run, tasks))


_own = threading.local()  # a thread's stream: memory is cached per stream, so streams are kept


@cache
def _load_linear_algebra(device: torch.device) -> None:
    """torch loads its GPU library at the first decomposition, and fails if two threads do so at once."""
    torch.linalg.qr(torch.eye(2, device=device, dtype=torch.float64))


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(STREAMS)


def rectangular_identity(rows: int, columns: int, device: torch.device | str | None = None) -> Tensor:
    """The map that "no alignment" means: the identity, zero-padded or cropped at the end of each axis."""
    return torch.eye(rows, columns, device=device, dtype=torch.float64)


def thin_svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Thin SVD; on a failure to converge (seen on accelerators) once more on the CPU."""
    try:
        U, S, Vh = torch.linalg.svd(matrix, full_matrices=False)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        U, S, Vh = (part.to(matrix.device) for part in torch.linalg.svd(matrix.cpu(), full_matrices=False))
    return U, S, Vh


def _eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    try:
        values, vectors = torch.linalg.eigh(matrix)
    except RuntimeError:
        values, vectors = (part.to(matrix.device) for part in torch.linalg.eigh(matrix.cpu()))
    return values, vectors


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns whose span holds the given ones."""
    Q: Tensor = torch.linalg.qr(columns).Q
    return Q


def _null_of(basis: Tensor) -> Tensor:
    """An orthonormal basis of the complement of orthonormal columns."""
    Q: Tensor = torch.linalg.qr(basis, mode="complete").Q
    return Q[:, basis.shape[1] :]


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, device=like.device, dtype=like.dtype)


def _gaussian(rows: int, columns: int, device: torch.device) -> Tensor:
    """Seeded, the same on every device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(device)
