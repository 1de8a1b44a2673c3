"""Similarity of two sets of paired tokens: linear CKA, mean cosine, change of length.

All numbers follow from float64 sums over tokens, so memory does not grow with the data. A number that the data do not
determine (a constant signal, different widths for a raw cosine, too few tokens) is NaN.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from tuneport.maps.statistics import CrossCovariance

NAN = float("nan")


class Similarity(CrossCovariance):
    """A cross-covariance with the linear CKA and the mean cosine of its paired tokens.

    Sums for CKA are around the mean of the first batch, so that a large common offset costs no digits.
    """

    def __init__(self, source_width: int, target_width: int, *, device: torch.device | str | None = None) -> None:
        super().__init__(source_width, target_width, device=device)
        self._agreement = TokenAgreement(source_width, target_width)
        self._shift: tuple[Tensor, Tensor] | None = None
        self._moments: dict[str, _Moments] = {}

    @property
    def cosine(self) -> float:
        """Mean cosine of the paired tokens without a map; NaN if the widths differ."""
        return self._agreement.cosine

    def update(self, source: Tensor, target: Tensor) -> None:
        super().update(source, target)
        self._agreement.update(source, target)
        X, Y = (signal.to(device=self.source_energy.device, dtype=torch.float64) for signal in (source, target))
        if self._shift is None:
            if not len(X):
                return
            self._shift = X.mean(0), Y.mean(0)
        X, Y = X - self._shift[0], Y - self._shift[1]
        for name, (left, right) in {"xy": (X, Y), "xx": (X, X), "yy": (Y, Y)}.items():
            self._moments.setdefault(name, _Moments(left.shape[1], right.shape[1], left.device)).update(left, right)

    def cka(self, *, debiased: bool = False) -> float:
        """Linear CKA, `|X^T Y|^2 / (|X^T X| |Y^T Y|)` of centred signals, from 0 to 1.

        The plain estimate is too high if there are few tokens for the width. `debiased` uses the unbiased estimator
        of HSIC in all three places; the result may be slightly below 0.
        """
        if not self._moments:
            return NAN
        xy, xx, yy = (self._moments[name].hsic(debiased=debiased) for name in ("xy", "xx", "yy"))
        return xy / math.sqrt(xx * yy) if xx > 0 and yy > 0 else NAN


class TokenAgreement:
    """The mean over paired tokens of their cosine and of the relative change of their length.

    `matrix` (d_A, d_B) is applied to the source's tokens first. Tokens that are zero on either side are left out.
    """

    def __init__(self, source_width: int, target_width: int, *, matrix: Tensor | None = None) -> None:
        self.source_energy, self.target_energy = torch.zeros(2, dtype=torch.float64)
        self.tokens = 0
        self._matrix = matrix
        self._comparable = matrix is not None or source_width == target_width
        self._cosines = self._changes = 0.0

    @property
    def cosine(self) -> float:
        """Mean of `cos(x_A R, x_B)`."""
        return self._cosines / self.tokens if self._comparable and self.tokens else NAN

    @property
    def direction(self) -> float:
        """Mean of `1 - cos(x_A R, x_B)`: the paper's directional shift."""
        return 1.0 - self.cosine

    @property
    def magnitude(self) -> float:
        """Mean of `| |x_B| - |x_A R| | / |x_A R|`: the paper's magnitude change."""
        return self._changes / self.tokens if self.tokens else NAN

    def update(self, source: Tensor, target: Tensor) -> None:
        """Add the tokens of one batch: source (M, d_A) and target (M, d_B), row i of both the same token."""
        X, Y = source.double(), target.double()
        self.source_energy = self.source_energy.to(X.device) + X.square().sum()
        self.target_energy = self.target_energy.to(Y.device) + Y.square().sum()
        if self._matrix is not None:
            X = X @ self._matrix.to(X)
        x, y = X.norm(dim=1), Y.norm(dim=1)
        nonzero = (x > 0) & (y > 0)
        x, y = x[nonzero], y[nonzero]
        self.tokens += len(x)
        self._changes += float(((y - x).abs() / x).sum())
        if self._comparable:
            self._cosines += float(((X[nonzero] * Y[nonzero]).sum(1) / (x * y)).sum())


class _Moments:
    """The sums that determine HSIC of two linear kernels, plain and unbiased."""

    def __init__(self, left: int, right: int, device: torch.device) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64, device=device)
        self._product, self._squares = zeros(left, right), zeros(3)
        self._sums, self._weighted = ([zeros(left), zeros(right)] for _ in range(2))
        self._tokens = 0

    def update(self, X: Tensor, Y: Tensor) -> None:
        self._product.addmm_(X.T, Y)
        x2, y2 = X.square().sum(1), Y.square().sum(1)
        for total, signal in zip(self._sums, (X, Y), strict=True):
            total += signal.sum(0)
        for total, signal, weight in zip(self._weighted, (X, Y), (y2, x2), strict=True):
            total += weight @ signal
        self._squares += torch.stack([x2.sum(), y2.sum(), x2 @ y2])
        self._tokens += len(X)

    def hsic(self, *, debiased: bool) -> float:
        """HSIC up to a factor that cancels in CKA. Unbiased: Song et al., of kernels whose diagonal is zero."""
        n, (sum_x, sum_y) = self._tokens, self._sums
        if not debiased:
            return float((self._product - torch.outer(sum_x, sum_y) / n).square().sum())
        if n < 4:
            return NAN
        x2, y2, x2y2 = self._squares
        trace = self._product.square().sum() - x2y2
        whole = (sum_x @ sum_x - x2) * (sum_y @ sum_y - y2) / ((n - 1) * (n - 2))
        rows = sum_x @ self._product @ sum_y - self._weighted[0] @ sum_x - self._weighted[1] @ sum_y + x2y2
        return float(trace + whole - 2 / (n - 2) * rows) / (n * (n - 3))


def cka(X: Tensor, Y: Tensor, *, debiased: bool = False) -> float:
    """Linear CKA of two sets of paired tokens (M, d_A) and (M, d_B).

    >>> X = torch.eye(5)[:, :3]
    >>> round(cka(X, 2 * X), 9)
    1.0
    """
    similarity = Similarity(X.shape[1], Y.shape[1], device=X.device)
    similarity.update(X, Y)
    return similarity.cka(debiased=debiased)


def token_cosine(X: Tensor, Y: Tensor, matrix: Tensor | None = None) -> float:
    """Mean cosine of paired tokens (M, d_A) and (M, d_B), the first mapped by `matrix` if given.

    >>> token_cosine(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([[2.0, 0.0], [0.0, 3.0]]))
    0.5
    """
    agreement = TokenAgreement(X.shape[1], Y.shape[1], matrix=matrix)
    agreement.update(X, Y)
    return agreement.cosine
