"""Images: folders of classes, and RGB images decoded from files, table cells and arrays.

Only common formats are decoded, no formats whose decoders spawn other programs, and no decompression bombs. An image
that cannot be read is a DataError of one line that names it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import DataError, brief
from ..io.untrusted import check_regular
from ..types import Split
from .dataset import SPLIT_NAMES, Dataset, LazySequence, Table, choose_split

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm")
_IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
LARGEST_RATIO = 100
_ANY_SPLIT = {name for names in SPLIT_NAMES.values() for name in names}
_IMAGES = "uint8, or floats from 0 to 1, of shape (N, H, W), (N, H, W, 1 or 3) or (N, 1 or 3, H, W)"


def read_image_folder(path: Path, split: Split) -> Table:
    """Read the paths of images: a sub-folder for each class, in folders for splits if there are any; or no classes."""
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
    columns: dict[str, list[Any]] = {"image": paths, "label": labels} if paths else {"image": flat}
    return Table(columns, classes, found or "all", expected="one sub-folder of images per class")


def images_under(folder: Path) -> list[Path]:
    """The image files in a folder and its sub-folders, without hidden ones."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in IMAGE_SUFFIXES and file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


def _sub_folders(folder: Path) -> list[Path]:
    return sorted(child for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))


def files_of(dataset: Dataset) -> list[Path]:
    """The image files of its samples, in order; empty if the samples are stored in the dataset's `files`."""
    inputs = dataset.inputs
    if isinstance(inputs, LazySequence) and isinstance(inputs.load, partial) and inputs.load.func is open_image:
        cells = inputs.load.args[0]
        if isinstance(cells, list) and cells and isinstance(cells[0], Path):
            return [cells[index] for index in inputs.indices]
    return []


def open_image(cells: Sequence[Any], path: Path, index: int) -> Image.Image:
    """One image of a column of the data at a path.

    It is an array that `check_images` has checked, a file, its bytes, or the `{bytes, path}` of HF datasets.
    """
    cell: Any = cells[index]
    if isinstance(cell, np.ndarray):
        pixels = cell if cell.dtype == np.uint8 else np.rint(cell.astype(np.float64) * 255).astype(np.uint8)
        return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).convert("RGB")
    where = f"in row {index + 1} of {path}"
    content, place = (cell.get("bytes"), cell.get("path")) if isinstance(cell, Mapping) else (cell, cell)
    if isinstance(content, bytes):
        return _decode(io.BytesIO(content), where)
    if isinstance(place, (str, Path)):
        file = place if isinstance(place, Path) else path.parent / place
        return _decode(file, str(file))
    raise DataError(f"cannot read image {where}: expected its bytes or its path, got {type(cell).__name__}.")


def check_images(images: NDArray[Any], key: str, path: Path) -> NDArray[Any]:
    """The images as (N, H, W, C), or a DataError with the accepted shapes and dtypes."""
    given, kind = f"{images.dtype} of shape {images.shape}", images.dtype.kind
    if images.ndim == 3:
        images = images[..., None]  # (N, H, W) -> (N, H, W, 1)
    elif images.ndim == 4 and images.shape[-1] not in (1, 3) and images.shape[1] in (1, 3):
        images = np.moveaxis(images, 1, -1)  # (N, C, H, W) -> (N, H, W, C)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not (images.dtype == np.uint8 or kind == "f"):
        raise DataError(f"{key} of {path} is {given}; expected {_IMAGES}.")
    if images.size == 0:
        raise DataError(f"{key} of {path} is empty: {given}.")
    if kind == "f" and not (images.min() >= 0 and images.max() <= 1):
        if wrong := [index for index, pixels in enumerate(images) if np.isnan(pixels).any()]:
            given = f"holds NaN in {len(wrong)} of {len(images)} images, the first is {key}[{wrong[0]}]"
            raise DataError(f"{key} of {path} {given}. Replace or drop them.")
        values = f"values from {images.min():g} to {images.max():g}"
        raise DataError(f"{key} of {path} is {images.dtype} with {values}; expected {_IMAGES}.")
    return images


def _decode(source: Path | io.BytesIO, where: str) -> Image.Image:
    if isinstance(source, Path):
        check_regular(source, DataError)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(source, formats=_IMAGE_FORMATS) as image:
                if max(image.size) > LARGEST_RATIO * min(image.size):  # resized by its shorter side, it is huge
                    size = f"{image.size[0]} x {image.size[1]} pixels"
                    raise ValueError(f"it has {size}, and one side may be {LARGEST_RATIO} times the other")
                ImageOps.exif_transpose(image, in_place=True)  # a camera may store a picture turned
                if image.mode == "F":
                    raise ValueError("its pixels are floats without a known range")
                if image.mode.startswith("I"):  # 16 bits; Pillow would clip at 255 instead of scaling
                    pixels = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
                    return Image.fromarray(pixels.astype(np.uint8)).convert("RGB")
                return image.convert("RGBA").convert("RGB") if image.mode == "P" else image.convert("RGB")
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(f"image {where} is too large to open safely: {brief(error)}. Resize it.") from error
    except UnidentifiedImageError as error:
        raise DataError(f"cannot read image {where}: not in a format Pillow knows. Replace it.") from error
    except Exception as error:  # broken files make decoders raise nearly anything
        raise DataError(f"cannot read image {where}: {brief(error)}. Replace it.") from error
