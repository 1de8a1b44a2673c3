"""The groups of the table: language models, classifiers of texts, vision towers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.skill import classifiers, language, towers
from benchmarks.skill.ablations import ABLATIONS, STARTS, WRITTEN, of
from benchmarks.skill.cells import ARMS, PAIRS, TASKS, Cell
from benchmarks.skill.place import Place

SCORES = {"choices": ("accuracy",), "answer": ("accuracy",), "slots": ("f1", "accuracy")}
BITS = ("bits",)


@dataclass(frozen=True)
class Group:
    """Cells of one kind of models.

    Args:
        grid: the tasks of each pair.
        arms: those with a number of samples have draws.
        missing: of folders of models and data, pairs and tasks: what is not there.
        make_old: makes or finds an old model, and returns its scores.
        make: makes a cell, and returns its scores.
        scores: the scores of a task, the main one first.
        also: the model that an arm needs beside those of the pair.
        ablations: arms with one thing changed; they are in no table of the group, and have a number of samples.
        whole: the score of a target that is fine-tuned on all data, where it is not that of the arm all-data.
    """

    grid: Mapping[str, tuple[str, ...]]
    arms: tuple[str, ...]
    missing: Callable[[Path, Path, Sequence[str], Sequence[str]], list[str]]
    make_old: Callable[[Place, str, str], dict[str, Any]]
    make: Callable[[Place, Cell], dict[str, Any]]
    scores: Callable[[str], tuple[str, ...]] = lambda _: ("accuracy",)
    also: Mapping[str, str] = field(default_factory=dict)
    ablations: tuple[str, ...] = tuple(STARTS)
    whole: Callable[[Cell], float | None] = lambda _: None

    def lacking(self, models: Path, shared: Path, cells: Sequence[Cell]) -> list[str]:
        """What the cells need and is not there, in words."""
        pairs, tasks = (list(dict.fromkeys(getattr(cell, name) for cell in cells)) for name in ("pair", "task"))
        ablations = dict.fromkeys(of(cell.arm) for cell in cells)
        names = [each.generator or self.also.get(each.arm) for each in ablations]
        also = [models / name for name in dict.fromkeys(names) if name is not None]
        found = self.missing(models, shared, pairs, tasks)
        return found + [f"model {folder}" for folder in also if not (folder / "config.json").is_file()]

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(task for tasks in self.grid.values() for task in tasks))

    def places(self, pairs: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, str]]:
        """Pairs and tasks of the grid; a pair that is not in it has all tasks."""
        return [(pair, task) for pair in pairs for task in tasks if task in self.grid.get(pair, tasks)]

    def check(self, pairs: Sequence[str], tasks: Sequence[str], arms: Sequence[str]) -> None:
        """Refuse what is no pair, and tasks and arms that nobody knows."""
        for pair in pairs:
            if len(pair.split(">")) != 2:
                raise SystemExit(f"{pair!r} is no pair; write SOURCE>TARGET, such as {next(iter(self.grid))}.")
        for task in tasks:
            if task not in self.tasks:
                raise SystemExit(f"unknown task {task!r}; known: {', '.join(self.tasks)}.")
        counted = {arm.partition("@")[0]: "@" in arm for arm in self.arms} | dict.fromkeys(self.ablations, True)
        for label in arms:
            arm, at, count = label.partition("@")
            if counted.get(arm) != bool(at) or (at and not count.isdigit()):
                raise SystemExit(f"unknown arm {label!r}; known: {', '.join(self.arms)}, or another number of samples.")


GROUPS = {
    "language": Group(
        {pair: tuple(TASKS) for pair in PAIRS},
        ARMS,
        language.missing,
        language.make_old,
        language.make,
        lambda task: SCORES.get(TASKS[task].kind, BITS),
        ablations=(*STARTS, *ABLATIONS),
    ),
    "classifiers": Group(
        classifiers.GRID,
        classifiers.ARMS,
        classifiers.missing,
        classifiers.make_old,
        classifiers.make,
        also={"synthetic": classifiers.GENERATOR},
        ablations=(*STARTS, *WRITTEN),
    ),
    "towers": Group(
        towers.GRID, towers.ARMS, towers.missing, towers.make_old, towers.make, whole=towers.fine_tuned_on_all
    ),
}
