"""Charts as SVG files of their own: lines over a budget, a block or a step, and horizontal bars.

Plain shapes and text on a white ground, so that a file looks the same in a browser, in a README and in print. A known
method has one colour everywhere; a variant of it is the same colour, dashed. Every mark tells its number on hover.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from ..report.plots import round_ticks

COLOURS = ("#1f6feb", "#d9480f", "#1a7f37", "#8250df", "#9a6700", "#bf3989", "#0e7c86", "#59636e", "#8c564b", "#1b1f24")
KNOWN = {
    "target": "#59636e",
    "source": "#8c564b",
    "naive": "#9a6700",
    "theseus": "#d9480f",
    "bico": "#1f6feb",
    "transfusion": "#1a7f37",
    "gradfix": "#bf3989",
    "input_only": "#8250df",
    "output_only": "#0e7c86",
    "gradient_only": "#1a7f37",
}
PLAIN = "#8c959f"
LETTER = 6.9  # the width of an average letter, in the units of the drawing
LEFT, TOP, WIDTH, HEIGHT = 56, 64, 560, 330


def chart(
    lines: Mapping[str, Sequence[float]],
    ticks: Sequence[float],
    *,
    title: str,
    x_label: str,
    y_label: str,
    spread: Mapping[str, Sequence[float]] | None = None,
    variants: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> str:
    """A line per name over evenly spaced ticks; NaN is a gap. The legend follows the lines' right ends, from the top.

    `spread` draws whiskers around the points of a line, `variants` names lines that belong to another, and `notes`
    stand below the legend.
    """
    spread, variants = spread or {}, variants or {}
    around = {name: spread.get(name, [math.nan] * len(points)) for name, points in lines.items()}
    edges = [
        value + sign * (0.0 if math.isnan(more) else more)
        for name, points in lines.items()
        for value, more in zip(points, around[name], strict=True)
        for sign in (-1, 1)
        if math.isfinite(value)
    ]
    marks = round_ticks(min(edges, default=0.0), max(edges, default=1.0))
    low, high = marks[0], marks[-1]

    def at(index: int, value: float) -> tuple[float, float]:
        share = index / (len(ticks) - 1) if len(ticks) > 1 else 0.5
        return LEFT + 12 + (WIDTH - 24) * share, TOP + HEIGHT * (1 - (value - low) / (high - low))

    parts = [_text(LEFT, TOP - 14, y_label, "soft")]
    for mark in marks:
        y = at(0, mark)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{mark:g}", "soft end"))
    for index, tick in enumerate(ticks):
        parts.append(_text(at(index, low)[0], TOP + HEIGHT + 20, f"{tick:g}", "soft middle"))
    parts.append(_text(LEFT + WIDTH / 2, TOP + HEIGHT + 42, x_label, "soft middle"))
    colours = colours_of(lines, variants)
    for name, points in lines.items():
        dash = ' stroke-dasharray="6 4"' if name in variants else ""
        stretch = [at(index, value) for index, value in enumerate(points) if math.isfinite(value)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in stretch)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"{dash}/>')
        for index, (value, more) in enumerate(zip(points, around[name], strict=True)):
            if not math.isfinite(value):
                continue
            x, y = at(index, value)
            told = f"{name}, {x_label} {ticks[index]:g}: {value:.4g}"
            if math.isfinite(more) and more > 0:
                parts.append(_whisker(x, at(index, value - more)[1], x, at(index, value + more)[1], colours[name]))
                told += f" ± {more:.2g}"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colours[name]}">{_title(told)}</circle>')
    right = LEFT + WIDTH + 20
    for row, name in enumerate(sorted(lines, key=lambda name: -_last(lines[name]))):
        dash = ' stroke-dasharray="6 4"' if name in variants else ""
        y = TOP + 20 * row + 4
        parts.append(
            f'<line x1="{right}" x2="{right + 26}" y1="{y}" y2="{y}" stroke="{colours[name]}"{dash} class="k"/>'
        )
        parts.append(_text(right + 34, y + 4, name))
    notes = [*notes, *(["whiskers: ± one deviation over seeds"] if _any(spread) else [])]
    below = TOP + 20 * len(lines) + 16
    parts += [_text(right, below + 18 * row, note, "soft") for row, note in enumerate(notes)]
    words = max([34 + LETTER * len(name) for name in lines] + [LETTER * len(note) for note in notes], default=0)
    tall = max(TOP + HEIGHT + 60, below + 18 * len(notes))
    return _drawing(title, parts, right + words + 16, tall)


def bars(
    values: Mapping[str, float],
    *,
    title: str,
    x_label: str,
    spread: Mapping[str, float] | None = None,
    line: float | None = None,
    variants: Mapping[str, str] | None = None,
    form: str = ".4g",
) -> str:
    """Horizontal bars from zero, one per name, with its number; `line` is a value to compare all with.

    A bar has the colour of the method that its name begins with.
    """
    spread, variants = spread or {}, variants or {}
    shown = {name: value for name, value in values.items() if math.isfinite(value)}
    ends = [value + spread.get(name, 0.0) for name, value in shown.items()]
    longest = max(ends, default=0.0) or 1.0
    left, step = 24 + LETTER * max((len(name) for name in shown), default=0), 26
    bottom = TOP + step * len(shown)
    parts = [_text(left, TOP - 14, x_label, "soft")]
    if line is not None:
        x = left + WIDTH * line / longest
        parts.append(f'<line class="rule" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{bottom}"/>')
    for row, (name, value) in enumerate(shown.items()):
        y, long = TOP + step * row, WIDTH * max(value, 0.0) / longest
        parts.append(_text(left - 10, y + 14, name, "end"))
        pale = ' fill-opacity="0.55"' if name in variants else ""
        colour, told = KNOWN.get(name.partition(",")[0], PLAIN), _title(f"{name}: {value:{form}}")
        parts.append(f'<rect x="{left:.1f}" y="{y}" width="{long:.1f}" height="18" fill="{colour}"{pale}>{told}</rect>')
        more, end = spread.get(name, 0.0), left + long
        if more > 0:
            width = WIDTH * more / longest
            parts.append(_whisker(end - width, y + 9, end + width, y + 9, "#1b1f24"))
            end += width
        parts.append(_text(end + 8, y + 14, f"{value:{form}}" + (f" ± {more:{form}}" if more > 0 else ""), "over"))
    return _drawing(title, parts, left + WIDTH + 110, bottom + 16)


def colours_of(names: Mapping[str, object], variants: Mapping[str, str]) -> dict[str, str]:
    """A colour per name: a known method's own, that of the line it is a variant of, or the next one that is free."""
    found: dict[str, str] = {}
    for name in names:
        base = variants.get(name, name)
        taken = set(found.values()) | {KNOWN[other] for other in names if other in KNOWN}
        free = [colour for colour in COLOURS if colour not in taken] or list(COLOURS)
        found[name] = KNOWN.get(base) or found.get(base) or free[0]
    return found


def _last(points: Sequence[float]) -> float:
    return next((value for value in reversed(points) if math.isfinite(value)), -math.inf)


def _any(spread: Mapping[str, Sequence[float]]) -> bool:
    return any(math.isfinite(value) and value > 0 for values in spread.values() for value in values)


def _whisker(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    """A line with caps at both ends, upright or level."""
    across, down = (0, 4) if y1 == y2 else (4, 0)
    ends = "".join(f"M{x - across:.1f},{y - down:.1f}L{x + across:.1f},{y + down:.1f}" for x, y in ((x1, y1), (x2, y2)))
    return f'<path d="M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}{ends}" stroke="{colour}" stroke-width="1.2" fill="none"/>'


def _text(x: float, y: float, words: str, kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{_escaped(words)}</text>'


def _title(words: str) -> str:
    return f"<title>{_escaped(words)}</title>"


def _escaped(words: str) -> str:
    return html.escape(words, quote=True)


STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1b1f24}.soft{fill:#59636e;font-size:12px}.head{font-weight:600;"
    "font-size:15px}.end{text-anchor:end}.middle{text-anchor:middle}.grid{stroke:#e1e6eb}.k{stroke-width:2.5}"
    ".over{paint-order:stroke;stroke:#fff;stroke-width:4px}.rule{stroke:#59636e;stroke-dasharray:3 3}"
)


def _drawing(title: str, parts: Sequence[str], width: float, height: float) -> str:
    wide, tall = math.ceil(max(width, 32 + 8.5 * len(title))), math.ceil(height)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" viewBox="0 0 {wide} {tall}" '
        f'role="img">{_title(title)}<style>{STYLE}</style><rect width="{wide}" height="{tall}" fill="#fff"/>'
        f"{_text(16, 26, title, 'head')}{''.join(parts)}</svg>\n"
    )
