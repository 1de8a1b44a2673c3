"""The geometry of the report's figures. `figures.html.jinja` draws them, `page.js` reads out the values of curves.

A heat map is a table with colours. Curves are a small SVG with labels in HTML, which keep their size on a phone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, TypeGuard

Number = float | int | None
Kind = Literal["hot", "cool"]  # "hot" where a high number is a warning


class Cell(NamedTuple):
    """A cell of a heat map: its text, its colour from 0 to 100 %, and how many columns it spans."""

    text: str = ""
    share: str = ""
    span: int = 1


@dataclass(frozen=True)
class HeatMap:
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[Cell]]
    note: str
    kind: Kind


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Number] | float],
    *,
    high: float = 1.0,
    note: str = "",
    kind: Kind = "hot",
) -> HeatMap:
    """A table of numbers with colours from 0 to `high`; None is an empty cell, and a single number spans its row."""

    def cell(value: Number, span: int = 1) -> Cell:
        if not _is_finite(value):
            return Cell()
        return Cell(f"{value:.2f}", f"{100 * min(max(value / (high or 1.0), 0.0), 1.0):.0f}", span)

    cells = {
        label: [cell(values, len(columns))] if isinstance(values, (int, float)) else [cell(value) for value in values]
        for label, values in rows.items()
    }
    return HeatMap(title, columns, cells, note, kind)


class Line(NamedTuple):
    """A curve: its name, its CSS classes, and the points of each stretch without a gap."""

    name: str
    style: str
    runs: list[str]


@dataclass(frozen=True)
class Curves:
    title: str
    labels: Sequence[str]
    x_label: str
    ticks: Sequence[tuple[str, str]]  # text and height in percent
    lines: Sequence[Line]
    data: str  # JSON for page.js

    @property
    def widest_tick(self) -> str:
        return max((text for text, _ in self.ticks), key=len)


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
) -> Curves | None:
    """Lines over evenly spaced labels; None if there is no number to draw. Lines without a number are left out.

    Args:
        lines: The values of each line by its name; None and NaN are gaps.
        x_label: What the labels are.
        low: The lower end of the scale; the smallest value if None.
        high: The upper end of the scale; the largest value if None.
        logarithmic: Use a scale of powers of ten.
        dashed: Names of lines to dash, so that a line below them can still be seen.
    """
    finite = {name: [value if _is_finite(value) else None for value in values] for name, values in lines.items()}
    shown = {name: values for name, values in finite.items() if values != [None] * len(values)}
    if not shown or not labels:
        return None
    scale = (lambda value: math.log10(max(value, 1e-16))) if logarithmic else float
    numbers = [scale(value) for values in shown.values() for value in values if value is not None]
    bottom = min(numbers) if low is None else scale(low)
    top = max(numbers) if high is None else scale(high)
    marks = round_ticks(bottom, top)
    if logarithmic:  # whole powers only
        marks = sorted({float(math.floor(mark)) for mark in marks[:-1]} | {float(math.ceil(marks[-1]))})

    def height(value: float) -> str:
        return f"{100 - 100 * (value - marks[0]) / (marks[-1] - marks[0]):.2f}"

    def runs(values: Sequence[Number]) -> list[str]:
        """The points of each stretch without a gap; a single point is doubled, since a polyline needs two."""
        found: list[str] = []
        last = max(len(labels) - 1, 1)
        for _, stretch in groupby(enumerate(values), lambda item: item[1] is None):
            points = [f"{100 * at / last:.2f},{height(scale(value))}" for at, value in stretch if value is not None]
            if points:
                found.append(" ".join(points if len(points) > 1 else points * 2))
        return found

    rounded = {
        name: [None if value is None else float(f"{value:.4g}") for value in values] for name, values in shown.items()
    }
    return Curves(
        title,
        labels,
        x_label,
        [(f"1e{mark:.0f}" if logarithmic else f"{mark:g}", height(mark)) for mark in marks],
        [
            Line(name, f"c{number % 6}{' dash' if name in dashed else ''}", runs(values))
            for number, (name, values) in enumerate(shown.items())
        ],
        json.dumps({"labels": list(labels), "lines": rounded}, ensure_ascii=False, separators=(",", ":")),
    )


def _is_finite(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def round_ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers (steps of 1, 2 or 5 times a power of ten) that span `low` to `high`.

    >>> round_ticks(50.8, 58.8)
    [50.0, 52.0, 54.0, 56.0, 58.0, 60.0]
    """
    span = (high - low) or max(abs(high), 1.0)
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * index, 12) for index in range(first, last + 1)]
