"""Lazy mappings of tensors by name, with shapes and dtypes that are known before a tensor is read, and their checks.

Operations on whole tensors go piece by piece, so that they need little extra memory. Each check collects all findings
into one CheckpointError that says what to do.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from ..errors import CheckpointError, first_of

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]  # by name
LONGEST_PATTERN = 200  # characters of a pattern in an error
MOST_PARTS = 20  # of a name, whose prefixes are compared
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
        return self.spec(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.spec(name).dtype

    def check_known(self, *names: str) -> None:
        """Raise an UnknownTensorError with the names that are not in the mapping."""
        if unknown := [name for name in names if name not in self._names]:
            raise UnknownTensorError(f"{len(unknown)} tensors are not in {self.holder}: {nearest(unknown, self)}.")

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


def nearest(names: Sequence[str], known: Iterable[str]) -> str:
    """Names for an error, the first three with the nearest known name."""
    near = {name: difflib.get_close_matches(name, list(known), n=1) for name in names[:3]}
    return first_of((f"{name} (nearest: {near[name][0]})" if near.get(name) else name for name in names), 3)


def check_finite(tensors: Tensors, names: Iterable[str] | None = None) -> None:
    """Raise a CheckpointError that names the tensors holding NaN or infinity, reading one at a time."""
    chosen = list(tensors if names is None else names)
    bad = [name for name in chosen if _is_weight(describe(tensors, name)) and not all_finite(tensors[name])]
    if bad:
        raise CheckpointError(
            f"{len(bad)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} hold NaN or infinite "
            f"values: {first_of(bad, 3)}. Use a checkpoint from before training diverged."
        )


def check_unquantised(tensors: Tensors, names: Iterable[str]) -> None:
    chosen = [name for name in names if name in tensors]
    quantised = [f"{name} ({dtype})" for name in chosen if is_quantised(dtype := describe(tensors, name).dtype)]
    if quantised:
        raise CheckpointError(
            f"{len(quantised)} of {len(chosen)} tensors of {_name_of(tensors, 'the model')} are quantised: "
            f"{first_of(quantised, 3)}. Give the model in float32, bfloat16 or float16."
        )


def is_quantised(dtype: torch.dtype) -> bool:
    """True for dtypes of one byte: their values are codes and cannot be subtracted."""
    return dtype.itemsize == 1 and dtype != torch.bool


def same_structure(base: Tensors, finetuned: Tensors, exclude: Sequence[str] = ()) -> None:
    """Raise one CheckpointError with every weight that is missing in one model or differs in shape.

    `exclude` holds glob patterns of names to leave out.
    """
    tuned, old = (
        {
            name: spec.shape
            for name in model
            if not any(fnmatchcase(name, glob) for glob in exclude) and _is_weight(spec := describe(model, name))
        }
        for model in (finetuned, base)
    )
    tuned_name, base_name = _name_of(finetuned, "the fine-tuned model"), _name_of(base, "the base")
    differing = {
        name: f"{name} {tuned[name]} vs {old[name]}" for name in tuned if tuned[name] != old.get(name, tuned[name])
    }
    extra = {name: name for name in tuned if name not in base}
    missing = {name: name for name in old if name not in finetuned}
    total = len({**tuned, **old})
    wrong = (
        (differing, tuned_name, "differ in shape from", base_name),
        (extra, tuned_name, "are not in", base_name),
        (missing, base_name, "are not in", tuned_name),
    )
    findings = [
        f"{len(found)} of {total} tensors of {holder} {are} {other}: {first_of(found.values(), 3)}."
        for found, holder, are, other in wrong
        if found
    ]
    if findings:
        padding = _padding({(tuned[name], old[name]) for name in differing})
        exclusion = _exclusion_of([*differing, *extra, *missing], {**tuned, **old}, tuned_name, base_name)
        raise CheckpointError(" ".join([*findings, *padding, exclusion]))


def _padding(shapes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[str]:
    """Advice where models differ only in the length of tables that look like vocabularies (256 rows or more)."""
    similar = all(len(one) == len(two) == 2 and one[1] == two[1] and min(one[0], two[0]) >= 256 for one, two in shapes)
    if not similar or len({(one[0], two[0]) for one, two in shapes}) != 1:
        return []
    ((one, _), (other, _)), *_ = shapes
    return [
        f"If these are vocabularies of {one} and {other} entries, and one of them is padded, resize one with "
        "resize_token_embeddings."
    ]


def _is_weight(spec: TensorSpec) -> bool:
    return spec.dtype.is_floating_point or spec.dtype.is_complex


def _exclusion_of(names: Sequence[str], among: Collection[str], one: str, other: str) -> str:
    """Advice on patterns that exclude these names: their modules, or shorter prefixes if those are more than three."""
    patterns = sorted({f"{name.rpartition('.')[0]}.*" if "." in name else name for name in names})
    if len(patterns) > 3 and 2 * len(names) < len(among):
        others = set(among) - set(names)
        patterns = sorted({_widest(name, others) for name in names})
    if len(patterns) > 3 or max(map(len, patterns)) > LONGEST_PATTERN:
        return f"Check that {one} was fine-tuned from {other}."
    return f"Exclude them with `exclude={json.dumps(patterns)}`."


def _widest(name: str, others: Collection[str]) -> str:
    """A pattern of the shortest prefix of a name that none of the others has."""
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) + "." for length in range(1, min(len(parts), MOST_PARTS)))
    return next((f"{start}*" for start in prefixes if not any(o.startswith(start) for o in others)), name)


def _name_of(tensors: object, default: str) -> str:
    path = getattr(tensors, "path", None)
    return default if path is None else f"{path}{'/' if Path(path).is_dir() else ''}"
