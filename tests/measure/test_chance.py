"""Intervals and tests of paired samples against published values and sums of binomial terms."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tuneport.measure.accuracy import direction, ratio, share_interval, shift, standard_error, tail


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
    before = np.repeat([False, True], [better, worse])
    assert direction(before, ~before) == (int(np.sign(better - worse)) if rare else 0)


def test_shifts() -> None:
    for values, sign in (([-1.0], 0), ([1.0, 1.1, 0.9], 1), ([0.0, 0.0], 0), ([-1.0, 1.0], 0)):
        sizes = np.ones(len(values), dtype=np.int64)
        assert shift((np.array(values), sizes), (np.zeros(len(values)), sizes)) == sign


def test_ratios_compare_where_a_model_reads_less_of_a_text() -> None:
    """Of a text that is cut there are fewer bits and fewer characters: the ratio is the same."""
    sizes, bits = np.array([4, 8, 6, 10]), np.array([8.0, 17.0, 11.0, 20.0])
    assert shift((bits, sizes), (bits / 2, sizes // 2)) == 0
    assert shift((bits, sizes), (bits / 4, sizes // 2)) == 1


def test_the_standard_error_of_a_ratio_is_that_of_many_draws() -> None:
    random, count, draws = np.random.default_rng(0), 400, 2000
    sizes = random.integers(1, 9, (draws, count))
    sums = 3.0 * sizes + random.normal(size=(draws, count)) * sizes
    found = [ratio(*pair) for pair in zip(sums, sizes, strict=True)]
    errors = [standard_error(parts) for _, parts in found]
    assert np.mean(errors) == pytest.approx(np.std([value for value, _ in found]), rel=0.06)  # 4 / sqrt(2 * draws)
    assert standard_error(found[0][1][:1]) is None


def test_tails() -> None:
    assert tail(20, 5, 0.1) == pytest.approx(_tail(20, 5, 0.1), rel=1e-9)
    assert (tail(5, 0, 0.3), tail(5, 3, 0.0), tail(5, 5, 1.0)) == (1.0, 0.0, 1.0)
