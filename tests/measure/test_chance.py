"""Intervals and tests of paired samples against published values and sums of binomial terms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tuneport.measure.chance import direction, share_interval, shift, tail


def _tail(count: int, least: int, share: float) -> float:
    terms = (math.comb(count, k) * share**k * (1 - share) ** (count - k) for k in range(least, count + 1))
    return math.fsum(terms)


@pytest.mark.parametrize(
    ("right", "samples", "ends"),
    [(81, 263, (0.2553, 0.3662)), (15, 148, (0.0624, 0.1605)), (0, 20, (0.0, 0.1611)), (29, 29, (0.8830, 1.0))],
)
def test_intervals_of_shares_are_those_of_newcombe(right: int, samples: int, ends: tuple[float, float]) -> None:
    """Newcombe (1998), Statistics in Medicine 17, table I, method 3; he gives the last as 0 of 29."""
    assert share_interval(right, samples) == pytest.approx(ends, abs=5.1e-5)


@pytest.mark.parametrize("better", range(13))
@pytest.mark.parametrize("worse", range(13))
def test_a_direction_is_clear_where_both_tails_together_are_rare(better: int, worse: int) -> None:
    rare = 2 * _tail(better + worse, max(better, worse), 0.5) < 0.05
    assert direction(better, worse) == (int(np.sign(better - worse)) if rare else 0)


def test_shifts() -> None:
    assert [shift(np.array(values)) for values in ([-1.0], [1.0, 1.1, 0.9], [0.0, 0.0], [-1.0, 1.0])] == [0, 1, 0, 0]


def test_tails() -> None:
    assert tail(20, 5, 0.1) == pytest.approx(_tail(20, 5, 0.1), rel=1e-9)
    assert (tail(5, 0, 0.3), tail(5, 3, 0.0), tail(5, 5, 1.0)) == (1.0, 0.0, 1.0)
