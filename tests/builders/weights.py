"""Tensors of many kinds, and what tests of weight files ask of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tuneport.errors import CheckpointError


def many_kinds() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "block.10.weight": torch.randn(8, 4, generator=generator),
        "block.2.weight": torch.randn(3, 5, generator=generator).to(torch.bfloat16),
        "block.2.bias": torch.randn(3, generator=generator, dtype=torch.float64),
        "position_ids": torch.arange(7),
        "mask": torch.tensor([True, False, True]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "half": torch.randn(5, generator=generator).half(),
    }


def assert_same(found: Any, expected: Any) -> None:
    assert sorted(found) == sorted(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


def error_of(action: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    text = str(caught.value)
    assert "\n" not in text
    return text
