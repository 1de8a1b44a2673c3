"""Rows: one JSON object for each finished cell, with what made it. A cell that has a row is not made again."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.skill.cells import Cell

Row = Mapping[str, Any]


def key_of(row: Row) -> tuple[Any, ...]:
    """What a row is the row of."""
    return (*(row.get(name) for name in ("pair", "task", "arm", "n", "draw")), bool(row.get("small")))


def key(cell: Cell, small: bool) -> tuple[Any, ...]:
    """The same of a cell."""
    return (cell.pair, cell.task, cell.arm, cell.n, cell.draw, small)


def finished(rows: Sequence[Row]) -> dict[tuple[Any, ...], Row]:
    """The last row of each cell that succeeded."""
    return {key_of(row): row for row in rows if "error" not in row}


def failed(rows: Sequence[Row]) -> dict[tuple[Any, ...], str]:
    """The last reason of each cell that failed and has not succeeded."""
    done = finished(rows)
    return {key_of(row): row["error"] for row in rows if "error" in row and key_of(row) not in done}


def to_do(cells: Sequence[Cell], rows: Sequence[Row], small: bool) -> list[Cell]:
    """The cells without a row; those that failed are tried again."""
    done = finished(rows)
    return [cell for cell in cells if key(cell, small) not in done]


def machine(device: str) -> dict[str, str]:
    """The device and the versions of the libraries."""
    import peft
    import torch
    import transformers

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    return {"device": name, **versions}


def command(group: str, cell: Cell, device: str, dtype: str, autocast: bool, small: bool) -> str:
    """The command that makes the row; folders in capitals are the user's own."""
    words = [f"python -m benchmarks.skill make --group {group} --models MODELS --shared SHARED --work WORK --rows ROWS"]
    words += [f"--pairs '{cell.pair}' --tasks {cell.task} --arms {cell.label}"]
    words += [] if cell.draw is None else [f"--draws {cell.draw}"]
    words += [f"--device {device} --dtype {dtype}", *["--autocast"] * autocast, *["--small"] * small]
    return " ".join(words)
