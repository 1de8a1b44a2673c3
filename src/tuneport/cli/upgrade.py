"""`tuneport upgrade`: bring a fine-tune, or all of a list, to a new base by the best route, chosen on own samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..config import UpgradeConfig, UpgradeInputs
from .terminal import Bar, as_options, emit_json, listening, say, show
from .transfer import print_next


def upgrade(inputs: UpgradeInputs, config: UpgradeConfig, json: bool) -> None:
    """Bring a fine-tune to a new base model by the best route."""
    if inputs.list_ is not None:
        _upgrade_list(inputs, config, json)
        return
    from ..pipeline.upgrade import upgrade_to_folder
    from ..processes import processes

    with processes(config.device) as here, listening("upgrading", here.first) as events:
        record = upgrade_to_folder(inputs.one(), config, events)
    if not here.first:
        return
    if json:
        emit_json(record)
        return
    out = record["out"]
    say("nothing was written" if out is None else f"written to {out}")
    say(record["decision"], prose=True)
    print_routes(record)
    if out is not None:
        say(f"report: {Path(out, 'report.html')}; samples to look at: {Path(out, 'disagreements.jsonl')}")
        print_next(record)


def print_routes(record: Mapping[str, Any]) -> None:
    """Print the table of routes, without columns that are empty, and then what there is to say of each."""
    from ..report.summary import route_table

    heads, rows = route_table(record)
    show([[f"{name} (chosen)" if name == record["chosen"] else name, *row] for name, *row in rows], *heads)
    for row in record["routes"]:
        if row["note"]:
            say(f"{row['name']}: {as_options(row['note'])}", prose=True)


def _upgrade_list(inputs: UpgradeInputs, config: UpgradeConfig, json: bool) -> None:
    """Upgrade all fine-tunes of a list; the exit code is 1 if one of them failed."""
    from ..fleet.lines import read_lines

    lines = read_lines(inputs, config)
    from ..fleet.run import upgrade_lines
    from ..fleet.summary import PAGE

    with Bar("upgrading") as events:
        fleet = upgrade_lines(lines, inputs, events)
    if json:
        emit_json(fleet.to_json())
    else:
        heads, rows = fleet.table()
        show([[*row[:-1], as_options(row[-1])] for row in rows], *heads, fold=True)
        say(fleet.headline)
        say(f"report: {Path(inputs.out, PAGE)}")
    if fleet.count("failed"):
        raise typer.Exit(1)
