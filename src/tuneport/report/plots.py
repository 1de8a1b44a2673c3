"""Pictures in a page without a plotting library: heat maps as tables, curves as SVG, one small script to read them.

Everything is text made from numbers: nothing is fetched, nothing runs but SCRIPT. Labels are HTML, so they keep
their size on a phone. A heat map is a table with colours; each curve can be read with pointer, finger or arrow keys.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

Number = float | int | None
HINT = "Point at the picture, or use the arrow keys, to read its values."


def heat_map(
    title: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[Number] | float],
    *,
    low: float = 0.0,
    high: float = 1.0,
    better: str = "",
    kind: str = "hot",
) -> str:
    """A table of numbers whose cells are coloured from `low` to `high`; None is an empty cell.

    A row that is one number belongs to no column and spans them all. `kind` is the colour: "hot" where a high number
    is a warning, "cool" where it is not.
    """
    head = "".join(f"<th scope=col>{escaped(name)}</th>" for name in columns)
    body = "".join(
        f"<tr><th scope=row>{escaped(label)}</th>"
        + (
            _cell(values, low, high, len(columns))
            if isinstance(values, (int, float))
            else "".join(_cell(value, low, high) for value in values)
        )
        + "</tr>"
        for label, values in rows.items()
    )
    note = f" <small>{escaped(better)}</small>" if better else ""
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escaped(title)}"><table class="heat {kind}">'
        f"<caption>{escaped(title)}{note}</caption><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(value: Number, low: float, high: float, columns: int = 1) -> str:
    if value is None or not math.isfinite(value):
        return "<td></td>"
    share = min(max((value - low) / ((high - low) or 1.0), 0.0), 1.0)
    span = f" colspan={columns}" if columns > 1 else ""
    return f'<td{span} style="--v:{100 * share:.0f}%">{value:.2f}</td>'


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
) -> str:
    """Lines over evenly spaced labels; with `logarithmic`, by powers of ten. Lines without a number are left out.

    Names in `dashed` are drawn so that a line below them can still be seen.
    """
    shown = {name: values for name, values in lines.items() if any(_finite(value) for value in values)}
    if not shown or not labels:
        return ""
    scale = (lambda value: math.log10(max(value, 1e-16))) if logarithmic else float
    numbers = [scale(value) for values in shown.values() for value in values if value is not None and _finite(value)]
    bottom = min(numbers) if low is None else scale(low)
    top = max(numbers) if high is None else scale(high)
    marks = round_ticks(bottom, top)
    if logarithmic:  # whole powers only
        marks = sorted({float(math.floor(mark)) for mark in marks[:-1]} | {float(math.ceil(marks[-1]))})
    bottom, top = marks[0], marks[-1]
    span = top - bottom
    parts = []
    for number, (name, values) in enumerate(shown.items()):
        style = f"line c{number % 6}{' dash' if name in dashed else ''}"
        points = [
            f"{100 * index / max(len(labels) - 1, 1):.2f},{100 - 100 * (scale(value) - bottom) / span:.2f}"
            if value is not None and _finite(value)
            else ""
            for index, value in enumerate(values)
        ]
        for run in _runs(points):
            parts.append(f'<polyline class="{style}" points="{" ".join(run)}"/>')
    texts = [f"1e{mark:.0f}" if logarithmic else f"{mark:g}" for mark in marks]
    heights = [100 - 100 * (mark - bottom) / span for mark in marks]
    widest = max(texts, key=len)  # holds the column open
    scale_texts = f"<i>{widest}</i>" + "".join(
        f'<span style="--y:{height:.2f}%">{text}</span>' for text, height in zip(texts, heights, strict=True)
    )
    legend = "".join(
        f'<span class="key"><i class="c{number % 6}{" dash" if name in dashed else ""}"></i>{escaped(name)}</span>'
        for number, name in enumerate(shown)
    )
    data = {
        "labels": list(labels),
        "lines": {name: [_short(value) for value in values] for name, values in shown.items()},
    }
    grid = "".join(f'<line class="grid" x1="0" x2="100" y1="{height:.2f}" y2="{height:.2f}"/>' for height in heights)
    return (
        f'<figure class="curves"><figcaption>{escaped(title)}<br>{legend}</figcaption>'
        f'<div class="frame"><div class="y" aria-hidden="true">{scale_texts}</div>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" tabindex="0" role="img" '
        f'aria-label="{escaped(title)}: left and right arrow keys read the values" '
        f'data-plot="{escaped(json.dumps(data, ensure_ascii=False, separators=(",", ":")))}">{grid}{"".join(parts)}'
        '<line class="cursor" x1="0" x2="0" y1="0" y2="100" hidden="hidden"/></svg>'
        f'<div class="x" aria-hidden="true"><span>{escaped(labels[0])}</span><span>{escaped(x_label)}</span>'
        f"<span>{escaped(labels[-1])}</span></div></div>"
        f'<output aria-live="polite">{HINT}</output></figure>'
    )


def _runs(points: Sequence[str]) -> list[list[str]]:
    """The stretches without a gap."""
    runs: list[list[str]] = [[]]
    for point in points:
        if point:
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [[*run, run[0]] if len(run) == 1 else run for run in runs if run]


def _finite(value: Number) -> bool:
    return value is not None and math.isfinite(value)


def _short(value: Number) -> Number:
    return float(f"{value:.4g}") if value is not None and _finite(value) else None


def escaped(text: Any) -> str:
    """Text that HTML shows as it is, in an element or in a quoted attribute."""
    return html.escape(str(text), quote=True)


STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1f24;--soft:#59636e;--rule:#d1d9e0;--hot:#e8743b;
--cool:#6ea8f7;--box:#f6f8fa;--c0:#1f6feb;--c1:#d9480f;--c2:#1a7f37;--c3:#8250df;--c4:#9a6700;--c5:#bf3989}
@media (prefers-color-scheme:dark){:root{--page:#0d1117;--ink:#e6edf3;--soft:#9198a1;--rule:#3d444d;--hot:#b3471a;
--cool:#1f5fbf;--box:#151b23;--c0:#58a6ff;--c1:#ff8c5a;--c2:#4ac26b;--c3:#bc8cff;--c4:#e3b341;--c5:#f778ba}}
*{box-sizing:border-box}
body{font:16px/1.5 system-ui,sans-serif;margin:0;background:var(--page);color:var(--ink);overflow-wrap:break-word}
main{max-width:72rem;margin:auto;padding:1rem}
h1{font-size:1.6rem;line-height:1.25}h2{margin-top:2.5rem;font-size:1.25rem;border-bottom:1px solid var(--rule)}
p.lead,small,.soft{color:var(--soft)}code{font-size:.9em}a{color:var(--c0)}
.tiles{display:grid;gap:.75rem;margin:1rem 0 1.25rem;padding:0;list-style:none;
grid-template-columns:repeat(auto-fit,minmax(min(9.5rem,100%),1fr))}
.tiles li{background:var(--box);border:1px solid var(--rule);border-radius:8px;padding:.6rem .9rem}
.tiles b{display:block;font-size:1.5rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.85rem}
pre{background:var(--box);padding:.75rem;white-space:pre-wrap;overflow-wrap:anywhere;border-radius:6px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;padding:.25rem 0}caption small{display:block;font-weight:400}
th,td{padding:.25rem .75rem .25rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
td.n,th.n{text-align:right}.wide{overflow-x:auto;max-width:100%}
.verdict{border-left:.4rem solid var(--c4);background:var(--box);padding:.5rem 1rem;border-radius:0 6px 6px 0}
.verdict.likely{border-color:var(--c2)}.verdict.unlikely{border-color:var(--c5)}
.grid2{display:grid;gap:1.5rem;margin:1rem 0;align-items:start;
grid-template-columns:repeat(auto-fit,minmax(min(20rem,100%),1fr))}
.grid2.broad{margin-top:2rem;grid-template-columns:repeat(auto-fit,minmax(min(30rem,100%),1fr))}
.grid2 td.n{white-space:nowrap}
.heat{font-size:.8rem;width:100%}.heat th,.heat td{padding:.15rem .3rem;border:1px solid var(--page);text-align:center}
.heat tbody th{text-align:right;font-weight:400;color:var(--soft);white-space:nowrap}
.heat td[style]{background:color-mix(in srgb,var(--hot) var(--v),var(--box))}
.heat.cool td[style]{background:color-mix(in srgb,var(--cool) var(--v),var(--box))}
figure{margin:0;min-width:0}.wide+figure{margin-top:1.5rem}figcaption{font-weight:600;margin-bottom:.6rem}.key{font-weight:400;margin-right:1rem;white-space:nowrap}
.key i{display:inline-block;width:1.2em;height:.25em;margin-right:.4em;vertical-align:middle;background:currentColor}
.key i.dash{background:repeating-linear-gradient(90deg,currentColor 0 5px,transparent 5px 8px)}
.frame{display:grid;grid-template-columns:auto minmax(0,1fr);gap:.25rem .5rem;font-size:.8rem;color:var(--soft)}
.frame svg{width:100%;height:12rem;overflow:visible;touch-action:pan-y}
.y{position:relative;height:12rem}.y i{visibility:hidden}
.y span{position:absolute;right:0;top:var(--y);transform:translateY(-50%)}
.x{grid-column:2;display:flex;justify-content:space-between;gap:1rem}
.x span{overflow:hidden;text-overflow:ellipsis;white-space:nowrap;min-width:0}
.line{fill:none;stroke:currentColor;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linecap:round}
.line.dash{stroke-dasharray:5 4;stroke-linecap:butt}
.grid,.cursor{stroke:var(--rule);vector-effect:non-scaling-stroke}.cursor{stroke:var(--ink)}.cursor[hidden]{display:none}
.c0{color:var(--c0)}.c1{color:var(--c1)}.c2{color:var(--c2)}.c3{color:var(--c3)}.c4{color:var(--c4)}.c5{color:var(--c5)}
output{display:block;font-size:.85rem;min-height:1.7em;color:var(--soft)}
summary{cursor:pointer;font-weight:600}:focus-visible{outline:2px solid var(--c0);outline-offset:2px}
@media print{.wide{overflow:visible}details>*{display:block}}
"""

SCRIPT = """
"use strict";
for (const svg of document.querySelectorAll("svg[data-plot]")) {
  const plot = JSON.parse(svg.dataset.plot), last = plot.labels.length - 1;
  const cursor = svg.querySelector(".cursor"), out = svg.closest("figure").querySelector("output");
  let at = -1;
  const show = (index) => {
    at = Math.min(Math.max(index, 0), last);
    const x = last ? 100 * at / last : 0;
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.removeAttribute("hidden");
    const values = Object.entries(plot.lines).map(([name, line]) => name + " " + (line[at] ?? "–"));
    out.textContent = plot.labels[at] + ": " + values.join(", ");
  };
  const point = (event) => {
    const box = svg.getBoundingClientRect();
    show(Math.round(last * (event.clientX - box.left) / box.width));
  };
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("keydown", (event) => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: last}[event.key];
    if (to !== undefined) { show(to); event.preventDefault(); }
  });
}
"""


def round_ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers (steps of 1, 2 or 5 times a power of ten) that hold `low` and `high` between them.

    >>> round_ticks(50.8, 58.8)
    [50.0, 52.0, 54.0, 56.0, 58.0, 60.0]
    """
    span = (high - low) or max(abs(high), 1.0)
    size = 10.0 ** math.floor(math.log10(span / 4))
    step = next(size * factor for factor in (1, 2, 5, 10) if span / (size * factor) <= 6)
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(step * index, 12) for index in range(first, last + 1)]
