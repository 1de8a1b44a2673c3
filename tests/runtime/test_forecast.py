"""The forecast on the meta device: models that read values are named, and batches keep their types."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from builders import toy
from builders.runs import prepare
from tuneport.runtime.forecast import Forecast, NeedsValuesError, meta_errors

READS = {
    "item": lambda x: x.item(),
    "float": float,
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "two devices": lambda x: x + torch.ones(1),
}


@pytest.mark.parametrize("read", READS)
def test_every_way_to_read_a_value_of_a_meta_tensor_is_known(read: str) -> None:
    with pytest.raises(NeedsValuesError, match="read values of tensors"), meta_errors():
        READS[read](torch.ones((), device="meta"))


def test_batches_in_named_tuples() -> None:
    class Batch(NamedTuple):
        pixels: torch.Tensor
        labels: torch.Tensor

    source, target = toy.ToyViT(seed=1), toy.ToyViT(seed=2)
    batches, pairs = toy.batches(64), toy.plan(source, target).pairs
    plain, named = (
        Forecast.of(prepare(source, toy.finetuned(source), target, given, loss=toy.loss, pairs=pairs).measurement)
        for given in (batches, [Batch(*batch) for batch in batches])
    )
    assert named.batch is not None
    assert isinstance(named.batch.source, Batch)
    assert named.statistics_bytes(pairs) == plain.statistics_bytes(pairs) > 0
