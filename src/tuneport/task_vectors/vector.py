"""Task vectors: the difference between a fine-tuned model and its base, as a lazy Mapping from tensor names.

An entry is a dense tensor or a LowRank pair of factors, computed on each access: sums, multiples and `apply_to`
read nothing by themselves, so that a model larger than memory is processed tensor by tensor.
Differences are computed in float32 (float64 if an input is) and cast back only when applied to a model.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import add
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, TuneportError, first_of, shortened
from ..io.checkpoint import open_checkpoint, write_safetensors
from ..io.output import PathLike, check_new, new_file
from ..io.tensors import (
    LazyMapping,
    LazyTensors,
    Tensors,
    TensorSpec,
    all_finite,
    check_unquantised,
    describe,
    is_quantised,
    nearest,
    pieces,
    same_structure,
)
from .low_rank import Entry, LowRank, add_entries, as_dense, norm_of

FORMAT = "tuneport-task-vector"
VERSION = "1"
_OUT, _IN = "::out", "::in"


class TaskVector(LazyMapping[Entry]):
    """The difference `finetuned - base`, tensor by tensor, with arithmetic.

    >>> base, finetuned = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 2.0])}
    >>> vector = TaskVector.between(base, finetuned)
    >>> (0.5 * vector).apply_to(base)["w"]
    tensor([0.5000, 1.0000])

    Nothing is cached: an entry of `a + b` is computed on each access.
    """

    holder = "the task vector"

    def __init__(self, entries: Mapping[str, Entry], describe: Callable[[str], TensorSpec] | None = None) -> None:
        super().__init__(entries, entries.__getitem__, describe)

    @classmethod
    def between(cls, base: Tensors, finetuned: Tensors, exclude: Sequence[str] = ()) -> TaskVector:
        """Return `finetuned - base` over their floating-point tensors, without those that match `exclude`.

        Both must hold the same names with the same shapes; `exclude` holds glob patterns ("head.*").
        Integer buffers are left out; quantised weights are refused, since their codes cannot be subtracted.
        """
        same_structure(base, finetuned, exclude)
        shared = [name for name in base if name in finetuned and not any(fnmatchcase(name, glob) for glob in exclude)]
        for model in (base, finetuned):
            check_unquantised(model, shared)
        specs = {}
        for name in shared:
            shape, dtype, _ = describe(base, name)
            if dtype.is_floating_point or dtype.is_complex:
                wide = torch.promote_types(torch.promote_types(dtype, describe(finetuned, name).dtype), torch.float32)
                specs[name] = TensorSpec(shape, wide)

        def difference(name: str) -> torch.Tensor:
            changed = finetuned[name].detach().to(specs[name].dtype, copy=True)
            for difference, piece in zip(pieces(changed), pieces(base[name].detach()), strict=True):
                difference.sub_(piece.to(difference))
            return changed

        return cls(LazyMapping(specs, difference), specs.__getitem__)

    def __repr__(self) -> str:
        return f"TaskVector({len(self)} tensors)"

    def dense(self, name: str) -> torch.Tensor:
        """Return an entry as one tensor, multiplying its factors if it is low-rank."""
        return as_dense(self[name])

    def changes(self, name: str) -> bool:
        """True if an entry is not zero; low-rank factors are not multiplied."""
        entry = self[name]
        return entry.norm() > 0 if isinstance(entry, LowRank) else bool(entry.any())

    def norm(self, name: str | None = None) -> float:
        """Return the Frobenius norm of an entry, or of all entries together, accumulated in float64."""
        if name is None:
            return math.sqrt(sum(self.norm(each) ** 2 for each in self))
        return norm_of(self[name])

    def __add__(self, other: TaskVector) -> TaskVector:
        if not isinstance(other, TaskVector):
            return NotImplemented
        shared = dict.fromkeys(name for name in self if name in other)
        shapes = {name: (self.shape(name), other.shape(name)) for name in shared}
        if differing := [f"{name} {one} vs {two}" for name, (one, two) in shapes.items() if one != two]:
            raise TuneportError(
                f"{len(differing)} of {len(shared)} shared tensors of two task vectors differ in shape: "
                f"{first_of(differing, 3)}. Only task vectors of the same model can be added."
            )

        def total(name: str) -> Entry:
            if name in shared:
                return add_entries(self[name], other[name])
            return self[name] if name in self else other[name]

        def spec(name: str) -> TensorSpec:
            if name not in shared:
                return self.spec(name) if name in self else other.spec(name)
            one, two = self.spec(name), other.spec(name)
            rank = None if one.rank is None or two.rank is None else one.rank + two.rank
            return TensorSpec(one.shape, torch.promote_types(one.dtype, two.dtype), rank)

        return TaskVector(LazyMapping([*self, *other], total), spec)

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + -other if isinstance(other, TaskVector) else NotImplemented

    def __neg__(self) -> TaskVector:
        return self * -1.0

    def __mul__(self, factor: float) -> TaskVector:
        number = _finite(factor)
        return TaskVector(LazyMapping(self, lambda name: self[name] * number), self.spec)

    __rmul__ = __mul__

    def rename(self, names: Mapping[str, str]) -> TaskVector:
        """Return the same entries under new names; names that are not in the mapping stay."""
        self.check_known(*names)
        old_of = {names.get(name, name): name for name in self}
        if len(old_of) < len(self):
            clash = [new for new, count in Counter(names.get(name, name) for name in self).items() if count > 1]
            raise TuneportError(f"several tensors would be renamed to {first_of(clash)}. Give each its own name.")
        return TaskVector(LazyMapping(old_of, lambda new: self[old_of[new]]), lambda new: self.spec(old_of[new]))

    def subset(self, names: Iterable[str]) -> TaskVector:
        """Return the entries with these names, in this order."""
        chosen = list(names)
        self.check_known(*chosen)
        return TaskVector(LazyMapping(chosen, self.__getitem__), self.spec)

    def apply_to(self, base: Tensors, scale: float = 1.0, lost: set[str] | None = None) -> LazyTensors:
        """Return `base + scale * self` as a lazy Mapping, with all tensors of the base in their own dtypes.

        The sum is computed in float32 (float64 if an input is) and cast once; tensors that the vector does
        not name stay unchanged. Every entry must fit a tensor of the base. When they are read, names of tensors whose
        change is too small for their dtype, all of it, are put into `lost`.
        """
        scale = _finite(scale)
        if unknown := [name for name in self if name not in base]:
            missing = f"{len(unknown)} of {len(self)} tensors are not in the base: {nearest(unknown, base)}"
            raise TuneportError(f"{missing}. Use rename() or subset().")
        unfit = [
            f"{name} {self.shape(name)} vs {old.shape} {old.dtype}"
            for name in self
            if (old := describe(base, name)).shape != self.shape(name) or not old.dtype.is_floating_point
        ]
        if unfit:
            raise TuneportError(
                f"{len(unfit)} of {len(self)} tensors of the task vector do not fit the base: "
                f"{first_of(unfit, 3)}. Apply it to the model that it was made for."
            )

        def changed(name: str) -> torch.Tensor:
            tensor = base[name].detach()
            if name not in self or scale == 0:
                return tensor
            delta = self.dense(name).to(tensor.device)
            dtype = torch.promote_types(torch.promote_types(tensor.dtype, torch.float32), delta.dtype)
            result = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for place, old, change in zip(pieces(result), pieces(tensor), pieces(delta), strict=True):
                place.copy_(old.to(dtype) + scale * change.to(dtype))
            if not all_finite(result):
                raise CheckpointError(
                    f"{name} would hold NaN or infinite values in {tensor.dtype} with the task vector at scale "
                    f"{scale:g}. Use a smaller scale, a wider dtype, or a task vector without them."
                )
            if lost is not None and torch.equal(result, tensor) and bool(delta.any()):
                lost.add(name)
            return result

        return LazyTensors(base, changed, lambda name: describe(base, name))


def merge(
    vectors: Sequence[TaskVector],
    weights: Sequence[float] | None = None,
    *,
    rule: str = "sum",
    density: float = 0.2,  # that of the paper of TIES
    seed: int = 0,
) -> TaskVector:
    """One task vector of several of the same base; an entry that a vector lacks counts as zero.

    A sum keeps low-rank entries low-rank. TIES keeps the largest entries of each tensor and averages those of the
    elected sign; DARE keeps entries at random and rescales them. Both make dense entries.

    `weights` are a factor for each vector (1), `density` the share of entries that TIES and DARE keep, of each tensor
    of each vector, `seed` that of the entries that DARE keeps.
    """
    factors = [1.0] * len(vectors) if weights is None else [float(weight) for weight in weights]
    if not vectors or len(factors) != len(vectors):
        raise TuneportError(f"{len(vectors)} task vectors and {len(factors)} `weights`: give a weight for each vector.")
    total = functools.reduce(add, (vector * factor for vector, factor in zip(vectors, factors, strict=True)))
    if rule == "sum":
        return total
    try:
        from peft.utils import merge_utils
    except ImportError as error:
        raise TuneportError(f'rule {rule} needs peft: pip install "tuneport[adapters]".') from error
    combine = {"ties": merge_utils.ties, "dare": merge_utils.dare_linear, "dare-ties": merge_utils.dare_ties}[rule]

    def merged(name: str) -> torch.Tensor:
        parts = [vector.dense(name) if name in vector else torch.zeros(total.shape(name)) for vector in vectors]
        # one seed for each tensor: the result does not depend on the order in which tensors are read
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed + zlib.crc32(name.encode()))
            return combine(parts, torch.tensor(factors), density)

    return TaskVector(LazyMapping(total, merged), lambda name: TensorSpec(total.shape(name), total.dtype(name)))


def save_task_vector(
    path: PathLike, vector: TaskVector, metadata: Mapping[str, str] | None = None, overwrite: bool = False
) -> float:
    """Write a task vector to one safetensors file, atomically and entry by entry; return its norm.

    A dense entry is stored under its name, a low-rank entry as `name::out` and `name::in`. The file's metadata
    are `format: tuneport-task-vector`, `version: 1` and the given ones. The file name must end in .safetensors.
    """
    if reserved := [name for name in vector if name.endswith((_OUT, _IN))]:
        raise TuneportError(f"task vector cannot be saved: names must not end in ::out or ::in: {first_of(reserved)}.")
    parts: dict[str, TensorSpec] = {}
    for name in vector:
        shape, dtype, rank = vector.spec(name)
        if rank is None:
            parts[name] = TensorSpec(shape, dtype)
        else:
            parts[name + _OUT] = TensorSpec((shape[0], rank), dtype)
            parts[name + _IN] = TensorSpec((rank, *shape[1:]), dtype)

    check_new(path, overwrite, suffix=".safetensors", needed_bytes=sum(spec.nbytes for spec in parts.values()))
    # The two factors of an entry are read in turn: do not compute it twice.
    pair_of = functools.lru_cache(maxsize=1)(vector.__getitem__)
    squares: dict[str, float] = {}

    def part(stored: str) -> torch.Tensor:
        name = stored.removesuffix(_OUT).removesuffix(_IN)
        entry = vector[name] if name == stored else pair_of(name)
        squares[name] = norm_of(entry) ** 2
        if isinstance(entry, torch.Tensor):
            return entry
        return (entry.out_factor if stored.endswith(_OUT) else entry.in_factor).to(entry.dtype)

    with new_file(path, overwrite=overwrite) as temporary:
        stored = {**(metadata or {}), "format": FORMAT, "version": VERSION}
        write_safetensors(temporary, LazyMapping(parts, part), parts, stored)
    return math.sqrt(sum(squares.values()))


def load_task_vector(path: PathLike) -> TaskVector:
    """Open a file of `save_task_vector`; entries are read on access."""
    if Path(path).is_dir():
        raise CheckpointError(f"{path} is a folder, not a task vector. Make one with tuneport extract.")
    stored = open_checkpoint(path)
    if (found := stored.metadata.get("format")) != FORMAT:
        why = f"its metadata have format {shortened(repr(found))}, expected {FORMAT!r}"
        raise CheckpointError(f"{path} is not a task vector: {why}. Make one with tuneport extract.")
    if (version := stored.metadata.get("version")) != VERSION:
        raise CheckpointError(
            f"{path} has version {shortened(repr(version))} of the task-vector format, "
            f"this tuneport reads {VERSION!r}. Upgrade tuneport or make the file again."
        )
    low = dict.fromkeys(name.removesuffix(_OUT).removesuffix(_IN) for name in stored if name.endswith((_OUT, _IN)))
    if broken := [name for name in low if not _are_factors(stored, name)]:
        raise CheckpointError(f"{path} is damaged: {first_of(broken)} lack one of two factors of matching shapes.")
    dtypes = ((name, stored.dtype(name)) for name in stored)
    if odd := [f"{name} ({dtype})" for name, dtype in dtypes if not dtype.is_floating_point or is_quantised(dtype)]:
        raise CheckpointError(f"{path} is damaged: {first_of(odd)} are not differences of weights.")

    def read(name: str) -> Entry:
        return LowRank(stored[name + _OUT], stored[name + _IN]) if name in low else stored[name]

    def spec(name: str) -> TensorSpec:
        if name not in low:
            return TensorSpec(stored.shape(name), stored.dtype(name))
        (d_out, rank), (_, *d_in) = stored.shape(name + _OUT), stored.shape(name + _IN)
        return TensorSpec((d_out, *d_in), stored.dtype(name + _OUT), rank)

    names = sorted([*low, *(name for name in stored if not name.endswith((_OUT, _IN)))])
    return TaskVector(LazyMapping(names, read), spec)


def _are_factors(stored: Tensors, name: str) -> bool:
    if name in stored or name + _OUT not in stored or name + _IN not in stored:
        return False
    out, in_ = describe(stored, name + _OUT), describe(stored, name + _IN)
    matrices = len(out.shape) == 2 and len(in_.shape) >= 2
    return matrices and out.shape[1] == in_.shape[0] and out.dtype == in_.dtype


def _finite(factor: float) -> float:
    with suppress(TypeError, ValueError):
        if math.isfinite(number := float(factor)):
            return number
    raise TuneportError(f"a task vector is scaled by a finite number, got {factor!r}.")


@dataclass(frozen=True)
class Part:
    """A tensor that the fine-tune changed, or the part of a fused one that is a layer."""

    tensor: str  # its name in the source's files; of a layer, the layer's name
    kind: str  # what it is, in the plural
    square: float  # the squared norm of its change
    targets: tuple[str, ...]  # the parameters of the target that take it up
    reason: str  # why there are none


def account(parts: Iterable[Part], kept: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The share of the change that moves and what is left behind, for a record; `kept` are not written after all."""
    kept, parts = kept or {}, tuple(parts)
    total = sum(part.square for part in parts)
    left: dict[tuple[str, str, str], float] = {}
    for part in parts:
        if not [name for name in part.targets if name not in kept]:
            reason = kept[part.targets[0]] if part.targets else part.reason
            key = (part.tensor, reason, part.kind)  # layers share a fused bias
            left[key] = left.get(key, 0.0) + part.square
    behind = [
        {"tensor": tensor, "reason": reason, "kind": kind, "share": square / total}
        for (tensor, reason, kind), square in left.items()
    ]
    return {"moved_share": 1.0 - sum(left.values()) / total if total else 0.0, "left_behind": behind}
