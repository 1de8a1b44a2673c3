"""Datasets by name: `TASK:PATH` in place of a path, with known class names and prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import DataError, unknown_name
from ...io.places import local
from ...types import Split
from ..dataset import Dataset
from ..formats import read_plain, suffixes
from .base import Task


def read_tasks(content: str) -> dict[str, Task]:
    """The tasks of a TOML text, in the order of their names; its keys are those of tasks.toml."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    tasks = {}
    for name, facts in sorted(tomllib.loads(content).items()):
        fixed: Any = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()}
        tasks[name] = Task(name=name, **fixed)
    return tasks


TASKS = read_tasks(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))


def get_task(name: str) -> Task:
    """The task of that name, or an error that lists the known tasks."""
    if name.lower() not in TASKS:
        raise DataError(unknown_name("task", name, TASKS))
    return TASKS[name.lower()]


class Reference(NamedTuple):
    """Where data are: the task and the path of `TASK:PATH`; of a path or a hub id, None and the local path."""

    task: Task | None
    place: Path

    def read(self, split: Split, *, labelled: bool = True, columns: Mapping[str, str] | None = None) -> Dataset:
        """Read one split, as `read_data` describes."""
        if self.task is None:
            return read_plain(self.place, split, labelled=labelled, columns=columns)
        return self.task.read(self.place, split, labelled=labelled, columns=columns)


def split_reference(reference: str | Path) -> Reference:
    """What a reference means; a path that exists is one, even with a colon."""
    name, mark, place = str(reference).partition(":")
    if os.path.exists(reference) or not mark or "/" in name or "\\" in name or len(name) < 2:
        return Reference(None, local(reference, "dataset", suffixes()))
    return Reference(get_task(name), Path(place).expanduser())


def read_data(
    reference: str | Path, split: Split, *, labelled: bool = True, columns: Mapping[str, str] | None = None
) -> Dataset:
    """Read one split of an image folder, an `.npz`, a table, a saved HF dataset, or of `TASK:PATH`.

    A source without splits serves as both, and its `Dataset.split` is "all"; with a task, the splits are disjoint.
    Without a test split, the validation split (dev, validation, val) replaces it.
    `labelled=False` also accepts data with neither labels nor text targets. `columns` maps names such as text and
    label to those of a table.
    """
    return split_reference(reference).read(split, labelled=labelled, columns=columns)
