"""Labelled images in an `.npz` archive: x, y and classes, or x_train, y_train, x_test, y_test and classes.

No array can run code (no pickles), and the headers of all arrays are checked before one of them is read.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError, first_of, is_text
from ..io.sizes import format_bytes
from ..types import Split
from .dataset import LazySequence, Table, check_count, choose_split
from .images import check_images

LARGEST_ARCHIVE = 4 * 2**30  # bytes of the arrays that are read
MOST_CLASSES = 10**6


def read_npz(path: Path, split: Split) -> Table:
    """Read the images of one split, its labels, and the class names, which come from the labels of all splits."""
    found, images, given, names = _unpack(path, split)
    x, y = ("x", "y") if found is None else (f"x_{found}", f"y_{found}")
    images = check_images(images, x, path)
    columns: dict[str, Sequence[Any]] = {"image": LazySequence(np.arange(len(images)), images.__getitem__)}
    if y not in given:
        return Table(columns, split=found or "all", files=(path,), expected="an array y, or y_train and y_test")
    labels = given[y][:, 0] if given[y].ndim == 2 and given[y].shape[1] == 1 else given[y]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        what = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{y} of {path} is {what}; expected integers of shape (N,).")
    if len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} images in {x} but {len(labels)} labels in {y}.")
    classes = _name_classes(given, names, path)
    if wrong := sorted(set(labels.tolist()) - set(range(len(classes)))):
        expected = f"0 to {len(classes) - 1} for its {len(classes)} classes"
        raise DataError(f"{y} of {path} has labels {first_of(map(str, wrong))}; expected {expected}.")
    return Table({**columns, "label": labels.tolist()}, classes, found or "all", (path,))


def _unpack(path: Path, split: Split) -> tuple[str | None, NDArray[Any], dict[str, NDArray[Any]], NDArray[Any] | None]:
    """Of an archive: the split's name in it, its images, the labels of all splits by key, the class names."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        found = choose_split([key[2:] for key in members if key.startswith("x_")], split, path)
        x = "x" if found is None else f"x_{found}"
        if x not in members:
            raise DataError(
                f"{path} has arrays {first_of(members) or 'none'}; "
                "expected x_train, y_train, x_test, y_test, or x, y (and classes)."
            )
        keys = [key for key in members if key[:1] == "y" and f"x{key[1:]}" in members]
        wanted = [key for key in (x, *keys, "classes") if key in members]
        _check_headers(archive, {key: members[key] for key in wanted}, path)
        arrays = {key: _read_member(archive, members[key]) for key in wanted}
        return found, arrays[x], {key: arrays[key] for key in keys}, arrays.get("classes")


def _check_headers(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], path: Path) -> None:
    """Refuse arrays that are too large together, that claim more than their member holds, or have too many labels."""
    total = 0
    for key, member in members.items():
        with archive.open(member) as file:
            first = npy.read_magic(file) == (1, 0)
            shape, _, dtype = (npy.read_array_header_1_0 if first else npy.read_array_header_2_0)(file)
        if dtype.hasobject:
            raise DataError(f"cannot read {path}: it holds pickled objects; save plain arrays.")
        size = math.prod(shape) * dtype.itemsize
        if size > member.file_size:
            raise DataError(f"cannot read {path}: {key} claims {size} bytes, but has {member.file_size}.")
        if key != "classes":
            check_count(shape[0] if shape else 0, f"{key} of {path}")
        total += size
    if total > LARGEST_ARCHIVE:
        most = format_bytes(LARGEST_ARCHIVE)
        raise DataError(f"{path} is refused: it has {format_bytes(total)} uncompressed, and may have {most}. Split it.")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array


def _name_classes(labels: Mapping[str, NDArray[Any]], names: NDArray[Any] | None, path: Path) -> tuple[str, ...]:
    """The given names, else the numbers up to the largest label of all splits."""
    if names is not None:
        if names.dtype.kind not in "USiub" or names.size > MOST_CLASSES:
            given = f"{names.dtype} of shape {names.shape}"
            raise DataError(f"classes of {path} is {given}; expected a list of texts, one per class.")
        decoded = np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names
        try:
            found = tuple(np.atleast_1d(decoded).ravel().astype(str).tolist())
        except (ValueError, SystemError):  # numbers that are no code points
            found = ("\ud800",)
        if not all(map(is_text, found)):
            raise DataError(f"a class of {path} has a name that is not Unicode text. Rename it.")
        return found
    tops = [int(values.max()) for values in labels.values() if values.size and values.dtype.kind in "iu"]
    most = max(tops, default=-1) + 1
    if most > MOST_CLASSES:
        raise DataError(f"{path} has the label {most - 1}; expected labels from 0, at most {MOST_CLASSES} classes.")
    return tuple(map(str, range(most)))
