"""Labelled images and texts from files and folders, by a registry of readers.

A reader gives a `Table`; `READERS` names it by the suffix of its files, or by a file that marks its folders. A new
format is one reader and one line. Rules that readers keep: images are read on access; no file can run code; class
names come from the whole source, so its splits agree on them; a file that cannot be read is a `DataError` of one line
that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from ..errors import DataError, unknown_name
from ..io.places import nearest_path
from ..io.untrusted import check_regular
from ..types import Split
from .arrow import read_parquet, read_saved
from .dataset import SPLIT_NAMES, Dataset, Table, reading
from .images import read_image_folder
from .npz import read_npz
from .rows import Parser, delimited, json_lines, json_list, read_rows, text_lines
from .tables import from_table, renamed

Reader = Callable[[Path, Split], Table]

FIRST = 1000  # rows of a large table that are looked at before it is read

_TEXTS: dict[str, Parser] = {
    ".jsonl": json_lines,
    ".json": json_list,
    ".csv": partial(delimited, ","),
    ".tsv": partial(delimited, "\t"),
    ".txt": text_lines,
}


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


def check_start(path: Path, columns: Mapping[str, str] | None = None) -> None:
    """Raise a DataError if the first rows of a text table cannot be read; other formats are not looked at."""
    parse = _TEXTS.get(_suffix(path.name).removesuffix(".gz"))
    if parse is None:
        return
    with reading(path):
        table = renamed(read_rows(parse, path, "train", most=FIRST), columns or {}, path)
        kept = {name: column for name, column in table.columns.items() if name != "split"}
        from_table(replace(table, columns=kept), path, "train", labelled=False)


def _name(path: Path) -> str:
    """The name of a dataset: that of its folder, or of its file without the suffix."""
    name = path.resolve().name
    return name[: len(name) - len(_suffix(name))] if path.is_file() else name
