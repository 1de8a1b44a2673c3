"""report.html: a run record as one page that opens offline. Renders, decides nothing.

Names in a record come from outside and are written as mere text; the page's policy lets nothing run but our own
script, and nothing be fetched. Every number in a picture also stands in a table.
"""

from __future__ import annotations

import base64
import hashlib
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .plots import SCRIPT, STYLE, Number, curves, heat_map
from .plots import escaped as e
from .record import LAYER_COLUMNS, Record, layer_rows, repeat_command, summary_rows

FLOOR = 1e-6  # of a singular value that a curve shows, relative to the largest
SIDES = (("in", "input side"), ("out", "output side"))


def report_page(record: Record) -> str:
    """The page about one transfer."""
    title = f"{record['finetuned']['name']} ported to {record['target']['name']}"
    lead = (
        f"The fine-tune <code>{e(record['finetuned']['name'])}</code> of <code>{e(record['source']['name'])}</code>, "
        f"ported to <code>{e(record['target']['name'])}</code> without training. "
        f"Method <code>{e(record['method'])}</code>, tuneport {e(record['tuneport'])}."
    )
    sections = (
        ("What was done", _summary(record)),
        ("Will it help?", verdict_section(record.get("verdict"))),
        ("Accuracy", _accuracy(record.get("evaluation"))),
        ("Strength", _scale_choice(record.get("scale_choice"))),
        ("How alike the models are", similarity_section(record.get("similarity") or ())),
        ("Layer by layer", _layer_pictures(record["layers"])),
        ("Not transported, and why", _kept(record)),
        ("Cost", _cost(record)),
        ("All layers in numbers", _layer_table(record)),
        ("Do it again", _repeat(record)),
    )
    return page(title, lead, sections)


def page(title: str, lead: str, sections: Iterable[tuple[str, str]]) -> str:
    """A self-contained page; sections without a body are left out. The lead and the bodies are HTML."""
    present = [(name, body) for name, body in sections if body]
    links = " · ".join(f'<a href="#{_anchor(name)}">{e(name)}</a>' for name, _ in present)
    content = "".join(
        f'<section aria-labelledby="{_anchor(name)}"><h2 id="{_anchor(name)}">{e(name)}</h2>{body}</section>\n'
        for name, body in present
    )
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{e(title)}</title><style>{STYLE}</style></head><body><main>
<h1>{e(title)}</h1><p class="lead">{lead}</p>
<nav aria-label="On this page"><p>{links}</p></nav>
{content}</main><script>{SCRIPT}</script></body></html>
"""


def verdict_section(verdict: Mapping[str, Any] | None) -> str:
    """The word of the pre-flight and its reasons."""
    if not verdict:
        return ""
    word = str(verdict["verdict"])
    reasons = "".join(f"<li>{e(reason)}</li>" for reason in verdict.get("reasons", ()))
    return f'<div class="verdict {e(word.split()[0])}"><p><strong>{e(word)}</strong></p><ul>{reasons}</ul></div>'


LIKENESS = {
    "cka": "CKA",
    "cka_debiased": "CKA, debiased",
    "cosine_before": "cosine before",
    "cosine_after": "cosine after",
    "cosine_held_out": "cosine after, held out",
}


def similarity_section(similarity: Sequence[Mapping[str, Any]]) -> str:
    """CKA and cosines: means over the layers of each block as curves and as a table, for each signal."""
    pictures, totals, rows = [], [], []
    for signal in sorted({str(item["signal"]) for item in similarity}):
        words = str(signal).replace("_", " ")
        items = [item for item in similarity if item["signal"] == signal]
        blocks = sorted({item["block"] for item in items if item["block"] is not None})
        lines: dict[str, list[Number]] = {
            title: [_mean(item[key] for item in items if item["block"] == block) for block in blocks]
            for key, title in LIKENESS.items()
        }
        labels = [f"block {block}" for block in blocks]
        pictures.append(curves(f"{words}s", lines, labels, x_label="means over blocks", low=0.0, high=1.0))
        totals.append([words, *(_text(_mean(item[key] for item in items)) for key in LIKENESS)])
        rows += [[words, label, *map(_text, numbers)] for label, *numbers in zip(labels, *lines.values(), strict=True)]
    if not pictures:
        return ""
    return (
        "<p>CKA is high where both models organise the tokens alike, in whatever coordinates. The cosine compares "
        "tokens coordinate by coordinate, before and after the map; held out means on samples "
        "that the map has not seen.</p>"
        + _table(["mean over layers", *LIKENESS.values()], totals, numbers=True)
        + f'<div class="grid2 broad">{"".join(pictures)}</div>'
        + "<details><summary>By block</summary>"
        + _table(["signal", "block", *LIKENESS.values()], rows, numbers=True)
        + "</details>"
    )


def _summary(record: Record) -> str:
    rows = "".join(f"<tr><th scope=row>{e(label)}</th><td>{e(text)}</td></tr>" for label, text in summary_rows(record))
    data = record.get("data", {}).get("name")
    more = f"<tr><th scope=row>calibration data</th><td>{e(data)}</td></tr>" if data else ""
    notes = "".join(f"<p>Note: {e(note)}</p>" for note in record.get("notes", ()))
    return f'{_tiles(record)}<div class="wide"><table>{rows}{more}</table></div>{notes}'


def _tiles(record: Record) -> str:
    """The few numbers that a reader looks for first."""
    tiles = []
    if found := record.get("evaluation"):
        words = f"points, {found['before']:.1f} to {found['after']:.1f} %"
        tiles.append((f"{found['after'] - found['before']:+.1f}", words))
    if verdict := record.get("verdict"):
        tiles.append((str(verdict["verdict"]), "the pre-flight's word"))
    tiles += [
        (f"{len(record['layers']):,}", f"layers moved, {len(record['not_transported']):,} tensors kept"),
        (f"{record['samples']:,}", "calibration samples"),
        (f"{record['seconds']:.1f} s", "to measure, align and move"),
    ]
    items = "".join(f"<li><b>{e(number)}</b><span>{e(words)}</span></li>" for number, words in tiles)
    return f'<ul class="tiles">{items}</ul>'


def _accuracy(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return ""
    before, after = evaluation["before"], evaluation["after"]
    rows = [
        ["the target as it was", f"{before:.2f} %", ""],
        ["the target with the skill", f"{after:.2f} %", f"{after - before:+.2f}"],
    ]
    words = f"On {evaluation['samples']} samples of the test split of {evaluation['data']} ({evaluation['protocol']})."
    return f"<p>{e(words)}</p>" + _table(["", "accuracy", "gain in points"], rows, numbers=True)


def _scale_choice(choice: Mapping[str, Any] | None) -> str:
    if not choice:
        return ""
    found = choice["candidates"]
    where = "held out from the maps" if choice["held_out"] else "that also made the maps (too few to hold any out)"
    rows = [
        [
            f"{item['scale']:g}",
            _text(item["loss"]),
            "–" if item["accuracy"] is None else f"{100 * item['accuracy']:.1f} %",
            "–" if item.get("sharpness") is None else f"{item['sharpness']:.3g}",
        ]
        for item in found
    ]
    labels = [f"scale {item['scale']:g}" for item in found]
    picture = curves(
        "Loss by scale", {"mean loss": [item["loss"] for item in found]}, labels, x_label="candidates in order"
    )
    words = f"The scale was chosen on {choice['samples']} calibration samples {where}."
    if choice.get("rule") == "safe" and any(item.get("sharpness") is not None for item in found):
        words += " Beyond the smallest, a scale had to be better by two standard errors, and by three beyond 1."
    if any(item.get("sharpness") is not None for item in found):
        words += " Losses are those at the sharpness of the head that suits each scale best, as a factor of its own."
    return f"<p>{words}</p>" + _table(["scale", "loss", "accuracy", "sharpness"], rows, numbers=True) + picture


def _layer_pictures(layers: Sequence[Mapping[str, Any]]) -> str:
    maps = []
    for side, words in SIDES:
        maps.append(
            _heat(f"Residual, {words}", layers, lambda item, s=side: item[f"residual_{s}"], "0 fits, 1 nothing")
        )
        maps.append(
            _heat(
                f"Rank, {words}",
                layers,
                lambda item, s=side: _share(item, s),
                "share of directions that the data determine",
                kind="cool",
            )
        )
    ratios = [ratio for item in layers if (ratio := _ratio(item)) is not None]
    if ratios:
        top = max(1.0, *ratios)
        maps.append(_heat("|tau| after / before", layers, _ratio, "1 keeps its length", high=top, kind="cool"))
    labels = [_layer_label(item) for item in layers]
    lines = [
        curves(
            "Residual along the model",
            {words: [item[f"residual_{side}"] for item in layers] for side, words in SIDES},
            labels,
            x_label="layers in order",
            low=0.0,
            high=1.0,
        ),
        curves(
            "Length of tau",
            {
                "source": [item["norm_source"] for item in layers],
                "target": [item["norm_target"] for item in layers],
            },
            labels,
            x_label="layers in order",
            low=0.0,
            dashed=("target",),  # the two agree where a map keeps lengths
        ),
        _spectra(layers),
    ]
    return (
        "<p>Each target layer takes its update from one source layer, through two maps. A map's residual says how far "
        "one rotation is from explaining the other model's signals; its rank, how much of it the data determine.</p>"
        f'<div class="grid2">{"".join(maps)}</div><div class="grid2 broad">{"".join(lines)}</div>'
    )


def _heat(
    title: str, layers: Sequence[Mapping[str, Any]], value: Any, better: str, high: float = 1.0, kind: str = "hot"
) -> str:
    """Blocks as rows, roles as columns; layers outside the blocks have a row each, with one wide cell."""
    roles = list(dict.fromkeys(str(item["role"]) for item in layers if item.get("block") is not None))
    columns = roles or ["value"]
    rows: dict[str, Any] = defaultdict(lambda: [None] * len(columns))
    found = False
    stacks = _short_names(str(item.get("stack")) for item in layers if item.get("block") is not None)
    for item in layers:
        number = value(item)
        found = found or number is not None
        if item.get("block") is None:
            rows |= {str(item.get("role", item["target"])): number} if number is not None else {}
        else:
            label = f"{stacks[str(item.get('stack'))]} {item['block']}" if len(stacks) > 1 else str(item["block"])
            rows[label][roles.index(str(item["role"]))] = number
    return heat_map(title, columns, rows, high=high, better=better, kind=kind) if found else ""


def _short_names(names: Iterable[str]) -> dict[str, str]:
    """Dotted names without the parts that all of them begin or end with."""
    parts = {name: name.split(".") for name in names}
    for at in (0, -1):
        while all(len(words) > 1 for words in parts.values()) and len({words[at] for words in parts.values()}) == 1:
            for words in parts.values():
                words.pop(at)
    return {name: ".".join(words) for name, words in parts.items()}


def _spectra(layers: Sequence[Mapping[str, Any]]) -> str:
    """How fast the singular values of the cross-covariances fall: the middle layer and the two extremes."""
    lines: dict[str, list[Number]] = {}
    points = 0
    for side, words in SIDES:
        spectra = [item[f"spectrum_{side}"] for item in layers if item.get(f"spectrum_{side}")]
        if spectra:
            points = len(spectra[0])
            places = list(zip(*spectra, strict=True))
            lines[f"{words}, median layer"] = [max(statistics.median(place), FLOOR) for place in places]
            lines[f"{words}, steepest"] = [max(min(place), FLOOR) for place in places]
            lines[f"{words}, flattest"] = [max(max(place), FLOOR) for place in places]
    labels = [f"{100 * index / max(points - 1, 1):.0f} %" for index in range(points)]
    return curves(
        "Spectrum of the cross-covariance, largest value 1",
        lines,
        labels,
        x_label="of the directions, strongest first",
        logarithmic=True,
    )


def _kept(record: Record) -> str:
    parts = []
    for key, words in (("not_transported", "stay as they were"), ("left_behind", "of the fine-tune find no place")):
        items = record.get(key, ())
        if not items:
            continue
        counts = Counter(item["reason"] for item in items).most_common()
        rows = [[str(count), reason] for reason, count in counts]
        body = _table(["tensor", "reason"], [[item["tensor"], item["reason"]] for item in items])
        parts.append(
            f"<p>{len(items)} tensors {words}.</p>{_table(['tensors', 'reason'], rows)}"
            f"<details><summary>All {len(items)} by name</summary>{body}</details>"
        )
    return "".join(parts) or "<p>Every tensor of the target was moved.</p>"


COST_ROWS = (
    ("forward", "forward passes, both models"),
    ("backward", "backward passes, both models"),
    ("statistics", "sums for the maps"),
    ("solves", "solving the maps (an SVD each, about)"),
    ("transport", "carrying the update over"),
    ("total", "together"),
)


def _cost(record: Record) -> str:
    cost = record.get("cost")
    seconds = record.get("seconds_by_stage", {})
    times = [[name, f"{value:.2f} s"] for name, value in seconds.items()]
    measured = _table(["measured", "time"], [*times, ["together", f"{record['seconds']:.2f} s"]], numbers=True)
    if not cost:
        return measured
    counted, paper = cost["counted"], cost["paper"]
    rows = [[words, _flops(counted[key])] for key, words in COST_ROWS] if counted else []
    estimate = [
        ["6 P per token and model", _flops(paper["passes"])],
        ["alignment, common widths", _flops(paper["alignment"])],
        ["together", _flops(paper["total"])],
        ["2,000 steps of fine-tuning the target", _flops(paper["fine_tuning"])],
    ]
    sizes = (
        f"{cost['parameters']['source']:,} parameters and {cost['tokens']['source']:,} tokens in the source, "
        f"{cost['parameters']['target']:,} and {cost['tokens']['target']:,} in the target."
    )
    exact = _table(["counted for this plan", "FLOP"], rows, numbers=True) if rows else ""
    return (
        f'<p>{e(sizes)}</p><div class="grid2">{exact}{_table(["the paper estimates", "FLOP"], estimate, numbers=True)}'
        f"{measured}</div>"
    )


def _layer_table(record: Record) -> str:
    rows = layer_rows(record)
    return f"<details><summary>{len(rows)} layers</summary>{_table(LAYER_COLUMNS, rows)}</details>"


def _repeat(record: Record) -> str:
    command = repeat_command(record)
    again = (
        f"<pre><code>{e(command)}</code></pre>"
        if command
        else "<p>This run was started from Python, on objects that have no path; the options are in tuneport.json.</p>"
    )
    inputs = [
        [key, record[key]["name"], name, digest[:16]]
        for key in ("source", "finetuned", "target", "data")
        for name, digest in list(record.get(key, {}).get("sha256", {}).items())[:20]
    ]
    files = (
        "<details><summary>Files it was made from</summary>"
        + _table(["", "name", "file", "SHA-256, first 16 digits"], inputs)
        + "</details>"
        if inputs
        else ""
    )
    versions = ", ".join(f"{name} {number}" for name, number in record.get("versions", {}).items())
    return f'{again}{files}<p class="soft">{e(versions)}</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table that scrolls by itself; with `numbers`, all columns but the first stand to the right."""
    right = ' class="n"' if numbers else ""
    head = "".join(f"<th scope=col{right if index else ''}>{e(name)}</th>" for index, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{right if index else ''}>{e(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{e(heads[0] or heads[-1])}"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _layer_label(item: Mapping[str, Any]) -> str:
    block = item.get("block")
    return f"block {block} {item.get('role')}" if block is not None else str(item.get("role", item["target"]))


def _share(item: Mapping[str, Any], side: str) -> float | None:
    rank, width = item[f"rank_{side}"], item.get(f"width_{side}")
    return rank / width if rank is not None and width else None


def _ratio(item: Mapping[str, Any]) -> float | None:
    source, target = item["norm_source"], item["norm_target"]
    return target / source if source and target is not None else None


def _mean(values: Iterable[Number]) -> float | None:
    known = [float(value) for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else None


def _text(value: Number) -> str:
    return "–" if value is None else f"{value:.4g}"


def _flops(count: int) -> str:
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if count >= size:
            return f"{count / size:.3g} {prefix}FLOP"
    return f"{count} FLOP"


def _anchor(name: str) -> str:
    return "-".join("".join(mark if mark.isalnum() else " " for mark in name.lower()).split())
