"""How an arm makes its LoRA, and the row of a cell.

Every arm ends as a folder with a LoRA, or as nothing, which is the base itself. Plain peft loads it and
`LanguageModel` scores it, whoever made it.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import commit
from benchmarks.skill.cells import FEW_SHOT, TASKS, Cell, Parts, Schedule, neutral_passages
from benchmarks.skill.models import LanguageModel, Scores
from benchmarks.skill.routes import Inputs, take
from benchmarks.skill.rows import command, machine
from benchmarks.skill.scores import flips

SMALL_STEPS = 2


@dataclass(frozen=True)
class Place:
    """Where everything is, and how it is computed."""

    models: Path
    shared: Path
    work: Path
    device: str
    dtype: str
    autocast: bool
    small: bool

    def open(self, name: str) -> LanguageModel:
        return LanguageModel(self.models / name, self.device, self.dtype)

    def parts(self, task: str) -> Parts:
        found = TASKS[task].read(self.shared)
        return found.small() if self.small else found

    def schedule(self, given: Schedule) -> Schedule:
        return replace(given, steps=SMALL_STEPS, batch=2) if self.small else given

    def without_paths(self, text: str) -> str:
        """The text with names in place of this machine's folders, as in a row's command."""
        for name in ("models", "shared", "work"):
            text = text.replace(str(getattr(self, name)), name.upper())
        return text

    def old_folder(self, source: str, task: str) -> Path:
        return self.work / f"old-{source}-{task}{'-small' * self.small}"


def make_old(place: Place, source: str, task: str) -> dict[str, Any]:
    """Train the old LoRA on all training samples, or find it; return its scores. One process makes it, others wait."""
    folder = place.old_folder(source, task)
    about = folder / "scores.json"
    with _locked(folder.with_suffix(".lock")):
        if not about.exists():
            shutil.rmtree(folder, ignore_errors=True)
            parts, started = place.parts(task), _start(place.device)
            model = place.open(source)
            schedule = place.schedule(TASKS[task].schedule)
            model.train(parts.train, schedule, autocast=place.autocast)
            model.save(folder)
            spent = _spent(place.device, started)
            del model
            found = {**_score(place, source, task, folder, parts), **spent, "about": {"schedule": asdict(schedule)}}
            about.write_text(json.dumps(found), encoding="utf-8")
    return dict(json.loads(about.read_text(encoding="utf-8")))


def make_row(place: Place, cell: Cell) -> dict[str, Any]:
    """Make a cell and return its row; a failure is a row too."""
    about: dict[str, Any] = {**asdict(cell), "small": place.small}
    shared = {
        "commit": commit(),
        "machine": machine(place.device),
        "command": command(cell, place.device, place.dtype, place.autocast, place.small),
    }
    try:
        old = make_old(place, cell.source, cell.task)
        found = old if cell.arm == "old" else _make(place, cell)
    except Exception as error:  # the other cells go on
        return {
            **about,
            "error": place.without_paths(f"{type(error).__name__}: {error}".splitlines()[0])[:300],
            **shared,
        }
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    right, before = found.pop("right"), old.get("right")
    flipped = None if right is None or cell.arm == "old" else flips(before or (), right)
    return {**about, "flips": flipped, **found, **shared}


def _make(place: Place, cell: Cell) -> dict[str, Any]:
    parts, folder = place.parts(cell.task), place.work / f"{cell.name}{'-small' * place.small}"
    shutil.rmtree(folder, ignore_errors=True)
    started = _start(place.device)
    about: dict[str, Any] = {}
    if cell.arm == "all-data":
        schedule = place.schedule(TASKS[cell.task].schedule)
        model = place.open(cell.target)
        model.train(parts.train, schedule, autocast=place.autocast)
        model.save(folder)
        about = {"schedule": asdict(schedule), "samples": len(parts.train)}
    elif cell.arm == "few-shot":
        about = _few_shot(place, cell, parts, folder)
    elif cell.arm != "target":
        samples = parts.draw(cell.draw or 0, min(cell.n or 0, len(parts.train)))
        if len(samples) < (cell.n or 0) and not place.small:
            raise ValueError(f"{cell.task} has {len(samples)} training samples, and {cell.n} are asked for")
        paths = place.models / cell.source, place.old_folder(cell.source, cell.task), place.models / cell.target
        inputs = Inputs(*paths, place.device, place.dtype)
        about = take(cell, TASKS[cell.task], samples, inputs, folder, SMALL_STEPS if place.small else None)
    spent = _spent(place.device, started)
    lora = folder if (folder / "adapter_config.json").exists() else None
    return {**_score(place, cell.target, cell.task, lora, parts), **spent, "about": about}


def _few_shot(place: Place, cell: Cell, parts: Parts, folder: Path) -> dict[str, Any]:
    """Train on the labelled samples of the draw; keep the best of some schedules on validation samples."""
    model, task, draw = place.open(cell.target), TASKS[cell.task], cell.draw or 0
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
    model = place.open(name)
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


def _start(device: str) -> float:
    """Forget the peak of memory, and read the clock."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
    return time.perf_counter()


def _spent(device: str, started: float) -> dict[str, float]:
    """Seconds, and the peak of memory: of the GPU's tensors, or of the whole process so far without one."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": round(time.perf_counter() - started, 1), "peak_gib": round(peak / 2**30, 2)}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def begin_process(jobs: int) -> None:
    """Share the processor's cores among the jobs, and draw no progress bars."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // jobs))
