"""Rows of text tables (JSONL, JSON, CSV, TSV), read as a stream and kept as JSON text until they are used.

Objects of Python take many times the memory of the text that they were read from, and a small archive can hold a huge
table. So the text of a table is bounded, and so is that of a row.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from ..errors import DataError, brief
from ..io.sizes import format_bytes
from .dataset import check_count, reading

LARGEST_TABLE = 4 * 2**30  # uncompressed bytes
LARGEST_ROW = 8 * 2**20  # characters; parsed, they take at most about 256 MiB
MOST_COLUMNS = 1000
_CHUNK = 2**16
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Rows:
    """Rows in one buffer of text, each parsed on access: objects, or lists of the values of all `keys`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keys: dict[str, None] = {}
        self._text = bytearray()
        self._ends = array("q")

    def __len__(self) -> int:
        return len(self._ends)

    def name(self, keys: Iterable[str]) -> None:
        """Add names of columns."""
        new = [key for key in keys if key not in self.keys]
        self.keys.update(dict.fromkeys(new))
        if new and len(self.keys) > MOST_COLUMNS:
            raise DataError(f"{self.path} is refused: it has more than {MOST_COLUMNS} columns.")

    def add(self, row: dict[str, Any] | list[str]) -> None:
        """Append one row."""
        self._text += _encode(row).encode("utf-8", "surrogatepass") + b","
        self._ends.append(len(self._text))
        check_count(len(self), self.path)

    def after(self, start: int, size: int) -> int:
        """The end of the rows from `start` on that take about `size` bytes, at least one."""
        begin = self._ends[start - 1] if start else 0
        return max(bisect_right(self._ends, begin + size), start + 1)

    def values(self, key: str, start: int, stop: int) -> list[Any]:
        """The values of one key in some rows; None where a row lacks it."""
        begin = self._ends[start - 1] if start else 0
        text = self._text[begin : self._ends[stop - 1] - 1].decode("utf-8", "surrogatepass")
        rows = json.loads(f"[{text}]")
        if isinstance(rows[0], dict):
            return [row.get(key) for row in rows]
        place = list(self.keys).index(key)
        return [row[place] for row in rows]


class Column(Sequence[Any]):
    """One column of rows; None where a row lacks it."""

    def __init__(self, rows: Rows, key: str) -> None:
        self._rows, self._key = rows, key

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row = int(index) % len(self)
        return self._rows.values(self._key, row, row + 1)[0]

    def __iter__(self) -> Iterator[Any]:
        start = 0
        while start < len(self):
            stop = self._rows.after(start, _CHUNK)
            yield from self._rows.values(self._key, start, stop)
            start = stop


def read_rows(path: Path) -> dict[str, Sequence[Any]]:
    """The columns of a JSONL, JSON, CSV or TSV file, which may be compressed by gzip."""
    name = path.name.lower()
    rows = Rows(path)
    with reading(path), gzip.open(path) if name.endswith(".gz") else path.open("rb") as packed:
        file = io.TextIOWrapper(io.BufferedReader(_Limited(packed, path)), encoding="utf-8-sig", newline="")
        kind = name.removesuffix(".gz")
        if kind.endswith((".jsonl", ".json")):
            for row in _json_rows(file, path) if kind.endswith(".jsonl") else _json_array(file, path):
                rows.name(row)
                rows.add(row)
        else:
            fields = _delimited_rows(file, path, "\t" if kind.endswith(".tsv") else ",")
            rows.name(next(fields, []))
            for values in fields:
                rows.add(values)
    return {key: Column(rows, key) for key in rows.keys}


class _Limited(io.RawIOBase):
    """A file that raises when more than the largest table is read from it."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path, self._left = file, path, LARGEST_TABLE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._file.read(len(buffer))
        self._left -= len(content)
        if self._left < 0:
            most = format_bytes(LARGEST_TABLE)
            raise DataError(f"{self._path} is refused: a table may have {most} uncompressed. Split it.")
        buffer[: len(content)] = content
        return len(content)


def _lines(file: TextIO, path: Path, row_ended: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """The lines of a file; a row, which ends with each line or when `row_ended` says so, may not be too long."""
    length = 0
    for number, line in enumerate(iter(lambda: file.readline(LARGEST_ROW + 1), ""), start=1):
        check_count(number - 1, path)  # of lines, since blank ones take time too
        length = len(line) if row_ended() else length + len(line)
        if length > LARGEST_ROW:
            raise DataError(f"line {number} of {path} is refused: a row may have {LARGEST_ROW} characters.")
        yield line


def _json_rows(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(file, path), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not JSON: {brief(error)}.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is a JSON {type(row).__name__}; expected an object.")
        yield row


def _json_array(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON list, one at a time."""
    decoder, text, expected = json.JSONDecoder(), "", "["
    while True:
        text = text.lstrip() or file.read(_CHUNK).lstrip()
        if text[:1] != expected and not (expected == "," and text[:1] == "]"):
            end = "it ends too early" if not text else f"{text[:20]!r} where {expected} was expected"
            raise DataError(f"{path} is no list of JSON objects; expected one object for each sample: {end}.")
        if text[0] == "]":
            return
        text = text[1:].lstrip() or file.read(_CHUNK).lstrip()
        if expected == "[" and text[:1] == "]":
            return
        while True:
            try:
                row, end_of_row = decoder.raw_decode(text)
                break
            except (ValueError, RecursionError) as error:
                more = file.read(max(_CHUNK, len(text))) if len(text) <= LARGEST_ROW else ""
                if not more or isinstance(error, RecursionError):
                    raise DataError(f"{path} is not JSON: {brief(error)}.") from error
                text += more
        if not isinstance(row, dict):
            raise DataError(f"{path} is no list of JSON objects; expected one object for each sample.")
        yield row
        text, expected = text[end_of_row:], ","


def _delimited_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[list[str]]:
    """The names of the columns, then the values of each row; of columns with the same name the last."""
    ended = True

    def row_ended() -> bool:
        nonlocal ended
        before, ended = ended, False
        return before

    reader = csv.reader(_lines(file, path, row_ended), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        names = list(dict.fromkeys(header))
        yield names
        ended = True
        for fields in reader:
            ended = True
            if fields and len(fields) != len(header):  # the reader gives [] for a blank line
                expected = f"expected {len(header)} as in its header"
                raise DataError(f"line {reader.line_num} of {path} has {len(fields)} fields; {expected}.")
            if fields and len(names) < len(header):
                fields = list(dict(zip(header, fields, strict=True)).values())
            if fields:
                yield fields
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {path} is malformed: {brief(error)}.") from error
