"""Small vision towers with frozen heads, by plain transformers and torch: fine-tune them, score them.

Old models and targets are those of the zoo of the shared folder (MODELS is SHARED/zoo). What tuneport writes is a
folder that plain transformers loads; nothing of tuneport is imported here.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from benchmarks.skill.cells import SMALL, VALIDATION, Cell, Schedule
from benchmarks.skill.place import Place, fast_products
from benchmarks.skill.routes import Inputs, scores_by_route, take_tower
from benchmarks.skill.scores import percent

FOUR, TWO = ("cifar10", "fashion", "gtsrb", "mnist"), ("cifar10", "mnist")
GRID = {"a>a2": FOUR, "a>b": FOUR, "a>c": FOUR, "c>a": TWO, "c>a2": TWO, "c>b": TWO}
ARMS = (
    "old",
    "target",
    "all-data",
    "few-shot@100",
    "port@100",
    "distill@20",
    "distill@100",
    "extra@20",
    "extra@100",
    "upgrade@100",
)
EXTRA = 500  # images of another data set
OTHER = {task: "gtsrb" if task == "cifar10" else "cifar10" for task in FOUR}
# Targets that were fine-tuned on the whole public sets, as the old models were, on 4,000 test images (README of the
# zoo; fashion and gtsrb of c: lab of the shared folder). Training images here are a tenth of those.
FINE_TUNED = {
    "a": {"cifar10": 72.8, "fashion": 87.1, "gtsrb": 91.4, "mnist": 97.6},
    "a2": {"cifar10": 73.0, "fashion": 86.8, "gtsrb": 90.9, "mnist": 97.9},
    "b": {"cifar10": 74.1, "fashion": 87.7, "gtsrb": 92.1, "mnist": 98.2},
    "c": {"cifar10": 74.4, "fashion": 87.7, "gtsrb": 92.1, "mnist": 98.5},
}
ALL_DATA = Schedule(2000, 1e-4, 128)  # the zoo's own
FEW_SHOT = tuple(Schedule(steps, rate, 64) for steps, rate in ((100, 1e-4), (300, 3e-5), (300, 1e-4), (300, 3e-4)))
FLIPPED = ("cifar10", "fashion")  # a mirrored digit or traffic sign is another one
DECAY, WARM_UP = 0.1, 0.1
ROWS = 500  # images of one pass

Array = NDArray[Any]


@dataclass(frozen=True)
class Images:
    """The images of a task, and their labels."""

    train: tuple[Array, Array]
    validation: tuple[Array, Array]
    test: tuple[Array, Array]

    def draw(self, number: int, count: int) -> tuple[Array, Array]:
        """The first images of a fixed order of the training images: a smaller draw is part of a larger one."""
        images, labels = self.train
        chosen = random.Random(number).sample(range(len(images)), len(images))[:count]
        return images[chosen], labels[chosen]


def fine_tuned_on_all(cell: Cell) -> float | None:
    """The accuracy of the target that was fine-tuned on the whole public set."""
    return FINE_TUNED.get(cell.target, {}).get(cell.task)


def missing(models: Path, shared: Path, pairs: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """What must be there and is not, in words."""
    names = dict.fromkeys(name for pair in pairs for name in pair.split(">"))
    olds = [f"{pair.split('>')[0]}-{task}" for pair in pairs for task in tasks if task in GRID.get(pair, tasks)]
    found = [
        f"model {models / name}"
        for name in dict.fromkeys([*names, *olds])
        if not (models / name / "config.json").is_file()
    ]
    files = [_file(shared, name) for task in tasks for name in (task, OTHER[task])]
    return found + [f"data {file}" for file in dict.fromkeys(files) if not file.is_file()]


@lru_cache
def read(shared: Path, task: str, small: bool = False) -> Images:
    """Read the images of a task."""
    with np.load(_file(shared, task)) as arrays:
        x, y, *test = (arrays[name] for name in ("x_train", "y_train", "x_test", "y_test"))
    order = np.random.default_rng(0).permutation(len(x))
    most = (SMALL, 6 * SMALL) if small else (VALIDATION, len(x))
    validation, train = order[: most[0]], order[most[0] : sum(most)]
    tests = slice(SMALL if small else None)
    return Images((x[train], y[train]), (x[validation], y[validation]), (test[0][tests], test[1][tests]))


def _file(shared: Path, task: str) -> Path:
    return shared / f"data/images/{task}.npz"


class Tower:
    """A CLIP-like vision tower with the head of a task."""

    def __init__(self, folder: Path, head: Path, device: str) -> None:
        from safetensors.torch import load_file
        from transformers import CLIPVisionModelWithProjection

        self.folder, self.device = folder, torch.device(device)
        module = CLIPVisionModelWithProjection.from_pretrained(folder, dtype=torch.float32)
        self.module: Any = module.to(self.device).eval()
        stored = load_file(head)
        self.classes = F.normalize(stored["class_embeds"].float(), dim=-1).to(self.device)
        self.factor = math.exp(float(stored["logit_scale"]))

    @cached_property
    def processor(self) -> Any:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(self.folder)

    def pixels(self, images: Array) -> Tensor:
        """Images as the tower reads them."""
        coloured = images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=-1)
        found: Tensor = self.processor(list(coloured), return_tensors="pt")["pixel_values"]
        return found.to(self.device)

    def logits(self, pixels: Tensor) -> Tensor:
        features = F.normalize(self.module(pixel_values=pixels).image_embeds, dim=-1)
        return self.factor * features @ self.classes.T

    @torch.inference_mode()
    def right(self, images: tuple[Array, Array]) -> list[bool]:
        """Of each image, whether its class is found."""
        pixels, labels = self.pixels(images[0]), images[1]
        found = [self.logits(part).argmax(-1).cpu() for part in pixels.split(ROWS)]
        return [bool(one == other) for one, other in zip(torch.cat(found).tolist(), labels.tolist(), strict=True)]

    def train(self, images: tuple[Array, Array], schedule: Schedule, *, flip: bool, seed: int = 0) -> None:
        """Fine-tune all weights of the tower on augmented images; the head is frozen."""
        pixels, labels = self.pixels(images[0]), torch.as_tensor(images[1], device=self.device)
        chance = torch.Generator().manual_seed(seed)
        parameters = list(self.module.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=schedule.rate, weight_decay=DECAY)
        with fast_products():
            for step in range(schedule.steps):
                for group in optimizer.param_groups:
                    group["lr"] = schedule.rate * _share(step, schedule.steps)
                rows = torch.randint(len(pixels), (schedule.batch,), generator=chance)
                loss = F.cross_entropy(self.logits(augmented(pixels[rows], chance, flip)), labels[rows])
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()


def augmented(pixels: Tensor, chance: torch.Generator, flip: bool) -> Tensor:
    """Turned by up to 0.2 radians, scaled and shifted by up to 15 %; mirrored half of the time, if at all."""
    count = len(pixels)

    def drawn(low: float, high: float) -> Tensor:
        return torch.rand(count, generator=chance) * (high - low) + low

    turn, scale, right, down = drawn(-0.2, 0.2), drawn(0.85, 1.15), drawn(-0.15, 0.15), drawn(-0.15, 0.15)
    side = torch.where(drawn(0, 1) < 0.5, -1.0, 1.0) if flip else torch.ones(count)
    first = torch.stack([side * scale * turn.cos(), -scale * turn.sin(), right], 1)
    second = torch.stack([side * scale * turn.sin(), scale * turn.cos(), down], 1)
    grid = F.affine_grid(torch.stack([first, second], 1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid.to(pixels.device), padding_mode="border", align_corners=False)


def _share(step: int, steps: int) -> float:
    """The share of the rate at a step: a warm-up, then half a cosine."""
    warm = min(1.0, (step + 1) / max(1.0, WARM_UP * steps))
    return warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def make_old(place: Place, source: str, task: str) -> dict[str, Any]:
    """Score the fine-tuned source, which the zoo has."""

    def made(_: Path) -> dict[str, Any]:
        started = place.start()
        return {**_score(place, source, task, place.models / f"{source}-{task}"), **place.spent(started), "about": {}}

    return place.kept(f"old-{source}-{task}", made)


def make(place: Place, cell: Cell) -> dict[str, Any]:
    """Make the tower of an arm and return its scores; what does not depend on the source is made once."""
    shared = {"target": _target, "all-data": _all_data, "few-shot": _few_shot}
    if cell.arm in shared:
        draw = "" if cell.draw is None else f"-{cell.draw}"
        name = f"{cell.target}-{cell.task}-{cell.label.replace('@', '-')}{draw}"
        return place.kept(name, lambda _: shared[cell.arm](place, cell))
    folder, images = place.empty_folder(cell.name), read(place.shared, cell.task, place.small)
    names = cell.source, f"{cell.source}-{cell.task}", cell.target
    inputs = Inputs(*(place.models / name for name in names), place.device, place.dtype)
    drawn, _ = images.draw(cell.draw or 0, cell.n or 0)
    data = _write(folder.with_name(f"{folder.name}.npz"), drawn)
    extra = _extra(place, cell.task) if cell.arm in ("extra", "upgrade") else None
    started = place.start()
    about = take_tower(cell, data, len(drawn), extra, inputs, folder, place.steps)
    spent = place.spent(started)
    written = folder if folder.exists() else place.models / cell.target
    found = scores_by_route(cell, folder, about, lambda path: _score(place, cell.target, cell.task, path))
    return {**_score(place, cell.target, cell.task, written), **found, **spent, "about": about}


def _target(place: Place, cell: Cell) -> dict[str, Any]:
    started = place.start()
    found = _score(place, cell.target, cell.task, place.models / cell.target)
    return {**found, **place.spent(started), "about": {}}


def _all_data(place: Place, cell: Cell) -> dict[str, Any]:
    images, started = read(place.shared, cell.task, place.small), place.start()
    tower, schedule = _open(place, cell.target, cell.task), place.schedule(ALL_DATA)
    tower.train(images.train, schedule, flip=cell.task in FLIPPED)
    about = {"schedule": asdict(schedule), "samples": len(images.train[0])}
    return {**_scores(tower.right(images.test)), **place.spent(started), "about": about}


def _few_shot(place: Place, cell: Cell) -> dict[str, Any]:
    """Train on the labelled images of the draw; the best of some schedules on validation images."""
    images, started, draw = read(place.shared, cell.task, place.small), place.start(), cell.draw or 0
    tried: list[tuple[float, Schedule, list[bool]]] = []
    for schedule in map(place.schedule, FEW_SHOT):
        tower = _open(place, cell.target, cell.task)
        tower.train(images.draw(draw, cell.n or 0), schedule, flip=cell.task in FLIPPED, seed=draw)
        tried.append((percent(tower.right(images.validation)), schedule, tower.right(images.test)))
    _, schedule, right = max(tried, key=lambda each: each[0])
    about = {"schedule": asdict(schedule), "validation": [round(each[0], 4) for each in tried]}
    return {**_scores(right), **place.spent(started), "about": about}


def _extra(place: Place, task: str) -> Path:
    """Images of another data set: the same for all draws."""
    images = read(place.shared, OTHER[task], place.small).draw(0, EXTRA)[0]
    folder = place.folder(f"extra-{task}")
    return _write(folder.with_name(f"{folder.name}.npz"), images)


def _write(path: Path, images: Array) -> Path:
    """Write images without labels; several processes may write the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    with new.open("wb") as file:
        np.savez(file, x_train=images)
    return new.replace(path)


def _open(place: Place, name: str, task: str, folder: Path | None = None) -> Tower:
    head = place.models / name / f"heads/{task}.safetensors"
    return Tower(folder or place.models / name, head, place.device)


def _score(place: Place, name: str, task: str, folder: Path) -> dict[str, Any]:
    """The accuracy of a folder with the head of a tower of the zoo."""
    return _scores(_open(place, name, task, folder).right(read(place.shared, task, place.small).test))


def _scores(right: list[bool]) -> dict[str, Any]:
    return {"scores": {"accuracy": round(percent(right), 4)}, "right": right, "tests": len(right)}
