"""The geometry of the report's tables with an axis, which `figures.html.jinja` draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

Number = float | int | None
Figure = Mapping[str, Any]  # what a macro of `figures.html.jinja` reads


def tracks(
    rows: Sequence[Mapping[str, Any]], *, low: float | None = None, high: float | None = None, unit: str = ""
) -> Figure:
    """Rows that share an axis: each has a `bar` between two values, and `marks` of a value and a style.

    The axis spans all finite values, and `low` and `high` if they are given; other values are not drawn.
    """
    marks = [[(value, style) for value, style in row["marks"] if is_finite(value)] for row in rows]
    bars = [[value for value in row["bar"] if is_finite(value)] for row in rows]
    drawn = [value for bar in bars for value in bar] + [value for found in marks for value, _ in found]
    drawn += filter(is_finite, (low, high))
    axis = round_ticks(min(drawn), max(drawn)) if drawn else [0.0, 1.0]
    placed = [
        {
            **row,
            "bar": [_share(choose(bar), axis) for choose in (min, max)] if bar else [0.0, 0.0],
            "marks": [(_share(value, axis), style) for value, style in found],
        }
        for row, bar, found in zip(rows, bars, marks, strict=True)
    ]
    ticks = [(f"{mark:g}{unit if mark == axis[-1] else ''}", _share(mark, axis)) for mark in axis]
    return {"rows": placed, "ticks": ticks}


def _share(value: float, axis: Sequence[float]) -> float:
    """The place of a value on an axis, in percent."""
    return round(100 * (value - axis[0]) / (axis[-1] - axis[0]), 2)


def is_finite(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def round_ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers (steps of 1, 2 or 5 times a power of ten) that span `low` to `high`."""
    largest = max(abs(low), abs(high))
    span = high - low if high - low > 1e-9 * largest else max(largest, 1.0)  # less is the rounding of one value
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [float(f"{step * index:.12g}") for index in range(first, last + 1)]
