"""Devices by name."""

from __future__ import annotations

import pytest
import torch

from tuneport import TuneportError
from tuneport.models.open import pick_device


@pytest.mark.parametrize("name", ["nosuch", "meta", "cuda:99", "hpu", "mps", ""])
def test_a_missing_device_is_refused(name: str) -> None:
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    with pytest.raises(TuneportError, match=f"device '{name}' is not available") as caught:
        pick_device(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
