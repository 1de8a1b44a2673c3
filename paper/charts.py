"""Line charts and bar charts as SVG, drawn by matplotlib. A known method has one colour everywhere."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLOURS = {
    "target": "#59636e",
    "source": "#8c564b",
    "naive": "#9a6700",
    "theseus": "#d9480f",
    "bico": "#1f6feb",
    "transfusion": "#1a7f37",
    "gradfix": "#bf3989",
    "gradfix_mean": "#e085c2",
    "input_only": "#8250df",
    "output_only": "#0e7c86",
    "gradient_only": "#1a7f37",
}
SPARE = ("#17becf", "#7f2704", "#e377c2", "#bcbd22", "#393b79", "#637939", "#8c6d31", "#843c39", "#7b4173", "#1b1f24")
PLAIN = "#8c959f"


def line_chart(
    lines: Mapping[str, Mapping[float, float]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    spread: Mapping[str, Mapping[float, float]] | None = None,
    variants: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """Draw a line per name over evenly spaced ticks, as SVG.

    Args:
        lines: Values by name and x; a missing one is a gap. The legend is in the order of the last values.
        title, x_label, y_label: Text of the chart and of its axes.
        spread: Half the length of the error bars, by name and x.
        variants: The line that a line is a variant of: it has the same colour and is dashed.
        notes: Lines of text below the legend.
    """
    spread, variants = spread or {}, variants or {}
    colours = colours_of(lines, variants)
    ticks = sorted({tick for values in lines.values() for tick in values})

    def points(values: Mapping[float, float]) -> list[float]:
        return [values.get(tick, math.nan) for tick in ticks]

    with _chart(title) as (axes, drawn):
        handles = {}
        for name in sorted(lines, key=lambda name: -max(lines[name].items(), default=(0, -math.inf))[1]):
            errors = points(spread[name]) if name in spread else None
            style = {"color": colours[name], "linestyle": "--" if name in variants else "-", "marker": "o"}
            handles[name], *_ = axes.errorbar(range(len(ticks)), points(lines[name]), yerr=errors, capsize=3, **style)
            handles[name].set_gid(f"line {name}")
        if any(value > 0 for values in spread.values() for value in values.values()):
            notes = [*notes, "error bars: ± one deviation over seeds"]
        blanks = [axes.plot([], [], " ")[0] for _ in notes]
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.set_xticks(range(len(ticks)), [f"{tick:g}" for tick in ticks])
        axes.grid(axis="y", color="#e1e6eb")
        labels = [*handles, *notes]
        axes.legend([*handles.values(), *blanks], labels, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return drawn.getvalue()


def bar_chart(
    values: Mapping[str, float],
    *,
    title: str,
    x_label: str,
    spread: Mapping[str, float] | None = None,
    line: float | None = None,
    variants: Mapping[str, str] | None = None,
    form: str = ".4g",
) -> str:
    """Draw a horizontal bar per name with its number, as SVG; `line` is a value to compare all with.

    A bar has the colour of the method that its name begins with; bars of `variants` are pale. NaN has no bar.
    """
    shown = {name: value for name, value in values.items() if math.isfinite(value)}
    around = [(spread or {}).get(name, 0.0) for name in shown]
    texts = [
        f"{value:{form}}" + (f" ± {more:{form}}" if more > 0 else "")
        for value, more in zip(shown.values(), around, strict=True)
    ]
    with _chart(title, height=1.2 + 0.3 * len(shown)) as (axes, drawn):
        colours = [COLOURS.get(name.partition(",")[0], PLAIN) for name in shown]
        errors = around if any(around) else None
        found = axes.barh(range(len(shown)), list(shown.values()), xerr=errors, color=colours, capsize=3)
        for bar, name in zip(found, shown, strict=True):
            bar.set_gid(f"bar {name}")
            bar.set_alpha(0.55 if name in (variants or {}) else 1.0)
        axes.bar_label(found, texts, padding=4)
        axes.set_yticks(range(len(shown)), list(shown))
        axes.invert_yaxis()
        axes.set_xlabel(x_label)
        axes.margins(x=0.2)
        if line is not None:
            axes.axvline(line, color="#59636e", linestyle=":")
    return drawn.getvalue()


@contextmanager
def _chart(title: str, height: float = 4.5) -> Iterator[tuple[Any, io.StringIO]]:
    """Axes to draw on; the SVG is in the buffer after the context.

    Text stays text, names are never read as formulas, and the same numbers give the same file.
    """
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tuneport", "text.parse_math": False}):
        figure = Figure(figsize=(9, height))
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(title, loc="left")
        yield axes, drawn
        figure.savefig(drawn, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})


def colours_of(names: Iterable[str], variants: Mapping[str, str]) -> dict[str, str]:
    """A colour per name: that of a known method, that of the line it is a variant of, or the next free one."""
    free = chain(SPARE, repeat(PLAIN))
    found: dict[str, str] = {}
    for name in names:
        base = variants.get(name, name)
        found[name] = COLOURS.get(base) or found.get(base) or next(free)
    return found
