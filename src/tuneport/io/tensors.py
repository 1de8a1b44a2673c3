"""Lazy mappings of tensors by name, with shapes and dtypes that are known before a tensor is read.

A mapping of tensors may have `shape(name)` and `dtype(name)`, which answer without reading; `describe` calls them.
Operations on whole tensors go piece by piece, so that they need little extra memory.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import torch

from ..errors import CheckpointError, first_of

T = TypeVar("T")
_PIECE = 2**22  # elements of a piece


class UnknownTensorError(CheckpointError, KeyError):
    """A checkpoint or task vector has no tensor of this name; also a KeyError, as the Mapping protocol requires."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor: enough to plan a file."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


def describe(tensors: Mapping[str, torch.Tensor], name: str) -> TensorSpec:
    """Return the TensorSpec of one tensor, without reading it if the mapping has `shape(name)` and `dtype(name)`.

    >>> describe({"weight": torch.zeros(2, 3)}, "weight")
    TensorSpec(shape=(2, 3), dtype=torch.float32)
    """
    shape, dtype = getattr(tensors, "shape", None), getattr(tensors, "dtype", None)
    if callable(shape) and callable(dtype):
        return TensorSpec(tuple(shape(name)), dtype(name))
    tensor = tensors[name]
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


class LazyMapping(Mapping[str, T]):
    """A Mapping whose values `read(name)` computes on each access."""

    holder = "the mapping"  # in errors

    def __init__(self, names: Iterable[str], read: Callable[[str], T]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def check_known(self, *names: str) -> None:
        """Raise an UnknownTensorError with the names that are not in the mapping."""
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise UnknownTensorError(unknown_tensors(unknown, self._names, self.holder))

    def __getitem__(self, name: str) -> T:
        self.check_known(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names


class LazyTensors(LazyMapping[torch.Tensor]):
    """Tensors computed on each access, with `shape(name)` and `dtype(name)` known before."""

    def __init__(
        self, names: Iterable[str], read: Callable[[str], torch.Tensor], spec: Callable[[str], TensorSpec]
    ) -> None:
        super().__init__(names, read)
        self._spec = spec

    def spec(self, name: str) -> TensorSpec:
        """Shape and dtype of a tensor, without computing it."""
        self.check_known(name)
        return self._spec(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without computing it."""
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, without computing it."""
        return self.spec(name).dtype


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor along its first dimension into views of a few million elements.

    >>> [tuple(piece.shape) for piece in pieces(torch.zeros(3, 2**22))]
    [(1, 4194304), (1, 4194304), (1, 4194304)]
    """
    if tensor.ndim == 0 or tensor.numel() <= _PIECE:
        yield tensor
        return
    rows = max(1, _PIECE * len(tensor) // tensor.numel())
    yield from tensor.split(rows)


def all_finite(tensor: torch.Tensor) -> bool:
    """True if a floating-point tensor holds neither NaN nor infinity; one-byte floats are cast to float32 first."""
    return all(
        bool(torch.isfinite(piece.float() if piece.dtype.itemsize == 1 else piece).all()) for piece in pieces(tensor)
    )


def unknown_tensors(names: Sequence[str], known: Iterable[str], holder: str, total: int | None = None) -> str:
    """An error text with the names that `holder` lacks; the first ten come with the nearest known name."""
    candidates = list(known)

    def hint(name: str) -> str:
        near = difflib.get_close_matches(name, candidates, n=1)
        return f"{name} (nearest: {near[0]})" if near else name

    shown = first_of([*(hint(name) for name in names[:10]), *names[10:]])
    of = "" if total is None else f" of {total}"
    return f"{len(names)}{of} tensors are not in {holder}: {shown}."
