"""Tables of samples: JSONL, JSON, CSV, TSV and Parquet files and saved HF datasets.

A table is held in memory, up to a size limit; its images are decoded on access. Class names come from the whole table,
so its splits agree on them. JSONL, JSON, CSV and TSV need no further package.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, brief, first_of
from ..io.sizes import format_bytes
from ..types import Split
from .chat import CHAT_COLUMNS, MORE_COLUMNS, read_chats
from .choices import read_choices
from .dataset import TABLE_SUFFIXES, Dataset, LazySequence, choose_split, dataset_name, reading
from .images import open_cell, open_file

_TEXT_COLUMNS = (("text", "text_pair"), ("text1", "text2"), ("text",), ("prompt",))
_INPUT_COLUMNS = (("image",), *CHAT_COLUMNS, *_TEXT_COLUMNS)  # the first complete
_PLAIN_COLUMNS = {name for names in (*CHAT_COLUMNS, MORE_COLUMNS, *_TEXT_COLUMNS) for name in names}
_PLAIN_COLUMNS |= {"label", "target", "choices", "split"}
_COLUMNS = (
    "image, or text (with text_pair if any), or text1 and text2, or prompt; and label or target. Chats have messages, "
    "conversations, instruction and output, or prompt and completion. Map other names with `columns`"
)
_LARGEST_TABLE = 4 * 2**30  # uncompressed bytes, since a table is held in memory


def is_table(path: Path) -> bool:
    """True for a file with the suffix of a table and for the folder of a saved HF dataset."""
    if path.is_dir():
        return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()
    return path.name.lower().endswith(TABLE_SUFFIXES)


def read_table(path: Path, split: Split, labelled: bool, columns: Mapping[str, str] | None = None) -> Dataset:
    """Read one split of a table or a saved HF dataset.

    `labelled` refuses one with neither labels nor answers. `columns` maps names such as text and label to its own.
    """
    table = _renamed(_columns(path), columns or {}, path)
    data = _from_table(table, path, split)
    if labelled and data.labels is None and data.targets is None and not data.has_chats:
        if "label" not in table.columns:
            raise DataError(f"{path} has no labels; expected a column label or target.")
        empty = f'the column label is empty (null, NaN, -1 or "") in every row of the split {data.split}'
        raise DataError(f"{path} has no labels: {empty}. Fill it.")
    return data


def _renamed(table: _Table, columns: Mapping[str, str], path: Path) -> _Table:
    known = {"image", *_PLAIN_COLUMNS}
    if unknown := sorted(set(columns) - known):
        raise DataError(f"`columns` names {first_of(unknown)}; expected some of {first_of(sorted(known), 30)}.")
    if missing := [name for name in columns.values() if name not in table.columns]:
        raise DataError(f"{path} has no column {first_of(missing)} of `columns`; it has {first_of(table.columns)}.")
    kept = {key: column for key, column in table.columns.items() if key not in (*columns, *columns.values())}
    named = {name: table.columns[own] for name, own in columns.items()}
    return _Table({**kept, **named}, table.classes if columns.get("label", "label") == "label" else None)


def read_columns(path: Path, split: Split, columns: Mapping[str, str], also: Sequence[str] = ()) -> Dataset | None:
    """Read one split of a table with other column names; None if the table does not have them.

    `columns` maps its names to text, text_pair and label; `also` holds further names of the split. Rows without a label
    (-1 or a dash) are dropped.
    """
    if not is_table(path):
        return None
    table = _columns(path)
    if not all(key in table.columns for key in columns):
        return None
    named = {columns.get(key, key): column for key, column in table.columns.items() if key not in columns.values()}
    labels = named.get("label", ())
    rows = [row for row, label in enumerate(labels) if label not in (None, "", "-", "-1", -1)]
    if "label" in named and not rows:
        return None
    if rows:
        named = {key: [column[row] for row in rows] for key, column in named.items() if key in _PLAIN_COLUMNS}
    return _from_table(_Table(named, table.classes), path, split, also)


@dataclass(frozen=True)
class _Table:
    """Columns of equal length by name, and the class names if the file has them."""

    columns: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...] | None = None


def _columns(path: Path) -> _Table:
    name = path.name.lower().removesuffix(".gz")
    if path.is_dir() or name.endswith(".parquet"):
        return _read_arrow(path)
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with reading(path):
        with opened(path, "rb") as packed:
            content = packed.read(_LARGEST_TABLE + 1)  # a small archive can hold a huge table
        if len(content) > _LARGEST_TABLE:
            most = format_bytes(_LARGEST_TABLE)
            raise DataError(f"{path} is refused: a table may have {most} uncompressed. Split it.")
        file = io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig", newline="")
        delimiter = "\t" if name.endswith(".tsv") else ","
        if name.endswith(".json"):
            rows = _json_array(file, path)
        else:
            rows = list(_json_rows(file, path) if name.endswith(".jsonl") else _delimited_rows(file, path, delimiter))
    keys = dict.fromkeys(key for row in rows for key in row)
    return _Table({key: [row.get(key) for row in rows] for key in keys})


def _json_rows(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not JSON: {brief(error)}.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is a JSON {type(row).__name__}; expected an object.")
        yield row


def _json_array(file: TextIO, path: Path) -> list[dict[str, Any]]:
    try:
        rows = json.load(file)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {brief(error)}.") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"{path} is no list of JSON objects; expected one object for each sample.")
    return rows


def _delimited_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for fields in filter(None, reader):  # the reader gives [] for a blank line
            if len(fields) != len(header):
                expected = f"expected {len(header)} as in its header"
                raise DataError(f"line {reader.line_num} of {path} has {len(fields)} fields; {expected}.")
            yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {path} is malformed: {brief(error)}.") from error


def _read_arrow(path: Path) -> _Table:
    """A Parquet file, or a dataset saved by HF `datasets` with its splits concatenated."""
    name = "datasets" if path.is_dir() else "pyarrow.parquet"
    try:
        module: Any = importlib.import_module(name)
    except ImportError as error:
        needed = f"{name.partition('.')[0]}, which is not installed. Run: pip install tuneport[data]"
        raise DataError(f"reading {path} needs {needed}") from error
    columns: dict[str, Sequence[Any]] = {}
    try:
        loaded = module.load_from_disk(str(path)) if path.is_dir() else module.ParquetFile(path).read()
        parts = dict(loaded) if isinstance(loaded, Mapping) else {}
        if path.is_dir():
            loaded = (module.concatenate_datasets(list(parts.values())) if parts else loaded).with_format("arrow")[:]
        for name in loaded.column_names:
            plain = name in _PLAIN_COLUMNS or str(loaded[name].type).endswith("string")
            lazy = LazySequence(np.arange(len(loaded)), partial(_cell, loaded[name]))
            columns[name] = loaded[name].to_pylist() if plain else lazy
    except Exception as error:  # errors of pyarrow, fsspec and json share no base class
        raise DataError(f"cannot read {path}: {brief(error)}.") from error
    if parts:
        columns["split"] = [name for name, part in parts.items() for _ in range(len(part))]
    try:  # HF `datasets` names the classes in the schema
        notes = json.loads((loaded.schema.metadata or {})[b"huggingface"])
        known = notes["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return _Table(columns)
    return _Table(columns, tuple(map(str, known)))


def _cell(column: Any, index: int) -> Any:
    return column[index].as_py()


def _from_table(table: _Table, path: Path, split: Split, also: Sequence[str] = ()) -> Dataset:
    columns = table.columns
    size = max(map(len, columns.values()), default=0)
    if size == 0:
        raise DataError(f"{path} is empty: it has no rows.")
    keys = next((keys for keys in _INPUT_COLUMNS if all(key in columns for key in keys)), None)
    if keys is None:
        raise DataError(f"{path} has columns {first_of(columns)}; expected {_COLUMNS}.")
    splits = [str(name or "").lower() for name in columns.get("split", [""] * size)]
    found = choose_split(sorted(set(splits)), split, path, also)
    rows = np.array([row for row, name in enumerate(splits) if found in (None, name)], dtype=np.int64)
    values = columns.get("label", [None] * size)
    choices: list[list[str]] | None = None
    if "choices" in columns:
        choices, labels = read_choices(columns["choices"], values, rows, path)
        classes = tuple(map(str, range(max(map(len, choices), default=0))))
    else:
        labels, classes = _read_labels(values, table.classes, rows, path)
    images, chats = keys == ("image",), keys in CHAT_COLUMNS
    inputs: Any
    if images:
        inputs = _images(columns["image"], rows, path)
    else:
        inputs = read_chats(columns, keys, rows, path) if chats else _texts(columns, keys, rows, path)
    if not (images or chats) and len(rows) and not any("".join(texts).strip() for texts in inputs):
        raise DataError(f"{' and '.join(keys)} of {path} is empty in all of {len(rows)} rows; expected text.")
    targets = _texts(columns, ("target",), rows, path) if "target" in columns and not chats else None
    return Dataset(
        inputs=inputs,
        labels=labels,
        classes=classes,
        name=dataset_name(path),
        kind="image" if images else "text",
        split=found or "all",
        targets=targets if targets and any(map(str.strip, targets)) else None,
        choices=choices,
        files=tuple(sorted(filter(Path.is_file, path.rglob("*")))) if path.is_dir() else (path,),
    )


def _images(column: Sequence[Any], rows: NDArray[np.int64], path: Path) -> LazySequence:
    if isinstance(column, LazySequence):
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


def _texts(columns: Mapping[str, Sequence[Any]], keys: Sequence[str], rows: NDArray[np.int64], path: Path) -> list[Any]:
    """The texts of one column, or pairs of texts of two."""
    for key, row in itertools.product(keys, rows):
        if not isinstance(columns[key][row], str):
            given = type(columns[key][row]).__name__
            raise DataError(f"{key} of row {row + 1} of {path} is {given}; expected text.")
    picked = [[columns[key][row] for row in rows] for key in keys]
    return picked[0] if len(keys) == 1 else list(zip(*picked, strict=True))


def _read_labels(
    values: Sequence[Any], classes: tuple[str, ...] | None, rows: NDArray[np.int64], path: Path
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Labels of `rows` and the class names of the whole column; None if all labels of `rows` are missing."""
    names = [_class_name(value, row, path) for row, value in enumerate(values, start=1)]
    present = {name for name in names if name is not None}
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
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and value >= 0 and value % 1 == 0:
        return str(int(value))
    given = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    raise DataError(f"label of row {row} of {path} is {given}; expected a class name or a number from 0.")
