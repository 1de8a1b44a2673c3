"""report.html: a run record as one page that opens offline, from `page.html.jinja`, `page.css` and `page.js`.

Names in a record are untrusted: the template escapes everything, and the page's policy allows only its own script and
no requests. Every number in a figure is also in a table.
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

from .plots import Figure, Number, curves, is_finite
from .record import Record
from .summary import LAYER_COLUMNS, kept_rows, layer_rows, number_text, repeat_command, summary_rows

Layers = Sequence[Mapping[str, Any]]
FLOOR = 1e-6  # the smallest singular value that a curve shows, relative to the largest
SIDES = (("in", "input side"), ("out", "output side"))
LIKENESS = {
    "cka": "CKA",
    "cka_debiased": "CKA, debiased",
    "cosine_before": "cosine before",
    "cosine_after": "cosine after",
    "cosine_held_out": "cosine after, held out",
}


def report_page(record: Record) -> str:
    """The page about one transfer."""
    style, script = (resources.files(__package__).joinpath(name).read_text("utf-8") for name in ("page.css", "page.js"))
    choice = record.get("scale_choice") or {"candidates": ()}
    scales = [f"scale {item['scale']:g}" for item in choice["candidates"]]
    losses = {"mean loss": [item["loss"] for item in choice["candidates"]]}
    return _ENVIRONMENT.get_template("page.html.jinja").render(
        record=record,
        style=style,
        script=script,
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        summary_rows=summary_rows(record),
        strength_curve=curves("Loss by scale", losses, scales, x_label="candidates in order"),
        similarity=_similarity(record.get("similarity") or ()),
        layer_maps=_layer_maps(record["layers"]),
        layer_curves=_layer_curves(record["layers"]),
        layer_columns=list(LAYER_COLUMNS.values()),
        layer_rows=layer_rows(record),
        kept_rows=kept_rows,
        command=repeat_command(record),
        distilled_curves=_distilled_curves(record.get("distilled")),
    )


def _distilled_curves(found: Mapping[str, Any] | None) -> list[Figure]:
    """Losses and agreement along a distillation."""
    marks = found["curve"] if found is not None else ()
    labels = [f"step {mark['step']}" for mark in marks]
    losses = {"training": [mark["loss"] for mark in marks], "held out": [mark["held_out_loss"] for mark in marks]}
    agreement = {"held out": [mark["agreement"] for mark in marks]}
    drawn = (
        curves("Distance from the teacher's answers", losses, labels, x_label="steps", low=0.0),
        curves("Agreement with the teacher", agreement, labels, x_label="steps", low=0.0, high=1.0),
    )
    return [figure for figure in drawn if figure is not None]


def _flops(count: int) -> str:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {prefix}FLOP"
    return f"{count} FLOP"


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
_ENVIRONMENT.filters |= {"flops": _flops, "number": number_text}


def _similarity(similarity: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """CKA and cosines: means over the layers of each block as curves and as a table, for each signal."""
    pictures, totals, rows = [], [], []
    for signal in sorted({str(item["signal"]) for item in similarity}):
        words = signal.replace("_", " ")
        items = [item for item in similarity if item["signal"] == signal]
        blocks = sorted({item["block"] for item in items if item["block"] is not None})
        lines: dict[str, list[Number]] = {
            title: [_mean(item[key] for item in items if item["block"] == block) for block in blocks]
            for key, title in LIKENESS.items()
        }
        labels = [f"block {block}" for block in blocks]
        pictures.append(curves(f"{words}s", lines, labels, x_label="means over blocks", low=0.0, high=1.0))
        totals.append([words, *(number_text(_mean(item[key] for item in items)) for key in LIKENESS)])
        rows += [
            [words, label, *map(number_text, numbers)] for label, *numbers in zip(labels, *lines.values(), strict=True)
        ]
    return {"columns": list(LIKENESS.values()), "totals": totals, "curves": filter(None, pictures), "rows": rows}


def _layer_maps(layers: Layers) -> list[Figure]:
    """Heat maps over blocks and roles: residuals, ranks and the change of length."""
    maps = []
    for side, words in SIDES:
        residuals = [item[f"residual_{side}"] for item in layers]
        maps.append(_by_block(f"Residual, {words}", layers, residuals, "0 fits, 1 nothing", kind="hot"))
        shares = [_ratio(item[f"rank_{side}"], item.get(f"width_{side}")) for item in layers]
        maps.append(_by_block(f"Rank, {words}", layers, shares, "share of directions that the data determine"))
    ratios = [_ratio(item["norm_target"], item["norm_source"]) for item in layers]
    top = max([1.0, *filter(None, ratios)])
    maps.append(_by_block("|tau| after / before", layers, ratios, "1 keeps its length", high=top))
    return list(filter(None, maps))


def _ratio(part: Number, whole: Number) -> float | None:
    return part / whole if part is not None and whole else None


def _by_block(
    title: str, layers: Layers, values: Sequence[Number], note: str, high: float = 1.0, kind: str = "cool"
) -> Figure | None:
    """A heat map with blocks as rows and roles as columns; a layer outside the blocks has a row with one wide cell.

    Colours go from 0 to `high`; the `kind` is "hot" where a high number is a warning.
    """
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
    return {"title": title, "columns": columns, "rows": rows, "high": high, "note": note, "kind": kind}


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names without the parts that all of them begin or end with."""
    parts = {name: name.split(".") for name in names}
    for at in (0, -1):
        while all(len(words) > 1 for words in parts.values()) and len({words[at] for words in parts.values()}) == 1:
            for words in parts.values():
                words.pop(at)
    return {name: ".".join(words) for name, words in parts.items()}


def _layer_curves(layers: Layers) -> list[Figure]:
    """Residuals and lengths along the model, and the spectra."""
    blocks = [f"block {item['block']} " if item.get("block") is not None else "" for item in layers]
    labels = [block + str(item.get("role", item["target"])) for block, item in zip(blocks, layers, strict=True)]
    residuals = {words: [item[f"residual_{side}"] for item in layers] for side, words in SIDES}
    norms = {side: [item[f"norm_{side}"] for item in layers] for side in ("source", "target")}
    x_label = "layers in order"
    drawn = (
        curves("Residual along the model", residuals, labels, x_label=x_label, low=0.0, high=1.0),
        # "target" is dashed: the two agree where a map keeps lengths
        curves("Length of tau", norms, labels, x_label=x_label, low=0.0, dashed=("target",)),
        _spectra(layers),
    )
    return list(filter(None, drawn))


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
    return curves(title, lines, labels, x_label=x_label, logarithmic=True)


def _mean(values: Iterable[Number]) -> float | None:
    known = [float(value) for value in values if is_finite(value)]
    return statistics.fmean(known) if known else None
