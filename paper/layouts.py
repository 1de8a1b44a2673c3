"""Readers of the usual layouts of the paper's data sets, added to tuneport's tasks when this module is imported.

`read(task, place, split)` returns None if the place has another layout. `layouts.toml` names the readers by the keys of
`READERS`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tuneport.data.dataset import Dataset, LazySequence, Origin, check_count, reading
from tuneport.data.formats import find_reader, from_table, read_plain
from tuneport.data.images import check_images, images_under, open_image, read_image_folder
from tuneport.data.tasks import TASKS, Task, plain_name
from tuneport.errors import DataError, first_of
from tuneport.types import Split

from .files import find_column, find_numbers, read_idx, read_lines, read_mat, read_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TaskReader: TypeAlias = Callable[[Task, Path, Split], Dataset | None]

# Test labels of the text pairs are not public: the validation or dev split is evaluated.
SCORED = ("validation_matched", "validation", "dev_matched", "dev", "val", "test")
MATCHED = ("validation_matched", "dev_matched")  # MNLI has two validation splits; this one has the training genres


def _class_folders(task: Task, place: Path, split: Split) -> Dataset | None:
    """One folder per class; their names, in any spelling, become those of `task.classes`."""
    known = {plain_name(folder): index for index, folder in enumerate(FACTS[task.name].folders)}
    inside = {plain_name(child.name) for child in place.iterdir() if child.is_dir()} if place.is_dir() else set()
    deeper = {"train", "training", "test", "testing", "val", "validation"} & inside
    if not deeper and not len(inside & set(known)) > len(known) // 2:
        return None
    data = read_plain(place, split)
    places = [known.get(plain_name(name), -1) for name in data.classes]
    if -1 in places or data.labels is None:
        return None
    return replace(data, labels=np.array(places, dtype=np.int64)[data.labels], classes=task.classes)


def _resisc45_lists(task: Task, place: Path, split: Split) -> Dataset | None:
    """One folder per class, and resisc45-train.txt, -val.txt, -test.txt with file names, in it or its parent."""
    home = place / "NWPU-RESISC45" if (place / "NWPU-RESISC45").is_dir() else place
    found = _first(folder / f"resisc45-{split}.txt" for folder in (place, home, place.parent))
    if found is None:
        return None
    files = [Path(line).name for line in read_lines(found)]
    labels = _labels([file.rpartition("_")[0] for file in files], FACTS[task.name].folders, found)
    paths = [home / FACTS[task.name].folders[label] / file for label, file in zip(labels, files, strict=True)]
    return _of_images(paths, labels, task.classes, name=task.name, split=split, files=[found])


def _gtsrb(task: Task, place: Path, split: Split) -> Dataset | None:
    """Training/CLASS/*.ppm with GT-CLASS.csv; Final_Test/Images/*.ppm with GT-final_test.csv."""
    training, test = place / "Training", place / "Final_Test" / "Images"
    if not (training.is_dir() or (place / "Final_Test").is_dir()):
        return None
    if split == "test":
        names = ("GT-final_test.csv", "GT-final_test.test.csv")
        found = _first(folder / name for folder in (place, place.parent, test) for name in names)
        if found is None:
            raise DataError(f"{place} has no GT-final_test.csv, which holds the classes of its test images.")
        return _listed(task, split, found, ";", "Filename", test)
    if not training.is_dir():
        raise DataError(f"{place} has no folder Training, which holds its training images.")
    paths, labels = [], []
    read: list[Path] = []
    for folder in sorted(child for child in training.iterdir() if child.is_dir() and child.name.isdecimal()):
        table = folder / f"GT-{folder.name}.csv"
        listed = find_column(read_rows(table, ";"), table, "Filename") if table.is_file() else []
        files = [folder / name for name in listed] or sorted(folder.glob("*.ppm"))
        paths += files
        labels += [int(folder.name)] * len(files)
        read += [table] if listed else []
    return _of_images(paths, labels, task.classes, name=task.name, split=split, files=read)


def _gtsrb_tables(task: Task, place: Path, split: Split) -> Dataset | None:
    """Train.csv and Test.csv with columns Path and ClassId."""
    table = place / ("Test.csv" if split == "test" else "Train.csv")
    return _listed(task, split, table, ",", "Path", place) if table.is_file() else None


def _listed(task: Task, split: Split, table: Path, delimiter: str, column: str, folder: Path) -> Dataset:
    """The images of a table with a column of their paths in `folder` and a column ClassId."""
    rows = read_rows(table, delimiter)
    paths = [folder / path for path in find_column(rows, table, column)]
    labels = find_numbers(rows, table, "ClassId")
    return _of_images(paths, labels, task.classes, name=task.name, split=split, files=[table])


def _svhn(task: Task, place: Path, split: Split) -> Dataset | None:
    """train_32x32.mat and test_32x32.mat: X (32, 32, 3, N), y (N, 1), where 10 stands for the digit 0."""
    file = place / f"{split}_32x32.mat"
    if not file.is_file():
        return None
    content = read_mat(file, "X", "y")
    images = np.asarray(content["X"])
    if images.ndim != 4:
        raise DataError(f"X of {file} has shape {images.shape}; expected (32, 32, 3, N).")
    images = np.ascontiguousarray(np.moveaxis(images, -1, 0))  # (N, 32, 32, 3)
    labels = np.asarray(content["y"]).reshape(-1) % 10
    return _of_images(images, labels, task.classes, name=task.name, split=split, files=[file])


def _mnist(task: Task, place: Path, split: Split) -> Dataset | None:
    """The four idx files, compressed or not."""
    part = "t10k" if split == "test" else "train"
    images, labels = (
        _first(place / f"{part}-{word}{mark}idx{dimensions}-ubyte{packed}" for mark in "-." for packed in ("", ".gz"))
        for word, dimensions in (("images", 3), ("labels", 1))
    )
    if images is None or labels is None:
        return None
    files = [images, labels]
    return _of_images(read_idx(images, 3), read_idx(labels, 1), task.classes, name=task.name, split=split, files=files)


def _dtd(task: Task, place: Path, split: Split) -> Dataset | None:
    """images/CLASS/*.jpg with labels/train1.txt, val1.txt, test1.txt: the first of its ten partitions."""
    if not (place / "labels").is_dir() or not (place / "images").is_dir():
        return None
    names = ("test1.txt",) if split == "test" else ("train1.txt", "val1.txt")
    lists = [place / "labels" / name for name in names]
    lines = [line for file in lists for line in read_lines(file)]
    labels = _labels([line.partition("/")[0] for line in lines], task.classes, place / "labels")
    paths = [place / "images" / line for line in lines]
    return _of_images(paths, labels, task.classes, name=task.name, split=split, files=lists)


def _cars(task: Task, place: Path, split: Split) -> Dataset | None:
    """devkit/cars_meta.mat and cars_train_annos.mat, cars_test_annos_withlabels.mat; cars_train/, cars_test/."""
    kit, meta = place / "devkit", place / "devkit" / "cars_meta.mat"
    if not meta.is_file():
        return None
    classes = np.atleast_1d(read_mat(meta, "class_names")["class_names"])
    names = [str(name).strip().replace("/", " ") for name in classes]
    title = "cars_test_annos_withlabels.mat" if split == "test" else "cars_train_annos.mat"
    found = _first((place / title, kit / title))
    if found is None:
        raise DataError(f"{place} has no {title}, which holds the classes of its {split} images.")
    notes = np.atleast_1d(read_mat(found, "annotations")["annotations"])
    if not {"fname", "class"} <= set(notes.dtype.names or ()):
        raise DataError(f"annotations of {found} have no fname and class.")
    paths = [place / f"cars_{split}" / str(note["fname"]) for note in notes]
    labels = [int(note["class"]) - 1 for note in notes]
    return _of_images(paths, labels, names, name=task.name, split=split, files=[meta, found])


def _sun397(task: Task, place: Path, split: Split) -> Dataset | None:
    """Folders by letter, ClassName.txt, and optionally Training_01.txt and Testing_01.txt."""
    listed = place / "ClassName.txt"
    letters = [child for child in place.iterdir() if child.is_dir() and len(child.name) == 1] if place.is_dir() else []
    if not letters:
        return None
    lists = [listed] if listed.is_file() else []
    folders = [line.strip("/") for file in lists for line in read_lines(file)]
    if not lists:
        folders = sorted({str(file.parent.relative_to(place)) for letter in letters for file in images_under(letter)})
    classes = [scene_name(folder) for folder in folders]
    partition = place / ("Testing_01.txt" if split == "test" else "Training_01.txt")
    if partition.is_file():
        files = [line.strip("/") for line in read_lines(partition)]
        labels = _labels([file.rpartition("/")[0] for file in files], folders, partition)
        paths = [place / file for file in files]
        return _of_images(paths, labels, classes, name=task.name, split=split, files=[*lists, partition])
    by_class = [[file for file in images_under(place / name) if file.parent == place / name] for name in folders]
    labels = [index for index, files in enumerate(by_class) for _ in files]
    return _of_images([file for files in by_class for file in files], labels, classes, name=task.name, files=lists)


def _labels(folders: Sequence[str], known: Sequence[str], place: Path) -> list[int]:
    """The class numbers of the folders that a list of images at `place` names."""
    numbers = {folder: index for index, folder in enumerate(known)}
    unknown = [folder for folder in folders if folder not in numbers]
    if unknown:
        raise DataError(f"{place} names an image in {unknown[0]!r}, which is none of the {len(known)} classes.")
    return [numbers[folder] for folder in folders]


def _first(files: Iterable[Path]) -> Path | None:
    return next(filter(Path.is_file, files), None)


def scene_name(folder: str) -> str:
    """The class name of a scene's folder: of a/apartment_building/outdoor, "outdoor apartment building"."""
    parts = folder.strip("/").split("/")
    words = parts[1:] if len(parts) > 1 and len(parts[0]) == 1 else parts
    return " ".join(reversed(words)).replace("_", " ")


def _text_pairs(task: Task, place: Path, split: Split) -> Dataset | None:
    """A saved HF dataset, one table with a column split, or a folder with a table for each split."""
    columns = dict(zip(FACTS[task.name].columns, ("text", "text_pair"), strict=True))
    for labels in ({}, {"gold_label": "label"}, {"is_duplicate": "label"}):
        for file in _places(place, split):
            found = _read_columns(file, split, {**columns, **labels}, MATCHED if split == "test" else ())
            if found is not None and found.labels is not None:
                return (
                    found if file == place else replace(found, origin=replace(found.origin, split=split))
                )  # a file of one split is all of it
    return None


def _read_columns(path: Path, split: Split, columns: Mapping[str, str], also: Sequence[str] = ()) -> Dataset | None:
    """Read one split of a table with other column names; None if the path is no table that has
    them, or no row has a label.

    `columns` maps its names to text, text_pair and label; `also` holds further names of the split. Rows without a label
    (-1 or a dash) are dropped.
    """
    reader = find_reader(path)
    if reader is None or reader is read_image_folder:
        return None
    with reading(path):
        table = reader(path, split)
        if not all(key in table.columns for key in columns):
            return None
        named = {columns.get(key, key): column for key, column in table.columns.items() if key not in columns.values()}
        labels = enumerate(named.get("label", ()))
        rows = np.array([row for row, label in labels if label not in (None, "", "-", "-1", -1)], dtype=np.int64)
        if not len(rows):
            return None
        named = {key: LazySequence(rows, column.__getitem__) for key, column in named.items()}
        return from_table(replace(table, columns=named), path, split, also)


def _places(place: Path, split: Split) -> list[Path]:
    if not place.is_dir():
        return [place]
    names = ("train",) if split == "train" else SCORED
    tables = {file.name.lower(): file for file in sorted(place.iterdir()) if file.is_file() and find_reader(file)}
    by_split = [file for name in names for key, file in tables.items() if key.partition(".")[0].split("-")[0] == name]
    return [place, *by_split]


def _of_images(
    images: Sequence[Path] | NDArray[Any],
    labels: ArrayLike,
    classes: Sequence[str],
    *,
    name: str = "data",
    split: str = "all",
    files: Iterable[Path] = (),
) -> Dataset:
    """A dataset of labelled images, checked for missing files and labels that are out of range.

    Args:
        images: paths, or an array (N, H, W) or (N, H, W, 1 or 3) of uint8 or floats from 0 to 1.
        labels: N indices of `classes`.
        classes: the class names.
        name: the dataset's name.
        split: the split's name.
        files: the files that were read, without the images themselves.
    """
    check_count(len(images), name)
    if isinstance(images, np.ndarray):
        images = check_images(images, "the images", Path(name))
    elif missing := [path.name for path in images if not path.is_file()]:
        given = f"{len(missing)} of {len(images)} images of {name}"
        raise DataError(f"{given} are not in {images[0].parent}: {first_of(missing)}.")
    numbers = np.asarray(labels, dtype=np.int64).reshape(-1)
    if len(numbers) != len(images):
        raise DataError(f"{name} has {len(images)} images but {len(numbers)} labels.")
    if not len(images):
        raise DataError(f"{name} has no images in its {split} split.")
    if numbers.min() < 0 or numbers.max() >= len(classes):
        raise DataError(
            f"{name} has labels from {numbers.min()} to {numbers.max()}; expected 0 to {len(classes) - 1} for its "
            f"{len(classes)} classes."
        )
    cells: Any = images if isinstance(images, np.ndarray) else list(images)
    inputs = LazySequence(np.arange(len(images)), partial(open_image, cells, Path(name)))
    return Dataset(inputs, numbers, tuple(classes), name, "image", origin=Origin(split, tuple(files)))


READERS: Mapping[str, TaskReader] = {
    "cars": _cars,
    "class_folders": _class_folders,
    "dtd": _dtd,
    "gtsrb": _gtsrb,
    "gtsrb_tables": _gtsrb_tables,
    "mnist": _mnist,
    "resisc45_lists": _resisc45_lists,
    "sun397": _sun397,
    "svhn": _svhn,
    "text_pairs": _text_pairs,
}


@dataclass(frozen=True)
class Facts:
    """How a data set lies on disk: the folders of its classes, the columns of two texts, its layouts in words."""

    layouts: Mapping[str, str]
    folders: Sequence[str] = ()
    columns: Sequence[str] = ()


def _read_facts() -> dict[str, Facts]:
    content = Path(__file__).with_name("layouts.toml").read_text(encoding="utf-8")
    return {name: Facts(**facts) for name, facts in tomllib.loads(content).items()}


FACTS = _read_facts()


@dataclass(frozen=True)
class LaidTask(Task):
    """A task of the paper: the first of its layouts that fits is read, before the formats that all tasks have."""

    def find(self, place: Path, split: Split, labelled: bool, columns: Mapping[str, str] | None) -> Dataset:
        known = FACTS[self.name].layouts
        for candidate in self.places(place):
            for reader in () if columns else known:
                with reading(candidate):
                    data = READERS[reader](self, candidate, split)
                if data is not None:
                    return data
        try:
            return super().find(place, split, labelled, columns)
        except DataError as error:
            unlike = f"{place} does not look like {self.title}. "
            why = str(error).removeprefix(unlike)
            raise DataError(f"{unlike}Known layouts: {'; '.join(known.values())}. Also: {why}") from error


TASKS.update({name: LaidTask(**vars(TASKS[name])) for name in FACTS})
