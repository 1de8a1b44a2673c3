"""Collect a target's task vector layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MethodError, first_of
from ..layers import Layer
from ..pairing import Plan
from ..task_vectors.low_rank import Entry, LowRank, as_dense
from ..task_vectors.vector import TaskVector


def matrix_of(layer: Layer, entry: Entry) -> Entry:
    """The (out, in) matrix of a layer inside the entry of its stored weight; factors stay factors."""
    if not isinstance(entry, LowRank):
        return layer.matrix(entry)
    out, in_ = (entry.in_factor.T, entry.out_factor.T) if layer.transposed else (entry.out_factor, entry.in_factor)
    return LowRank(layer.vector(out), in_.flatten(1))


def spectrum_of(singular_values: Tensor, width: int, points: int = 17) -> tuple[float, ...]:
    """Singular values of a `width` wide matrix, of which the rest are zero, at evenly spaced places: the largest is 1.

    >>> spectrum_of(torch.tensor([4.0, 2.0, 1.0]), 5, points=3)
    (1.0, 0.25, 0.0)
    """
    values = torch.zeros(width, dtype=torch.float64)
    values[: len(singular_values)] = singular_values[:width].double().cpu()
    places = torch.linspace(0, width - 1, points, dtype=torch.float64).round().long()
    relative = values[places] / values[0] if width and values[0] > 0 else values[places]
    return tuple(float(f"{value:.4g}") for value in relative.tolist())


def recorded_norm(matrix: Entry) -> float:
    """The Frobenius norm as records have it: of a dense matrix in its own precision (`low_rank.norm_of`: float64)."""
    return matrix.norm() if isinstance(matrix, LowRank) else float(matrix.norm())


class Entries:
    """The target's task vector while it is being made, layer by layer, in float32.

    Layers may share a fused weight and come in any order. Their factors are put together without a product:
    a block of columns for each, or one for all that have the same input factor.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry | list[tuple[Layer, LowRank]]] = {}

    def put(self, layer: Layer, matrix: Entry) -> None:
        """Take a layer's (out, in) matrix."""
        held = self._entries.setdefault(layer.weight, [])
        if isinstance(held, list) and isinstance(matrix, LowRank):
            held.append((layer, LowRank(matrix.out_factor.float(), matrix.in_factor.float())))
            return
        if isinstance(held, list):  # a weight with a dense part is dense
            self._entries[layer.weight] = torch.zeros(layer.weight_shape, device=_device_of(matrix))
            for part, factors in held:
                self.put(part, factors)
        self._store(layer, layer.weight, layer.weight_shape, as_dense(matrix))

    def put_bias(self, layer: Layer, bias: Tensor) -> None:
        """Take a layer's (out,) bias."""
        assert layer.bias is not None
        self._store(layer, layer.bias, (layer.weight_shape[1 if layer.transposed else 0],), bias)

    def put_loose(self, name: str, entry: Entry) -> None:
        """Take a whole tensor."""
        if isinstance(entry, LowRank):
            entry = LowRank(entry.out_factor.float(), entry.in_factor.float())
        self._entries[name] = entry if isinstance(entry, LowRank) else entry.float()

    def task_vector(self) -> TaskVector:
        """The entries, each with the stored shape of its tensor."""
        return TaskVector(
            {name: _joined(entry) if isinstance(entry, list) else entry for name, entry in self._entries.items()}
        )

    def _store(self, layer: Layer, name: str, shape: tuple[int, ...], values: Tensor) -> None:
        if name not in self._entries:
            self._entries[name] = torch.zeros(shape, device=values.device)
        into = self._entries[name]
        assert isinstance(into, Tensor)
        layer.store(values.float(), into)


def _joined(parts: list[tuple[Layer, LowRank]]) -> LowRank:
    """The factors of a stored weight from those of its layers."""
    first = parts[0][0]
    inputs: list[Tensor] = []
    blocks: list[Tensor] = []  # the out_factor of the whole weight that goes with each of the inputs
    rows = first.weight_shape[1 if first.transposed else 0]
    for layer, part in parts:
        index = next((i for i, known in enumerate(inputs) if torch.equal(known, part.in_factor)), None)
        if index is None:
            index = len(inputs)
            inputs.append(part.in_factor)
            blocks.append(part.out_factor.new_zeros(rows, part.rank))
        at = 0
        for start, stop in layer.rows or ((0, rows),):
            blocks[index][start:stop] = part.out_factor[at : at + stop - start]
            at += stop - start
    out, in_ = torch.cat(blocks, dim=1), torch.cat(inputs)
    if first.transposed:
        return LowRank(in_.T.contiguous(), out.T.contiguous())
    return LowRank(out, in_.reshape(-1, *first.weight_shape[1:]))


def _device_of(entry: Entry) -> torch.device:
    return entry.out_factor.device if isinstance(entry, LowRank) else entry.device


def check_same_shapes(plan: Plan, method: str) -> None:
    """Refuse a plan whose layers differ in shape or depth, for methods that cannot change coordinates."""
    differing = [
        f"{pair.target.name} ({pair.target.out_features}, {pair.target.in_features}) from "
        f"({pair.source.out_features}, {pair.source.in_features})"
        for pair in plan.pairs
        if (pair.source.out_features, pair.source.in_features) != (pair.target.out_features, pair.target.in_features)
    ]
    if differing or list(plan.source_blocks.values()) != list(plan.target_blocks.values()):
        depths = f"blocks {dict(plan.source_blocks)} and {dict(plan.target_blocks)}"
        raise MethodError(
            f"{method} needs two models of one architecture; {first_of(differing, 3) or depths}. "
            "Use bico, theseus or naive across shapes."
        )
