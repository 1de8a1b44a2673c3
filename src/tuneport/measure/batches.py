"""Batches for two models: the same samples for both, counted and divided.

A batch is any nest of tensors that a loss understands. Its first tensor's first dimension is the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import CaptureError
from .tokens import Match


@dataclass(frozen=True)
class PairedBatch:
    """The same samples as each model reads them; `match` pairs their tokens where the default cannot.

    `rows` is the number of sequences in the batch, if it differs from the number of samples (pairs of texts).
    `part(start, stop)` makes a batch of some samples, if a batch with its own match may be run in parts.
    """

    source: Any
    target: Any
    size: int | None = None
    match: Match | None = None
    rows: int | None = None
    part: Callable[[int, int], PairedBatch] | None = None

    def __len__(self) -> int:
        return self.size or first_dimension(self.target)


def count_samples(batches: Iterable[Any]) -> int:
    """The number of samples in all batches."""
    return sum(len(batch) if isinstance(batch, PairedBatch) else first_dimension(batch) for batch in batches)


def split_batch(batch: PairedBatch, most: int | None) -> Iterator[tuple[PairedBatch, int]]:
    """The batch, or parts of at most `most` samples, each with its size."""
    size = len(batch)
    whole = batch.part is None and (batch.match is not None or batch.rows not in (None, size))
    if most is None or size <= most or whole:
        yield batch, size
        return
    for start in range(0, size, most):
        stop = min(start + most, size)
        if batch.part is not None:
            yield batch.part(start, stop), stop - start
        else:
            source, target = (slice_batch(side, size, start, stop) for side in (batch.source, batch.target))
            yield PairedBatch(source, target, size=stop - start), stop - start


def slice_batch(batch: Any, size: int, start: int, stop: int) -> Any:
    """The samples from `start` to `stop` of a batch of `size`, in the same nest of tensors."""
    return change_tensors(batch, lambda tensor: tensor[start:stop] if tensor.ndim and len(tensor) == size else tensor)


def first_dimension(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one."""
    for tensor in tensors_in(batch):
        if tensor.ndim:
            return len(tensor)
    raise CaptureError(f"cannot tell the size of a batch of type {type(batch).__name__}; use PairedBatch(size=...).")


def change_tensors(nest: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to the tensors in a nest of mappings, tuples, lists and dataclasses; other values stay.

    A mapping of any kind becomes a dict: those of model libraries hold more than their items.

    >>> change_tensors({"x": (torch.ones(1), "label")}, lambda tensor: tensor + 1)
    {'x': (tensor([2.]), 'label')}
    """
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, Mapping):
        return {key: change_tensors(item, change) for key, item in nest.items()}
    if isinstance(nest, (tuple, list)):
        items = [change_tensors(item, change) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if is_dataclass(nest) and not isinstance(nest, type):
        names = [field.name for field in fields(nest) if field.init]
        return replace(nest, **{name: change_tensors(getattr(nest, name), change) for name in names})
    return nest


def tensors_in(nest: Any) -> list[Tensor]:
    """The tensors in a nest, in its order."""
    found: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    change_tensors(nest, collect)
    return found


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on the device."""
    return change_tensors(batch, lambda tensor: tensor.to(device))
