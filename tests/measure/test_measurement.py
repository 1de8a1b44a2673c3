"""Measurements: the number of samples that run together."""

from __future__ import annotations

import pytest

from builders.runs import prepare
from builders.toy import ToyViT, batches, finetuned, loss
from tuneport.measure.samples import samples_at_once


@pytest.mark.parametrize(("hidden", "expected"), [(20, 8192 // 48), (512, 16), (1024, 8), (2048, 8)])
def test_the_widest_layer_of_both_models_decides_how_many_samples_run_at_once(hidden: int, expected: int) -> None:
    """The patches of the toy have 48 values, which is its widest layer if `hidden` is smaller."""
    for widths in ((20, hidden), (hidden, 20)):
        source, target = (ToyViT(hidden=width) for width in widths)
        job = prepare(source, finetuned(source), target, batches(), loss=loss)
        assert samples_at_once(job.models) == expected
