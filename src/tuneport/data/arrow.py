"""Columns of Parquet files and of saved HF datasets, bounded before and while they are read.

A value that is repeated a million times takes a few bytes of a Parquet file. So texts are kept as dictionaries, as
the file stores them, and are decoded one cell at a time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..io.untrusted import parse_json, read_apart
from ..types import Split
from .dataset import LazySequence, Table, check_count
from .rows import MOST_COLUMNS, check_table_size

_THRIFT = {"thrift_string_size_limit": 10**8, "thrift_container_size_limit": 10**6}

# pyarrow ends the process where it meets damaged metadata of a column: they are read in a process of their own.
_FACTS = """
import json
from pyarrow.parquet import ParquetFile
with ParquetFile(sys.argv[1], **json.loads(sys.argv[2])) as file:
    facts = file.metadata
    groups = [facts.row_group(index) for index in range(facts.num_row_groups)]
    few = facts.num_columns <= int(sys.argv[3])
    chunks = [group.column(index) for group in groups for index in range(group.num_columns) if few]
    found = {
        "columns": facts.num_columns,
        "rows": max(facts.num_rows, sum(group.num_rows for group in groups)),
        "size": sum(chunk.total_uncompressed_size for chunk in chunks),
        "values": max((chunk.num_values for chunk in chunks), default=0),
        "encodings": sorted({name for chunk in chunks for name in chunk.encodings}),
        "texts": sorted({chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}),
    }
print(json.dumps(found))
"""


def read_parquet(path: Path, _split: Split) -> Table:
    """Read a Parquet file."""
    return _as_table(_parquet(path), (path,))


def read_saved(path: Path, _split: Split) -> Table:
    """Read the folder of a saved HF dataset, whose files stay mapped, with its splits concatenated."""
    import datasets

    loaded = datasets.load_from_disk(str(path))
    parts = dict(loaded) if isinstance(loaded, Mapping) else {}
    whole = datasets.concatenate_datasets(list(parts.values())) if parts else loaded
    check_count(len(whole), path)
    stored = whole.with_format("arrow")[:]
    check_table_size(sum(map(_decoded, (chunk for column in stored.columns for chunk in column.chunks))), path)
    table = _as_table(stored, tuple(sorted(filter(Path.is_file, path.rglob("*")))))
    splits = [name for name, part in parts.items() for _ in range(len(part))]
    return replace(table, columns={**table.columns, "split": splits}) if splits else table


def _as_table(stored: Any, files: tuple[Path, ...]) -> Table:
    classes = _class_names((stored.schema.metadata or {}).get(b"huggingface"))
    columns = {name: LazySequence(range(len(stored)), partial(_cell, stored[name])) for name in stored.column_names}
    return Table(columns, classes, files=files)


def _cell(column: Any, row: int) -> Any:
    return column[row].as_py()


def _parquet(path: Path) -> Any:
    """The table of a Parquet file, after its metadata were checked."""
    import pyarrow
    from pyarrow import parquet

    facts = json.loads(read_apart(path, "pyarrow", _FACTS, json.dumps(_THRIFT), str(MOST_COLUMNS)))
    if facts["columns"] > MOST_COLUMNS:
        raise DataError(f"{path} is refused: it has {facts['columns']} columns, and at most {MOST_COLUMNS} are read.")
    check_count(facts["rows"], path)
    check_table_size(max(facts["size"], 8 * facts["values"]), path)
    if "DELTA_BYTE_ARRAY" in facts["encodings"]:
        raise DataError(f"{path} is refused: it has columns in the encoding DELTA_BYTE_ARRAY. Save it without.")
    size = 0
    tables = []
    with parquet.ParquetFile(path, read_dictionary=facts["texts"], **_THRIFT) as file:
        for index in range(file.num_row_groups):
            tables.append(file.read_row_group(index))
            size += sum(_decoded(chunk) for column in tables[-1].columns for chunk in column.chunks)
            check_table_size(size, path)
        return pyarrow.concat_tables(tables) if tables else file.schema_arrow.empty_table()


def _decoded(array: Any) -> int:
    """The bytes that an array would take with every value of its dictionaries written out."""
    from pyarrow import compute, types

    kind = array.type
    if types.is_dictionary(kind):
        if not len(array.dictionary) or array.null_count == len(array):
            return int(array.nbytes)
        lengths = compute.binary_length(array.dictionary)
        return int(array.indices.nbytes) + int(compute.sum(lengths.take(array.indices)).as_py() or 0)
    if types.is_struct(kind):
        return sum(_decoded(array.field(index)) for index in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return int(array.nbytes) - int(array.values.nbytes) + _decoded(array.flatten())
    return int(array.nbytes)


def _class_names(notes: bytes | None) -> tuple[str, ...] | None:
    """The names of the classes in the schema's metadata, as HF `datasets` writes them."""
    try:
        known = parse_json(notes or b"null")["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return None
    return tuple(map(str, known)) if isinstance(known, list) else None
