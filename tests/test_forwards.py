"""The guard of the tests that claim "no forward pass" sees forward passes."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

from builders.forwards import count_forwards

pytest_plugins = ["pytester"]


def test_every_module_that_runs_is_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with count_forwards() as ran:
        model(torch.zeros(1, 2))
    assert ran == ["Sequential", "Linear", "ReLU"]
    model(torch.zeros(1, 2))
    assert len(ran) == 3, "the hook is gone"


def test_a_pass_that_fails_is_counted() -> None:
    with count_forwards() as ran, suppress(RuntimeError):
        nn.Linear(2, 2)(torch.zeros(1, 3))
    assert ran == ["Linear"]


def test_shapes_alone_are_no_work() -> None:
    with count_forwards() as ran:
        nn.Linear(2, 2, device="meta")(torch.zeros(1, 2, device="meta"))
    assert ran == []


def test_the_fixture_fails_a_test_that_catches_everything(
    pytester: pytest.Pytester, request: pytest.FixtureRequest
) -> None:
    pytester.makeconftest((request.config.rootpath / "tests" / "conftest.py").read_text())
    pytester.makepyfile(
        """
        from contextlib import suppress
        import pytest, torch

        @pytest.mark.usefixtures("no_forward")
        @pytest.mark.parametrize("works", [True, False])
        def test_quiet(works):
            with suppress(BaseException):
                if works:
                    torch.nn.Linear(2, 2)(torch.zeros(1, 2))
        """
    )
    pytester.runpytest().assert_outcomes(passed=2, errors=1)
