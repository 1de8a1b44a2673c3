"""A wrong command line is refused in one line, and before torch is loaded."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuneport import checks, types
from tuneport.data.samplers import SAMPLERS
from tuneport.measure.objectives import OBJECTIVES
from tuneport.methods import METHODS

TOOL = Path(__file__).resolve().parents[2] / "tools" / "mistakes.py"
MISTAKES: dict[str, Any] = runpy.run_path(str(TOOL))["MISTAKES"]


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """What every wrong command says, in one new process that has loaded nothing."""
    done = subprocess.run([sys.executable, str(TOOL), "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("mistake", MISTAKES)
def test_is_refused_before_torch_is_loaded(answers: dict[str, Any], mistake: str) -> None:
    about, found = MISTAKES[mistake], answers[mistake]
    assert found["code"] == about.code, found["text"]
    for words in about.said:
        assert words in found["text"], found["text"]
    assert "Traceback" not in found["text"]
    if "Usage" not in found["text"]:  # what typer refuses has a box
        assert found["text"].count("\n") == 1
    assert not found["torch"]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_advice_helps(answers: dict[str, Any], mistake: str) -> None:
    """The corrected command says something else: the models of the scene have no weights."""
    text = answers[mistake]["corrected"]
    assert not [words for words in MISTAKES[mistake].said if words in text], text
    assert "Usage" not in text


def test_there_are_enough() -> None:
    assert len(MISTAKES) >= 43


def test_the_names_are_those_of_the_registries() -> None:
    assert {name: known.needs_data for name, known in types.METHODS.items()} == {
        name: bool(method.signals) for name, method in METHODS.items()
    }
    assert set(checks.LOSSES) == set(OBJECTIVES)
    assert set(checks.SAMPLERS) <= set(SAMPLERS)  # the paper adds some
