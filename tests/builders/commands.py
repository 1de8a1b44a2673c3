"""Run the program's commands in tests, and check how they end."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from builders.folders import Zoo
from builders.processes import Done, run_program

COMMANDS = ("upgrade", "transfer", "plan", "distill", "evaluate", "extract", "apply", "merge", "methods", "demo")

Run = Callable[..., Done]


def options(zoo: Zoo, family: str = "clip_vision", **changes: Any) -> list[str]:
    """The options of transfer and plan, with changes; None drops one."""
    source, finetuned, target = zoo.trio(family)
    given = {"source": source, "finetuned": finetuned, "target": target, "data": zoo.data, "samples": 24, **changes}
    return [word for key, value in given.items() if value is not None for word in (f"--{key}", str(value))]


def loud(zoo: Zoo, data: Path, out: Path) -> list[str]:
    """A transfer that is much too strong."""
    given = options(zoo, "vit", data=data, method="naive", scale=30, out=out)
    return ["transfer", *given, "--head-fit", "none"]


def run_apart(*arguments: str) -> Done:
    """Run a command as `python -m tuneport` does, in a process of its own."""
    return run_program('import runpy; runpy.run_module("tuneport", run_name="__main__", alter_sys=True)', *arguments)


def assert_refused(done: Done, code: int, *words: str) -> None:
    """One clear line on stderr, nothing on stdout."""
    assert done.code == code, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    if "Usage" not in done.err:  # what typer refuses has a box
        assert done.err.endswith("\n")
        assert done.warnings.count("\n") == 1, done.err
        assert "unexpected" not in done.err
        assert re.match(r"\w*Error: \S", done.warnings)
    for word in words:
        assert word in done.err, done.err


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path
