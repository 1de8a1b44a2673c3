"""report.html: a run record as one page that opens offline, from `page.html.jinja` and `page.css`.

The first screen answers: did it help, how sure is that, what to do next. Names in a record are untrusted: the template
escapes everything, and the page's policy allows pictures inside the page, no script and no requests. Every number in a
figure is also in a text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..errors import printable
from ..types import FORMATS
from .decision import is_far
from .plots import Figure, Number, is_finite, tracks
from .record import Record
from .summary import (
    LAYER_COLUMNS,
    SCORE_FORMS,
    data_reference,
    evaluate_command,
    kept_rows,
    left_shares,
    number_text,
    repeat_command,
    route_table,
    sample_words,
    short_names,
    summary_rows,
    table_of,
)

STYLES = {  # of an outcome: its colour, and a sign for eyes that see no colour
    "gain": ("good", "▲"),
    "harm": ("bad", "▼"),
    "no clear change": ("unsure", "≈"),
    "nothing moved": ("unsure", "○"),
    "not measured": ("unknown", "?"),
}
UNMEASURED = "accuracy was not measured: this page cannot say whether the transfer helps"
WRITTEN = ("port", "distilled")  # roles of models that did not exist before
MEASURE = "evaluate the output on a labelled test split"
Layers = Sequence[Mapping[str, Any]]
SIDES = (("in", "input side"), ("out", "output side"))
DONE = ("samples", "head", "adapter", "server")  # rows of the summary that no other part of the page shows
CLASSES = 16  # shown before the rest is folded away


_ENVIRONMENT = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    # control characters could hide or turn around a part of a text
    finalize=lambda value: printable(value) if type(value) is str else value,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def report_page(record: Record) -> str:
    return render(
        "page.html.jinja",
        record=record,
        answer=answer_of(record),
        done_rows=[row for row in summary_rows(record) if row[0] in DONE],
        class_tracks=_class_tracks(record.get("by_class") or ()),
        scale_tracks=_scale_tracks(record.get("scale_choice"), record["scale"]),
        shares=[(kind, 100 * part) for kind, part in (("moved", record.get("moved_share", 0.0)), *left_shares(record))],
        layer_maps=_layer_maps(record["layers"]),
        layer_table=table_of(record["layers"], LAYER_COLUMNS),
        kept_rows=kept_rows,
        route_table=route_table,
        command=repeat_command(record),
        distilled_tracks=_distilled_tracks(record.get("distilled")),
    )


def render(template: str, **values: Any) -> str:
    """A page from its template and the style that all pages share."""
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    return _ENVIRONMENT.get_template(template).render(style=style, **values)


def answer_of(record: Record) -> dict[str, Any]:
    """What the first screen shows of a record; without a test split, that there is none and how to get one."""
    outcome = record.get("outcome", "not measured")
    chosen = [row for row in record.get("routes", ()) if row["name"] == record.get("chosen")]
    kind = outcome
    if chosen:  # it is clearly better than the target, and may be far from the old model
        kind = "no clear change" if is_far(chosen[0].get("agreement")) else "gain"
    style, sign = STYLES[kind]
    scores, advice = _scores(record), record.get("recommendation") or MEASURE
    return {
        "sentence": _sentence(record.get("headline") or UNMEASURED),
        "style": style,
        "sign": sign,
        "scores": scores,
        "about_scores": _about(record) if scores is not None else "",
        "advice": _sentence(advice),
        "command": _measuring(record) if outcome == "not measured" else _distilling(record, outcome, advice),
    }


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].replace("->", "→").rstrip(".") + "." if text else ""


def _scores(record: Record) -> Figure | None:
    """The models on one axis: those that exist, the target before and what was written."""
    rows: Sequence[Mapping[str, Any]] = record.get("accuracies") or ()
    if not rows:
        return None
    form, unit = SCORE_FORMS[record.get("evaluation", {}).get("metric", "accuracy")]
    written, name = rows[-1]["role"], Path(record.get("out", "")).name
    names = {key: record.get(key, {}).get("name", "") for key in ("finetuned", "source", "target")} | {written: name}
    return tracks([_score(row, form, unit, names.get(row["role"], "")) for row in rows], unit=unit)


def _score(row: Mapping[str, Any], form: str, unit: str, name: str) -> dict[str, Any]:
    value, known = row["value"], is_finite(row["low"]) and is_finite(row["high"])
    return {
        "label": row["words"],
        "note": name,
        "text": f"{value:{form}}{unit}",
        "more": f"{row['low']:{form}} to {row['high']:{form}}" if known else "",
        "bar": (row["low"], row["high"]) if known else (value, value),
        "style": "written" if row["role"] in WRITTEN else "",
        "marks": ((value, "after" if row["role"] in WRITTEN else "before"),),
    }


def _about(record: Record) -> str:
    """What was scored, how sure the scores are, and which direction is good."""
    found, turned = record.get("evaluation", {}), record.get("turned") or {}
    parts = [f"{sample_words(found)}, {found['protocol']}" if found else ""]
    if any(is_finite(row["low"]) for row in record["accuracies"]):
        parts.append("Bars: 95 % intervals")
    if found.get("metric") == "bits per character":
        parts.append("Lower is better")
    if turned:
        parts.append(f"{turned['right_count']} samples turned right and {turned['wrong_count']} turned wrong")
    return ". ".join(filter(None, parts)) + "."


def _measuring(record: Record) -> str | None:
    """The command that scores the output; None if it would need other data, or more than a record knows."""
    out, data, place = record.get("out"), record.get("data", {}), data_reference(record)
    unlabelled = "labels" in data and data["labels"]["agreement"] is None
    whole = data.get("split") == "all"  # calibration has used some of the samples
    if not out or not place or unlabelled or whole or not FORMATS[record.get("as", "model")].whole:
        return None
    return evaluate_command(record, out, place)


def _distilling(record: Record, outcome: str, advice: str) -> str | None:
    """The command with the distillation that the advice names; after harm it starts from a safe scale."""
    named = re.search(r"--distill (\d+)", advice)
    if named is None or "distilled" in record:
        return None
    safer = {"scale": "safe"} if outcome == "harm" else {}
    return repeat_command(record, out=f"{record.get('out')}-distilled", distill=int(named[1]), **safer)


def _class_tracks(classes: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """Accuracies of each class before and after, those that lose most first; the second figure is folded away."""
    rows = [
        {
            "label": item["class"],
            "note": f"{item['samples']} samples",
            "text": (f"{item['before']:.0f} to " if item["before"] != item["after"] else "") + f"{item['after']:.0f} %",
            "bar": (item["before"], item["after"]),
            "style": "up" if item["after"] > item["before"] else "down" if item["after"] < item["before"] else "",
            "marks": ((item["before"], "before"), (item["after"], "after")),
        }
        for item in sorted(classes, key=lambda item: item["after"] - item["before"])
    ]
    half, many = CLASSES // 2, len(rows) > CLASSES
    parts = (rows[:half] + rows[-half:], rows[half:-half]) if many else (rows,)
    return [tracks(part, low=0.0, high=100.0, unit=" %") for part in parts if part]


def _scale_tracks(choice: Mapping[str, Any] | None, chosen: float) -> Figure | None:
    """The loss at every candidate scale; the mark of the chosen one is filled."""
    rows = []
    for item in choice["candidates"] if choice else ():
        notes = ["chosen"] if item["scale"] == chosen else []
        if item.get("sharpness") is not None:
            notes += [f"accuracy {100 * item['accuracy']:.1f} %", f"sharpness {item['sharpness']:.3g}"]
        row = {"label": f"{item['scale']:g}", "note": ", ".join(notes), "text": number_text(item["loss"])}
        rows.append({**row, "bar": (), "marks": ((item["loss"], "after" if item["scale"] == chosen else "before"),)})
    return tracks(rows) if rows else None


def _distilled_tracks(found: Mapping[str, Any] | None) -> list[tuple[str, Figure]]:
    """The loss and the agreement along a distillation; the empty marks are the loss of training."""
    losses, agreements = [], []
    for mark in found["curve"] if found else ():
        step, ends = str(mark["step"]), (mark["loss"], mark["held_out_loss"])
        note, text = f"training {number_text(mark['loss'])}", number_text(mark["held_out_loss"])
        both = tuple(zip(ends, ("before", "after"), strict=True))
        losses.append({"label": step, "note": note, "text": text, "bar": ends, "marks": both})
        share = 100 * mark["agreement"]
        agreements.append({"label": step, "text": f"{share:.1f} %", "bar": (), "marks": ((share, "after"),)})
    if not losses:
        return []
    distance = ("Distance from the teacher's answers", tracks(losses, low=0.0))
    return [distance, ("Agreement with the teacher", tracks(agreements, low=0.0, high=100.0))]


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
    stacks = short_names(str(item.get("stack")) for item in inside)
    rows: dict[str, Any] = defaultdict(lambda: [None] * len(columns))
    for item, value in zip(layers, values, strict=True):
        if item.get("block") is not None:
            label = f"{stacks[str(item.get('stack'))]} {item['block']}" if len(stacks) > 1 else str(item["block"])
            rows[label][roles.index(str(item["role"]))] = value
        elif value is not None:
            rows[str(item.get("role", item["target"]))] = value
    return {"title": title, "columns": columns, "rows": rows, "best": best}
