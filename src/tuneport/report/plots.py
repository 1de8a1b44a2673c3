"""The geometry of the report's curves. `figures.html.jinja` draws them, `page.js` reads out their values.

The picture is a small SVG with labels in HTML, which keep their size on a phone.
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
    *,
    x_label: str,
    low: float | None = None,
    high: float | None = None,
    logarithmic: bool = False,
    dashed: Sequence[str] = (),
) -> Figure | None:
    """Lines over evenly spaced labels; None if there is no number to draw. Lines without a number are left out.

    Args:
        lines: The values of each line by its name; None and NaN are gaps.
        x_label: What the labels are.
        low: The lower end of the scale; the smallest value if None.
        high: The upper end of the scale; the largest value if None.
        logarithmic: Use a scale of powers of ten.
        dashed: Names of lines to dash, so that a line below them can still be seen.
    """
    shown = {name: values for name, values in lines.items() if any(map(is_finite, values))}
    if not shown or not labels:
        return None
    scale = (lambda value: math.log10(max(value, 1e-16))) if logarithmic else float
    numbers = [scale(value) for values in shown.values() for value in values if is_finite(value)]
    bottom = min(numbers) if low is None else scale(low)
    top = max(numbers) if high is None else scale(high)
    marks = round_ticks(bottom, top)
    if logarithmic:  # whole powers only
        marks = sorted({float(math.floor(mark)) for mark in marks[:-1]} | {float(math.ceil(marks[-1]))})

    def height(value: float) -> str:
        return f"{100 - 100 * (value - marks[0]) / (marks[-1] - marks[0]):.2f}"

    def runs(values: Sequence[Number]) -> list[str]:
        """The points of each stretch without a gap; a single point is doubled, since a polyline needs two."""
        last = max(len(labels) - 1, 1)
        stretches = [
            [f"{100 * at / last:.2f},{height(scale(value))}" for at, value in stretch if is_finite(value)]
            for _, stretch in groupby(enumerate(values), lambda item: is_finite(item[1]))
        ]
        return [" ".join(points if len(points) > 1 else points * 2) for points in stretches if points]

    rounded = {
        name: [float(f"{value:.4g}") if is_finite(value) else None for value in values]
        for name, values in shown.items()
    }
    ticks = [(f"1e{mark:.0f}" if logarithmic else f"{mark:g}", height(mark)) for mark in marks]
    return {
        "title": title,
        "labels": labels,
        "x_label": x_label,
        "ticks": ticks,
        "widest_tick": max((text for text, _ in ticks), key=len),
        "lines": [
            {"name": name, "style": f"c{number % 6}{' dash' if name in dashed else ''}", "runs": runs(values)}
            for number, (name, values) in enumerate(shown.items())
        ],
        "data": json.dumps({"labels": list(labels), "lines": rounded}, ensure_ascii=False, separators=(",", ":")),
    }


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
