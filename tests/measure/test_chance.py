"""Intervals and tests of paired samples agree with SciPy."""

from __future__ import annotations

import numpy as np
import pytest

from tuneport.measure.chance import direction, share_interval, shift, sign_test, tail

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize(("right", "samples"), [(0, 4), (3, 7), (93, 100), (400, 400), (5012, 9000)])
def test_interval_of_a_share(right: int, samples: int) -> None:
    wanted = stats.binomtest(right, samples).proportion_ci(method="wilson")
    assert share_interval(right, samples) == pytest.approx((wanted.low, wanted.high), abs=1e-6)  # of the quantile


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (2, 1), (9, 1), (1, 9), (40, 60), (600, 500)])
def test_sign_test(better: int, worse: int) -> None:
    wanted = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert sign_test(better, worse) == pytest.approx(wanted, rel=1e-9)  # lgamma has about 13 digits at 1,000


def test_directions() -> None:
    assert [direction(*pair) for pair in ((2, 1), (9, 1), (1, 9), (0, 0), (6, 0), (5, 0))] == [0, 1, -1, 0, 1, 0]
    assert [shift(np.array(values)) for values in ([-1.0], [1.0, 1.1, 0.9], [0.0, 0.0], [-1.0, 1.0])] == [0, 1, 0, 0]


def test_tails() -> None:
    assert tail(20, 5, 0.1) == pytest.approx(stats.binom.sf(4, 20, 0.1), rel=1e-9)
    assert (tail(5, 0, 0.3), tail(5, 3, 0.0), tail(5, 5, 1.0)) == (1.0, 0.0, 1.0)
