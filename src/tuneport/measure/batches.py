"""Batches as two models get them: the same samples for both, counted, and divided where they are too many at once.

A batch is any nest of tensors that a loss understands; its first tensor's first dimension tells how many samples it
has. Two models that want different inputs get a PairedBatch; one with a match of its own is divided only where it says
how.
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
    """The same samples as each model wants them; `match` pairs their tokens where the default cannot.

    `rows` is the number of sequences in the batch, where it is not the number of samples (pairs of texts). `part`
    makes a batch of the samples from the first number to the second, where the batch may be run in parts.
    """

    source: Any
    target: Any
    size: int | None = None
    match: Match | None = None
    rows: int | None = None
    part: Callable[[int, int], PairedBatch] | None = None


def count_samples(batches: Iterable[Any]) -> int:
    """The number of samples in all batches."""
    return sum(
        (batch.size or first_dimension(batch.target)) if isinstance(batch, PairedBatch) else first_dimension(batch)
        for batch in batches
    )


def samples_at_once(device: torch.device) -> int | None:
    """How many samples go through the models at once, whatever the batches; None for all of a batch.

    On a CPU a few are faster than many, since they stay in its caches, and need less memory.
    """
    return 8 if device.type == "cpu" else None


def parts_of(batch: PairedBatch, most: int | None) -> Iterator[tuple[PairedBatch, int]]:
    """The batch, or parts of at most so many samples, each with its size."""
    size = batch.size or first_dimension(batch.target)
    whole = batch.part is None and (batch.match is not None or batch.rows not in (None, size))
    if most is None or size <= most or whole:
        yield batch, size
        return
    for start in range(0, size, most):
        stop = min(start + most, size)
        if batch.part is not None:
            yield batch.part(start, stop), stop - start
        else:
            ours, theirs = (part_of(side, size, start, stop) for side in (batch.source, batch.target))
            yield PairedBatch(ours, theirs, size=stop - start), stop - start


def part_of(batch: Any, size: int, start: int, stop: int) -> Any:
    """Some of `size` samples, in the same nest of tensors."""

    def cut(tensor: Tensor) -> Tensor:
        return tensor[start:stop] if tensor.ndim and len(tensor) == size else tensor

    return change_tensors(batch, cut)


def first_dimension(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of the first tensor in it that has any."""
    first = next((tensor for tensor in tensors_in(batch) if tensor.ndim), None)
    if first is None:
        given = f"a batch of type {type(batch).__name__}"
        raise CaptureError(f"cannot tell the size of {given}; use PairedBatch(size=...).")
    return len(first)


def change_tensors(nest: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same nest of mappings, tuples, lists and data classes with its tensors changed; what is none stays.

    A mapping of any kind becomes a dict: those of model libraries are made of more than their items.

    >>> change_tensors({"x": (torch.ones(1), "label")}, lambda tensor: tensor + 1)
    {'x': (tensor([2.]), 'label')}
    """
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, Mapping):
        return {key: change_tensors(item, change) for key, item in nest.items()}
    if isinstance(nest, (tuple, list)):
        items = [change_tensors(item, change) for item in nest]
        return type(nest)(*items) if hasattr(nest, "_fields") else type(nest)(items)
    if is_dataclass(nest) and not isinstance(nest, type):
        return replace(nest, **{name: change_tensors(item, change) for name, item in _fields(nest)})
    return nest


def tensors_in(nest: Any) -> Iterator[torch.Tensor]:
    """The tensors of such a nest, in its order."""
    if isinstance(nest, torch.Tensor):
        yield nest
    elif isinstance(nest, (Mapping, tuple, list)):
        for item in nest.values() if isinstance(nest, Mapping) else nest:
            yield from tensors_in(item)
    elif is_dataclass(nest) and not isinstance(nest, type):
        for _, item in _fields(nest):
            yield from tensors_in(item)


def _fields(nest: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(nest, field.name)) for field in fields(nest) if field.init]


def nested_to(value: Any, device: torch.device) -> Any:
    """A batch with its tensors on the device."""
    return change_tensors(value, lambda tensor: tensor.to(device))
