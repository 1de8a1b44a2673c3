"""How much of a cross-covariance is data, and how much rounding: the cut below which a direction is undetermined."""

from __future__ import annotations

import math

import torch

_FINE = 1e-6  # eps of signals that a model rounds at every step, not once
_ABOVE_NOISE = 4.0  # on tiny models and on trained ones, at most twice the noise was seen


def rank_cut(signal_dtype: torch.dtype, sum_dtype: torch.dtype, width: int) -> float:
    """The share of the largest singular value of C below which a direction counts as undetermined.

    Two floors: rounding of the sum (width * eps of its dtype), and rounding of the signals. A direction with
    relative amplitude a in both signals shows as a^2 in C, and is trustworthy while a stays above the signals'
    own error. Models amplify rounding by cancellation (a LayerNorm's backward pass leaves 1e-5, some 200 eps of
    float32, in a direction that is exactly zero), hence (256 eps)^2. Half-precision signals are rounded once,
    from sums in float32: (4 eps)^2. Where the widths differ, `noise` may lie higher.
    """
    eps = torch.finfo(signal_dtype).eps
    return max(width * torch.finfo(sum_dtype).eps, ((256 if eps < _FINE else 4) * eps) ** 2)


def noise(signal_dtype: torch.dtype, shape: tuple[int, int], tokens: int, size: float, whole: float) -> float:
    """What the rounding of one signal leaves in C, of norm `size`, as a share of that norm; `whole` is |X_A| |X_B|.

    A direction that is empty in the narrower signal (the mean of a gradient behind a LayerNorm) holds rounding, of
    eps |X_A| / sqrt(M d) in each token, and meets whatever the other signal has left: over all tokens, out of step,
    eps |X_A| |X_B| / sqrt(M d). With equal widths the other is empty there as well, and nothing shows.
    """
    if not size > 0 or not tokens:
        return 0.0
    return float(torch.finfo(signal_dtype).eps * whole / ((tokens * min(shape)) ** 0.5 * size))


def cut_above_noise(
    signal_dtype: torch.dtype, sum_dtype: torch.dtype, shape: tuple[int, int], tokens: int, size: float, whole: float
) -> float:
    """The rank cut of C, of norm `size`: above all noise, in steps of four, so that many maps have one in common."""
    cut = rank_cut(signal_dtype, sum_dtype, max(shape))
    if torch.finfo(signal_dtype).eps >= _FINE:
        return cut
    above = _ABOVE_NOISE * noise(signal_dtype, shape, tokens, size, whole) / cut
    return cut * 4.0 ** math.ceil(math.log(above, 4)) if above > 1 else cut
