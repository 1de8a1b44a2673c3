"""docs/limits.md names the limits of the readers; they are those of the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from paper import files, recipe
from tuneport.data import dataset, images, npz, rows
from tuneport.fleet import lines
from tuneport.io import checkpoint, untrusted
from tuneport.models import families
from tuneport.models.families import huggingface_config
from tuneport.models.families import huggingface_vision as vision
from tuneport.report import provenance

PAGE = Path(__file__).resolve().parents[1] / "docs" / "limits.md"


def gib(size: int) -> str:
    return f"{size / 2**30:g} GiB"


def mb(size: int) -> str:
    return f"{size / 1e6:g} MB"


VALUES = f"{untrusted.MOST_VALUES:,} values"
LIMITS = {
    "JSONL, JSON, CSV, TSV, also with `.gz`": (
        f"{gib(rows.LARGEST_TABLE)} unpacked",
        f"{rows.LARGEST_ROW:,} characters a row",
        f"{rows.MOST_COLUMNS:,} columns",
    ),
    "Parquet, saved HF datasets": (gib(rows.LARGEST_TABLE), f"{rows.MOST_COLUMNS:,} columns", "DELTA_BYTE_ARRAY"),
    "`.npz`": (gib(npz.LARGEST_ARCHIVE), f"{npz.MOST_CLASSES:,} classes"),
    "idx, `.mat`": (gib(files._LARGEST),),
    "any data": (f"{dataset.MOST_SAMPLES:,} samples",),
    "lists of images of a known task": (mb(files._LARGEST_LIST), f"{files.MOST_COLUMNS:,} columns"),
    "an image": (f"{Image.MAX_IMAGE_PIXELS:,} pixels", f"{images.LARGEST_RATIO} times the other"),
    "a safetensors file": (
        mb(checkpoint._LARGEST_HEADER),
        f"{VALUES} of header",
        f"{checkpoint._MOST_DIMENSIONS} dimensions",
    ),
    "a pickle (`.bin`, `.pt`)": (
        mb(untrusted.LARGEST_PICKLE),
        f"{untrusted.MOST_OPERATIONS:,} operations",
        f"{untrusted.MOST_OBJECTS:,} objects",
    ),
    "a configuration": (mb(checkpoint.LARGEST_JSON), VALUES),
    "a configuration without weights (`plan --shapes-only`)": (
        f"sizes over {huggingface_config.LARGEST:,}",
        f"{huggingface_config.MOST_BLOCKS:,} blocks",
    ),
    "a list of fine-tunes (`upgrade --list`)": (mb(lines.LARGEST), f"{lines.MOST_LINES:,} lines"),
    "an index, a run record": (mb(checkpoint.LARGEST_INDEX), VALUES),
    "a file of a tokenizer": (mb(families.LARGEST_TOKENIZER),),
    "images that a preprocessor makes": (
        f"{vision.LARGEST_IMAGE:,} pixels a side",
        f"{vision.LARGEST_SHARE} times the side",
    ),
    "patterns in an adapter": (
        f"names of {untrusted.LONGEST_NAME} characters",
        f"{untrusted.MOST_STEPS:,} steps",
    ),
    "a recipe": (mb(recipe.LARGEST_RECIPE),),
    "the licence in a model card": (f"{provenance.LARGEST_CARD // 1024} KiB",),
}


def rows_of_the_page() -> dict[str, str]:
    section = PAGE.read_text(encoding="utf-8").partition("## Input files")[2].partition("\n## ")[0]
    cells = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return dict(cells[1:])


def test_the_table_has_a_row_for_every_reader() -> None:
    assert list(rows_of_the_page()) == list(LIMITS)


@pytest.mark.parametrize("reader", LIMITS)
def test_the_numbers_are_those_of_the_code(reader: str) -> None:
    stated = rows_of_the_page()[reader]
    assert [number for number in LIMITS[reader] if number not in stated] == []
