"""The options of a transfer: one typed table for Python and the command line."""

from __future__ import annotations

import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import get_args

import pytest
from tuneport.pipeline.options import DEFAULTS, Options

import tuneport
from tuneport import TuneportError, cli
from tuneport.cli.plan import plan as plan_command
from tuneport.cli.transfer import transfer as transfer_command
from tuneport.types import OutputKind, ScaleRule

IN_PYTHON_ONLY = {"match", "pairs", "roles", "depth_rule"}


def test_every_option_has_a_default() -> None:
    assert set(DEFAULTS) == set(Options.__annotations__)


@pytest.mark.parametrize("command", [transfer_command, plan_command])
def test_the_command_line_has_the_options_and_defaults_of_python(command: object) -> None:
    parameters = signature(command).parameters  # type: ignore[arg-type]
    assert set(DEFAULTS) - IN_PYTHON_ONLY <= set(parameters)
    for name in set(DEFAULTS) - IN_PYTHON_ONLY:
        wanted = DEFAULTS[name] or None  # type: ignore[literal-required]
        assert (parameters[name].default or None) == wanted


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(TuneportError, match=r"^unknown option 'sampels'\. Did you mean 'samples'\? Known: "):
        tuneport.transfer("old", "tuned", "new", "data", sampels=3)  # type: ignore[call-arg]


@pytest.mark.slow
def test_mypy_finds_a_misspelt_option_and_accepts_the_right_one(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = [
        "import tuneport",
        'tuneport.transfer("old", "tuned", "new", "data", samples=3, completion="svd").save("out", as_="adapter")',
        'tuneport.transfer("old", "tuned", "new", "data", sampels=3)',
        'tuneport.transfer("old", "tuned", "new", "data").save("out", as_="zip")',
    ]
    (tmp_path / "snippet.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", str(tmp_path / "snippet.py")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False).stdout
    assert 'snippet.py:3: error: Unexpected keyword argument "sampels" for "transfer"' in found
    assert 'snippet.py:4: error: Argument "kind" to "save"' in found
    assert "snippet.py:2:" not in found


class TestMessages:
    @pytest.mark.parametrize(
        ("message", "printed"),
        [
            ("lower `samples`.", "lower --samples."),
            ("pass `memory_budget=8GiB`.", "pass --memory-budget 8GiB."),
            ("pass `overwrite=True`.", "pass --overwrite."),
            ('use `kind="task-vector"`.', "use --as task-vector."),
            ("""leave out `exclude=['*', "head.*"]`.""", "leave out --exclude '*' --exclude 'head.*'."),
            ("pass `roles={'fc1': 'wi', 'gate': None}`.", "pass --roles fc1=wi --roles gate=none."),
            ("pass `pairs=[...]`.", "pass pairs=[...]."),
            ("a file called `samples", "a file called `samples"),
        ],
    )
    def test_parameters_are_printed_as_options(self, message: str, printed: str) -> None:
        assert cli.terminal.as_options(message) == printed


def test_words_with_a_fixed_choice_are_those_that_the_code_knows() -> None:
    from tuneport.pipeline.scale import RULES

    assert set(get_args(ScaleRule)) == set(RULES)
    assert set(get_args(OutputKind)) == {"model", "adapter", "task-vector"}
