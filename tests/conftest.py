"""Fixtures shared by the tests that work on model folders.

The heavy libraries are imported in the fixtures: the process that starts the test workers needs none of them.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from builders.commands import Run
    from builders.folders import Zoo
    from builders.lessons import Animals
    from builders.processes import Done

settings.register_profile("tuneport", deadline=None)  # a busy machine is no error
settings.load_profile("tuneport")
gc.disable()  # what is imported and collected stays
# Setting up a product in oneDNN takes longer than a product of tiny matrices; large ones still run there. It must be
# set before torch is imported, and holds for all programs that the tests start.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_SIZE", "10000000")


def pytest_collection_finish() -> None:
    """Leave the libraries and the tests out of all later garbage collections, which took 6 % of the time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _small_and_quiet() -> None:
    """One thread: the models are tiny, and the test workers share the cores. No bars from transformers."""
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def _commands_made_once() -> Iterator[None]:
    """Keep the parsers of the commands, which typer makes again for each call."""
    from functools import cache

    from typer import main, testing

    once = cache(main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "get_command", once)
        patch.setattr(testing, "_get_command", once)  # its own name for it
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_values_on_meta() -> Iterator[None]:
    """Draw no first values for weights on the meta device: transformers makes every model there, and loads it then."""
    from torch import nn

    def unless_meta(reset: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda module: None if module.weight is not None and module.weight.is_meta else reset(module)

    with pytest.MonkeyPatch.context() as patch:
        for kind in (nn.Linear, nn.Embedding, nn.LayerNorm, nn.modules.conv._ConvNd):
            patch.setattr(kind, "reset_parameters", unless_meta(kind.reset_parameters))
        yield


@pytest.fixture(scope="session", autouse=True)
def _short_exams() -> Iterator[None]:
    """Exams of students are short."""
    from builders.exams import shorten_exams

    with pytest.MonkeyPatch.context() as patch:
        shorten_exams(patch.setattr)
        yield


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    """Keep oneDNN on: torch turns it off for the whole process after one product that it cannot compute.

    That happens in bfloat16 on a CPU without units for it. The float32 results of all later tests would change.
    """
    import torch

    enabled = torch._C._get_mkldnn_enabled()
    yield
    torch._C._set_mkldnn_enabled(enabled)


@pytest.fixture
def half_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models run in the half precision that is asked for, whether this CPU has units for it or not."""
    from tuneport.models import open as opening

    monkeypatch.setattr(opening, "has_units", lambda _: True)


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    """Tiny model folders, built when asked for; read only: copy one before changing it."""
    from builders.folders import Zoo

    return Zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Call the program's entry point in this process."""
    from builders.processes import Done
    from tuneport import cli

    def call(*arguments: Any) -> Done:
        monkeypatch.setattr(sys, "argv", ["tuneport", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.main()
        out, err = capsys.readouterr()
        return Done(int(left.value.code or 0), out, err)

    return call


@pytest.fixture
def no_forward() -> Iterator[None]:
    """Fail the test if any model runs forward in this process, also where the test catches every exception."""
    from builders.forwards import count_forwards

    with count_forwards() as ran:
        yield
    assert ran == []


@pytest.fixture(scope="session")
def animals(tmp_path_factory: pytest.TempPathFactory) -> Animals:
    """A tiny language model that was taught the sounds of animals, and the models around it; read only."""
    from builders.lessons import animals

    return animals(tmp_path_factory.mktemp("animals"))
