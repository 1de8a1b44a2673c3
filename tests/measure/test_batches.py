"""Batches of any nest of tensors are counted and divided."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tuneport.errors import CaptureError
from tuneport.measure.capture import PairedBatch, count_samples, slice_batch, split_batch


class Named(NamedTuple):
    pixels: torch.Tensor
    label: int


def test_samples_are_counted_in_any_nest() -> None:
    x = torch.zeros(3, 2)
    nests: list[Any] = [
        x,
        {"pixels": x},
        (x, 1),
        [{"a": None, "b": x}],
        ({}, torch.tensor(0.5), Named(x, 1)),
        PairedBatch(None, x),
        PairedBatch(x, x, size=7),
    ]
    assert [count_samples(nest) for nest in nests] == [3, 3, 3, 3, 3, 3, 7]
    with pytest.raises(CaptureError, match=r"cannot tell the size of a batch of type str; use PairedBatch\(size=...\)"):
        count_samples("text")


def test_a_slice_has_the_nest_of_the_batch() -> None:
    x = torch.arange(10).reshape(5, 2)
    part = slice_batch({"named": Named(x, 3), "list": [x, torch.tensor(1.0)], "other": torch.zeros(4)}, 5, 1, 3)
    assert isinstance(part["named"], Named)
    assert part["named"].label == 3
    assert torch.equal(part["named"].pixels, x[1:3])
    assert torch.equal(part["list"][0], x[1:3])
    assert part["list"][1].ndim == 0
    assert part["other"].shape == (4,)  # not one of the samples


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (PairedBatch(torch.zeros(5, 1), torch.zeros(5, 2)), [2, 2, 1]),
        (PairedBatch(torch.zeros(2, 1), torch.zeros(2, 2)), [2]),
        (PairedBatch(torch.zeros(5, 1), torch.zeros(5, 2), match=lambda a, b: (a, b)), [5]),
        (PairedBatch(torch.zeros(10, 1), torch.zeros(10, 2), size=5, rows=10), [5]),
    ],
)
def test_batches_with_a_match_or_with_several_rows_stay_whole(batch: PairedBatch, sizes: list[int]) -> None:
    parts = list(split_batch(batch, 2))
    assert [size for _, size in parts] == sizes
    assert sum(len(part.target) for part, _ in parts) == len(batch.target)
    assert [size for _, size in split_batch(batch, None)] == [sum(sizes)]
