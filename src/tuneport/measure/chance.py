"""How much of a count or a difference may be chance: intervals, and tests of paired samples.

SciPy is imported on use: its statistics take a second to load.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

LEVEL = 0.05  # a difference that chance makes less often than this is clear


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


def shift(changes: NDArray[np.float64]) -> int:
    """Return the sign of the mean of some changes if it is two standard errors from zero, else 0.

    >>> shift(np.array([-1.0, -1.2, -0.9, -1.1])), shift(np.array([-1.0, 1.2, -0.9, 1.1]))
    (-1, 0)
    """
    if len(changes) < 2:
        return 0
    mean, error = float(changes.mean()), float(changes.std(ddof=1)) / math.sqrt(len(changes))
    return int(np.sign(mean)) if abs(mean) > 2 * error else 0
