"""Polar factors of cross-covariances: several routes to one answer, each certified before it is used.

Torch only. A route finds the polar factor of C on the singular values above a cut; the choice among routes follows
shape and device. Squaring C (a Gram matrix) halves the digits, so one family of routes lifts small singular values by
a few steps of an iteration before it squares anything, and the other goes down the spectrum in stages. A result that
fails its certificate is thrown away for the next route, in the end a plain SVD; if that fails too, the solver raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import TuneportError
from .certificate import Certificate, certify, gaussian
from .halley import Iterated, iterate, iterate_split, largest_values

SPAN = 1e-4  # singular values that one Gram matrix resolves, as a share of its largest: the map error is eps / SPAN^2
SMALL = 64  # up to this width an SVD is as fast as anything
NEAR = 128  # up to this width the CPU is faster at it than any accelerator
ALONE = 1024  # up to this width a single matrix is decomposed, also on an accelerator
FEW = 12  # the block of subspace iteration is this part of the width, and half of it may count
TURNS = 12
WIDE = 512  # from this width on, it pays to look whether a few directions are all
LARGE = 2048  # from this width on, full rank is tried first
TOGETHER = 48  # matrices that an accelerator solves at once take this part of its memory, their work twelve times that


@dataclass(frozen=True, eq=False)
class Polar:
    """The determined part of a polar factor as factors, `left @ right.T`, with its evidence.

    `left` is None where it is the identity: R is `right.T` then. `total` is the sum of the singular values above the
    cut, `<R, C>`. `singular_values` are all min(d_A, d_B) of C, largest first, the first `rank` above the cut, those
    far below it estimates only; None where the route does not find them. `null` spans what the shorter side has
    left, (min(d_A, d_B), min - rank); it is empty where that is filled already, or nearly everything.
    """

    left: Tensor | None  # (d_A, rank)
    right: Tensor | None  # (d_B, rank); None in the transposed problem where `left` is
    null: Tensor
    rank: int
    total: float
    singular_values: Tensor | None
    route: str
    certificate: Certificate

    @property
    def T(self) -> Polar:  # noqa: N802 - as of a tensor
        """The polar factor of the transposed problem."""
        return replace(self, left=self.right, right=self.left)

    def to(self, device: torch.device) -> Polar:
        """The same on another device."""
        left, right, values = (
            None if x is None else x.to(device) for x in (self.left, self.right, self.singular_values)
        )
        return replace(self, left=left, right=right, null=self.null.to(device), singular_values=values)

    def dense(self) -> Tensor:
        """R itself (d_A, d_B)."""
        return product(self.left, self.right)


def product(left: Tensor | None, right: Tensor | None) -> Tensor:
    """`left @ right.T`, one of which may be None for the identity."""
    if left is None:
        assert right is not None
        return right.T
    return left if right is None else left @ right.T


def polar(C: Tensor, cut: float, route: str | None = None, *, most: int | None = None) -> Polar:
    """The polar factor of C on the directions whose singular value exceeds `cut` times the largest.

    `route` is one of ROUTES; None chooses. Where it cannot serve, or its result is not certified, the next one of
    ROUTES does. `most` is the largest rank that C can have, where known. C must be float64 and finite.
    Trap: `left` and `right` mean something only together.
    """
    if C.shape[0] > C.shape[1]:
        return polar(C.T, cut, route, most=most).T
    if C.device.type != "cpu" and len(C) <= NEAR and route is None:
        return polar(C.cpu(), cut).to(C.device)
    names = list(ROUTES)
    for name in names[names.index(route or _choose(C, most)) :]:
        found = ROUTES[name](C, cut)
        if found is not None and found.certificate.holds:
            return found
    assert found is not None
    raise TuneportError(
        f"no route gives a certified polar factor of a {tuple(C.shape)} cross-covariance: orthogonality defect "
        f"{found.certificate.orthogonality:.1e}, stationarity {found.certificate.stationarity:.1e}. Check the "
        "calibration data."
    )


def polar_together(
    matrices: Sequence[Tensor], cut: float, *, fill: bool = False, budget: int | None = None
) -> list[Polar]:
    """Batched polar factors of equally shaped matrices (used on GPUs).

    With `fill`, the iteration completes them to isometries where it can; `null` is empty there. A batch holds at most
    `together_bytes` of a device with `budget` bytes. A matrix without a certified result goes through `polar` alone.
    """
    rows, columns = matrices[0].shape
    if rows > columns:
        return [found.T for found in polar_together([C.T for C in matrices], cut, fill=fill, budget=budget)]
    if len(matrices) < 4 and rows < ALONE:
        return [polar(C, cut) for C in matrices]
    results: dict[int, Polar] = {}
    each = max(together_bytes(matrices[0].device, budget) // (8 * rows * columns), 1)
    looks = (False, True) if rows >= LARGE else (True,)  # where a look for null directions costs more than a miss
    for look in looks:
        waiting = [index for index in range(len(matrices)) if index not in results]
        parts = -(-len(waiting) // each)
        for part in range(parts):
            indices = waiting[part::parts]
            stack = torch.stack([matrices[index] for index in indices])
            found = _attempt(iterate, stack, cut, fill=fill, look=look, split=True)
            results.update({i: one for i, one in zip(indices, found, strict=True) if one and one.certificate.holds})
    return [results[i] if i in results else polar(C, cut, "eigh") for i, C in enumerate(matrices)]


def together_bytes(device: torch.device, budget: int | None = None) -> int:
    """The bytes of matrices in one batch of `polar_together`: a share of the device's memory, and of `budget`."""
    usual = 2**28
    if device.type == "cuda":  # which a plan may be for on a machine without one
        there = torch.cuda.is_available()
        usual = int(torch.cuda.get_device_properties(device).total_memory) // TOGETHER if there else 2**31
    return usual if budget is None else min(usual, max(budget // TOGETHER, 1))


def _attempt(way: Callable[..., list[Iterated | None]], C: Tensor, cut: float, **options: bool) -> list[Polar | None]:
    try:
        found = way(C, cut, **options)
    except RuntimeError as error:  # small eigenvectors on an accelerator may fail
        if isinstance(error, torch.OutOfMemoryError):
            raise
        found = [None] * len(C)
    return [_polar_of(one) if one is not None else None for one in found]


def _polar_of(one: Iterated) -> Polar:
    name = LIFT if one.split else QDWH
    return Polar(None, one.matrix.T, one.null, one.rank, one.total, None, name, one.certificate)


def by_qdwh(C: Tensor, cut: float) -> Polar | None:
    """The weighted Halley iteration, see `iterate`: products only; for matrices with a few null directions at most."""
    return _attempt(iterate, C[None], cut)[0]


def by_lift(C: Tensor, cut: float) -> Polar | None:
    """The same, with a projector onto what lies above the cut, see `iterate_split`; for any rank."""
    return _attempt(iterate_split, C[None], cut)[0]


def by_svd(C: Tensor, cut: float) -> Polar:
    """The reference: a thin SVD."""
    U, S, Vh = _decompose(torch.linalg.svd, C, full_matrices=False)
    rank = int((cut * S[0] < S).sum()) if len(S) and S[0] > 0 else 0
    return _decomposed("svd", C, U, Vh[:rank].T, S[:rank], S)


def by_few(C: Tensor, cut: float) -> Polar | None:
    """Subspace iteration with a narrow block, where few singular values lie above a cut that one Gram matrix resolves.

    It ends when the vectors above the cut are as exact as eigenvectors of the Gram matrix would be, and serves only
    where all else is proven to lie below the cut: what the block leaves of C, and its own values below the cut, are
    together no larger. Gradients of a classifier have some ten directions, one per class.
    """
    n = len(C)
    width = n // FEW
    if cut < SPAN or width < 8:
        return None
    whole = float(C.square().sum())
    block = gaussian(n, width, C.device)
    for turn in range(TURNS):
        block = torch.linalg.qr(block).Q
        across = C.T @ block  # (m, width)
        squares, Q = _decompose(torch.linalg.eigh, across.T @ across)
        S, Q = squares.clamp_min(0).sqrt().flip(0), Q.flip(1)
        floor = cut * float(S[0])
        count = int((floor < S).sum())
        beyond = max(whole - float(squares.sum()), 0.0)
        if 2 * count > width or (turn > 1 and beyond + float(S[count]) ** 2 > floor**2):
            return None
        image = C @ across
        U = block @ Q[:, :count]
        error = image @ Q[:, :count] - U * S[:count].square()
        if float(error.norm()) <= 8 * torch.finfo(C.dtype).eps * whole and beyond + float(S[count]) ** 2 <= floor**2:
            below = (beyond / torch.arange(1, n - width + 1, device=C.device, dtype=C.dtype)).sqrt()
            values = torch.cat([S, below.clamp_max(float(S[-1]))])
            V = across @ Q[:, :count] / S[:count]
            core, nothing = S[:count], C.new_zeros(n, 0)
            return Polar(U, V, nothing, count, float(core.sum()), values, "few", certify(C, U, V, core))
        block = image
    return None


def by_eigh(C: Tensor, cut: float) -> Polar:
    """Eigenvectors of the Gram matrix of the shorter side, in stages down the spectrum.

    A stage takes the singular values within SPAN of its largest, takes them out of C on both sides, and squares
    what is left. So values near the cut come out as exactly as rounding of C allows.
    """
    n, m = C.shape
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    values = [C.new_zeros(0)]
    basis, rest = torch.eye(n, device=C.device, dtype=C.dtype), C  # of the rows that are left, and C on them
    tail, floor = C.new_zeros(n), 0.0
    while basis.shape[1]:
        squares, Q = _decompose(torch.linalg.eigh, rest @ rest.T)
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
        if floor >= SPAN * float(S[0]):  # nothing that is left lies above the cut
            break
        rest = basis.T @ C
        for earlier in rights:
            rest = rest - (rest @ earlier) @ earlier.T
        if float(rest.norm()) <= floor:  # so is every singular value of it
            break
    V = torch.cat(rights, dim=1) if rights else C.new_zeros(m, 0)
    core = torch.cat(values)
    return _decomposed("eigh", C, torch.cat([*lefts, basis], dim=1), V, core, torch.cat([core, tail]))


def _decomposed(route: str, C: Tensor, basis: Tensor, V: Tensor, core: Tensor, values: Tensor) -> Polar:
    """From singular vectors: a basis of all rows, the right ones, and the values above the cut."""
    U, null = basis[:, : len(core)], basis[:, len(core) :]
    return Polar(U, V, null, len(core), float(core.sum()), values, route, certify(C, U, V, core))


QDWH, LIFT = "qdwh", "lift"
ROUTES: dict[str, Callable[[Tensor, float], Polar | None]] = {  # from the most special to the most general
    QDWH: by_qdwh,
    LIFT: by_lift,
    "few": by_few,
    "eigh": by_eigh,
    "svd": by_svd,
}


def _choose(C: Tensor, most: int | None) -> str:
    """The route for a shape and a device.

    On a CPU one decomposition costs half of what the iteration's products do, and on an accelerator a single matrix
    must be large to keep it busy.
    """
    if len(C) <= SMALL:
        return "svd"
    if C.device.type == "cpu" or len(C) < ALONE:
        return "few" if C.device.type == "cpu" and len(C) >= WIDE else "eigh"
    return QDWH if most is None or most >= len(C) else LIFT


def polar_of_factors(X: Tensor, Y: Tensor, cut: float) -> Polar:
    """The polar factor of `X^T Y` from its M x d factors, M below both widths: two QRs and an M x M problem.

    `null` is empty: with few tokens it would be nearly everything. Complete it with `complete_thin`.
    """
    (Q_A, R_A), (Q_B, R_B) = torch.linalg.qr(X.double().T), torch.linalg.qr(Y.double().T)
    core = R_A @ R_B.T  # (M, M)
    small = polar(core, cut)
    left, right = thin_factors(small)
    nothing = core.new_zeros(min(X.shape[1], Y.shape[1]), 0)
    return replace(small, left=Q_A @ left, right=Q_B @ right, null=nothing, route=f"qr+{small.route}")


def thin_factors(found: Polar) -> tuple[Tensor, Tensor]:
    """Both factors of the determined part, rank columns each, also where a route gave the whole matrix."""
    if found.right is None:
        left, right = thin_factors(found.T)
        return right, left
    if found.left is not None:
        return found.left, found.right
    if not found.null.shape[1]:
        return torch.eye(found.rank, device=found.right.device, dtype=found.right.dtype), found.right
    left = null_of(found.null)
    return left, found.right @ left


def null_of(basis: Tensor) -> Tensor:
    """An orthonormal basis of the complement of orthonormal columns."""
    Q: Tensor = torch.linalg.qr(basis, mode="complete").Q
    return Q[:, basis.shape[1] :]


def largest_value(C: Tensor) -> float:
    """The largest singular value, or a little less."""
    return float(largest_values(C[None]))


def _decompose(decompose: Callable[..., Sequence[Tensor]], matrix: Tensor, **options: bool) -> Sequence[Tensor]:
    """`decompose(matrix)`, repeated on the CPU where it does not converge (seen on accelerators)."""
    try:
        return decompose(matrix, **options)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return [part.to(matrix.device) for part in decompose(matrix.cpu(), **options)]
