"""Datasets by name: `TASK:PATH` in place of a path, with known class names and prompts.

With a fixed seed, a tenth of the training samples of each class is split off for validation; if the source has no test
split, a tenth of each class is split off for it first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError, unknown_name
from ...io.places import local
from ...types import Split
from ..dataset import Dataset, Kind, as_numbers
from ..formats import read_plain, suffixes

TaskSplit = Literal["train", "validation", "test"]

VALIDATION_SHARE = 0.1
TEST_SHARE = 0.1
SPLIT_SEED = 0


@dataclass(frozen=True)
class Task:
    """A dataset by name. `classes` is empty if the class names come with the data.

    `prompts` are templates: with `{}` for the class name (images, for a zero-shot head), or with `{text}` and
    `{text_pair}` (texts, for a text-to-text model). `label_texts` are the texts that a text-to-text model generates
    and a sentence encoder embeds, one per class. `aliases` are other names of the task's folder or file.
    """

    name: str
    title: str
    kind: Kind
    classes: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    label_texts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()

    def read(
        self, place: str | Path, split: TaskSplit, *, labelled: bool = True, columns: Mapping[str, str] | None = None
    ) -> Dataset:
        """Read one split from `place`: the dataset's folder or file, or a folder that holds it under a known name.

        With `columns` it is a table (see `read_data`).
        """
        place = Path(place)
        if not os.path.exists(place):
            raise DataError(f"no data at {place}: no such file or folder, for the task {self.name}.")
        wanted: Split = "test" if split == "test" else "train"
        data = self._with_class_names(self.find(place, wanted, labelled, columns))
        origin = replace(data.origin, prompts=self.prompts)
        if data.classes == self.classes:
            origin = replace(origin, label_texts=self.label_texts)
        if origin.split == "all":
            train, test = _split(data, TEST_SHARE)
            data = data.subset(test if split == "test" else train)
        if split != "test":
            train, validation = _split(data, VALIDATION_SHARE)
            data = data.subset(validation if split == "validation" else train)
        if split != "test" or origin.split == "all":
            origin = replace(origin, split=split)
        if not len(data):
            few = f"{place} has too few samples for a {split} split of {self.title}: no class has two"
            raise DataError(f"{few}. Add samples{', or a test split' if split == 'test' else ''}.")
        return replace(data, name=self.name, origin=origin)

    def places(self, place: Path) -> list[Path]:
        """The place, and what lies in it under a known name."""
        inside = [place / name for name in (self.title, self.name, *self.aliases) if (place / name).exists()]
        return list(dict.fromkeys([place, *inside]))

    def find(self, place: Path, split: Split, labelled: bool, columns: Mapping[str, str] | None) -> Dataset:
        """Read the first place that can be read."""
        reasons = []
        for candidate in self.places(place):
            try:
                return read_plain(candidate, split, labelled=labelled, columns=columns)
            except DataError as error:
                reasons.append(str(error))
        raise DataError(f"{place} does not look like {self.title}. {reasons[-1]}")

    def _with_class_names(self, data: Dataset) -> Dataset:
        """The data with the task's class names, if its own are numbers or the same names in another spelling."""
        if not self.classes or data.labels is None or data.classes == self.classes:
            return data
        own = {plain_name(name): index for index, name in enumerate(self.classes)}
        places = [own.get(plain_name(name), -1) for name in data.classes]
        numbers = as_numbers(data.classes)
        if min(places, default=-1) < 0 and numbers:
            places = [number if number < len(self.classes) else -1 for number in numbers]
        if min(places, default=-1) < 0 or len(set(places)) != len(places):
            return data  # other classes keep their names
        return replace(data, labels=np.array(places, dtype=np.int64)[data.labels], classes=self.classes)


def plain_name(name: str) -> str:
    """A name reduced to lower-case letters and digits, so that Annual_Crop is equal to "annual crop"."""
    return "".join(mark for mark in name.lower() if mark.isalnum())


def _split(data: Dataset, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers of two parts: the rest, and `share` of each class (at least one of two samples or more)."""
    labels = np.zeros(len(data), dtype=np.int64) if data.labels is None else data.labels
    random = np.random.default_rng(SPLIT_SEED)  # all commands agree on the parts
    kept, taken = [], []
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        count = min(max(1, round(share * len(rows))), len(rows) - 1)
        taken.append(rows[:count])
        kept.append(rows[count:])
    return np.sort(np.concatenate(kept)), np.sort(np.concatenate(taken))


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

    A source without splits serves as both, and the split of its `Dataset.origin` is "all"; with a task, the splits are
    disjoint. Without a test split, the validation split (dev, validation, val) replaces it.
    `labelled=False` also accepts data with neither labels nor text targets. `columns` maps names such as text and
    label to those of a table.
    """
    return split_reference(reference).read(split, labelled=labelled, columns=columns)
