"""Datasets by name: `TASK:PATH` in place of a path, with known class names, prompts and layouts."""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import DataError, unknown_name
from ...io.hub import local
from ...types import Split
from ..dataset import Dataset
from ..formats import read_plain
from .base import Layout, Task, TaskSplit, plain_name
from .text import AGNEWS, CUSTREV, MNLI, QNLI, QQP, RTE, SNLI, SST2, SUBJ, TREC6
from .vision import CARS, DTD, EUROSAT, GTSRB, MNIST, RESISC45, SUN397, SVHN

TASKS: dict[str, Task] = {
    "agnews": AGNEWS,
    "cars": CARS,
    "custrev": CUSTREV,
    "dtd": DTD,
    "eurosat": EUROSAT,
    "gtsrb": GTSRB,
    "mnist": MNIST,
    "mnli": MNLI,
    "qnli": QNLI,
    "qqp": QQP,
    "resisc45": RESISC45,
    "rte": RTE,
    "snli": SNLI,
    "sst2": SST2,
    "subj": SUBJ,
    "sun397": SUN397,
    "svhn": SVHN,
    "trec6": TREC6,
}


def get_task(name: str) -> Task:
    """The task of that name, or an error that lists the known tasks."""
    found = TASKS.get(name.lower())
    if found is None:
        raise DataError(unknown_name("task", name, TASKS))
    return found


def split_reference(reference: str | Path) -> tuple[Task | None, Path]:
    """The task and the path of `TASK:PATH`; for any other reference, None and the path (a hub id is downloaded).

    A path that exists is never split, even if its name contains a colon.
    """
    name, mark, place = str(reference).partition(":")
    if os.path.exists(reference) or not mark or "/" in name or "\\" in name or len(name) < 2:
        return None, local(reference, "dataset")
    return get_task(name), Path(place).expanduser()


def read_data(reference: str | Path, split: Split, *, labelled: bool = True) -> Dataset:
    """Read one split of an image folder, an `.npz`, a table, a saved HF dataset, or of `TASK:PATH`.

    A source without splits serves as both, and its `Dataset.split` is "all"; with a task, the splits are disjoint.
    Without a test split, the validation split (dev, validation, val) replaces it.
    `labelled=False` also accepts data with neither labels nor text targets.
    """
    task, place = split_reference(reference)
    if task is None:
        return read_plain(place, split, labelled=labelled)
    return task.read(place, split, labelled=labelled)


__all__ = ["TASKS", "Layout", "Task", "TaskSplit", "get_task", "plain_name", "read_data", "split_reference"]
