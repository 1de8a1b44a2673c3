"""The routes of tuneport: the one place that calls it, by its public functions and on paths."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.skill.ablations import STARTS, every_route, of
from benchmarks.skill.cells import Cell, Sample, Task

ROUTES = {"copy": ("copy",), "port": ("port",), "upgrade": None, **dict.fromkeys(STARTS, ("port", "distill"))}
CLOSED_FORMS = ("cross-lora", "theseus", "bico")  # methods of `transfer`, at scale 1
WRITTEN = 2000  # samples that models write
RANK = 16  # of a student's LoRA


@dataclass(frozen=True)
class Inputs:
    """Folders of the models, and of the old LoRA or model; what the machine is."""

    source: Path
    tuned: Path
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

    models = str(inputs.source), str(inputs.tuned), str(inputs.target)
    options: dict[str, Any] = {"seed": cell.draw or 0, "device": inputs.device, "dtype": inputs.dtype}
    if cell.arm in CLOSED_FORMS:
        data = write_samples([{"text": sample.prompt or sample.answer} for sample in samples], out)
        more = {"samples": len(samples)} if samples else {}
        tuneport.transfer(*models, data, method=cell.arm, scale=1.0, as_="adapter", **more, **options).save(out)
        return {"method": cell.arm, "scale": 1.0}
    data = write_samples([task.row(sample) for sample in samples], out)
    options["steps"] = steps
    if task.form:
        options["template"] = task.form.replace("{}", "{text}")
    if cell.arm in ROUTES:
        return _upgraded(cell, data, inputs, out, "adapter", **options)
    ablation = of(cell.arm)
    if ablation.arm == "synthetic":
        options |= {"synthetic": WRITTEN, "keep_texts": True, **ablation.options}
        options |= {"synthetic": 16} if steps is not None else {}
        options |= {"describe": task.describe} if task.form and not samples else {}
        options |= {"generator": str(inputs.source.parent / ablation.generator)} if ablation.generator else {}
    source, adapter, target = models
    options |= {"samples": len(samples) or None, "lora": RANK}
    with ablation.changed():
        result = tuneport.distill(adapter, target, data, source, **options)
    result.save(out)
    kept = ("distilled", "synthetic", "seconds")
    return {key: result.record[key] for key in kept if key in result.record}


def take_tower(
    cell: Cell, data: Path, count: int, extra: Path | None, inputs: Inputs, out: Path, steps: int | None
) -> dict[str, Any]:
    """Let tuneport distill a vision tower, or upgrade it, on a file with images, and write the model to `out`.

    Returns:
        What tuneport says of it.
    """
    import tuneport

    options: dict[str, Any] = {"seed": cell.draw or 0, "device": inputs.device, "dtype": inputs.dtype}
    options["head"] = cell.task
    others = None if extra is None else str(extra)
    if cell.arm in ROUTES and cell.arm != "port":
        return _upgraded(cell, str(data), inputs, out, "model", steps=steps, extra=others, **options)
    source, tuned, target = str(inputs.source), str(inputs.tuned), str(inputs.target)
    options["samples"] = count
    if cell.arm == "port":
        result = tuneport.transfer(source, tuned, target, str(data), labels="source", **options)
        result.save(out, as_="model")
        return {"scale": result.scale}
    result = tuneport.distill(tuned, target, str(data), extra=others, steps=steps, **options)
    result.save(out)
    return {"distilled": result.record["distilled"]}


def take_classifier(
    cell: Cell, data: Path, count: int, more: Path | None, inputs: Inputs, out: Path, steps: int | None
) -> dict[str, Any]:
    """Let tuneport bring a classifier to another encoder, on a file with texts, and write the model to `out`.

    `more` is a file with other sentences, or the model that writes some.

    Returns:
        What tuneport says of it.
    """
    import tuneport

    options: dict[str, Any] = {"seed": cell.draw or 0, "device": inputs.device, "dtype": inputs.dtype}
    ablation = of(cell.arm)
    if ablation.arm == "synthetic":
        options |= {"generator": str(more), "synthetic": WRITTEN, "routes": ("synthetic",), "keep_texts": True}
        options |= {**ablation.options} if steps is None else {"synthetic": 16}
        with ablation.changed():
            return _upgraded(cell, str(data), inputs, out, "model", steps=steps, **options)
    others = None if more is None else str(more)
    if cell.arm in ROUTES and cell.arm != "port":
        return _upgraded(cell, str(data), inputs, out, "model", steps=steps, extra=others, **options)
    options |= {"scale": 0.0} if cell.arm == "target" else {}
    models = str(inputs.source), str(inputs.tuned), str(inputs.target)
    result = tuneport.transfer(*models, str(data), samples=count, **options)
    about: dict[str, Any] = {"scale": result.scale}
    if cell.arm in ("distill", "extra"):
        result = result.distill(steps, extra=others)
        about["distilled"] = result.record["distilled"]
    result.save(out, as_="model")
    return about


def _upgraded(cell: Cell, data: str | None, inputs: Inputs, out: Path, as_: str, **options: Any) -> dict[str, Any]:
    """Upgrade by the routes of an arm and write the chosen one, if any is worth it.

    Where all routes compete, each is written beside it. A student that begins as an ablation says is written whatever
    is chosen.
    """
    import tuneport

    models = str(inputs.source), str(inputs.tuned), str(inputs.target)
    routes, begin = ROUTES.get(cell.arm), STARTS.get(cell.arm)
    options |= {} if routes is None else {"routes": routes}
    for left in out.parent.glob(beside(out, "*").name):  # by a run that failed
        shutil.rmtree(left)
    with every_route(begin) as made:
        found = tuneport.upgrade(*models, data, as_=as_, **options)
    if begin is not None:
        made["distill"].save(out)
        return {**about_upgrade(found), "distilled": made["distill"].record["distilled"]}
    for name, result in made.items() if cell.arm == "upgrade" else ():
        result.save(beside(out, name))
    if found.chosen is not None:
        found.save(out)
    return about_upgrade(found)


def beside(out: Path, route: str) -> Path:
    """Where a route of an upgrade is written, chosen or not."""
    return out.with_name(f"{out.name}-by-{route}")


def scores_by_route(cell: Cell, out: Path, about: dict[str, Any], score: Callable[[Path], dict[str, Any]]) -> Any:
    """The scores of what each route of an upgrade has written; nothing of other arms."""
    if cell.arm != "upgrade":
        return {}
    folders = {row["name"]: beside(out, row["name"]) for row in about.get("routes", ())}
    return {"by_route": {name: score(folder)["scores"] for name, folder in folders.items() if folder.exists()}}


def about_upgrade(found: Any) -> dict[str, Any]:
    """What an upgrade says of its routes, and of the lessons of the chosen one."""
    lessons = {} if found.result is None else found.result.record
    return {
        **{key: lessons[key] for key in ("distilled", "synthetic") if key in lessons},
        "chosen": found.chosen,
        "decision": found.decision,
        "routes": [{key: value for key, value in row.row().items() if value is not None} for row in found.routes],
    }


def write_samples(rows: Sequence[dict[str, Any]], out: Path) -> str | None:
    """Write rows as a table beside the folder of the LoRA; None if there are none."""
    if not rows:
        return None
    path = out.with_name(f"{out.name}.jsonl")  # names of models have dots
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)
