"""How much of a count or a difference may be chance: intervals, and tests of paired samples."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05  # a difference that chance makes less often than this is clear
_Z = 1.959964  # of 95 %


def share_interval(right: int, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share of samples (Wilson's).

    >>> [round(end, 3) for end in share_interval(45, 50)]
    [0.786, 0.957]
    """
    share, weight = right / samples, _Z**2 / samples
    middle = (share + weight / 2) / (1 + weight)
    width = _Z / (1 + weight) * math.sqrt(share * (1 - share) / samples + weight / (4 * samples))
    return max(middle - width, 0.0), min(middle + width, 1.0)


def sign_test(better: int, worse: int) -> float:
    """How often chance alone divides as many samples as unevenly, in either direction (McNemar's exact test).

    >>> round(sign_test(2, 1), 3), round(sign_test(9, 1), 4)
    (1.0, 0.0215)
    """
    count = better + worse
    return min(1.0, 2 * tail(count, max(better, worse), 0.5))


def tail(count: int, least: int, share: float) -> float:
    """The probability that at least `least` of `count` independent events of this probability happen.

    >>> round(tail(3, 2, 0.5), 9)
    0.5
    """
    if least <= 0:
        return 1.0
    if share in (0.0, 1.0):
        return float(share == 1.0 and least <= count)

    def log_of(k: int) -> float:
        ways = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        return ways + k * math.log(share) + (count - k) * math.log1p(-share)

    return min(1.0, math.fsum(math.exp(log_of(k)) for k in range(least, count + 1)))


def direction(better: int, worse: int) -> int:
    """1 if clearly more samples become better than worse, -1 if clearly fewer do, and 0 if chance could do it."""
    return 0 if sign_test(better, worse) >= LEVEL else 1 if better > worse else -1


def shift(changes: NDArray[np.float64]) -> int:
    """The sign of the mean of some changes if it is two standard errors from zero, else 0.

    >>> shift(np.array([-1.0, -1.2, -0.9, -1.1])), shift(np.array([-1.0, 1.2, -0.9, 1.1]))
    (-1, 0)
    """
    if len(changes) < 2:
        return 0
    mean, error = float(changes.mean()), float(changes.std(ddof=1)) / math.sqrt(len(changes))
    return int(np.sign(mean)) if abs(mean) > 2 * error else 0
