"""Help, version and lists: they answer without heavy libraries."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from rich.console import Console

from builders.commands import COMMANDS, Run
from tuneport import __version__, cli
from tuneport.cli.terminal import show
from tuneport.methods import METHODS


def test_a_table_of_many_columns_loses_no_letter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tuneport.cli.terminal.out_console", Console(width=80))
    columns = ("method", "scale", "budget", "cifar10", "fashion", "gtsrb", "mnist", "mean", "deviation", "gain")
    show([["gradient_only", "1", "100", *["57.5"] * 5, "10.3", "+22.3"]], *columns, fold=True)
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = ["".join(parts).replace(" ", "") for parts in zip(*rows, strict=True)]
    assert cells == ["gradient_only", "1", "100", *["57.5"] * 5, "10.3", "+22.3"]


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
sys.argv = ["tuneport", "methods"]
main()
assert "torch" not in sys.modules
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
        assert f"tuneport {name}" in done.out.partition("╭")[0]

    def test_required_and_usual_options_of_a_transfer_fit_a_small_terminal(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """80 columns and 29 lines with three calls; all panels are short."""
        monkeypatch.setenv("COLUMNS", "80")
        lines = run("transfer", "--help").out.splitlines()
        panels: dict[str, list[str]] = {}
        for number, line in enumerate(lines, start=1):
            if found := re.match("╭─ ([^─]+) ─", line):
                name = found[1]
                panels[name] = []
            elif found := re.match(r"│[ *]{1,4}(--[a-z-]+)", line):
                panels[name].append(found[1])
            elif line.startswith("╰") and name == "Usual options":
                assert number <= 29
        assert list(panels)[:2] == ["Options", "Usual options"]
        assert {"--source", "--finetuned", "--target", "--data", "--out"} < set(panels["Options"])
        assert {"--method", "--samples", "--scale", "--as", "--json"} < set(panels["Usual options"])
        assert max(map(len, panels.values())) <= 8
        assert sum(map(len, panels.values())) <= 32
        assert max(map(len, lines)) <= 80

    def test_three_commands_come_first(self, run: Run) -> None:
        names = re.findall(r"^│ ([a-z]+)  ", run("--help").out, re.MULTILINE)
        assert names[:3] == ["upgrade", "plan", "evaluate"]
        assert sorted(names) == sorted(COMMANDS)

    @pytest.mark.parametrize("run_command", cli.COMMANDS, ids=lambda command: command.__name__)
    def test_the_usual_calls_can_be_read(self, run_command: Any) -> None:
        """Every call has options that the command knows, and all that it requires."""
        calls, name = cli.COMMANDS[run_command], run_command.__name__
        program = typer.main.get_command(cli.app)
        assert len(calls) == (2 if name == "methods" else 3)
        for call in calls:
            first, *words = shlex.split(call.replace("...", calls[0]))
            assert first == name
            assert program.commands[name].make_context(name, words).params  # type: ignore[attr-defined]
            assert len(f"tuneport {call}") <= 78

    def test_version(self, run: Run) -> None:
        done = run("--version")
        assert (done.code, done.out, done.err) == (0, f"tuneport {__version__}\n", "")


class TestLists:
    def test_methods(self, run: Run) -> None:
        assert run("methods", "--json").json == {name: method.summary for name, method in METHODS.items()}
        done = run("methods")
        assert all(re.search(rf"^{name} ", done.out, re.MULTILINE) for name in METHODS)
