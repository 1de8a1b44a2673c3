"""Tensors by name, before they are there: their shapes and dtypes, and mappings that make each when asked for it.

Torch only. A mapping of tensors may have `shape(name)` and `dtype(name)`, which tell without reading; `describe` asks
for them. What is done to whole tensors is done in pieces, so that it takes little memory beside them. Nests of tensors,
such as batches, are gone through in one way.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..errors import CheckpointError, first_of

T = TypeVar("T")
_PIECE = 2**22  # numbers that are worked on at a time


class UnknownTensorError(CheckpointError, KeyError):
    """A name that a checkpoint or task vector does not hold; a KeyError too, as a Mapping promises."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor: enough to plan a file without having the tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(tensors: Mapping[str, torch.Tensor], name: str) -> TensorSpec:
    """Return the TensorSpec of one tensor, unread where the mapping has `shape(name)` and `dtype(name)`.

    >>> describe({"weight": torch.zeros(2, 3)}, "weight")
    TensorSpec(shape=(2, 3), dtype=torch.float32)
    """
    shape, dtype = getattr(tensors, "shape", None), getattr(tensors, "dtype", None)
    if callable(shape) and callable(dtype):
        return TensorSpec(tuple(shape(name)), dtype(name))
    tensor = tensors[name]
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class LazyMapping(Mapping[str, T]):
    """Names and a function that makes the value of one."""

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> T:
        if name not in self._names:
            raise UnknownTensorError(unknown_tensors([name], self._names, "the mapping"))
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class LazyTensors(LazyMapping[torch.Tensor]):
    """Tensors made when asked for, with `shape(name)` and `dtype(name)` known beforehand."""

    def __init__(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], spec: Callable[[str], TensorSpec]
    ) -> None:
        super().__init__(names, read)
        self._spec = spec

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without making it."""
        return self._spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without making it."""
        return self._spec(name).dtype


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the tensor, each of a few million numbers: working on them needs little memory.

    >>> [tuple(piece.shape) for piece in pieces(torch.zeros(3, 2**22))]
    [(1, 4194304), (1, 4194304), (1, 4194304)]
    """
    if tensor.ndim == 0 or tensor.numel() <= _PIECE:
        yield tensor
        return
    rows = max(1, _PIECE * len(tensor) // tensor.numel())
    yield from tensor.split(rows)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether a floating-point tensor holds neither NaN nor infinity; one-byte floats are widened first."""
    return all(
        bool(torch.isfinite(piece.float() if piece.dtype.itemsize == 1 else piece).all()) for piece in pieces(tensor)
    )


def unknown_tensors(names: Sequence[str], known: Iterable[str], holder: str, total: int | None = None) -> str:
    """Say which names `holder` lacks, each of the first ten with its nearest known one."""
    there = list(known)

    def hint(name: str) -> str:
        near = difflib.get_close_matches(name, there, n=1)
        return f"{name} (nearest: {near[0]})" if near else name

    shown = first_of([*(hint(name) for name in names[:10]), *names[10:]])
    of = "" if total is None else f" of {total}"
    return f"{len(names)}{of} tensors are not in {holder}: {shown}."
