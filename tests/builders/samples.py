"""Small labelled data as a user has them: images, class folders, tables; and the errors of reading them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tuneport.data.dataset import Dataset
from tuneport.errors import DataError


def raises(*parts: str) -> Any:
    """Expect a DataError of one line that holds every part, in order."""
    pattern = ".*".join(re.escape(part) for part in parts)
    return pytest.raises(DataError, match=f"^[^\n]*{pattern}[^\n]*$")


def picture(value: int, size: int = 4, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (size, size), (value,) * len(mode) if len(mode) > 1 else value)


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    picture(value).save(buffer, "PNG")
    return buffer.getvalue()


def image_folder(root: Path, counts: dict[str, int], value: int = 10) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            picture(value + index).save(root / name / f"{index}.png")
    return root


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def halves(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A JSONL file whose first half is the training split and whose second half is the test split."""
    return jsonl(path, [{**row, "split": "train" if 2 * at < len(rows) else "test"} for at, row in enumerate(rows)])


def empty_dataset(name: str, classes: Sequence[str]) -> Dataset:
    """A data set without samples, for what only asks for its classes."""
    return Dataset((), None, tuple(classes), name)


def labelled(labels: list[int] | np.ndarray, **fields: Any) -> Dataset:
    codes = np.asarray(labels, dtype=np.int64)
    names = tuple(f"class{i}" for i in range(int(codes.max()) + 1))
    return Dataset(**{"inputs": list(range(len(codes))), "labels": codes, "classes": names, **fields})
