"""Language models: how an arm makes its LoRA, and its scores.

Every arm ends as a folder with a LoRA, or as nothing, which is the base itself. Plain peft loads it and
`LanguageModel` scores it, whoever made it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.skill.cells import FEW_SHOT, NEUTRAL_FILE, TASKS, Cell, Parts, neutral_passages
from benchmarks.skill.models import LanguageModel, Scores
from benchmarks.skill.place import Place
from benchmarks.skill.routes import Inputs, scores_by_route, take
from benchmarks.skill.scores import overlap_of_written


def missing(models: Path, shared: Path, pairs: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """What must be there and is not, in words."""
    names = dict.fromkeys(name for pair in pairs for name in pair.split(">"))
    found = [f"model {models / name}" for name in names if not (models / name / "config.json").is_file()]
    files = [TASKS[task].file for task in tasks] + [NEUTRAL_FILE]
    return found + [f"data {shared / file}" for file in dict.fromkeys(files) if not (shared / file).is_file()]


def make_old(place: Place, source: str, task: str) -> dict[str, Any]:
    """Train the old LoRA on all training samples, or find it; return its scores."""

    def made(folder: Path) -> dict[str, Any]:
        parts, started = _parts(place, task), place.start()
        model = _open(place, source)
        schedule = place.schedule(TASKS[task].schedule)
        model.train(parts.train, schedule, autocast=place.autocast)
        model.save(folder)
        spent = place.spent(started)
        del model
        return {**_score(place, source, task, folder, parts), **spent, "about": {"schedule": asdict(schedule)}}

    return place.kept(_old(source, task), made)


def make(place: Place, cell: Cell) -> dict[str, Any]:
    """Make the LoRA of an arm and return its scores."""
    parts, folder = _parts(place, cell.task), place.empty_folder(cell.name)
    started = place.start()
    about: dict[str, Any] = {}
    if cell.arm == "all-data":
        schedule = place.schedule(TASKS[cell.task].schedule)
        model = _open(place, cell.target)
        model.train(parts.train, schedule, autocast=place.autocast)
        model.save(folder)
        about = {"schedule": asdict(schedule), "samples": len(parts.train)}
    elif cell.arm == "few-shot":
        about = _few_shot(place, cell, parts, folder)
    elif cell.arm != "target":
        samples = parts.draw(cell.draw or 0, min(cell.n or 0, len(parts.train)))
        if len(samples) < (cell.n or 0) and not place.small:
            raise ValueError(f"{cell.task} has {len(samples)} training samples, and {cell.n} are asked for")
        old = place.folder(_old(cell.source, cell.task))
        inputs = Inputs(place.models / cell.source, old, place.models / cell.target, place.device, place.dtype)
        about = take(cell, TASKS[cell.task], samples, inputs, folder, place.steps)
    spent = place.spent(started)
    lora = folder if (folder / "adapter_config.json").exists() else None
    found = scores_by_route(cell, folder, about, lambda path: _score(place, cell.target, cell.task, path, parts))
    found |= overlap_of_written(folder, [sample.prompt or sample.answer for sample in parts.test])
    return {**_score(place, cell.target, cell.task, lora, parts), **found, **spent, "about": about}


def _open(place: Place, name: str) -> LanguageModel:
    return LanguageModel(place.models / name, place.device, place.dtype)


def _parts(place: Place, task: str) -> Parts:
    found = TASKS[task].read(place.shared)
    return found.small() if place.small else found


def _old(source: str, task: str) -> str:
    return f"old-{source}-{task}"


def _few_shot(place: Place, cell: Cell, parts: Parts, folder: Path) -> dict[str, Any]:
    """Train on the labelled samples of the draw; keep the best of some schedules on validation samples."""
    model, task, draw = _open(place, cell.target), TASKS[cell.task], cell.draw or 0
    samples, tried = parts.draw(draw, cell.n or 0), []
    for schedule in map(place.schedule, FEW_SHOT):
        model.train(samples, schedule, seed=draw, autocast=place.autocast)
        value = next(iter(model.score(task, parts.validation).values.values()))
        value = -value if task.lower_is_better else value
        if not tried or value > max(known for known, _ in tried):
            model.save(folder)
        tried.append((value, schedule))
    best = max(tried, key=lambda each: each[0])  # the first of equal ones, as saved
    return {"schedule": asdict(best[1]), "validation": [round(abs(value), 4) for value, _ in tried]}


def _score(place: Place, name: str, task: str, lora: Path | None, parts: Parts) -> dict[str, Any]:
    """Scores on the test part and on neutral text of a model with a LoRA, which plain peft loads."""
    model = _open(place, name)
    if lora is not None:
        model.load(lora)
    found: Scores = model.score(TASKS[task], parts.test)
    passages = neutral_passages(place.shared, 3) if place.small else neutral_passages(place.shared)
    neutral = model.bits(passages)
    with model.without_lora():
        base = neutral if lora is None else model.bits(passages)
    if found.answers and lora is not None:
        pairs = zip(parts.test, found.answers, strict=True)
        lines = [
            json.dumps({"prompt": each.prompt, "wanted": each.answer.strip(), "got": got}) + "\n" for each, got in pairs
        ]
        (lora / "answers.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "scores": {key: round(value, 4) for key, value in found.values.items()},
        "right": None if found.right is None else list(found.right),
        "tests": len(parts.test),
        "neutral": round(neutral, 5),
        "neutral_base": round(base, 5),
    }
