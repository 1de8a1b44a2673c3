"""Labelled images and texts from files and folders, by a registry of readers; a table of samples as a `Dataset`.

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
from numpy.typing import NDArray

from ..errors import DataError, first_of, is_text, unknown_name
from ..io.places import nearest_path
from ..io.untrusted import check_regular
from ..types import Split
from .answers import CHAT_COLUMNS, MORE_COLUMNS, PROMPTS_ONLY, prompt_of, read_chats, read_choices
from .arrow import read_parquet, read_saved
from .dataset import SPLIT_NAMES, Dataset, LazySequence, Origin, Table, choose_split, reading
from .images import open_image, read_image_folder
from .npz import read_npz
from .rows import Parser, delimited, json_lines, json_list, read_rows, text_lines

Reader = Callable[[Path, Split], Table]

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

_TEXT_COLUMNS = (("text", "text_pair"), ("text1", "text2"), ("text",), ("prompt",), ("tokens",))
_INPUT_COLUMNS = (("image",), *CHAT_COLUMNS, *_TEXT_COLUMNS)  # the first complete
_ANSWERS = ("label", "target", "choices")
_KNOWN = {name for names in (*_INPUT_COLUMNS, MORE_COLUMNS, _ANSWERS, ("split",)) for name in names}
_COLUMNS = (
    "image, or text (with text_pair if any), or text1 and text2, or prompt, or tokens (a list of words); and label or "
    "target. Chats have messages, conversations, instruction and output, or prompt and completion. Map other names "
    "with `columns`"
)


def suffixes() -> tuple[str, ...]:
    """How the names of files end that can be read."""
    return tuple(key for key in READERS if key.startswith("."))


def find_reader(path: Path) -> Reader | None:
    """The reader of a file by its suffix, or of a folder by the file that marks it; None if its format is unknown."""
    if path.is_dir():
        marks = (key for key in READERS if not key.startswith(".") and (path / key).is_file())
        return READERS[next(marks, "/")]
    return READERS.get(_suffix(path.name))


def _suffix(name: str) -> str:
    return max((suffix for suffix in suffixes() if name.lower().endswith(suffix)), key=len, default="")


def read_plain(
    path: str | Path, split: Split, *, labelled: bool = True, columns: Mapping[str, str] | None = None
) -> Dataset:
    """Read one split of a file or folder in a format of `READERS`, as `read_data` describes."""
    path = Path(path)
    files = ", ".join(suffix for suffix in suffixes() if not suffix.endswith(".gz"))
    formats = f"an image folder (class = sub-folder), a saved HF dataset, or a file that ends in {files}"
    if split not in SPLIT_NAMES:
        raise DataError(unknown_name("split", split, SPLIT_NAMES))
    if not path.exists():
        raise DataError(f"no data at {path}: no such file or folder.{nearest_path(path)} Pass {formats}.")
    reader = find_reader(path)
    if reader is None:
        check_regular(path, DataError)
        raise DataError(f"the format of {path} is unknown by its name. Pass {formats}.")
    with reading(path):
        data = from_table(_renamed(reader(path, split), columns or {}, path), path, split, labelled=labelled)
    name = path.resolve().name
    return replace(data, name=name[: len(name) - len(_suffix(name))] if path.is_file() else name)


def _renamed(table: Table, columns: Mapping[str, str], path: Path) -> Table:
    """The table with columns under the names of `columns`, which maps names such as text and label to its own."""
    if unknown := sorted(set(columns) - _KNOWN):
        raise DataError(f"`columns` names {first_of(unknown)}; expected some of {first_of(sorted(_KNOWN), 30)}.")
    if missing := [name for name in columns.values() if name not in table.columns]:
        raise DataError(f"{path} has no column {first_of(missing)} of `columns`; it has {first_of(table.columns)}.")
    kept = {key: column for key, column in table.columns.items() if key not in (*columns, *columns.values())}
    named = {name: table.columns[own] for name, own in columns.items()}
    return replace(
        table, columns={**kept, **named}, classes=table.classes if columns.get("label", "label") == "label" else None
    )


def from_table(table: Table, path: Path, split: Split, also: Sequence[str] = (), *, labelled: bool = True) -> Dataset:
    """Read one split of a table, which may have further names `also`; paths of images are relative to `path`.

    If `labelled`, a split with neither labels nor answers is refused.
    """
    columns = table.columns
    size = max(map(len, columns.values()), default=0)
    if size == 0:
        raise DataError(f"{path} is empty: it has no rows.")
    keys = next((keys for keys in _INPUT_COLUMNS if all(key in columns for key in keys)), None)
    if keys is None:
        raise DataError(f"{path} has columns {first_of(columns)}; expected {_COLUMNS}.")
    found, rows = table.split, np.arange(size)
    if found is None:
        found, rows = _rows_of(split, columns.get("split"), size, path, also)
    labels, classes, choices = _read_answers(table, rows, path, labelled)
    bare = keys == PROMPTS_ONLY and not labelled and columns.keys().isdisjoint(_ANSWERS)
    images, chats = keys == ("image",), keys in CHAT_COLUMNS or bare
    if keys == ("tokens",):
        columns = {**columns, "tokens": LazySequence(np.arange(size), partial(_words, columns["tokens"], path))}
    if images:
        inputs = _images(columns["image"], rows, path)
    elif chats:
        inputs = read_chats(columns, keys, rows, path, labelled)
    else:
        inputs = _texts(columns, keys, rows, path)
    if not (images or chats) and len(rows) and not any("".join(texts).strip() for texts in inputs):
        raise DataError(f"{' and '.join(keys)} of {path} is empty in all of {len(rows)} rows; expected text.")
    targets = _texts(columns, ("target",), rows, path) if "target" in columns and not chats else None
    targets = targets if targets and any(map(str.strip, targets)) else None
    if labelled and labels is None and targets is None and not chats:
        if "label" not in columns:
            raise DataError(f"{path} has no labels; expected {table.expected}.")
        empty = f'the column label is empty (null, NaN, -1 or "") in every row of the split {found or "all"}'
        raise DataError(f"{path} has no labels: {empty}. Fill it.")
    return Dataset(
        inputs=inputs,
        labels=labels,
        classes=classes,
        kind="image" if images else "text",
        targets=targets,
        choices=choices,
        origin=Origin(found or "all", table.files),
        answers="none" if chats and not labelled and any(prompt_of(chat) is chat for chat in inputs) else "data",
    )


def _rows_of(
    split: Split, column: Sequence[Any] | None, size: int, path: Path, also: Sequence[str]
) -> tuple[str | None, NDArray[np.int64]]:
    """The name of a split in a table, if it has splits, and its rows."""
    if column is None:
        return None, np.arange(size)
    names: dict[str, int] = {}
    codes = np.fromiter((names.setdefault(str(name or "").lower(), len(names)) for name in column), np.int64, size)
    found = choose_split(sorted(names), split, path, also)
    return found, np.arange(size) if found is None else np.flatnonzero(codes == names[found])


def _read_answers(
    table: Table, rows: NDArray[np.int64], path: Path, labelled: bool
) -> tuple[NDArray[np.int64] | None, tuple[str, ...], Sequence[list[str]] | None]:
    """The labels of some rows, the class names, and the choices of each row if it has its own."""
    values = table.columns.get("label")
    if "choices" in table.columns:
        column = table.columns["choices"]
        if values is None and not labelled:
            return None, (), read_choices(column, None, rows, path)[0]
        choices, labels = read_choices(column, [None] * len(column) if values is None else values, rows, path)
        return labels, tuple(map(str, range(max(map(len, choices), default=0)))), choices
    if values is None or (not labelled and _name_no_class(values)):
        return None, (), None
    return *_read_labels(values, table.classes, rows, path), None


def _images(column: Sequence[Any], rows: NDArray[np.int64], path: Path) -> LazySequence:
    first = next((cell for cell in column if cell is not None), None)
    if first is None or isinstance(first, str):
        names = _texts({"image": column}, ("image",), rows, path)
        column, rows = [path.parent / name for name in names], np.arange(len(names))
        if missing := [name for name, file in zip(names, column, strict=True) if not file.is_file()]:
            absent = f"{len(missing)} of {len(column)} images of {path} do not exist: {first_of(missing)}"
            raise DataError(f"{absent}. Paths are relative to {path.parent}.")
    return LazySequence(rows, partial(open_image, column, path))


def _texts(
    columns: Mapping[str, Sequence[Any]], keys: Sequence[str], rows: NDArray[np.int64], path: Path
) -> LazySequence:
    """The texts of one column, or pairs of texts of two, read on access."""
    for key in keys:
        for row in rows:
            if not isinstance(cell := columns[key][row], str):
                raise DataError(f"{key} of row {row + 1} of {path} is {type(cell).__name__}; expected text.")
    if len(keys) == 1:
        return LazySequence(rows, columns[keys[0]].__getitem__)
    return LazySequence(rows, lambda row: tuple(columns[key][row] for key in keys))


def _words(column: Sequence[Any], path: Path, row: int) -> str:
    """The words of a row, joined by blanks."""
    cell = column[row]
    if not isinstance(cell, list) or not all(isinstance(word, str) for word in cell):
        raise DataError(f"tokens of row {row + 1} of {path} is {type(cell).__name__}; expected a list of words.")
    return " ".join(cell)


def _name_no_class(values: Sequence[Any]) -> bool:
    """Whether labels are those of a regression (numbers, some not whole or below -1), or a list for each sample."""
    known = [value for value in values if value is not None and value == value]
    numbers = all(isinstance(value, (int, float)) for value in known)
    return all(isinstance(value, list) for value in known) or (numbers and any(v % 1 or v < -1 for v in known))


def _read_labels(
    values: Sequence[Any], classes: tuple[str, ...] | None, rows: NDArray[np.int64], path: Path
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Labels of `rows` and the class names of the whole column; None if all labels of `rows` are missing."""
    shared: dict[str | None, str | None] = {}  # each name once: rows share it
    found = (_class_name(value, row, path) for row, value in enumerate(values, start=1))
    names = [shared.setdefault(name, name) for name in found]
    present = {name for name in shared if name is not None}
    if classes is None:
        numbers = all(name.isdecimal() and len(name) < 20 for name in present)
        classes = tuple(sorted(present, key=lambda name: (int(name) if numbers else 0, name)))
        codes = {name: code for code, name in enumerate(classes)}
    else:
        codes = {str(code): code for code in range(len(classes))}
    unknown = sorted(present - codes.keys())
    if unknown:
        raise DataError(
            f"{path} has labels {first_of(unknown)}; expected 0 to {len(classes) - 1}: {first_of(classes)}."
        )
    labels = np.array([-1 if (name := names[row]) is None else codes[name] for row in rows], dtype=np.int64)
    missing = rows[labels < 0]
    if len(missing) == len(rows):
        return None, ()
    if len(missing):
        raise DataError(
            f"{len(missing)} of {len(rows)} rows of {path} have no label, the first is row {missing[0] + 1}. "
            "Fill or drop them, or give a column that names no classes another name."
        )
    return labels, classes


def _class_name(value: Any, row: int, path: Path) -> str | None:
    """A label as a class name; None if it is missing (null, NaN, empty or -1)."""
    if value is None or value in ("", "-1", -1) or value != value:
        return None
    if isinstance(value, str) and is_text(value):
        return value
    if isinstance(value, (int, float)) and value >= 0 and value % 1 == 0:
        return str(int(value))
    given = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    raise DataError(f"label of row {row} of {path} is {given}; expected a class name or a number from 0.")
