"""Readers of the file formats of known datasets: idx, .mat, CSV, lists of names. Errors name the file."""

from __future__ import annotations

import csv
import gzip
import math
import pickle
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tuneport.data.dataset import reading
from tuneport.data.rows import MOST_COLUMNS
from tuneport.errors import DataError, first_of
from tuneport.io.sizes import format_bytes
from tuneport.io.untrusted import read_apart

_LARGEST = 2**32  # uncompressed bytes
_LARGEST_LIST = 10**7  # bytes of a list of images

_LOADMAT = """
import pickle
from scipy.io import loadmat
content = loadmat(sys.argv[1], squeeze_me=True, variable_names=sys.argv[2:])
pickle.dump(content, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
"""


def read_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """An array of bytes in MNIST's format: magic number, sizes (big-endian), values; may be compressed by gzip."""
    with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        header = file.read(4 + 4 * dimensions)
        head = np.frombuffer(header[: len(header) // 4 * 4], dtype=">u4")
        expected = math.prod(head[1:].tolist()) if len(head) == 1 + dimensions else 0
        content = file.read(min(expected, _LARGEST) + 1)
    if expected < 1 or head[0] != 0x800 + dimensions or len(content) != expected:
        raise DataError(f"{path} is not an idx file of bytes in {dimensions} dimensions, or it is truncated.")
    return np.frombuffer(content, dtype=np.uint8).reshape(head[1:].astype(np.int64))


def read_mat(path: Path, *wanted: str) -> Mapping[str, Any]:
    """Arrays of a MATLAB file (versions 4 to 7.2)."""
    with reading(path):
        size = _unpacked(path)
    if size > _LARGEST:
        raise DataError(f"{path} is refused: a file may have {format_bytes(_LARGEST)} uncompressed. Split it.")
    content: dict[str, Any] = pickle.loads(read_apart(path, "scipy", _LOADMAT, *wanted))
    missing = [name for name in wanted if name not in content]
    if missing:
        raise DataError(f"{path} has no {first_of(missing)}.")
    return content


def _unpacked(path: Path) -> int:
    """The bytes of a MATLAB file with its compressed arrays unpacked; it stops counting when there are too many."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(128)
        order = "<" if header[126:128] == b"IM" else ">"
        while len(tag := file.read(8)) == 8 and size <= _LARGEST:
            kind, left = struct.unpack(f"{order}II", tag)
            unpack = zlib.decompressobj() if kind == 15 else None  # miCOMPRESSED
            if unpack is None:
                file.seek(left, 1)
            while unpack and size <= _LARGEST and (packed := unpack.unconsumed_tail or file.read(min(left, 2**16))):
                left -= 0 if unpack.unconsumed_tail else len(packed)
                size += len(unpack.decompress(packed, 2**20))
    return size


def read_lines(path: Path) -> list[str]:
    """The lines of a text file that are not blank; none of them may contain `..`, since they are file names."""
    with reading(path):
        _check_list(path)
        text = path.read_text(encoding="utf-8")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    outside = [line for line in lines if ".." in Path(line).parts]
    if outside:
        raise DataError(f"{path} names {outside[0]}, which is outside its folder.")
    return lines


def read_rows(path: Path, delimiter: str) -> list[dict[str, str]]:
    """The rows of a table by column name."""
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        _check_list(path)
        reader = csv.DictReader(file, delimiter=delimiter)
        if len(reader.fieldnames or ()) > MOST_COLUMNS:  # each row would have them all
            raise DataError(f"{path} is refused: it has more than {MOST_COLUMNS} columns.")
        return list(reader)


def _check_list(path: Path) -> None:
    size = path.stat().st_size
    if size > _LARGEST_LIST:
        raise DataError(f"{path} is refused: {size / 1e6:.0f} MB are too many for a list of images.")


def find_numbers(rows: Sequence[Mapping[str, Any]], path: Path, name: str) -> list[int]:
    """A column of whole numbers."""
    values = find_column(rows, path, name)
    wrong = [value for value in values if not value.isdecimal() or len(value) > 9]
    if wrong:
        raise DataError(f"column {name} of {path} has {first_of(wrong, 3)}; expected whole numbers.")
    return [int(value) for value in values]


def find_column(rows: Sequence[Mapping[str, Any]], path: Path, name: str) -> list[str]:
    """A column without empty cells; none of them may contain `..`, since they are file names."""
    values = [row.get(name) for row in rows]
    if not rows or any(not isinstance(value, str) or not value or ".." in Path(value).parts for value in values):
        raise DataError(f"{path} has no column {name} that is filled in every row.")
    return [str(value) for value in values]
