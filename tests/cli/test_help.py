"""Help, version and lists: they answer without heavy libraries."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from builders.commands import COMMANDS, Run
from tuneport import __version__
from tuneport.methods import METHODS


class TestHelp:
    def test_help_waits_for_no_heavy_library(self) -> None:
        program = f"""
import sys
from tuneport.cli import main
for words in ([], *([name] for name in {COMMANDS!r})):
    sys.argv = ["tuneport", *words, "--help"]
    try:
        main()
    except SystemExit as done:
        assert done.code == 0, words
heavy = {{"torch", "transformers", "numpy", "sklearn", "safetensors", "PIL"}} & set(sys.modules)
assert not heavy, heavy
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        for name in COMMANDS:
            assert f"tuneport {name}" in done.stdout

    def test_the_overview_lists_every_command(self, run: Run) -> None:
        done = run("--help")
        assert done.code == 0
        for name in COMMANDS:
            assert re.search(rf"\b{name}\b", done.out)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_each_command_explains_itself(self, run: Run, name: str) -> None:
        done = run(name, "-h")
        assert (done.code, done.err) == (0, "")
        assert "Usage" in done.out
        if name not in ("methods", "samplers"):
            assert "Example: tuneport" in " ".join(done.out.split())

    def test_version(self, run: Run) -> None:
        done = run("--version")
        assert (done.code, done.out, done.err) == (0, f"tuneport {__version__}\n", "")


class TestLists:
    def test_methods(self, run: Run) -> None:
        assert run("methods", "--json").json == {name: method.summary for name, method in METHODS.items()}
        done = run("methods")
        assert all(re.search(rf"^{name} ", done.out, re.MULTILINE) for name in METHODS)

    def test_samplers(self, run: Run) -> None:
        names = {"random", "class_balanced", "centroid_near", "centroid_far", "half_class", "single_class"}
        assert set(run("samplers", "--json").json) == names
        assert all(name in run("samplers").out for name in names)
