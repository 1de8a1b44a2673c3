"""The routes of tuneport: the one place that calls it, by its public functions and on paths."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.skill.cells import Cell, Sample, Task

ROUTES = {"copy": ("copy",), "port": ("port",), "distill": ("distill",), "synthetic": ("synthetic",), "upgrade": None}
DESCRIBED = ("synthetic", "upgrade")  # routes that are told the sentence about the texts
CLOSED_FORMS = ("cross-lora", "theseus", "bico")  # methods of `transfer`, at scale 1


@dataclass(frozen=True)
class Inputs:
    """Folders of the models and the old LoRA; what the machine is."""

    source: Path
    adapter: Path
    target: Path
    device: str
    dtype: str


def take(
    cell: Cell, task: Task, samples: Sequence[Sample], inputs: Inputs, out: Path, steps: int | None
) -> dict[str, Any]:
    """Let tuneport upgrade by one route, or by the one that it chooses, or transfer, and write the LoRA to `out`.

    Args:
        cell: the arm and the draw.
        task: says how samples are written.
        samples: own samples; their answers are not shown.
        inputs: models and machine.
        out: the folder of the LoRA; nothing is written if tuneport advises against every route.
        steps: of a distillation, if not by its own rule.

    Returns:
        What tuneport says of its routes.
    """
    import tuneport

    data = write_samples(task, samples, out.with_suffix(".jsonl")) if samples else None
    models = str(inputs.source), str(inputs.adapter), str(inputs.target)
    options: dict[str, Any] = {"device": inputs.device, "dtype": inputs.dtype, "as_": "adapter", "seed": cell.draw or 0}
    if cell.arm in CLOSED_FORMS:
        more = {"samples": len(samples)} if samples else {}
        tuneport.transfer(*models, data, method=cell.arm, scale=1.0, **more, **options).save(out)
        return {"method": cell.arm, "scale": 1.0}
    if (routes := ROUTES[cell.arm]) is not None:
        options["routes"] = routes
    if cell.arm in DESCRIBED:
        options["describe"] = task.describe
    if steps is not None:
        options["steps"] = steps
    found = tuneport.upgrade(*models, data, **options)
    if found.chosen is not None:
        found.save(out)
    return {
        "chosen": found.chosen,
        "decision": found.decision,
        "routes": [{key: value for key, value in row.row().items() if value is not None} for row in found.routes],
    }


def write_samples(task: Task, samples: Sequence[Sample], path: Path) -> str:
    """Write samples without their answers as a table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(task.row(sample)) + "\n" for sample in samples), encoding="utf-8")
    return str(path)
