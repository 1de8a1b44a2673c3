"""`tuneport upgrade`: bring a fine-tune to a new base by the best route, chosen on own samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import TransferInputs, UpgradeConfig
from .terminal import emit_json, listening, say, show
from .transfer import print_next


def upgrade(inputs: TransferInputs, config: UpgradeConfig, json: bool) -> None:
    """Bring a fine-tune to a new base model by the best route."""
    from ..pipeline.upgrade import upgrade_to_folder
    from ..processes import processes

    with processes(config.device) as here, listening("upgrading", here.first) as events:
        record = upgrade_to_folder(inputs, config, events)
    if not here.first:
        return
    if json:
        emit_json(record)
        return
    out = record["out"]
    say("nothing was written" if out is None else f"written to {out}")
    say(record["decision"])
    print_routes(record)
    if out is not None:
        say(f"report: {Path(out, 'report.html')}; samples to look at: {Path(out, 'disagreements.jsonl')}")
        print_next(record)


def print_routes(record: Mapping[str, Any]) -> None:
    """Print the table of routes."""
    rows = []
    for row in record["routes"]:
        numbers = [("score", ".4g"), ("agreement", ".1f"), ("flips", "d"), ("neutral", "+.1f"), ("seconds", ".1f")]
        cells = ["" if row[key] is None else format(row[key], form) for key, form in numbers]
        rows.append([row["name"], *cells, row["note"] or ("chosen" if row["name"] == record["chosen"] else "")])
    show(rows, "route", "score", "agreement, %", "flips", "neutral, %", "seconds", "", fold=True)
