"""Tensors before they are there: described unread, made when asked for, worked on in pieces."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from tuneport.io.tensors import (
    LazyMapping,
    LazyTensors,
    TensorSpec,
    UnknownTensorError,
    all_finite,
    describe,
    pieces,
)
from tuneport.measure.capture import change_tensors, tensors_in


def test_lazy_mapping_computes_on_access() -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.ones(2, 3)

    tensors = LazyTensors(["a", "b"], make, lambda _: TensorSpec((2, 3), torch.float32))
    assert (list(tensors), len(tensors), "a" in tensors, "c" in tensors) == (["a", "b"], 2, True, False)
    assert describe(tensors, "a") == TensorSpec((2, 3), torch.float32)
    assert made == []
    assert torch.equal(tensors["b"], torch.ones(2, 3))
    assert made == ["b"]


def test_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(UnknownTensorError) as caught:
        LazyMapping(["layer.0.weight", "head.bias"], len)["layer.0.weigth"]
    assert str(caught.value) == "1 tensors are not in the mapping: layer.0.weigth (nearest: layer.0.weight)."


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 2**21), (2, 2**22 + 1)])
def test_pieces_cover_the_tensor(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(max(torch.Size(shape).numel(), 1))[: torch.Size(shape).numel()].reshape(shape)
    parts = list(pieces(tensor))
    assert torch.equal(torch.cat(parts) if tensor.ndim else parts[0], tensor)
    assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)
    assert all(part.numel() <= max(2**22, tensor[:1].numel() if tensor.ndim else 1) for part in parts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_all_finite(dtype: torch.dtype) -> None:
    assert all_finite(torch.tensor([1.0, 2.0]).to(dtype))
    assert not all_finite(torch.tensor([1.0, torch.nan]).to(dtype))
    assert not all_finite(torch.tensor([torch.inf, 2.0]).to(dtype))


class Named(NamedTuple):
    pixels: torch.Tensor
    label: int


@dataclass(frozen=True)
class Pair:
    one: Any
    other: Any = None


def test_nests_keep_their_shape() -> None:
    one, two, three, four = (torch.full((2,), float(number)) for number in range(1, 5))
    nest = Pair({"named": Named(one, 3), "list": [two, None]}, UserDict(deep=(three, Pair("text", four)), kind=Pair))
    changed = change_tensors(nest, lambda tensor: -tensor)
    assert changed == Pair(changed.one, {"deep": changed.other["deep"], "kind": Pair})
    assert isinstance(changed.one["named"], Named)
    assert changed.one["named"].label == 3
    assert changed.one["list"][1] is None
    assert changed.other["deep"][1].one == "text"
    assert [float(tensor[0]) for tensor in tensors_in(nest)] == [1, 2, 3, 4]
    assert [float(tensor[0]) for tensor in tensors_in(changed)] == [-1, -2, -3, -4]
    assert list(tensors_in(["text", 3, None])) == []
