"""Text tables (JSONL, JSON, CSV, TSV, lines, also packed by gzip), read as a stream and kept as JSON text until used.

Objects of Python take many times the memory of the text that they were read from, and a small archive can hold a huge
table. So the text of a table is bounded, and so is that of a row. Cells stay as they are written: libraries that
convert columns turn "NA" into a missing value, "01" into 1 and a date into a time.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import DataError, brief
from ..io.sizes import format_bytes
from ..types import Split
from .dataset import LazySequence, Table, check_count

LARGEST_TABLE = 4 * 2**30  # uncompressed bytes
LARGEST_ROW = 8 * 2**20  # characters; parsed, they take at most about 256 MiB
MOST_COLUMNS = 1000
_CHUNK = 2**16  # characters of a JSON list that are read at once
_encode = json.JSONEncoder(ensure_ascii=False).encode


class _Text:
    """The text of a table: bounded as a whole, and in the lines and the characters of a row."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._text = file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        self.path, self.line = path, 0
        self.begin_row()

    def begin_row(self) -> None:
        """Count the characters of a row from here."""
        self._left = LARGEST_ROW

    def read(self, size: int) -> str:
        """Read some characters; none at the end."""
        return self._checked(self._text.read(size))

    def lines(self) -> Iterator[str]:
        """Yield the lines; those of one row may have `LARGEST_ROW` characters together."""
        while line := self._checked(self._text.readline(self._left + 1)):
            check_count(self.line, self.path)  # of lines, since blank ones take time too
            self.line += 1
            self._left -= len(line)
            if self._left < 0:
                refused = f"line {self.line} of {self.path} is refused"
                raise DataError(f"{refused}: a row may have {LARGEST_ROW} characters.")
            yield line

    def _checked(self, text: str) -> str:
        check_table_size(self._file.tell(), self.path)
        return text


Parser = Callable[[_Text], Iterator[tuple[Iterable[str], str]]]  # names of columns that a row has, and its JSON text


def check_table_size(size: int, path: Path) -> None:
    """Refuse a table that is too large."""
    if size > LARGEST_TABLE:
        most = format_bytes(LARGEST_TABLE)
        raise DataError(f"{path} is refused: a table may have {most} uncompressed. Split it.")


def read_rows(parse: Parser, path: Path, _split: Split) -> Table:
    """Read a text table."""
    rows: list[bytes] = []
    names: dict[str, None] = {}
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        for found, text in parse(_Text(file, path)):
            names.update(dict.fromkeys(found))
            if len(names) > MOST_COLUMNS:
                raise DataError(f"{path} is refused: it has more than {MOST_COLUMNS} columns.")
            rows.append(text.encode("utf-8", "surrogatepass"))
            check_count(len(rows), path)
    cells = {name: partial(_cell, rows, name, place) for place, name in enumerate(names)}
    return Table({name: LazySequence(range(len(rows)), cell) for name, cell in cells.items()}, files=(path,))


def _cell(rows: list[bytes], name: str, place: int, index: int) -> Any:
    """A cell of rows that are JSON objects or lists; None where an object lacks it."""
    row = json.loads(rows[index])
    return row[place] if isinstance(row, list) else row.get(name)


def text_lines(file: _Text) -> Iterator[tuple[Iterable[str], str]]:
    """Yield the lines of a text file, each of which is a sample."""
    for line in file.lines():
        file.begin_row()
        if line.strip():
            yield ("text",), _encode({"text": line.rstrip("\r\n")})


def json_lines(file: _Text) -> Iterator[tuple[Iterable[str], str]]:
    """Yield the objects of a file with one in each line."""
    for line in file.lines():
        file.begin_row()
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {file.line} of {file.path} is not JSON: {brief(error)}.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {file.line} of {file.path} is a JSON {type(row).__name__}; expected an object.")
        yield row, line.strip()


def json_list(file: _Text) -> Iterator[tuple[Iterable[str], str]]:
    """Yield the objects of a JSON list, one at a time."""
    decoder, text, expected = json.JSONDecoder(), "", "["
    while True:
        text = text.lstrip()
        while not text and (more := file.read(_CHUNK)):
            text = more.lstrip()
        mark = text[:1]
        if not mark or mark not in expected:
            end = f"{text[:20]!r} where {' or '.join(expected)} was expected" if mark else "it ends too early"
            raise DataError(f"{file.path} is no list of JSON objects; expected one object for each sample: {end}.")
        if mark == "]":
            return
        if mark != "{":
            text, expected = text[1:], "{]" if mark == "[" else "{"
            continue
        while True:
            try:
                row, end_of_row = decoder.raw_decode(text)
                break
            except (ValueError, RecursionError) as error:
                more = file.read(max(_CHUNK, len(text))) if len(text) <= LARGEST_ROW else ""
                if not more or isinstance(error, RecursionError):
                    raise DataError(f"{file.path} is not JSON: {brief(error)}.") from error
                text += more
        yield row, text[:end_of_row]
        text, expected = text[end_of_row:], ",]"


def delimited(delimiter: str, file: _Text) -> Iterator[tuple[Iterable[str], str]]:
    """Yield the rows below a header; of columns with the same name the last counts."""
    reader = csv.reader(file.lines(), delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        places = {name: place for place, name in enumerate(header)}
        file.begin_row()
        for fields in reader:
            file.begin_row()
            if fields and len(fields) != len(header):  # [] is a blank line
                expected = f"expected {len(header)} as in its header"
                raise DataError(f"line {file.line} of {file.path} has {len(fields)} fields; {expected}.")
            if fields:
                yield places, _encode([fields[place] for place in places.values()])
    except csv.Error as error:
        raise DataError(f"line {file.line} of {file.path} is malformed: {brief(error)}.") from error
