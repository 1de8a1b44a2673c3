"""Products and inverses of many symmetric matrices at once, of which half is enough: nearly all by plain products.

Torch only. Matrices are (B, n, m) in float64. A product runs at full speed on a GPU, a factorisation does not: Cholesky
factors are made, and inverted, by halves down to small leaves. What is known to be zero, or the mirror of something,
is left out in a few large parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 4  # into which a triangle is divided
_PART = 128  # the least width of a part that is worth a product of its own
_LEAF = 192  # width of an inverse that is not divided any more
_HALF = 384  # from this width on, a triangular factor is multiplied by halves
_FEW = 9  # matrices, of which fewer have their Cholesky factors from the library
_ONE_BY_ONE = 1024  # from this width on, the library makes a few of them faster one by one


def lower_product(X: Tensor, Y: Tensor) -> Tensor:
    """The lower triangle of X Y^T; what stands above the diagonal blocks is not set."""
    n = X.shape[-2]
    if n < _PARTS * _PART:
        return X @ Y.mT
    whole = X.new_empty(*X.shape[:-1], n)
    for start, stop in _parts(n):
        torch.bmm(X[..., start:, :], Y[..., start:stop, :].mT, out=whole[..., start:, start:stop])
    return whole


def symmetric_product(X: Tensor, Y: Tensor) -> Tensor:
    """X Y^T where it is known to be symmetric."""
    whole = lower_product(X, Y)
    if whole.shape[-1] >= _PARTS * _PART:
        for start, stop in _parts(whole.shape[-1]):
            whole[..., start:stop, stop:] = whole[..., stop:, start:stop].mT
    return whole


def inverse(A: Tensor) -> Tensor:
    """The inverse of a positive definite matrix of which the lower triangle is read, in its place.

    By way of the inverse of its Cholesky factor: halving A itself would square its condition.
    """
    root, _ = inverse_root(A)
    n = A.shape[-1]
    if n < _PARTS * _PART:
        return torch.bmm(root.mT, root, out=A)
    for start, stop in _parts(n):
        rows = A[..., start:stop, :stop]
        torch.bmm(root[..., start:, start:stop].mT, root[..., start:, :stop], out=rows)
        A[..., :start, start:stop] = rows[..., :start].mT
    return A


def inverse_root(A: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of the Cholesky factor, lower triangular, and where there is none."""
    whole = torch.zeros_like(A, memory_format=torch.contiguous_format)
    if len(A) >= _FEW:
        return whole, _put_inverse_root(A, whole)
    each = A.split(1) if A.shape[-1] >= _ONE_BY_ONE else (A,)
    found = [torch.linalg.cholesky_ex(one) for one in each]
    for (root, _), into in zip(found, whole.split(len(each[0])), strict=True):
        _put_triangular_inverse(root, into)
    return whole, torch.cat([info for _, info in found]) != 0


def _parts(n: int) -> list[tuple[int, int]]:
    size = -(-n // _PARTS)
    return [(start, min(start + size, n)) for start in range(0, n, size)]


def _put_inverse_root(A: Tensor, into: Tensor) -> Tensor:
    n = A.shape[-1]
    if n <= _LEAF:
        root, info = torch.linalg.cholesky_ex(A)
        into.copy_(_triangular_inverse(root))
        failed: Tensor = info != 0
        return failed
    k = n // 2
    first, corner, second = into[..., :k, :k], into[..., k:, :k], into[..., k:, k:]
    bad = _put_inverse_root(A[..., :k, :k], first)
    below = _times_upper(A[..., k:, :k], first.mT)
    rest = A[..., k:, k:].clone()
    for start, stop in _parts(n - k) if n - k >= _HALF else [(0, n - k)]:
        rest[..., start:, start:stop].baddbmm_(below[..., start:, :], below[..., start:stop, :].mT, alpha=-1)
    worse = _put_inverse_root(rest, second)
    _put_times_lower(_lower_times(second, below).neg_(), first, corner)
    return bad | worse


def _times_upper(M: Tensor, T: Tensor) -> Tensor:
    """M T for an upper triangular T."""
    n = T.shape[-1]
    if n < _HALF:
        return M @ T
    h = n // 2
    whole = M.new_empty(M.shape)
    torch.bmm(M[..., :h], T[..., :h, :h], out=whole[..., :h])
    torch.bmm(M, T[..., h:], out=whole[..., h:])
    return whole


def _lower_times(T: Tensor, M: Tensor) -> Tensor:
    """T M for a lower triangular T."""
    n = T.shape[-1]
    if n < _HALF:
        return T @ M
    h = n // 2
    whole = M.new_empty(M.shape)
    torch.bmm(T[..., :h, :h], M[..., :h, :], out=whole[..., :h, :])
    torch.bmm(T[..., h:, :], M, out=whole[..., h:, :])
    return whole


def _put_times_lower(M: Tensor, T: Tensor, into: Tensor) -> None:
    """M T for a lower triangular T."""
    n = T.shape[-1]
    if n < _HALF:
        torch.bmm(M, T, out=into)
        return
    h = n // 2
    torch.bmm(M, T[..., :h], out=into[..., :h])
    torch.bmm(M[..., h:], T[..., h:, h:], out=into[..., h:])


def _put_triangular_inverse(root: Tensor, into: Tensor) -> None:
    """Of lower triangular matrices: all blocks on the diagonal at once, then by products, pair by pair."""
    n = root.shape[-1]
    size, odd = min(_LEAF, n), n % min(_LEAF, n)
    starts = range(0, n - odd, size)
    blocks = _triangular_inverse(torch.stack([root[..., at : at + size, at : at + size] for at in starts]))
    for at, block in zip(starts, blocks, strict=True):
        into[..., at : at + size, at : at + size] = block
    if odd:
        into[..., -odd:, -odd:] = _triangular_inverse(root[..., -odd:, -odd:])
    while size < n:
        for at in range(0, n - size, 2 * size):
            first, second = slice(at, at + size), slice(at + size, at + 2 * size)
            below = into[..., second, second] @ root[..., second, first]
            into[..., second, first] = below.neg_() @ into[..., first, first]
        size *= 2


def _triangular_inverse(root: Tensor) -> Tensor:
    eye = torch.eye(root.shape[-1], device=root.device, dtype=root.dtype).expand_as(root)
    found: Tensor = torch.linalg.solve_triangular(root, eye, upper=False)
    return found
