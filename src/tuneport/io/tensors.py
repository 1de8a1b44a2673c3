"""Lazy mappings of tensors by name, with shapes and dtypes that are known before a tensor is read.

Operations on whole tensors go piece by piece, so that they need little extra memory.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import CheckpointError, first_of

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]  # by name
_PIECE = 2**22  # elements of a piece


class UnknownTensorError(CheckpointError, KeyError):
    """A checkpoint or task vector has no tensor of this name; also a KeyError, as the Mapping protocol requires."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor and, if it is the product of two factors, their rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes."""
        return math.prod(self.shape) * self.dtype.itemsize


class LazyMapping(Mapping[str, T]):
    """A Mapping whose values `read(name)` computes on each access; `spec(name)`, if given, describes one before."""

    holder = "the mapping"  # in errors

    def __init__(
        self, names: Iterable[str], read: Callable[[str], T], spec: Callable[[str], TensorSpec] | None = None
    ) -> None:
        self._names = dict.fromkeys(names)
        self._read = read
        self._spec = spec

    def spec(self, name: str) -> TensorSpec:
        """Shape, dtype and rank of a value, without computing it where possible."""
        self.check_known(name)
        return _spec_of(self[name]) if self._spec is None else self._spec(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a value."""
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a value."""
        return self.spec(name).dtype

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


LazyTensors = LazyMapping[torch.Tensor]


def describe(tensors: Tensors, name: str) -> TensorSpec:
    """The TensorSpec of one tensor, without reading it from a lazy mapping that knows it."""
    return tensors.spec(name) if isinstance(tensors, LazyMapping) else _spec_of(tensors[name])


def _spec_of(tensor: Any) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, getattr(tensor, "rank", None))


def renamed(tensors: Tensors, names: Mapping[str, str]) -> LazyTensors:
    """Tensors under other names, by `names` of new name -> old name."""
    return LazyTensors(names, lambda name: tensors[names[name]], lambda name: describe(tensors, names[name]))


def pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor along its first dimension into views of a few million elements."""
    if tensor.ndim == 0 or tensor.numel() <= _PIECE:
        yield tensor
    else:
        yield from tensor.split(max(1, _PIECE * len(tensor) // tensor.numel()))


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
