"""report.html: a run record as one page that opens offline, from `page.html.jinja`, `page.css` and `page.js`.

The first screen answers: did it help, how sure is that, what to do next. Names in a record are untrusted: the template
escapes everything, and the page's policy allows only its own script, pictures inside the page and no requests. Every
number in a figure is also in a table.
"""

from __future__ import annotations

import base64
import hashlib
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .answer import answer_of
from .plots import Figure, Number, curves, is_finite, tracks
from .record import Record
from .summary import (
    LAYER_COLUMNS,
    kept_rows,
    layer_rows,
    left_shares,
    number_text,
    repeat_command,
    route_table,
    summary_rows,
)

Layers = Sequence[Mapping[str, Any]]
FLOOR = 1e-6  # the smallest singular value that a curve shows, relative to the largest
SIDES = (("in", "input side"), ("out", "output side"))
DONE = ("samples", "head", "adapter", "server")  # rows of the summary that no other part of the page shows
CLASSES = 16  # shown before the rest is folded away


def report_page(record: Record) -> str:
    """The page about one transfer."""
    script = resources.files(__package__).joinpath("page.js").read_text("utf-8")
    return render(
        "page.html.jinja",
        record=record,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        answer=answer_of(record),
        done_rows=[row for row in summary_rows(record) if row[0] in DONE],
        class_tracks=_class_tracks(record.get("by_class") or ()),
        scale_curve=_scale_curve(record),
        shares=[(kind, 100 * part) for kind, part in (("moved", record.get("moved_share", 0.0)), *left_shares(record))],
        layer_maps=_layer_maps(record["layers"]),
        spectra=_spectra(record["layers"]),
        layer_columns=list(LAYER_COLUMNS.values()),
        layer_rows=layer_rows(record),
        kept_rows=kept_rows,
        route_table=route_table,
        command=repeat_command(record),
        distilled_curves=_distilled_curves(record.get("distilled")),
    )


def render(template: str, **values: Any) -> str:
    """A page from its template and the style that all pages share."""
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    return _ENVIRONMENT.get_template(template).render(style=style, **values)


def _class_tracks(classes: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Accuracies of each class before and after, those that lose most first; the second figure is folded away."""
    rows = [
        {
            "label": item["class"],
            "note": f"{item['samples']} samples",
            "text": (f"{item['before']:.0f} to " if item["before"] != item["after"] else "") + f"{item['after']:.0f} %",
            "more": "",
            "bar": (item["before"], item["after"]),
            "style": "up" if item["after"] > item["before"] else "down" if item["after"] < item["before"] else "",
            "marks": ((item["before"], "before"), (item["after"], "after")),
        }
        for item in sorted(classes, key=lambda item: item["after"] - item["before"])
    ]
    half, many = CLASSES // 2, len(rows) > CLASSES
    parts = (rows[:half] + rows[-half:], rows[half:-half]) if many else (rows,)
    return [tracks(part, low=0.0, high=100.0, unit=" %") for part in parts if part]


def _scale_curve(record: Record) -> Figure | None:
    """The loss at every candidate scale on a true axis, with a mark at the chosen one."""
    found = (record.get("scale_choice") or {}).get("candidates", ())
    scales = [item["scale"] for item in found]
    losses = {"mean loss": [item["loss"] for item in found]}
    marked = scales.index(record["scale"]) if record["scale"] in scales else None
    labels = [f"scale {scale:g}{', chosen' if number == marked else ''}" for number, scale in enumerate(scales)]
    return curves(
        "Mean loss by scale, lower is better", losses, labels, x_label="scale", at=scales or None, marked=marked
    )


def _distilled_curves(found: Mapping[str, Any] | None) -> list[Figure]:
    """Losses and agreement along a distillation."""
    marks = found["curve"] if found is not None else ()
    steps = [mark["step"] for mark in marks]
    losses = {"training": [mark["loss"] for mark in marks], "held out": [mark["held_out_loss"] for mark in marks]}
    agreement = {"held out": [mark["agreement"] for mark in marks]}
    shown = (("Distance from the teacher's answers", losses, None), ("Agreement with the teacher", agreement, 1.0))
    drawn = [
        curves(title, lines, [f"step {step}" for step in steps], x_label="steps", at=steps or None, ends=(0.0, high))
        for title, lines, high in shown
    ]
    return [figure for figure in drawn if figure is not None]


def _shown(value: Any) -> Any:
    """Replace control characters, which could hide or turn around a part of a text."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    return "".join(mark if mark.isprintable() else "\N{REPLACEMENT CHARACTER}" for mark in value)


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters["number"] = number_text


def _layer_maps(layers: Layers) -> list[Figure]:
    """Heat maps over blocks and roles; the colour of a value is its distance from the best one."""
    maps = [
        _by_block(f"Residual, {words}", layers, [item[f"residual_{side}"] for item in layers], best=0.0)
        for side, words in SIDES
    ]
    for side, words in SIDES:
        shares = [_ratio(item[f"rank_{side}"], item.get(f"width_{side}")) for item in layers]
        maps.append(_by_block(f"Rank over width, {words}", layers, shares, best=1.0))
    ratios = [_ratio(item["norm_target"], item["norm_source"]) for item in layers]
    if any(ratio is not None and abs(ratio - 1) > 0.01 for ratio in ratios):  # a map of full rank keeps lengths
        maps.append(_by_block("Length of the change, after over before", layers, ratios, best=1.0))
    return list(filter(None, maps))


def _ratio(part: Number, whole: Number) -> float | None:
    return part / whole if part is not None and whole else None


def _by_block(title: str, layers: Layers, values: Sequence[Number], best: float) -> Figure | None:
    """A heat map with blocks as rows and roles as columns; a layer outside the blocks has a row with one wide cell."""
    values = [value if is_finite(value) else None for value in values]
    if all(value is None for value in values):
        return None
    inside = [item for item in layers if item.get("block") is not None]
    roles = list(dict.fromkeys(str(item["role"]) for item in inside))
    columns = roles or ["value"]
    stacks = _short_names(str(item.get("stack")) for item in inside)
    rows: dict[str, Any] = defaultdict(lambda: [None] * len(columns))
    for item, value in zip(layers, values, strict=True):
        if item.get("block") is not None:
            label = f"{stacks[str(item.get('stack'))]} {item['block']}" if len(stacks) > 1 else str(item["block"])
            rows[label][roles.index(str(item["role"]))] = value
        elif value is not None:
            rows[str(item.get("role", item["target"]))] = value
    return {"title": title, "columns": columns, "rows": rows, "best": best}


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names without the parts that all of them begin or end with."""
    parts = {name: name.split(".") for name in names}
    for at in (0, -1):
        while all(len(words) > 1 for words in parts.values()) and len({words[at] for words in parts.values()}) == 1:
            for words in parts.values():
                words.pop(at)
    return {name: ".".join(words) for name, words in parts.items()}


def _spectra(layers: Layers) -> Figure | None:
    """How fast the singular values of the cross-covariances fall: the middle layer and the two extremes."""
    lines: dict[str, list[Number]] = {}
    points = 0
    for side, words in SIDES:
        spectra = [item[f"spectrum_{side}"] for item in layers if item.get(f"spectrum_{side}")]
        places = list(zip(*spectra, strict=True))
        points = len(places) or points
        for name, choose in (("median layer", statistics.median), ("steepest", min), ("flattest", max)):
            lines[f"{words}, {name}"] = [max(choose(place), FLOOR) for place in places]
    labels = [f"{100 * index / max(points - 1, 1):.0f} %" for index in range(points)]
    title, x_label = "Spectrum of the cross-covariance, largest value 1", "of the directions, strongest first"
    lines = {name: values for name, values in lines.items() if values}
    return curves(title, lines, labels, x_label=x_label, logarithmic=True)
