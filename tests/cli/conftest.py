"""Fixtures of the command line: the program in this process, and a folder for its outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from builders.commands import Run
from builders.processes import Done
from tuneport import cli


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the program's entry point in this process."""

    def call(*arguments: Any) -> Done:
        monkeypatch.setattr(sys, "argv", ["tuneport", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out, err)

    return call


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder for outputs, to see what is left in it."""
    (tmp_path / "place").mkdir()
    return tmp_path / "place"
