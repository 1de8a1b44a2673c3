"""Where a student of an upgrade begins, and what a route may forget; models, samples and the judge are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tuneport.measure.unseen import RouteScore
from tuneport.pipeline.upgrade import _Routes
from tuneport.training.neutral import TOLERANCE
from tuneport.types import Events

ROWS = [RouteScore("old"), RouteScore("target"), RouteScore("port")]


def routes(**judge: Any) -> _Routes:
    nothing: Any = None
    lessons: Any = SimpleNamespace(of=lambda name: f"lessons of {name}", events=Events(), work=None)
    scores: Any = SimpleNamespace(**judge)
    return _Routes(nothing, "", nothing, nothing, lessons, scores)


@pytest.mark.parametrize(("better", "start"), [(1, "the port"), (0, False), (-1, False)])
def test_a_student_begins_at_a_port_that_clearly_helps(
    monkeypatch: pytest.MonkeyPatch, better: int, start: str | bool
) -> None:
    monkeypatch.setattr(_Routes, "_teach", lambda _, name, lessons, port, helps: (name, lessons, helps and port))
    port: Any = "the port"
    found: Any = routes(better=lambda first, second: better * (first.name == "target") * (second.name == "port"))
    assert found.take("distill", port, ROWS) == ("distill", "lessons of distill", start)
    assert found.take("distill", port, ROWS[:2])[2] is False


@pytest.mark.parametrize(("more", "note"), [(0.9, ""), (1.1, "forgets: its loss on neutral text is higher by 5.5 %")])
def test_a_route_that_forgets_is_not_taken(more: float, note: str) -> None:
    """Just below what is tolerated, and just above it."""
    found = routes(score=lambda name, _: RouteScore(name))
    found.__dict__["neutral"] = SimpleNamespace(base=2.0, loss=lambda _: 2.0 * (1 + more * TOLERANCE))
    model: Any = SimpleNamespace(module=nn.Identity())
    row = found._score("distill", model, {})
    assert row.note == note
    assert row.neutral == pytest.approx(100 * more * TOLERANCE, abs=1e-3)
