"""Products and inverses of many symmetric matrices (B, n, m) in float64, mostly by plain products.

A GPU runs products at full speed, factorisations not: Cholesky factors are computed by halves down to small leaves.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_PARTS = 4  # into which a triangle is divided
_PART = 128  # the least width of a part with its own product
_LEAF = 192  # up to this width an inverse is not divided
_HALF = 384  # from this width on, a triangular factor is multiplied by halves
_FEW = 9  # fewer matrices than this get their Cholesky factors from the library
_ONE_BY_ONE = 1024  # from this width on, the library is faster on a few matrices one by one

Triangular = Literal["lower X", "upper Y", "lower Y"]


def lower_product(X: Tensor, Y: Tensor) -> Tensor:
    """The lower triangle of X Y^T; entries above the diagonal blocks are undefined."""
    n = X.shape[-2]
    if n < _PARTS * _PART:
        return X @ Y.mT
    whole = X.new_empty(*X.shape[:-1], n)
    for start, stop in _parts(n):
        torch.bmm(X[..., start:, :], Y[..., start:stop, :].mT, out=whole[..., start:, start:stop])
    return whole


def symmetric_product(X: Tensor, Y: Tensor) -> Tensor:
    """X Y^T, if it is known to be symmetric."""
    whole = lower_product(X, Y)
    if whole.shape[-1] >= _PARTS * _PART:
        for start, stop in _parts(whole.shape[-1]):
            whole[..., start:stop, stop:] = whole[..., stop:, start:stop].mT
    return whole


def inverse(A: Tensor) -> Tensor:
    """The inverse of a positive definite matrix, in place, by its Cholesky factor; only its lower triangle is read."""
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
    """The inverse of the Cholesky factor, lower triangular, and which matrices have none."""
    whole = torch.zeros_like(A, memory_format=torch.contiguous_format)
    if len(A) >= _FEW:
        return whole, _put_inverse_root(A, whole)
    each = A.split(1) if A.shape[-1] >= _ONE_BY_ONE else (A,)
    found = [torch.linalg.cholesky_ex(one) for one in each]
    for (root, _), into in zip(found, whole.split(len(each[0])), strict=True):
        _put_triangular_inverse(root, into)
    return whole, torch.cat([info for _, info in found]) != 0


def orthonormal(columns: Tensor, rounds: int) -> Tensor:
    """Columns (B, n, k) made orthonormal by Cholesky factors; each round improves the condition up to a factor 1e6."""
    for _ in range(rounds):
        gram = columns.mT @ columns
        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        shift = 4 * len(columns[0]) * torch.finfo(columns.dtype).eps * diagonal.amax(-1, keepdim=True)
        diagonal.add_(shift)
        columns = columns @ inverse_root(gram)[0].mT
    gram = columns.mT @ columns  # the identity, up to the shift e: the next line leaves e^2
    return columns @ gram.mul_(-0.5).add_(1.5 * torch.eye(gram.shape[-1], device=gram.device, dtype=gram.dtype))


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
    below = _multiply(A[..., k:, :k], first.mT, "upper Y")
    rest = A[..., k:, k:].clone()
    for start, stop in _parts(n - k) if n - k >= _HALF else [(0, n - k)]:
        rest[..., start:, start:stop].baddbmm_(below[..., start:, :], below[..., start:stop, :].mT, alpha=-1)
    worse = _put_inverse_root(rest, second)
    _multiply(_multiply(second, below, "lower X").neg_(), first, "lower Y", out=corner)
    return bad | worse


def _multiply(X: Tensor, Y: Tensor, triangular: Triangular, out: Tensor | None = None) -> Tensor:
    """X Y, without the products with the zero half of the triangular factor."""
    if out is None:
        out = X.new_empty(*X.shape[:-1], Y.shape[-1])
    h = X.shape[-1] // 2
    if X.shape[-1] < _HALF:
        torch.bmm(X, Y, out=out)
    elif triangular == "lower X":
        torch.bmm(X[..., :h, :h], Y[..., :h, :], out=out[..., :h, :])
        torch.bmm(X[..., h:, :], Y, out=out[..., h:, :])
    elif triangular == "upper Y":
        torch.bmm(X[..., :h], Y[..., :h, :h], out=out[..., :h])
        torch.bmm(X, Y[..., h:], out=out[..., h:])
    else:
        torch.bmm(X, Y[..., :h], out=out[..., :h])
        torch.bmm(X[..., h:], Y[..., h:, h:], out=out[..., h:])
    return out


def _put_triangular_inverse(root: Tensor, into: Tensor) -> None:
    """Invert lower triangular matrices: all diagonal blocks at once, then pairs of blocks by products."""
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
