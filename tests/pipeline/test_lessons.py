"""What is taught and what judges are apart, and where a student begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuneport.config import UpgradeConfig
from tuneport.data.dataset import Dataset
from tuneport.pipeline.lessons import HELD_OUT, UpgradeSamples
from tuneport.pipeline.upgrade import _Routes
from tuneport.types import Events


def _answers(data: Dataset, _: Events) -> tuple[Dataset, Any]:
    return data, np.arange(len(data))


@pytest.mark.parametrize("count", [16, 80, 2000])
def test_samples_that_judge_are_not_taught(count: int) -> None:
    drawn = Dataset([f"text {place}" for place in range(count)], None, (), answers="none")
    old: Any = SimpleNamespace(writes=False, answers=_answers)
    found = UpgradeSamples(old, None, drawn, UpgradeConfig.of(routes="distill"), None, Events())
    judging, taught = set(found.held_out.inputs), set(found.own.inputs)
    assert not judging & taught
    assert judging | taught == set(drawn.inputs)
    assert len(judging) == min(round(HELD_OUT * count), 400)
    assert found.of("distill").own is found.own
    assert list(found.raw_held_out.inputs) == list(found.held_out.inputs)


@pytest.mark.parametrize(("better", "start"), [(1, "the port"), (0, None), (-1, None)])
def test_a_student_begins_at_a_port_that_helps(monkeypatch: pytest.MonkeyPatch, better: int, start: str | None) -> None:
    lessons: Any = SimpleNamespace(of=lambda _: "lessons", events=Events())
    judge: Any = SimpleNamespace(better=lambda *_: better)
    none: Any = None
    routes = _Routes(none, none, "", {}, none, none, lessons, judge)
    monkeypatch.setattr(_Routes, "_teach", lambda _, name, what, begin: (name, what, begin))
    rows: Any = [SimpleNamespace(name=name) for name in ("old", "target", "port")]
    port: Any = "the port"
    assert routes.take("distill", port, rows) == ("distill", "lessons", start)
    assert routes.take("distill", None, rows[:2]) == ("distill", "lessons", None)
