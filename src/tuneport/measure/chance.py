"""How much of a count or a difference may be chance: intervals, and tests of paired samples.

SciPy is imported on use: its statistics take a second to load.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05  # a difference that chance makes less often than this is clear
LEAST = 100  # samples from which a guess can be told from skill


def share_interval(right: int, samples: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of samples (Wilson's).

    >>> [round(end, 3) for end in share_interval(45, 50)]
    [0.786, 0.957]
    """
    from scipy.stats import binomtest

    interval = binomtest(right, samples).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def tail(count: int, least: int, share: float) -> float:
    """Return the probability that at least `least` of `count` independent events of this probability happen.

    >>> round(tail(3, 2, 0.5), 9)
    0.5
    """
    from scipy.stats import binom

    return float(binom.sf(least - 1, count, share))


def direction(better: int, worse: int) -> int:
    """Return 1 if clearly more samples become better than worse, -1 if clearly fewer, 0 if chance could do it.

    The test is McNemar's exact one.
    """
    from scipy.stats import binomtest

    if better == worse or binomtest(better, better + worse).pvalue >= LEVEL:
        return 0
    return 1 if better > worse else -1


def ratio(sums: NDArray[np.float64], sizes: NDArray[np.int64]) -> tuple[float, NDArray[np.float64]]:
    """Return the ratio of two sums over samples, and the part of each sample in its deviation.

    >>> ratio(np.array([2.0, 4.0]), np.array([1, 3]))
    (1.5, array([ 0.125, -0.125]))
    """
    whole = int(sizes.sum())
    found = float(sums.sum() / whole)
    return found, (sums - found * sizes) / whole


def standard_error(parts: NDArray[np.float64]) -> float | None:
    """Return the standard error of a ratio, or of the difference of two, by the parts of its samples; of one, None."""
    count = len(parts)
    return math.sqrt(float(np.square(parts).sum()) * count / (count - 1)) if count > 1 else None


def shift(
    first: tuple[NDArray[np.float64], NDArray[np.int64]], second: tuple[NDArray[np.float64], NDArray[np.int64]]
) -> int:
    """Return the sign of the difference of two ratios over the same samples, or 0 within two standard errors.

    >>> sizes = np.array([1, 1, 1, 1])
    >>> shift((np.array([-1.0, -1.2, -0.9, -1.1]), sizes), (np.zeros(4), sizes))
    -1
    """
    (one, parts), (two, others) = ratio(*first), ratio(*second)
    error = standard_error(parts - others)
    return int(np.sign(one - two)) if error is not None and abs(one - two) > 2 * error else 0
