"""Rows of results: JSON objects, one a line, with the commit that made them. Needs nothing but Python."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from pathlib import Path
from typing import Any


def commit() -> str:
    """The commit of the code: what COMMIT says on a machine without the repository, else what git knows."""
    if given := os.environ.get("COMMIT"):
        return given
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def rows_in(path: Path) -> list[dict[str, Any]]:
    """The rows of a file with one JSON object a line; none without the file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_row(path: Path, row: dict[str, Any]) -> None:
    """Print a row and append it to such a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # several processes may share the file
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
