"""The memory of measuring, foretold: the very code that measures, run on tensors that have shapes and no numbers.

One batch goes through copies of both models on the meta device while the bytes of all tensors alive are counted. It
takes a second or two for models of any size, needs neither weights nor a device, and knows what attention, losses and
recomputed blocks hold at their worst. What a kernel takes inside itself is not seen.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TuneportError
from ..job import Job, PairedBatches
from ..maps.covariance import work_bytes
from ..measure.batches import PairedBatch, change_tensors, count_samples
from ..measure.capture import measure_pairs
from ..measure.tokens import Match, TokenLimit, match_tokens
from ..models.offload import Placement, placed
from ..pairing import LayerPair


class NeedsValuesError(TuneportError):
    """A model or a loss reads the values of its tensors, which the meta device does not have."""


@contextmanager
def meta_errors() -> Iterator[None]:
    """Turn the errors that torch raises about meta tensors into `NeedsValuesError`; others pass."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:  # NotImplementedError is a RuntimeError
        if not re.search(r"meta(?![a-z])|data pointer", str(error), re.IGNORECASE):
            raise
        raise NeedsValuesError(
            "these models cannot be planned on the meta device: they or their loss read values of tensors "
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Leave out memory_budget, or give one that holds "
            "both models."
        ) from error


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        given = {id(leaf.untyped_storage()) for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.from_file.default:  # the system has it in RAM only while there is room
            return result
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in given:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known and self._known[key]() is storage:
            return
        size = storage.nbytes()

        def gone(_: Any) -> None:
            self.now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class ShapeSum:
    """Stands in the place of a cross-covariance: what it would be made of, none of its memory."""

    def __init__(self, source_width: int, target_width: int, dense: Callable[[ShapeSum], bool]) -> None:
        self.shape = (source_width, target_width)
        self.tokens = 0
        self.signal_dtype = torch.float64
        self.source_energy = self.target_energy = torch.zeros((), device="cpu")
        self._dense = dense

    def update(self, source: Tensor, target: Tensor) -> None:
        self.tokens += len(target)
        self.signal_dtype = max((source.dtype, target.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        if self._dense(self):
            size = work_bytes(len(target), self.shape, self.signal_dtype, target.device)
            _ = torch.empty(size, dtype=torch.uint8, device=target.device)


@dataclass(frozen=True, eq=False)
class Forecast:
    """What one batch of a job is like: `sums` of all its tokens by (target layer, signal), and `size` samples."""

    job: Job
    batch: PairedBatch
    size: int
    samples: int
    sums: Mapping[tuple[str, str], ShapeSum]
    _known: dict[Any, int] = field(default_factory=dict, repr=False)

    def peak(self, pairs: Sequence[LayerPair], placements: tuple[Placement, Placement]) -> int:
        """The most bytes of signals, graphs and fetched weights while these pairs are measured on one batch."""
        key = (tuple(pair.target.name for pair in pairs), *((p.blocks, p.fetched) for p in placements))
        if key not in self._known:
            self._known[key] = _run(self.job, self.batch, self.size, self.samples, pairs, placements)[1]
        return self._known[key]

    def of_part(self, job: Job) -> Forecast:
        """The same for a job with some of the batches and as large a share of the tokens."""
        return replace(self, job=job, samples=job.samples or self.samples)


def foretell(job: Job) -> Forecast:
    """Run a job's first batch on shapes alone."""
    first = first_batch(job)
    if first is None:
        raise TuneportError("a memory budget needs batches that can be gone through again: pass a list.")
    size = count_samples([first])
    samples = job.samples or (count_samples(job.batches) if isinstance(job.batches, (list, tuple)) else size)
    batch = replace(first, source=to_meta(first.source), target=to_meta(first.target), size=size)
    batch = replace(batch, match=_by_shape(first.match or job.match or match_tokens(None, None)))
    sums, _ = _run(replace(job, max_tokens=None), batch, size, samples, job.plan.pairs, None)
    return Forecast(job, batch, size, samples, sums)


def _run(
    job: Job,
    batch: PairedBatch,
    size: int,
    samples: int,
    pairs: Sequence[LayerPair],
    placements: tuple[Placement, Placement] | None,
) -> tuple[dict[tuple[str, str], ShapeSum], int]:
    assert job.source_loss is not None
    assert job.target_loss is not None
    modules = [shapes_of(model.module) for model in (job.source, job.target)]
    limit = None if job.max_tokens is None else TokenLimit(job.max_tokens, samples)

    def dense(found: ShapeSum) -> bool:
        rows = found.tokens * samples // size * sum(found.shape) * found.signal_dtype.itemsize
        return 2 * rows > 8 * found.shape[0] * found.shape[1]

    def make(pair: LayerPair, signal: str, ours: int, theirs: int, device: torch.device) -> ShapeSum:
        del pair, signal, device
        return ShapeSum(ours, theirs, dense)

    live = LiveBytes()
    with ExitStack() as stack:
        stack.enter_context(meta_errors())
        for module, placement in zip(modules, placements or (None, None), strict=True):
            stack.enter_context(placed(module, placement.on_meta() if placement is not None else None))
        stack.enter_context(WithoutNumbers())
        stack.enter_context(live)
        found = measure_pairs(
            modules[0],
            modules[1],
            pairs,
            [batch],
            signals=job.method.signals,
            source_loss=job.source_loss,
            target_loss=job.target_loss,
            limit=limit,
            make_sum=make,
        )
    return dict(found.covariances), live.peak


def _by_shape(match: Match) -> Match:
    """A match that tells only how many tokens meet."""
    known: dict[Any, int] = {}

    def matched(ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        shapes = tuple(ours.shape[:2]), tuple(theirs.shape[:2])
        if shapes not in known:
            known[shapes] = len(match(*(torch.zeros(*shape, 1) for shape in shapes))[1])
        if known[shapes] == ours.shape[0] * ours.shape[1] == theirs.shape[0] * theirs.shape[1]:
            return ours.flatten(0, 1), theirs.flatten(0, 1)
        return ours.new_empty(known[shapes], ours.shape[-1]), theirs.new_empty(known[shapes], theirs.shape[-1])

    return matched


def first_batch(job: Job) -> PairedBatch | None:
    """The first batch; none where reading it would use it up. Texts differ in length: it stands for the others."""
    batches = job.batches
    if isinstance(batches, PairedBatches):
        batches = replace(batches, indices=batches.indices[: batches.size])
    elif iter(batches) is batches:
        return None
    first = next(iter(batches), None)
    return first if first is None or isinstance(first, PairedBatch) else PairedBatch(first, first)


class WithoutNumbers(TorchDispatchMode):
    """Says yes to a question about the numbers of a meta tensor.

    transformers asks whether no token is padding and whether texts are not packed into one row, to leave out a mask.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        asked = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        if asked and args[0].dtype == torch.bool:
            return True
        return func(*args, **(kwargs or {}))


def shapes_of(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes and no numbers; nothing is copied."""
    tensors = chain(module.parameters(), module.buffers())
    stand_ins: dict[int, Any] = {}
    for tensor in tensors:
        empty = torch.empty_like(tensor, device="meta")
        stand_ins[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, stand_ins)


def to_meta(value: Any) -> Any:
    """A batch with shapes and no numbers."""
    return change_tensors(value, lambda tensor: tensor.to("meta"))
