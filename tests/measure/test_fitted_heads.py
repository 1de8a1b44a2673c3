"""An order of classes is proposed where the answers of the fine-tune show one beyond chance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tuneport.data.dataset import Dataset
from tuneport.measure import fitted_heads
from tuneport.measure.fitted_heads import answers_by_name

CLASSES = ("sea", "sky", "tree")
ANSWERS = {"sea": 2, "sky": 0, "tree": 1}  # what the fine-tune says of each


@pytest.mark.parametrize(
    ("right", "said"),
    [
        (8, "So pass `classes='sky,tree,sea'`."),
        (4, "That shows no clear order: give it as `classes`."),  # 4 of 8 happen by chance in a quarter of all cases
    ],
)
def test_an_order_is_proposed_on_evidence(monkeypatch: pytest.MonkeyPatch, right: int, said: str) -> None:
    """Of eight trees, this many are answered alike, the others as something else."""

    def scores(*given: Any, **_: Any) -> Any:
        data = given[3]
        name = CLASSES[data.labels[0]]
        found = np.full(len(data), ANSWERS[name])
        if name == "tree":
            found[right:] = np.arange(len(data) - right) % 2 * 2
        return np.eye(3)[found]

    monkeypatch.setattr(fitted_heads, "scores_by", scores)
    data = Dataset([f"text {number}" for number in range(24)], np.arange(24) % 3, CLASSES)
    models: Any = SimpleNamespace(source=None)
    change: Any = SimpleNamespace(teacher=None)
    head: Any = SimpleNamespace(classes=("0", "1", "2"))
    words = answers_by_name(models, change, head, data)
    assert words.endswith(said)
    assert f"sea: 2 (8 of 8), sky: 0 (8 of 8), tree: 1 ({right} of 8)" in words
