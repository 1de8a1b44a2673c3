"""Run the program's commands in tests, and check how they end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders.folders import Zoo

COMMANDS = ("transfer", "plan", "compare", "extract", "apply", "evaluate", "methods", "samplers", "demo", "bench")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(content, dict)
        return content


Run = Callable[..., Done]


def options(zoo: Zoo, family: str = "clip_vision", **changes: Any) -> list[str]:
    """The options of transfer and plan, with changes; None drops one."""
    source, finetuned, target = zoo.trio(family)
    given = {"source": source, "finetuned": finetuned, "target": target, "data": zoo.data, "samples": 24, **changes}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


def subprocess_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tuneport", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def assert_refused(done: Done, code: int, *words: str) -> None:
    """One clear line on stderr, nothing on stdout."""
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    if code == 1:
        assert done.err.endswith("\n")
        assert done.err.count("\n") == 1, done.err
        assert "unexpected" not in done.err
        assert re.match(r"\w*Error: \S", done.err)
    for word in words:
        assert word in done.err, done.err


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path
