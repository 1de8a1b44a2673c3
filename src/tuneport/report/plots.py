"""The geometry of the report's figures. `figures.html.jinja` draws them, `page.js` reads out the values of curves.

A picture is a small SVG, or boxes at given places, with labels in HTML, which keep their size on a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeGuard

Number = float | int | None
Figure = Mapping[str, Any]  # what a macro of `figures.html.jinja` reads


def curves(
    title: str,
    lines: Mapping[str, Sequence[Number]],
    labels: Sequence[str],
    at: Sequence[float],
    *,
    x_label: str,
    marked: int | None = None,
    ends: tuple[float | None, float | None] = (None, None),
) -> Figure | None:
    """Lines by their names; None if there is no number to draw. Lines without a number are left out.

    Args:
        lines: the values of each line; None and NaN are gaps.
        labels: what is said of each place.
        at: the places on the axis.
        marked: the number of a place to mark.
        ends: the ends of the scale; the smallest and the largest value where they are None.
    """
    shown = {name: values for name, values in lines.items() if any(map(is_finite, values))}
    if not shown:
        return None
    numbers = [value for values in shown.values() for value in values if is_finite(value)]
    marks = round_ticks(min(numbers) if ends[0] is None else ends[0], max(numbers) if ends[1] is None else ends[1])
    axis = round_ticks(min(at), max(at))
    places = [_share(place, axis) for place in at]

    def height(value: float) -> float:
        return round(100 - _share(value, marks), 2)

    def runs(values: Sequence[Number]) -> list[str]:
        """The points of each stretch without a gap; a single point is doubled, since a polyline needs two."""
        stretches = [
            [f"{place:.2f},{height(value):.2f}" for place, value in stretch if is_finite(value)]
            for _, stretch in groupby(zip(places, values, strict=True), lambda item: is_finite(item[1]))
        ]
        return [" ".join(points if len(points) > 1 else points * 2) for points in stretches if points]

    rounded = {
        name: [float(f"{value:.4g}") if is_finite(value) else None for value in values]
        for name, values in shown.items()
    }
    ticks = [(f"{mark:g}", f"{height(mark):.2f}") for mark in marks]
    data = {"labels": list(labels), "places": places, "lines": rounded}
    return {
        "title": title,
        "x_label": x_label,
        "x_ticks": _ticks(axis),
        "marked": None if marked is None else {"x": places[marked], "label": labels[marked]},
        "ticks": ticks,
        "widest_tick": max((text for text, _ in ticks), key=len),
        "lines": [
            {"name": name, "style": f"c{number % 6}", "runs": runs(values)}
            for number, (name, values) in enumerate(shown.items())
        ],
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")),
    }


def tracks(
    rows: Sequence[Mapping[str, Any]], *, low: float | None = None, high: float | None = None, unit: str = ""
) -> Figure:
    """Rows that share an axis: each has a `bar` between two values, and `marks` of a value and a style.

    The axis spans all values, and `low` and `high` if they are given.
    """
    values = [value for row in rows for value in (*row["bar"], *(value for value, _ in row["marks"]))]
    axis = round_ticks(*(choose([*values, *filter(is_finite, [end])]) for choose, end in ((min, low), (max, high))))
    placed = [
        {
            **row,
            "bar": [_share(value, axis) for value in sorted(row["bar"])],
            "marks": [(_share(value, axis), style) for value, style in row["marks"]],
        }
        for row in rows
    ]
    return {"rows": placed, "ticks": _ticks(axis, unit)}


def _share(value: float, axis: Sequence[float]) -> float:
    """The place of a value on an axis, in percent."""
    return round(100 * (value - axis[0]) / (axis[-1] - axis[0]), 2)


def _ticks(axis: Sequence[float], unit: str = "") -> list[tuple[str, float]]:
    return [(f"{mark:g}{unit if mark == axis[-1] else ''}", _share(mark, axis)) for mark in axis]


def is_finite(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def round_ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers (steps of 1, 2 or 5 times a power of ten) that span `low` to `high`."""
    span = (high - low) or max(abs(high), 1.0)
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * index, 12) for index in range(first, last + 1)]
