"""Reading labelled images and texts, from whatever a user already has, into one `Dataset`.

Rules kept here: images stay on disk until they are looked at; nothing that is read can run code
(no pickles); class names come from the whole source, so its splits agree on them; and whatever
cannot be read is a `DataError` of one line that names the file.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, UnidentifiedImageError

from tuneport.errors import DataError, first_of, unknown_name

Kind = Literal["image", "text"]
Split = Literal["train", "test"]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff")
TABLE_SUFFIXES = (".jsonl", ".csv", ".tsv", ".jsonl.gz", ".csv.gz", ".tsv.gz", ".parquet")

_SPLIT_NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "test": ("test", "dev", "validation", "val", "valid"),  # the first that exists is taken
}
_ANY_SPLIT = {name for names in _SPLIT_NAMES.values() for name in names}
_FORMATS = "an image folder (class = sub-folder), .npz, table (.jsonl, .csv, .tsv, .parquet) or saved HF dataset"
_INPUT_COLUMNS = (("image",), ("text", "text_pair"), ("text1", "text2"), ("text",), ("prompt",))  # the first complete
_PLAIN_COLUMNS = {"text", "text_pair", "text1", "text2", "prompt", "label", "target", "split"}
_COLUMNS = "image, or text (with text_pair if any), or text1 and text2, or prompt; and label or target"
_IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # none that starts other programs
_LARGEST_TABLE = 4 * 2**30  # bytes, unpacked: a table is held in memory
_LARGEST_ARCHIVE = 16 * 2**30
_MOST_CLASSES = 10**6
_IMAGES = "uint8, or floats from 0 to 1, of shape (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W)"


@dataclass(frozen=True, eq=False)
class Lazy(Sequence[Any]):
    """A sequence whose items are made by `load(index)` each time they are asked for; slices stay lazy."""

    indices: NDArray[np.int64]
    load: Callable[[int], Any]

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Lazy: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Lazy(self.indices[index], self.load)
        return self.load(int(self.indices[index]))


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples with what is known of them: labels, or text targets, or neither.

    `inputs` are RGB `PIL.Image`s (read from disk on access), texts, or pairs of texts. `labels` index
    `classes`; `label_texts` are words for the classes, where their names say too little, and `prompts` templates
    for the class names, where the data belong to a known task. `split` is the split's name as found in the source,
    or "all" where it has none.

    >>> data = Dataset(inputs=["good", "bad", "fine"], labels=np.array([1, 0, 1]), classes=("neg", "pos"))
    >>> data.subset([2, 1]).inputs[0], len(data)
    ('fine', 3)
    """

    inputs: Sequence[Any]
    labels: NDArray[np.int64] | None
    classes: tuple[str, ...]
    name: str = "data"
    kind: Kind = "text"
    split: str = "all"
    targets: Sequence[str] | None = None
    prompts: tuple[str, ...] = ()
    label_texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.inputs)

    def __str__(self) -> str:
        return self.name if self.split == "all" else f"{self.split} split of {self.name}"

    def subset(self, indices: ArrayLike) -> Dataset:
        """The samples at `indices`, in that order; copies no sample and opens no file."""
        wanted = np.asarray(indices)
        picked = np.arange(len(self))[wanted if wanted.size else wanted.astype(np.int64)]
        return replace(
            self,
            inputs=_pick(self.inputs, picked),
            labels=None if self.labels is None else self.labels[picked],
            targets=None if self.targets is None else _pick(self.targets, picked),
        )


def _pick(items: Sequence[Any], indices: NDArray[np.int64]) -> Sequence[Any]:
    if isinstance(items, Lazy):  # views of views would grow with every subset
        return Lazy(items.indices[indices], items.load)
    return Lazy(indices, items.__getitem__)


def read_data(path: str | Path, split: Split, *, labelled: bool = True) -> Dataset:
    """Read one split of an image folder, an `.npz`, a table or a saved HF dataset.

    A source without splits serves both, and its `Dataset.split` is "all". Without a test split, the
    validation split (dev, validation, val) stands in for it. `labelled=False` also lets data through
    that have neither labels nor text targets.
    """
    path = Path(path)
    if split not in _SPLIT_NAMES:
        raise DataError(unknown_name("split", split, _SPLIT_NAMES))
    if not path.exists():
        raise DataError(f"no data at {path}: no such file or folder. Pass {_FORMATS}.")
    name = path.name.lower()
    try:
        if path.is_dir():
            saved = _is_saved(path)
            data = _from_table(_read_saved(path), path, split) if saved else _read_folder(path, split)
        elif name.endswith(".npz"):
            data = _read_npz(path, split)
        elif name.endswith(TABLE_SUFFIXES):
            data = _from_table(_read_table(path), path, split)
        else:
            raise DataError(f"cannot tell what data {path} holds from its name. Pass {_FORMATS}.")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {_brief(error)}.") from error
    if labelled and data.labels is None and data.targets is None:
        raise DataError(f"{path} has no labels; expected {_label_place(path)}.")
    return data


def read_columns(path: Path, split: Split, columns: Mapping[str, str]) -> Dataset | None:
    """One split of a table or a saved HF dataset whose columns have names of their own; None where it lacks them.

    `columns` leads from their names to ours. Rows without a label (-1, or a dash) are dropped.
    """
    name = path.name.lower()
    if not (_is_saved(path) if path.is_dir() else name.endswith(TABLE_SUFFIXES)):
        return None
    table = _read_saved(path) if path.is_dir() else _read_table(path)
    if not all(key in table.columns for key in columns):
        return None
    named = {columns.get(key, key): column for key, column in table.columns.items() if key not in columns.values()}
    labels = named.get("label", ())
    rows = [row for row, label in enumerate(labels) if label not in (None, "", "-", "-1", -1)]
    if "label" in named and not rows:
        return None
    if rows:
        named = {key: [column[row] for row in rows] for key, column in named.items() if key in _PLAIN_COLUMNS}
    return _from_table(_Table(named, table.classes), path, split)


def worded(dataset: Dataset) -> Dataset:
    """The data as a text-to-text model reads them: each sample inside the task's prompt, where it has one."""
    if dataset.kind != "text" or not dataset.prompts:
        return dataset
    prompt, inputs = dataset.prompts[0], dataset.inputs

    def word(index: int) -> str:
        texts = inputs[index]
        first, second = (texts, "") if isinstance(texts, str) else texts
        return re.sub(r"\{text(_pair)?\}", lambda found: second if found[1] else first, prompt)

    return replace(dataset, inputs=Lazy(np.arange(len(dataset)), word), prompts=())


def of_files(
    paths: Sequence[Path], labels: ArrayLike, classes: Sequence[str], *, name: str = "data", split: str = "all"
) -> Dataset:
    """A data set of image files, which are opened when they are looked at; each must be there."""
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        where = paths[0].parent
        raise DataError(f"{len(missing)} of {len(paths)} images of {name} are not in {where}: {first_of(missing)}.")
    images = Lazy(np.arange(len(paths)), partial(_open_file, list(paths)))
    return _labelled(images, labels, classes, name, split)


def of_arrays(
    images: NDArray[Any], labels: ArrayLike, classes: Sequence[str], *, name: str = "data", split: str = "all"
) -> Dataset:
    """A data set of images in memory: (N, H, W) or (N, H, W, 1 or 3), uint8 or floats from 0 to 1."""
    checked = _check_images(images, "the images", Path(name))
    return _labelled(Lazy(np.arange(len(checked)), partial(_open_array, checked)), labels, classes, name, split)


def _labelled(images: Lazy, labels: ArrayLike, classes: Sequence[str], name: str, split: str) -> Dataset:
    numbers = np.asarray(labels, dtype=np.int64).reshape(-1)
    if len(numbers) != len(images):
        raise DataError(f"{name} has {len(images)} images but {len(numbers)} labels.")
    if not len(images):
        raise DataError(f"{name} has no images in its {split} split.")
    if numbers.min() < 0 or numbers.max() >= len(classes):
        raise DataError(
            f"{name} has labels from {numbers.min()} to {numbers.max()}; expected 0 to {len(classes) - 1} for its "
            f"{len(classes)} classes."
        )
    return Dataset(images, numbers, tuple(classes), name, "image", split)


def files_of(dataset: Dataset) -> list[Path]:
    """The image files behind a data set, in its order; none where the samples lie in the source itself."""
    inputs = dataset.inputs
    if isinstance(inputs, Lazy) and isinstance(inputs.load, partial) and inputs.load.func is _open_file:
        return [inputs.load.args[0][index] for index in inputs.indices]
    return []


def align_labels(dataset: Dataset, classes: Sequence[str]) -> Dataset:
    """Re-number labels to a head's `classes`, by name; the head may know more classes than the data.

    Class names that are mere numbers ("0", "1", ...) and unknown to the head are taken as positions in it.

    >>> data = Dataset(inputs=["good", "bad"], labels=np.array([1, 0]), classes=("neg", "pos"))
    >>> align_labels(data, ["pos", "neutral", "neg"]).labels.tolist()
    [0, 2]
    """
    if dataset.labels is None:
        raise DataError(f"{dataset} has no labels; expected labels among the head's {len(classes)} classes.")
    head = tuple(classes)
    if dataset.classes == head:
        return dataset
    unknown = [name for name in dataset.classes if name not in head]
    places = [head.index(name) for name in dataset.classes] if not unknown else _positions(dataset.classes)
    if unknown and not (places and max(places) < len(head)):
        raise DataError(
            f"{len(unknown)} of {len(dataset.classes)} classes of {dataset.name} are unknown to the head: "
            f"{first_of(unknown)}. The head has {len(head)}: {first_of(head)}. "
            "Name the classes as the head does, or number them in its order from 0."
        )
    repeats = Counter(head) | Counter(dataset.classes)
    twice = [name for name in dict.fromkeys(dataset.classes) if repeats[name] > 1]
    if twice:
        raise DataError(f"more than one class is called {first_of(twice)}, in {dataset.name} or in the head.")
    return replace(dataset, labels=np.array(places, dtype=np.int64)[dataset.labels], classes=head)


def _positions(names: Sequence[str]) -> list[int]:
    """The names as numbers, or nothing if they are not distinct numbers."""
    numbers = [int(name) for name in names if name.isdecimal() and len(name) < 20]
    return numbers if len(set(numbers)) == len(names) else []


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "dataset_info.json").is_file()


def _label_place(path: Path) -> str:
    if path.name.lower().endswith(".npz"):
        return "an array y, or y_train and y_test, beside the images"
    if path.name.lower().endswith(TABLE_SUFFIXES) or _is_saved(path):
        return "a column label or target"
    return "one sub-folder of images per class"


def _dataset_name(path: Path) -> str:
    name = path.resolve().name
    suffix = max((s for s in (*TABLE_SUFFIXES, ".npz") if name.lower().endswith(s)), key=len, default="")
    return name[: len(name) - len(suffix)] if path.is_file() else name


def _choose_split(found: Sequence[str], split: Split, path: Path) -> str | None:
    """The name under which the source keeps `split`; None where it has no splits at all."""
    by_name = {name.lower(): name for name in found}
    for name in _SPLIT_NAMES[split]:
        if name in by_name:
            return by_name[name]
    if set(by_name) <= {"all", ""}:
        return None
    raise DataError(
        f"{path} has no {split} split; found: {first_of(sorted(by_name))}. "
        f"Add one named {' or '.join(_SPLIT_NAMES[split])}, or drop the splits to use all samples for both."
    )


def _opened(source: Path | io.BytesIO) -> Image.Image:
    """An image of a common format; one of absurd size is an error, not a warning."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    return Image.open(source, formats=_IMAGE_FORMATS)


def _decode(source: Path | io.BytesIO, where: str) -> Image.Image:
    try:
        with warnings.catch_warnings(), _opened(source) as image:
            if image.mode == "F":
                raise ValueError("its pixels are floats without a known range")
            if image.mode.startswith("I"):  # 16 bits; Pillow would clip at 255 instead of scaling
                pixels = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
                return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")
            return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"image {where} is too large to open safely: {_brief(error)}. Resize it.") from error
    except UnidentifiedImageError as error:
        raise DataError(f"cannot read image {where}: not in a format Pillow knows. Replace it.") from error
    except Exception as error:  # broken files make decoders raise nearly anything
        raise DataError(f"cannot read image {where}: {_brief(error)}. Replace it.") from error


def _open_file(paths: Sequence[Path], index: int) -> Image.Image:
    return _decode(paths[index], str(paths[index]))


def _open_cell(cells: Lazy, path: Path, index: int) -> Image.Image:
    """An image kept in a table: its bytes, or the `{bytes, path}` of HF datasets."""
    cell: Any = cells[index]
    where = f"in row {index + 1} of {path}"
    content, place = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, cell)
    if isinstance(content, bytes):
        return _decode(io.BytesIO(content), where)
    if isinstance(place, str):
        return _decode(path.parent / place, str(path.parent / place))
    raise DataError(f"cannot read image {where}: expected its bytes or its path, got {type(cell).__name__}.")


def _open_array(images: NDArray[Any], index: int) -> Image.Image:
    pixels = images[index]
    if pixels.dtype != np.uint8:
        pixels = np.rint(pixels.astype(np.float64) * 255).astype(np.uint8)
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")


def _images_under(folder: Path) -> list[Path]:
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    return sorted(file for file in found if not _hidden(file.relative_to(folder)))


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def _read_folder(path: Path, split: Split) -> Dataset:
    # A class may itself be called "train": a split is a folder of folders.
    splits = {f.name: f for f in _sub_folders(path) if f.name.lower() in _ANY_SPLIT and _sub_folders(f)}
    found = _choose_split(list(splits), split, path)
    files = {
        name: {child.name: images for child in _sub_folders(root) if (images := _images_under(child))}
        for name, root in (splits or {"all": path}).items()
    }
    classes = tuple(sorted({name for by_class in files.values() for name in by_class}))
    by_class = files[found or "all"]
    paths = [file for name in sorted(by_class) for file in by_class[name]]
    labels = [classes.index(name) for name in sorted(by_class) for _ in by_class[name]]
    flat = [] if classes else [file for file in _images_under(path) if file.parent == path]
    if not paths and not flat:
        where = f"{path} has no images in its {found} split" if found else f"{path} has no images"
        raise DataError(f"{where}; expected a sub-folder per class, with {', '.join(IMAGE_SUFFIXES)}.")
    return Dataset(
        inputs=Lazy(np.arange(len(paths or flat)), partial(_open_file, paths or flat)),
        labels=np.array(labels, dtype=np.int64) if paths else None,
        classes=classes,
        name=_dataset_name(path),
        kind="image",
        split=found or "all",
    )


def _read_npz(path: Path, split: Split) -> Dataset:
    try:
        with zipfile.ZipFile(path) as packed:
            unpacked = sum(member.file_size for member in packed.infolist())
        if unpacked > _LARGEST_ARCHIVE:
            raise DataError(f"{path} is refused: unpacked it would take {unpacked / 1e9:.0f} GB. Split it up.")
        with np.load(path, allow_pickle=False) as archive:
            found = _choose_split([key[2:] for key in archive.files if key.startswith("x_")], split, path)
            x, y = ("x", "y") if found is None else (f"x_{found}", f"y_{found}")
            if x not in archive.files:
                raise DataError(
                    f"{path} has arrays {first_of(archive.files) or 'none'}; "
                    "expected x_train, y_train, x_test, y_test, or x, y (and classes)."
                )
            images = archive[x]
            keys = [key for key in archive.files if key[:1] == "y" and f"x{key[1:]}" in archive.files]
            given = {key: archive[key] for key in keys}
            names = archive["classes"] if "classes" in archive.files else None
    except DataError:
        raise
    except Exception as error:  # a broken archive fails in zipfile, zlib or NumPy, each in its own way
        hint = "it holds pickled objects; save plain arrays" if "pickle" in str(error) else _brief(error)
        raise DataError(f"cannot read {path}: {hint}.") from error
    images = _check_images(images, x, path)
    labels = _check_labels(given[y], y, path) if y in given else None
    classes = () if labels is None else _name_classes(given, names, path)
    if labels is not None and len(labels) != len(images):
        raise DataError(f"{path} has {len(images)} images in {x} but {len(labels)} labels in {y}.")
    wrong = [] if labels is None else sorted(set(labels.tolist()) - set(range(len(classes))))
    if wrong:
        raise DataError(
            f"{y} of {path} has labels {first_of(map(str, wrong))}; "
            f"expected 0 to {len(classes) - 1} for its {len(classes)} classes."
        )
    return Dataset(
        inputs=Lazy(np.arange(len(images)), partial(_open_array, images)),
        labels=labels,
        classes=classes,
        name=_dataset_name(path),
        kind="image",
        split=found or "all",
    )


def _check_images(images: NDArray[Any], key: str, path: Path) -> NDArray[Any]:
    """The images as (N, H, W, C), or an error that says what is accepted."""
    given, kind = f"{images.dtype} of shape {images.shape}", images.dtype.kind
    if images.ndim == 3:
        images = images[..., None]  # (N, H, W) -> (N, H, W, 1)
    elif images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)  # (N, C, H, W) -> (N, H, W, C)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not (images.dtype == np.uint8 or kind == "f"):
        raise DataError(f"{key} of {path} is {given}; expected {_IMAGES}.")
    if images.size == 0:
        raise DataError(f"{key} of {path} is empty: {given}.")
    if kind == "f" and not (images.min() >= 0 and images.max() <= 1):  # NaN fails both
        raise DataError(
            f"{key} of {path} is {images.dtype} with values from {images.min():g} to {images.max():g}; "
            f"expected {_IMAGES}."
        )
    return images


def _check_labels(labels: NDArray[Any], key: str, path: Path) -> NDArray[np.int64]:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        given = f"{labels.dtype} of shape {labels.shape}"
        raise DataError(f"{key} of {path} is {given}; expected integers of shape (N,).")
    return labels.astype(np.int64)


def _name_classes(labels: Mapping[str, NDArray[Any]], names: NDArray[Any] | None, path: Path) -> tuple[str, ...]:
    """The given names, or else the numbers up to the largest label of any split."""
    if names is not None:
        if names.dtype.kind not in "USiub" or names.size > _MOST_CLASSES:
            given = f"{names.dtype} of shape {names.shape}"
            raise DataError(f"classes of {path} is {given}; expected a list of texts, one per class.")
        decoded = np.char.decode(names, "utf-8", "replace") if names.dtype.kind == "S" else names
        return tuple(np.atleast_1d(decoded).ravel().astype(str).tolist())
    tops = [int(values.max()) for values in labels.values() if values.size and values.dtype.kind in "iu"]
    most = max(tops, default=-1) + 1
    if most > _MOST_CLASSES:
        raise DataError(f"{path} has the label {most - 1}; expected labels from 0, at most {_MOST_CLASSES} classes.")
    return tuple(map(str, range(most)))


@dataclass(frozen=True)
class _Table:
    """Equally long columns by name; `classes` where the file itself names them."""

    columns: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...] | None = None


def _read_table(path: Path) -> _Table:
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".parquet"):
        return _read_parquet(path)
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with (
        opened(path, "rb") as packed,
        io.TextIOWrapper(io.BufferedReader(_Limited(packed, path)), encoding="utf-8-sig", newline="") as file,
    ):
        if name.endswith(".jsonl"):
            rows = list(_json_rows(file, path))
        else:
            rows = list(_delimited_rows(file, path, "\t" if name.endswith(".tsv") else ","))
    keys = dict.fromkeys(key for row in rows for key in row)
    return _Table({key: [row.get(key) for row in rows] for key in keys})


class _Limited(io.RawIOBase):
    """The bytes of a file, unpacked, up to what fits in memory: a small archive can hold a huge table."""

    def __init__(self, file: Any, path: Path) -> None:
        self._file, self._path, self._left = file, path, _LARGEST_TABLE

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)
        self._left -= count
        if self._left < 0:
            limit = f"{_LARGEST_TABLE / 2**30:.0f} GiB"
            raise DataError(f"{self._path} is refused: a table may take {limit} unpacked. Split it up.")
        return count


def _json_rows(file: TextIO, path: Path) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not JSON: {_brief(error)}.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is a JSON {type(row).__name__}; expected an object.")
        yield row


def _delimited_rows(file: TextIO, path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
        for fields in filter(None, reader):  # the reader gives [] for a blank line
            if len(fields) != len(header):
                given = f"line {reader.line_num} of {path} has {len(fields)} fields"
                raise DataError(f"{given}; expected {len(header)} as in its header.")
            yield dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"line {reader.line_num} of {path} is malformed: {_brief(error)}.") from error


def _optional(module: str, path: Path) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        hint = "Run: pip install tuneport[data]"
        raise DataError(f"reading {path} needs {package}, which is not installed. {hint}") from error


def _arrow_cell(column: Any, index: int) -> Any:
    return column[index].as_py()


def _saved_cell(rows: Any, column: str, index: int) -> Any:
    return rows[index][column]


def _read_parquet(path: Path) -> _Table:
    parquet = _optional("pyarrow.parquet", path)
    try:
        table = parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow's errors share no base class short of this one
        raise DataError(f"cannot read {path}: {_brief(error)}.") from error
    columns: dict[str, Sequence[Any]] = {}
    for name in table.column_names:
        plain = name in _PLAIN_COLUMNS or (name == "image" and str(table[name].type).endswith("string"))
        cells = partial(_arrow_cell, table[name])
        columns[name] = table[name].to_pylist() if plain else Lazy(np.arange(len(table)), cells)
    try:  # files from the HF hub name their classes in the schema
        notes = json.loads((table.schema.metadata or {})[b"huggingface"])
        known = notes["info"]["features"]["label"]["names"]
    except (KeyError, TypeError, ValueError):
        return _Table(columns)
    return _Table(columns, tuple(map(str, known)))


def _read_saved(path: Path) -> _Table:
    """A dataset saved by HF `datasets`, its splits one below the other."""
    datasets = _optional("datasets", path)
    try:
        loaded = datasets.load_from_disk(str(path))
        parts = dict(loaded) if isinstance(loaded, Mapping) else {}
        rows = (datasets.concatenate_datasets(list(parts.values())) if parts else loaded).with_format(None)
        if isinstance(rows.features.get("image"), datasets.Image):
            rows = rows.cast_column("image", datasets.Image(decode=False))
        columns: dict[str, Sequence[Any]] = {}
        for name in rows.column_names:
            cells = rows.select_columns([name])
            plain = name in _PLAIN_COLUMNS or getattr(rows.features[name], "dtype", "") == "string"
            lazy = Lazy(np.arange(len(rows)), partial(_saved_cell, cells, name))
            columns[name] = cells[:][name] if plain else lazy
    except Exception as error:  # the library raises what pyarrow, fsspec and json raise
        raise DataError(f"cannot read {path}: {_brief(error)}.") from error
    if parts:
        columns["split"] = [name for name, part in parts.items() for _ in range(len(part))]
    names = getattr(rows.features.get("label"), "names", None)
    return _Table(columns, tuple(names) if names else None)


def _from_table(table: _Table, path: Path, split: Split) -> Dataset:
    columns = table.columns
    size = max(map(len, columns.values()), default=0)
    if size == 0:
        raise DataError(f"{path} is empty: it has no rows.")
    keys = next((keys for keys in _INPUT_COLUMNS if all(key in columns for key in keys)), None)
    if keys is None:
        raise DataError(f"{path} has columns {first_of(columns)}; expected {_COLUMNS}.")
    splits = [str(name or "").lower() for name in columns.get("split", [""] * size)]
    found = _choose_split(sorted(set(splits)), split, path)
    chosen = [row for row, name in enumerate(splits) if found in (None, name)]
    rows = np.array(chosen, dtype=np.int64)
    labels, classes = _read_labels(columns.get("label", [None] * size), table.classes, rows, path)
    images = keys == ("image",)
    return Dataset(
        inputs=_images(columns["image"], rows, path) if images else _texts(columns, keys, rows, path),
        labels=labels,
        classes=classes,
        name=_dataset_name(path),
        kind="image" if images else "text",
        split=found or "all",
        targets=_texts(columns, ("target",), rows, path) if "target" in columns else None,
    )


def _images(column: Sequence[Any], rows: NDArray[np.int64], path: Path) -> Lazy:
    if isinstance(column, Lazy):
        return Lazy(rows, partial(_open_cell, column, path))
    names = _texts({"image": column}, ("image",), rows, path)
    paths = [path.parent / name for name in names]
    missing = [name for name, file in zip(names, paths, strict=True) if not file.is_file()]
    if missing:
        raise DataError(
            f"{len(missing)} of {len(paths)} images of {path} are not there: {first_of(missing)}. "
            f"Paths are relative to {path.parent}."
        )
    return Lazy(np.arange(len(paths)), partial(_open_file, paths))


def _texts(columns: Mapping[str, Sequence[Any]], keys: Sequence[str], rows: NDArray[np.int64], path: Path) -> list[Any]:
    """The texts of one column, or pairs of texts of two."""
    picked = [[columns[key][row] for row in rows] for key in keys]
    for key, texts in zip(keys, picked, strict=True):
        for row, text in zip(rows, texts, strict=True):
            if not isinstance(text, str):
                raise DataError(f"{key} of row {row + 1} of {path} is {type(text).__name__}; expected text.")
    return picked[0] if len(keys) == 1 else list(zip(*picked, strict=True))


def _read_labels(
    values: Sequence[Any], classes: tuple[str, ...] | None, rows: NDArray[np.int64], path: Path
) -> tuple[NDArray[np.int64] | None, tuple[str, ...]]:
    """Labels of `rows` and the class names of the whole column; no labels if all of them are missing."""
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
    """A label as a class name; None where it is missing, which many sets write as -1."""
    if value is None or value in ("", "-1", -1) or value != value:
        return None
    if isinstance(value, str):
        return value
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if whole and value >= 0:
        return str(int(value))
    given = repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    raise DataError(f"label of row {row} of {path} is {given}; expected a class name or a number from 0.")
