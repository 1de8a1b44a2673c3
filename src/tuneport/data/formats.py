"""Labelled images and texts from the usual formats: class folders, an `.npz`, a table or a saved HF dataset.

Rules kept here: images are read on access; no file can run code (no pickles); class names come from the whole source,
so its splits agree on them; a file that cannot be read is a `DataError` of one line that names it.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError, brief, first_of, is_text, unknown_name
from ..io.hub import nearest_path
from ..io.sizes import format_bytes
from ..types import Split
from .dataset import SPLIT_NAMES, Dataset, LazySequence, check_count, choose_split, dataset_name, reading
from .images import IMAGE_SUFFIXES, check_images, open_array, open_file
from .tables import is_table, read_table

_FORMATS = "an image folder (class = sub-folder), .npz, table (.jsonl, .json, .csv, .tsv, .parquet) or saved HF dataset"
_ANY_SPLIT = {name for names in SPLIT_NAMES.values() for name in names}
_LARGEST_ARCHIVE = 4 * 2**30  # bytes of the arrays that are read
_MOST_CLASSES = 10**6


def read_plain(
    path: str | Path, split: Split, *, labelled: bool = True, columns: Mapping[str, str] | None = None
) -> Dataset:
    """Read one split of an image folder, an `.npz`, a table or a saved HF dataset, as `read_data` describes."""
    path = Path(path)
    if split not in SPLIT_NAMES:
        raise DataError(unknown_name("split", split, SPLIT_NAMES))
    if not path.exists():
        raise DataError(f"no data at {path}: no such file or folder.{nearest_path(path)} Pass {_FORMATS}.")
    with reading(path):
        if is_table(path):
            data = read_table(path, split, labelled, columns)
        elif columns:
            raise DataError(f"`columns` names the columns of a table, and {path} is none.")
        elif path.is_dir():
            data = _read_folder(path, split)
        elif path.name.lower().endswith(".npz"):
            data = _read_npz(path, split)
        else:
            raise DataError(f"the format of {path} is unknown by its name. Pass {_FORMATS}.")
    if labelled and data.labels is None and data.targets is None and not data.has_chats:
        expected = "one sub-folder of images per class" if path.is_dir() else "an array y, or y_train and y_test"
        raise DataError(f"{path} has no labels; expected {expected}.")
    return data


def _read_folder(path: Path, split: Split) -> Dataset:
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
    inputs = LazySequence(np.arange(len(paths or flat)), partial(open_file, paths or flat))
    numbers = np.array(labels, dtype=np.int64) if paths else None
    return Dataset(inputs, numbers, classes, dataset_name(path), "image", found or "all")


def images_under(folder: Path) -> list[Path]:
    """The image files in a folder and its sub-folders, without hidden ones."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _read_npz(path: Path, split: Split) -> Dataset:
    found, images, given, names = _unpack(path, split)
    x, y = ("x", "y") if found is None else (f"x_{found}", f"y_{found}")
    images = check_images(images, x, path)
    labels = given.get(y)
    if labels is not None:
        labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            what = f"{labels.dtype} of shape {labels.shape}"
            raise DataError(f"{y} of {path} is {what}; expected integers of shape (N,).")
        labels = labels.astype(np.int64)
    classes = () if labels is None else _name_classes(given, names, path)
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} images in {x} but {len(labels)} labels in {y}.")
    wrong = [] if labels is None else sorted(set(labels.tolist()) - set(range(len(classes))))
    if wrong:
        expected = f"0 to {len(classes) - 1} for its {len(classes)} classes"
        raise DataError(f"{y} of {path} has labels {first_of(map(str, wrong))}; expected {expected}.")
    inputs = LazySequence(np.arange(len(images)), partial(open_array, images))
    return Dataset(inputs, labels, classes, dataset_name(path), "image", found or "all", files=(path,))


def _unpack(path: Path, split: Split) -> tuple[str | None, NDArray[Any], dict[str, NDArray[Any]], NDArray[Any] | None]:
    """Of an archive: the split's name in it, its images, the labels of all splits by key, the class names.

    The headers of all arrays are checked before one of them is read.
    """
    try:
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
    except DataError:
        raise
    except Exception as error:  # errors of zipfile, zlib and NumPy share no base class
        hint = "it holds pickled objects; save plain arrays" if "pickle" in str(error) else brief(error)
        raise DataError(f"cannot read {path}: {hint}.") from error


def _check_headers(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], path: Path) -> None:
    """Refuse arrays that are too large together, that claim more than their member holds, or have too many labels."""
    total = 0
    for key, member in members.items():
        with archive.open(member) as file:
            version = npy.read_magic(file)
            read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, dtype = read(file)
        size = math.prod(shape) * dtype.itemsize
        if size > member.file_size and not dtype.hasobject:
            raise DataError(f"cannot read {path}: {key} claims {size} bytes, but has {member.file_size}.")
        if key != "classes":
            check_count(shape[0] if shape else 0, f"{key} of {path}")
        total += size
    if total > _LARGEST_ARCHIVE:
        most = format_bytes(_LARGEST_ARCHIVE)
        raise DataError(f"{path} is refused: it has {format_bytes(total)} uncompressed, and may have {most}. Split it.")


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(member) as file:
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array


def _name_classes(labels: Mapping[str, NDArray[Any]], names: NDArray[Any] | None, path: Path) -> tuple[str, ...]:
    """The given names, else the numbers up to the largest label of all splits."""
    if names is not None:
        if names.dtype.kind not in "USiub" or names.size > _MOST_CLASSES:
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
    if most > _MOST_CLASSES:
        raise DataError(f"{path} has the label {most - 1}; expected labels from 0, at most {_MOST_CLASSES} classes.")
    return tuple(map(str, range(most)))
