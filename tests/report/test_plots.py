"""Plots of the report page: round ticks."""

from __future__ import annotations

import pytest

from tuneport.report.plots import round_ticks


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (50.8, 58.8, [50, 52, 54, 56, 58, 60]),
        (0.006, 0.965, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (-3.0, 3.0, [-3, -2, -1, 0, 1, 2, 3]),
        (0.02, 0.061, [0.02, 0.03, 0.04, 0.05, 0.06, 0.07]),
        (0.0, 8.57e-14, [0, 2e-14, 4e-14, 6e-14, 8e-14, 1e-13]),
    ],
)
def test_ticks_are_round(low: float, high: float, wanted: list[float]) -> None:
    assert round_ticks(low, high) == pytest.approx(wanted, abs=0)


@pytest.mark.parametrize("value", [0.0, 55.5, -2.0, 1e-9, 1e9, 8.57e-14])
@pytest.mark.parametrize("rounding", [0.0, 1e-15])
def test_ticks_of_one_value_contain_it(value: float, rounding: float) -> None:
    found = round_ticks(value, value + abs(value) * rounding)
    assert found[0] <= value <= found[-1] > found[0]
    assert 2 <= len(found) <= 9
