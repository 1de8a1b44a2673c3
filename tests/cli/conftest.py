"""Fixtures of the command line: a folder for its outputs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for outputs, to see what is left in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"
