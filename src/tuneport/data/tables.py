"""A table of samples as a `Dataset`: which columns are inputs, labels, answers and splits.

Cells are decoded on access. Class names come from the whole table, so its splits agree on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, first_of, is_text
from ..types import Split
from .chat import CHAT_COLUMNS, MORE_COLUMNS, PROMPTS_ONLY, prompt_of, read_chats
from .choices import read_choices
from .dataset import Dataset, LazySequence, Table, choose_split
from .images import open_array, open_cell, open_file

_TEXT_COLUMNS = (("text", "text_pair"), ("text1", "text2"), ("text",), ("prompt",), ("tokens",))
_INPUT_COLUMNS = (("image",), *CHAT_COLUMNS, *_TEXT_COLUMNS)  # the first complete
_KNOWN = {name for names in (*_INPUT_COLUMNS, MORE_COLUMNS, ("label", "target", "choices", "split")) for name in names}
_COLUMNS = (
    "image, or text (with text_pair if any), or text1 and text2, or prompt, or tokens (a list of words); and label or "
    "target. Chats have messages, conversations, instruction and output, or prompt and completion. Map other names "
    "with `columns`"
)


def renamed(table: Table, columns: Mapping[str, str], path: Path) -> Table:
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
    bare = keys == PROMPTS_ONLY and not labelled and not {"label", "target", "choices"} & set(columns)
    images, chats = keys == ("image",), keys in CHAT_COLUMNS or bare
    inputs: Any
    if images:
        inputs = _images(columns["image"], rows, path)
    else:
        if keys == ("tokens",):
            columns = {**columns, "tokens": LazySequence(np.arange(size), partial(_words, columns["tokens"], path))}
        inputs = read_chats(columns, keys, rows, path, labelled) if chats else _texts(columns, keys, rows, path)
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
        split=found or "all",
        targets=targets,
        choices=choices,
        files=table.files,
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
    if values is None or (not labelled and _are_measures(values)):
        return None, (), None
    return *_read_labels(values, table.classes, rows, path), None


def _images(column: Sequence[Any], rows: NDArray[np.int64], path: Path) -> LazySequence:
    first = next((cell for cell in column if cell is not None), None)
    if isinstance(first, np.ndarray):
        return LazySequence(rows, partial(open_array, column))
    if isinstance(first, Path):
        return LazySequence(rows, partial(open_file, column))
    if isinstance(first, (bytes, Mapping)):
        return LazySequence(rows, partial(open_cell, column, path))
    names = _texts({"image": column}, ("image",), rows, path)
    paths = [path.parent / name for name in names]
    missing = [name for name, file in zip(names, paths, strict=True) if not file.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} images of {path} do not exist: {first_of(missing)}. "
            f"Paths are relative to {path.parent}."
        )
    return LazySequence(np.arange(len(paths)), partial(open_file, paths))


def _texts(
    columns: Mapping[str, Sequence[Any]], keys: Sequence[str], rows: NDArray[np.int64], path: Path
) -> LazySequence:
    """The texts of one column, or pairs of texts of two, read on access."""
    for key in keys:
        wanted = np.zeros(len(columns[key]), dtype=bool)
        wanted[rows] = True
        for row, cell in enumerate(columns[key]):
            if wanted[row] and not isinstance(cell, str):
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


def _are_measures(values: Sequence[Any]) -> bool:
    """Whether labels are those of a regression: numbers, and not all of them whole."""
    known = [value for value in values if value is not None and value == value]
    return all(isinstance(value, (int, float)) for value in known) and any(value % 1 for value in known)


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
            "Fill or drop them."
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
