"""The row of a cell, whatever the group of its models."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from benchmarks.rows import commit
from benchmarks.skill.cells import Cell
from benchmarks.skill.groups import GROUPS
from benchmarks.skill.place import Place
from benchmarks.skill.rows import command, machine
from benchmarks.skill.scores import flips


def make_old(place: Place, group: str, source: str, task: str) -> dict[str, Any]:
    """Make or find the old model; return its scores."""
    return GROUPS[group].make_old(place, source, task)


def make_row(place: Place, group: str, cell: Cell) -> dict[str, Any]:
    """Make a cell and return its row; a failure is a row too."""
    try:
        old = make_old(place, group, cell.source, cell.task)
        found = old if cell.arm == "old" else GROUPS[group].make(place, cell)
    except Exception as error:  # the other cells go on
        return failed_row(place, group, cell, f"{type(error).__name__}: {error}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    right, before = found.pop("right"), old.get("right")
    flipped = None if right is None or cell.arm == "old" else flips(before or (), right)
    return _row(place, group, cell, {"flips": flipped, **found})


def failed_row(place: Place, group: str, cell: Cell, why: str) -> dict[str, Any]:
    """Return the row of a cell that could not be made."""
    return _row(place, group, cell, {"error": place.without_paths(why.splitlines()[0])[:300]})


def _row(place: Place, group: str, cell: Cell, found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with what it was found by."""
    return {
        **asdict(cell),
        "small": place.small,
        **found,
        "commit": commit(),
        "machine": machine(place.device),
        "command": command(group, cell, place.device, place.dtype, place.autocast, place.small),
    }
