"""Polar factors of cross-covariances: several routes to one answer, each certified before it is used.

A Gram matrix halves the digits, so some routes lift small singular values first, and others go down the spectrum in
stages. A result that fails its certificate is dropped for the next route; the last one is a plain SVD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import TuneportError, lacks_memory
from .certificate import Polar, certify, gaussian
from .halley import LIFT, QDWH, Nulls, iterate, largest_values, small_eigh
from .symmetric import orthonormal

SPAN = 1e-4  # singular values that one Gram matrix resolves, as a share of its largest: the map error is eps / SPAN^2
SMALL = 64  # up to this width an SVD is the fastest route
NEAR = 128  # up to this width the CPU is faster than an accelerator
ALONE = 1024  # up to this width a single matrix is decomposed, also on an accelerator
FEW = 12  # the block of subspace iteration is 1/FEW of the width; at most half of it may lie above the cut
NARROW, WIDER = 48, 6  # the same for the two blocks that an accelerator tries
TURNS = 12  # of subspace iteration
ROUNDED = 64  # times eps: the residual of eigenvectors on accelerators, several times that on a CPU
WIDE = 512  # from this width on, subspace iteration is tried first
LARGE = 2048  # from this width on, full rank or few directions are tried first
TOGETHER = 48  # the matrices of one batch take 1/TOGETHER of the memory, the work on them twelve times that


def polar(C: Tensor, cut: float, route: str | None = None, *, most: int | None = None) -> Polar:
    """The polar factor of C on the directions whose singular value exceeds `cut` times the largest.

    `route` is one of ROUTES, None to choose; without a certified result, the next one is tried. `most` is the largest
    rank that C can have, if known. Trap: `left` and `right` are unique only up to a common rotation.
    """
    if C.shape[0] > C.shape[1]:
        return polar(C.T, cut, route, most=most).T
    if C.device.type != "cpu" and len(C) <= NEAR and route is None:
        near = polar(C.cpu(), cut)
        tensors: dict[str, Any] = {name: part for name, part in vars(near).items() if isinstance(part, Tensor)}
        return replace(near, **{name: part.to(C.device) for name, part in tensors.items()})
    names = list(ROUTES)
    for name in names[names.index(route or _choose(C, cut, most)) :]:
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
    """Batched polar factors of equally shaped matrices (used on GPUs), each alone where it has no certified result.

    With `fill`, the iteration completes them to isometries where it can; `null` is empty there.
    """
    rows, columns = matrices[0].shape
    if rows > columns:
        return [found.T for found in polar_together([C.T for C in matrices], cut, fill=fill, budget=budget)]
    if len(matrices) < 4 and rows < ALONE:
        return [polar(C, cut) for C in matrices]
    results: dict[int, Polar] = {}
    each = max(together_bytes(matrices[0].device, budget) // (8 * rows * columns), 1)
    attempts: tuple[Nulls | None, ...] = ("both" if cut < SPAN else "any",)  # half precision leaves many null ones
    if rows >= LARGE:  # and few others
        attempts = ("none" if cut < SPAN else None, *attempts)
    for nulls in attempts:
        waiting = [index for index in range(len(matrices)) if index not in results]
        parts = -(-len(waiting) // each)
        for part in range(parts):
            indices = waiting[part::parts]
            stack = torch.stack([matrices[index] for index in indices])
            found = _iterate(stack, cut, nulls, fill)
            results.update({i: one for i, one in zip(indices, found, strict=True) if one and one.certificate.holds})
    return [results[i] if i in results else polar(C, cut, "eigh") for i, C in enumerate(matrices)]


def together_bytes(device: torch.device, budget: int | None = None) -> int:
    """The bytes of matrices in one batch of `polar_together`: a share of the device's memory, and of `budget`."""
    usual = 2**28
    if device.type == "cuda":  # a plan may be made on a machine without a GPU
        there = torch.cuda.is_available()
        usual = int(torch.cuda.get_device_properties(device).total_memory) // TOGETHER if there else 2**31
    return usual if budget is None else min(usual, max(budget // TOGETHER, 1))


def _iterate(C: Tensor, cut: float, nulls: Nulls | None, fill: bool = False) -> list[Polar | None]:
    try:
        return few_together(C, cut) if nulls is None else iterate(C, cut, nulls=nulls, fill=fill)
    except RuntimeError as error:  # small eigenvectors on an accelerator may fail
        if lacks_memory(error):
            raise
        return [None] * len(C)


def by_svd(C: Tensor, cut: float) -> Polar:
    """The reference: a thin SVD."""
    U, S, Vh = _decompose(torch.linalg.svd, C, full_matrices=False)
    rank = int((cut * S[0] < S).sum()) if len(S) and S[0] > 0 else 0
    return _decomposed("svd", C, U, Vh[:rank].T, S[:rank])


def by_few(C: Tensor, cut: float) -> Polar | None:
    """Subspace iteration with a narrow block, for few singular values above a cut that one Gram matrix resolves.

    The result is None unless the norm of C outside the block proves that all other values are below the cut.
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
            V = across @ Q[:, :count] / S[:count]
            return _decomposed("few", C, U, V, S[:count])
        block = image
    return None


def few_together(C: Tensor, cut: float) -> list[Polar | None]:
    """`by_few` of matrices (B, n, m) on an accelerator, with power steps in place of the norm outside the block.

    A narrow block first, then a wide one for the others; the decay of its spectrum says how many more turns are needed.
    """
    n, eps = C.shape[-2], torch.finfo(C.dtype).eps
    results: list[Polar | None] = [None] * len(C)
    indices, block, needed = torch.arange(len(C)), C.new_zeros(len(C), n, 0), 0
    for part, turns in ((NARROW, 6), (WIDER, 10), (WIDER, None)):
        width = n // part
        if block.shape[-1] != width:
            block = gaussian(n, width, C.device).expand(len(C), -1, -1)
        for _ in range(needed if turns is None else turns):
            block = orthonormal(C @ (C.mT @ block), 2)
        block = orthonormal(block, 1)
        across = C.mT @ block  # (B, m, width)
        squares, Q = small_eigh(across.mT @ across)
        S, Q = squares.clamp_min(0).sqrt().flip(-1), Q.flip(-1)
        block, image = block @ Q, across @ Q  # singular vectors, the right ones times their values
        floor = cut * S[:, :1]
        error = ((C @ image - block * S[:, None].square()).norm(dim=-2) * (floor < S)).amax(-1)
        beyond = largest_values(torch.baddbmm(C, block, image.mT, alpha=-1))
        limit, rate = ROUNDED * eps * C.square().sum((-2, -1)), (S[:, -1] / floor[:, 0]).square()
        more = ((limit / error).log() / rate.log()).ceil() + 1
        numbers = torch.stack([(floor < S).sum(-1), beyond / floor[:, 0], error / limit, rate, more]).T.tolist()
        waiting, needed = [], 0
        for place, (count, outside, missing, decay, further) in enumerate(numbers):
            rank = int(count)
            if 2 * rank <= width and outside < 1 and missing <= 1:
                U, core = block[place, :, :rank].clone(), S[place, :rank].clone()
                V = image[place, :, :rank] / core
                results[indices[place]] = _decomposed("few", C[place], U, V, core)
            elif part == NARROW or (2 * rank <= width and decay < 1 and further <= TURNS):
                waiting.append(place)
                needed = max(needed, 0 if part == NARROW else int(further))
        if not waiting:
            break
        C, block, indices = C[waiting], block[waiting], indices[waiting]
    return results


def by_eigh(C: Tensor, cut: float) -> Polar:
    """Eigenvectors of the Gram matrix of the shorter side, in stages down the spectrum.

    A stage removes the singular values within SPAN of its largest from C, so that later ones are as exact.
    """
    n, m = C.shape
    lefts: list[Tensor] = []
    rights: list[Tensor] = []
    values = [C.new_zeros(0)]
    basis, rest = torch.eye(n, device=C.device, dtype=C.dtype), C  # the remaining left directions, and C on them
    floor = 0.0
    while basis.shape[1]:
        squares, Q = _decompose(torch.linalg.eigh, rest @ rest.T)
        S, Q = squares.clamp_min(0).sqrt().flip(0), Q.flip(1)
        floor = floor if lefts else cut * float(S[0])
        count = int(((SPAN * S[0]).clamp_min(floor) < S).sum())
        if count == 0:
            break
        rights.append(rest.T @ Q[:, :count] / S[:count])
        values.append(S[:count])
        rotated = basis @ Q if lefts else Q  # the first basis is the identity
        lefts.append(rotated[:, :count])
        basis = rotated[:, count:]
        if floor >= SPAN * float(S[0]):  # all values above the cut are found
            break
        rest = basis.T @ C
        for earlier in rights:
            rest = rest - (rest @ earlier) @ earlier.T
        if float(rest.norm()) <= floor:  # a bound of all its singular values
            break
    V = torch.cat(rights, dim=1) if rights else C.new_zeros(m, 0)
    return _decomposed("eigh", C, torch.cat([*lefts, basis], dim=1), V, torch.cat(values))


def _decomposed(route: str, C: Tensor, basis: Tensor, V: Tensor, core: Tensor) -> Polar:
    """From singular vectors: the left ones (with the null directions), the right ones, the values above the cut."""
    U, null = basis[:, : len(core)], basis[:, len(core) :]
    return Polar(U, V, null, len(core), float(core.sum()), route, certify(C, U, V, core))


ROUTES: dict[str, Callable[[Tensor, float], Polar | None]] = {  # from the most special to the most general
    QDWH: lambda C, cut: _iterate(C[None], cut, "few")[0],
    LIFT: lambda C, cut: _iterate(C[None], cut, "any")[0],
    "few": by_few,
    "eigh": by_eigh,
    "svd": by_svd,
}


def _choose(C: Tensor, cut: float, most: int | None) -> str:
    """The route for a shape and a device: only a large matrix on an accelerator makes the iteration pay.

    It does not if one Gram matrix resolves the cut, as that of half-precision signals: many directions are below it.
    """
    if len(C) <= SMALL:
        return "svd"
    if C.device.type == "cpu":
        return "few" if len(C) >= WIDE else "eigh"
    if len(C) < ALONE or cut >= SPAN:
        return "eigh"
    return QDWH if most is None or most >= len(C) else LIFT


def polar_of_factors(X: Tensor, Y: Tensor, cut: float) -> Polar:
    """The polar factor of `X^T Y` by two QRs, from M x d factors; `null` is empty."""
    (Q_A, R_A), (Q_B, R_B) = torch.linalg.qr(X.double().T), torch.linalg.qr(Y.double().T)
    core = R_A @ R_B.T  # (M, M)
    small = polar(core, cut)
    left, right = thin_factors(small)
    nothing = core.new_zeros(min(X.shape[1], Y.shape[1]), 0)
    return replace(small, left=Q_A @ left, right=Q_B @ right, null=nothing, route=f"qr+{small.route}")


def thin_factors(found: Polar) -> tuple[Tensor, Tensor]:
    """Both factors of the determined part, `rank` columns each, also if one of them is the identity."""
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


def _decompose(decompose: Callable[..., Sequence[Tensor]], matrix: Tensor, **options: bool) -> Sequence[Tensor]:
    """`decompose(matrix)`, repeated on the CPU where it does not converge (seen on accelerators)."""
    try:
        return decompose(matrix, **options)
    except RuntimeError:  # torch.linalg.LinAlgError is one
        return [part.to(matrix.device) for part in decompose(matrix.cpu(), **options)]
