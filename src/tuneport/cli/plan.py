"""`tuneport plan`: what a transfer would do, and what memory it would take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import PlanConfig, PlanInputs
from .terminal import emit_json, note, say, show
from .transfer import print_kept


def plan(inputs: PlanInputs, config: PlanConfig, json: bool) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the memory."""
    from ..pipeline.estimate import estimate, estimate_shapes

    shapes = config.shapes_only
    found = estimate_shapes(inputs.source, inputs.target, config) if shapes else estimate(inputs, config)
    for text in found.pop("notes", ()):
        note(text)
    if json:
        emit_json(found)
    elif config.shapes_only:
        _print_shapes(found, config)
    else:
        _print_plan(found, config.layers)


def _print_plan(found: Mapping[str, Any], layers: bool) -> None:
    from ..io.sizes import format_bytes
    from ..report.summary import PLAN_COLUMNS, moved_words, plan_rows

    title = f"{found['method']}: {len(found['layers'])} layers"
    if layers:
        rows = [
            [word for side in ("target", "source") for word in (row[side], "{} x {}".format(*row[f"{side}_shape"]))]
            for row in found["layers"]
        ]
        show(rows, "target layer", "shape", "source layer", "shape", title=title, fold=True)
    else:
        show(plan_rows(found["layers"]), *PLAN_COLUMNS, title=title, fold=True)
    say(f"would move: {moved_words(found)}")
    print_kept(found)
    if "same_tokenizer" in found:
        words = "the models have one tokenizer" if found["same_tokenizer"] else "the tokenizers differ"
        if tokens := found.get("tokens"):
            share = "{target_matched} of the {target_tokens} tokens of the target have a partner".format(**tokens)
            words += f": {share} in the source ({100 * tokens['share']:.0f} %)"
        say(words)
    cost = found["expected"]
    say(
        f"expected: {format_bytes(cost['statistics_bytes'])} of statistics; for the scale and the scores, the source "
        f"answers {cost['answers']['source']} samples and the target {cost['answers']['target']}"
    )
    say("upgrade would try: " + "; ".join(f"{name}{_route_words(row)}" for name, row in found["routes"].items()))
    if "groups" in cost:
        runs = f"{len(cost['groups'])} runs" if len(cost["groups"]) > 1 else "one run"
        if "peak_bytes" in cost:
            say(f"within the memory budget: {runs} over the calibration data, peak {format_bytes(cost['peak_bytes'])}")
        else:
            say(f"{runs} over the calibration data: all statistics at once would take too much of the free memory")
        if cost.get("fetched_bytes"):
            say(
                f"the models are larger: {format_bytes(cost['home_bytes'])} stay in {cost['home']}, and "
                f"{format_bytes(cost['fetched_bytes'])} of weights come from there, block by block"
            )


def _route_words(row: Mapping[str, Any]) -> str:
    if "why_not" in row:
        return f", not: {row['why_not']}"
    written = f" and {row['written']} written ones" if "written" in row else ""
    steps = f" in {row['steps']} steps" if "steps" in row else ""
    return f" on {row['samples']} samples{written}{steps}" if row["samples"] else ""


def _print_shapes(found: Mapping[str, Any], config: PlanConfig) -> None:
    """Plans for several devices."""
    from ..io.sizes import format_bytes

    rows = []
    for line in found["plans"]:
        cells = [line.get("error", ""), "", "", ""]
        if "error" not in line:
            sizes = [format_bytes(line[name]) for name in ("peak_bytes", "home_bytes", "fetched_bytes")]
            cells = [str(line["runs"]), *sizes]
        rows.append([str(line["devices"]), *cells])
    columns = ("devices", "runs over the data", "peak of a device", "off the device", "fetched by a device")
    show(rows, *columns, title=f"{found['layers']} layers, {found['samples']} texts of {config.length} tokens")
    if "teaching" in found:
        _print_teaching(found["teaching"], config)


def _print_teaching(found: Mapping[str, Any], config: PlanConfig) -> None:
    """Memory and hours of the teaching of a LoRA."""
    from ..io.sizes import format_bytes

    rows = []
    for line in found["plans"]:
        hours = [f"{line[name]:.3g}" if name in line else "too small" for name in ("hours", "hours_of_1000")]
        rows.append([str(line["devices"]), format_bytes(line["peak_bytes"]), *hours])
    title = f"teaching a LoRA {found['texts']} texts of {config.length} tokens, scaled from 8B on an {found['gpu']}"
    held = "models in parts" if found["in_parts"] else "both models"
    show(rows, "devices", f"peak of a device, {held}", "hours", "hours of 1,000 adapters", title=title)
