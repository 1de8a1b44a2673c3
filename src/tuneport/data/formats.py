"""Labelled images and texts from files and folders, by a registry of readers.

A reader gives a `Table`; `READERS` names it by the suffix of its files, or by a file that marks its folders. A new
format is one reader and one line. Rules that readers keep: images are read on access; no file can run code; class
names come from the whole source, so its splits agree on them; a file that cannot be read is a `DataError` of one line
that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, unknown_name
from ..io.hub import nearest_path
from ..io.untrusted import check_regular
from ..types import Split
from .arrow import read_parquet, read_saved
from .dataset import SPLIT_NAMES, Dataset, LazySequence, Table, choose_split, reading
from .images import IMAGE_SUFFIXES
from .npz import read_npz
from .rows import Parser, delimited, json_lines, json_list, read_rows
from .tables import from_table, renamed

Reader = Callable[[Path, Split], Table]

_ANY_SPLIT = {name for names in SPLIT_NAMES.values() for name in names}
_TEXTS: dict[str, Parser] = {
    ".jsonl": json_lines,
    ".json": json_list,
    ".csv": partial(delimited, ","),
    ".tsv": partial(delimited, "\t"),
}


def read_image_folder(path: Path, split: Split) -> Table:
    """Read the paths of images: a sub-folder for each class, in folders for splits if there are any; or no classes."""
    # A class may be called "train": a split is a folder of folders.
    splits = {f.name: f for f in _sub_folders(path) if f.name.lower() in _ANY_SPLIT and _sub_folders(f)}
    found = choose_split(list(splits), split, path)
    files = {
        name: {child.name: images for child in _sub_folders(root) if (images := images_under(child))}
        for name, root in (splits or {"all": path}).items()
    }
    classes = tuple(sorted({name for by_class in files.values() for name in by_class}))
    by_class = files[found or "all"]
    paths = [file for name in sorted(by_class) for file in by_class[name]]
    labels = [classes.index(name) for name in sorted(by_class) for _ in by_class[name]]
    flat = [] if classes else [file for file in images_under(path) if file.parent == path]
    if not paths and not flat:
        where = f"{path} has no images in its {found} split" if found else f"{path} has no images"
        raise DataError(f"{where}; expected a sub-folder per class, with {', '.join(IMAGE_SUFFIXES)}.")
    columns: dict[str, list[Any]] = {"image": paths, "label": labels} if paths else {"image": flat}
    return Table(columns, classes, found or "all", expected="one sub-folder of images per class")


def images_under(folder: Path) -> list[Path]:
    """The image files in a folder and its sub-folders, without hidden ones."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


# By the suffix of a file, or by the name of a file that marks a folder.
READERS: dict[str, Reader] = {
    **{f"{suffix}{gz}": partial(read_rows, parse) for suffix, parse in _TEXTS.items() for gz in ("", ".gz")},
    ".parquet": read_parquet,
    ".npz": read_npz,
    "dataset_dict.json": read_saved,
    "dataset_info.json": read_saved,
    "/": read_image_folder,  # any other folder
}


def suffixes() -> tuple[str, ...]:
    """How the names of files end that can be read."""
    return tuple(key for key in READERS if key.startswith("."))


def find_reader(path: Path) -> Reader | None:
    """The reader of a file by its suffix, or of a folder by the file that marks it; None if its format is unknown."""
    if path.is_dir():
        marks = (key for key in READERS if not key.startswith(".") and (path / key).is_file())
        return READERS[next(marks, "/")]
    return READERS.get(_suffix(path.name))


def _formats() -> str:
    files = ", ".join(suffix for suffix in suffixes() if not suffix.endswith(".gz"))
    return f"an image folder (class = sub-folder), a saved HF dataset, or a file that ends in {files}"


def _suffix(name: str) -> str:
    return max((suffix for suffix in suffixes() if name.lower().endswith(suffix)), key=len, default="")


def read_plain(
    path: str | Path, split: Split, *, labelled: bool = True, columns: Mapping[str, str] | None = None
) -> Dataset:
    """Read one split of a file or folder in a format of `READERS`, as `read_data` describes."""
    path = Path(path)
    if split not in SPLIT_NAMES:
        raise DataError(unknown_name("split", split, SPLIT_NAMES))
    if not path.exists():
        raise DataError(f"no data at {path}: no such file or folder.{nearest_path(path)} Pass {_formats()}.")
    reader = find_reader(path)
    if reader is None:
        check_regular(path, DataError)
        raise DataError(f"the format of {path} is unknown by its name. Pass {_formats()}.")
    with reading(path):
        data = from_table(renamed(reader(path, split), columns or {}, path), path, split, labelled=labelled)
    return replace(data, name=_name(path))


def read_columns(path: Path, split: Split, columns: Mapping[str, str], also: Sequence[str] = ()) -> Dataset | None:
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


def _name(path: Path) -> str:
    """The name of a dataset: that of its folder, or of its file without the suffix."""
    name = path.resolve().name
    return name[: len(name) - len(_suffix(name))] if path.is_file() else name
