"""Polar factors of cross-covariances: several routes to one answer, each certified before it is used.

Torch only. A route finds the singular triplets of C above a cut, or enough of them to know the polar factor; the
choice among routes follows shape and device. Squaring C (a Gram matrix) halves the digits, so the Gram route goes
down the spectrum in stages, each of which squares only what is left. A result that fails its certificate is
thrown away for a plain SVD; if that fails too, the solver raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .errors import TuneportError

SPAN = 1e-4  # singular values that one Gram matrix resolves, as a share of its largest: the map error is eps / SPAN^2
ORTHOGONALITY = 1e-6  # the certificate's limits, see Certificate
STATIONARITY = 1e-6
SMALL = 64  # below this width an SVD is as fast as anything
BLIND = 1e-8  # a singular value of the projected identity that says nothing
STREAMS = 4  # decompositions that run side by side on a GPU
_PROBES = 8

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

    `singular_values` are all min(d_A, d_B) of C, largest first; the first `rank` lie above the cut. Those far
    below it may be upper bounds only. `null` spans what the shorter side has left, (min(d_A, d_B), min - rank).
    """

    left: Tensor  # (d_A, rank)
    right: Tensor  # (d_B, rank)
    singular_values: Tensor
    null: Tensor
    route: str
    certificate: Certificate

    @property
    def rank(self) -> int:
        return self.left.shape[1]


Triplets = tuple[Tensor, Tensor, Tensor, Tensor]  # U (n, r), S of all, V (m, r), null basis of the rows (n, n - r)


def polar(C: Tensor, cut: float, route: str | None = None) -> Polar:
    """The polar factor of C on the directions whose singular value exceeds `cut` times the largest.

    `route` is one of ROUTES; None chooses. C must be float64 and finite. Trap: singular vectors of equal
    singular values are not unique, so `left` and `right` mean something only together.
    """
    turned = C.shape[0] > C.shape[1]
    wide = C.T if turned else C
    tried = route or _choose(wide)
    for name in dict.fromkeys((tried, "svd")):
        found = ROUTES[name](wide, cut)
        if found is None:
            continue
        U, S, V, null = found
        certificate = certify(wide, U, S[: U.shape[1]], V)
        if certificate.holds:
            left, right = (V, U) if turned else (U, V)
            return Polar(left, right, S, null, name, certificate)
    raise TuneportError(
        f"no route gives a certified polar factor of a {tuple(C.shape)} cross-covariance: orthogonality defect "
        f"{certificate.orthogonality:.1e}, stationarity {certificate.stationarity:.1e}. Check the calibration data."
    )


def certify(C: Tensor, U: Tensor, S: Tensor, V: Tensor) -> Certificate:
    """Probe the factors of a polar factor; costs a few matrix-vector products."""
    rank = U.shape[1]
    if rank == 0:
        return Certificate(0.0, 0.0, STATIONARITY)
    probe = _gaussian(rank, _PROBES, C.device)
    root = S.sqrt()[:, None]
    turned = U.T @ (C @ (V @ (probe / root)))
    found = torch.stack(
        [
            (U.T @ (U @ probe) - probe).square().mean(),
            (V.T @ (V @ probe) - probe).square().mean(),
            (turned / root - probe).square().mean(),
            100 * torch.finfo(C.dtype).eps * S[0] / S[-1],
        ]
    ).tolist()
    return Certificate(max(found[0], found[1]) ** 0.5, found[2] ** 0.5, STATIONARITY + found[3])


def by_svd(C: Tensor, cut: float) -> Triplets:
    """The reference: a thin SVD."""
    U, S, Vh = thin_svd(C)
    rank = int((cut * S[0] < S).sum()) if len(S) and S[0] > 0 else 0
    return U[:, :rank], S, Vh[:rank].T, U[:, rank:]


def by_eigh(C: Tensor, cut: float) -> Triplets:
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
    return U, torch.cat([*values, tail]), V, basis


ROUTES: dict[str, Callable[[Tensor, float], Triplets | None]] = {"svd": by_svd, "eigh": by_eigh}


def _choose(C: Tensor) -> str:
    return "svd" if min(C.shape) <= SMALL else "eigh"


def polar_of_factors(X: Tensor, Y: Tensor, cut: float) -> Polar:
    """The polar factor of `X^T Y` from its M x d factors, M below both widths: two QRs and an M x M problem.

    `null` is empty: with few tokens it would be nearly everything. Complete it with `complete_thin`.
    """
    (Q_A, R_A), (Q_B, R_B) = torch.linalg.qr(X.double().T), torch.linalg.qr(Y.double().T)
    core = R_A @ R_B.T  # (M, M)
    small = polar(core, cut, "svd" if len(core) <= SMALL else None)
    return Polar(
        Q_A @ small.left,
        Q_B @ small.right,
        small.singular_values,
        X.new_zeros(min(X.shape[1], Y.shape[1]), 0, dtype=torch.float64),
        f"qr+{small.route}",
        small.certificate,
    )


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
        turned = complete(
            Polar(found.right, found.left, found.singular_values, found.null, found.route, found.certificate)
        )
        return CoordinateMap(turned.right, turned.left, turned.identity)
    U, V = found.left, found.right
    if found.rank in (0, len(U)):
        return CoordinateMap(U, V, identity=found.rank == 0)
    N = found.null if found.null.shape[1] else _null_of(U)
    F = torch.nn.functional.pad(N.T, (0, len(V) - len(U)))
    F = F - (F @ V) @ V.T
    nearest = polar(F, BLIND / max(float(F.norm()), BLIND)) if bool(F.any()) else None
    lefts, rights = [U], [V]
    if nearest is not None:
        seen = nearest.singular_values[: nearest.rank] > BLIND
        lefts.append(N @ nearest.left[:, seen])
        rights.append(nearest.right[:, seen])
    left, right = torch.cat(lefts, dim=1), torch.cat(rights, dim=1)
    blind = len(U) - left.shape[1]
    if blind:
        left = torch.cat([left, complement(left, blind)], dim=1)
        right = torch.cat([right, complement(right, blind)], dim=1)
    return CoordinateMap(left, right)


def complete_thin(found: Polar) -> CoordinateMap:
    """`complete` where the rank r is far below both widths: the identity plus a correction of rank 2 r or so.

    Outside W_A = span(U, E V) the completed map is the identity E itself, whose image is orthogonal to
    W_B = span(E^T W_A, V); between W_A and W_B it is a problem of size 2 r x 3 r.
    """
    if found.left.shape[0] > found.right.shape[0]:
        turned = complete_thin(
            Polar(found.right, found.left, found.singular_values, found.null, found.route, found.certificate)
        )
        return CoordinateMap(turned.right, turned.left, turned.identity)
    U, V = found.left, found.right
    n, m, r = len(U), len(V), U.shape[1]
    if r == 0 or 3 * r > n:
        return complete(found)
    W_A = _orthonormal(torch.cat([U, V[:n]], dim=1))
    padded = torch.nn.functional.pad(W_A, (0, 0, 0, m - n))  # E^T W_A
    W_B = _orthonormal(torch.cat([padded, V], dim=1))
    u, v, same = W_A.T @ U, W_B.T @ V, padded.T @ W_B  # U, V and E in these coordinates
    inside = Polar(u, v, found.singular_values, _null_of(u), found.route, found.certificate)
    F = inside.null.T @ same
    F = F - (F @ v) @ v.T
    nearest = polar(F, BLIND / max(float(F.norm()), BLIND)) if F.shape[0] and bool(F.any()) else None
    core = u @ v.T - same
    seen_left, seen_right = u.new_zeros(len(u), 0), v.new_zeros(len(v), 0)
    if nearest is not None:
        seen = nearest.singular_values[: nearest.rank] > BLIND
        seen_left, seen_right = inside.null @ nearest.left[:, seen], nearest.right[:, seen]
        core = core + seen_left @ seen_right.T
    left, right = W_A, W_B @ core.T
    blind = len(u) - r - seen_left.shape[1]
    if blind:
        mapped_left, mapped_right = W_A @ torch.cat([u, seen_left], 1), W_B @ torch.cat([v, seen_right], 1)
        left = torch.cat([left, _pivoted([(W_A, 1.0), (mapped_left, -1.0)], n, blind)], dim=1)
        free = [(padded, 1.0), (mapped_right, -1.0)]  # I - E^T E + E^T W_A W_A^T E - what is mapped already
        right = torch.cat([right, _pivoted(free, n, blind)], dim=1)
    return CoordinateMap(left, right, identity=True)


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
    ready = torch.cuda.current_stream(device)

    def run(task: Callable[[], T]) -> T:
        with torch.cuda.device(device), torch.cuda.stream(stream := torch.cuda.Stream(device)):
            stream.wait_stream(ready)
            result = task()
            stream.synchronize()
        for tensor in tensors(result):
            tensor.record_stream(ready)
        return result

    with ThreadPoolExecutor(min(STREAMS, len(tasks))) as pool:
        return list(pool.map(run, tasks))


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
