"""What is said of written texts beside a test split is true of that split."""

from __future__ import annotations

from pathlib import Path

import pytest

from builders.texts import write_rows
from tuneport.config import DistillConfig
from tuneport.pipeline.lessons import texts_of_test_split
from tuneport.synthetic.filters import overlap_of

WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen"


@pytest.mark.parametrize("split", [True, False])
def test_only_a_test_split_is_compared(tmp_path: Path, split: bool) -> None:
    rows = [{"text": f"{WORDS} {name}", **({"split": name} if split else {})} for name in ("train", "test")]
    found = texts_of_test_split(write_rows(tmp_path / "own.jsonl", rows), DistillConfig())
    assert list(found) == ([f"{WORDS} test"] if split else [])
    shared = overlap_of([f"{WORDS}!", "another text"], [], found)["test_overlap"]
    assert shared == (0.5 if split else None)
