"""Known datasets: their classes and their prompts.

With a fixed seed, a tenth of the training samples of each class is split off for validation; if the source has no test
split, a tenth of each class is split off for it first.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import DataError
from ...types import Split
from ..dataset import Dataset, Kind, as_numbers
from ..formats import read_plain

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
        found = self.find(place, wanted, labelled, columns)
        data = replace(self._with_class_names(found), name=self.name, prompts=self.prompts)
        if data.classes == self.classes:
            data = replace(data, label_texts=self.label_texts)
        if found.split == "all":
            train, test = _split(data, TEST_SHARE)
            data = replace(data.subset(test if split == "test" else train), split=wanted)
        if split != "test":
            train, validation = _split(data, VALIDATION_SHARE)
            data = replace(data.subset(validation if split == "validation" else train), split=split)
        if not len(data):
            few = f"{place} has too few samples for a {split} split of {self.title}: no class has two"
            raise DataError(f"{few}. Add samples{', or a test split' if split == 'test' else ''}.")
        return data

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
