"""Peak memory of measuring and solving, predicted by a run on the meta device.

One batch goes through copies of both models on the meta device, in the code that measures, while the bytes of all live
tensors are counted. This takes a second or two for models of any size, needs neither weights nor a device, and includes
the peaks of attention, losses and recomputed blocks. Memory that a kernel allocates inside itself is not counted.
"""

from __future__ import annotations

import copy
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import TuneportError
from ..maps.polar import together_bytes
from ..maps.procrustes import held_bytes
from ..maps.statistics import CrossCovariance, Key, work_bytes
from ..measure.capture import PairedBatch, Request, measure_pairs, move_batch, split_batch, tensors_in
from ..measure.samples import Measurement, samples_at_once
from ..measure.tokens import Match, TokenLimit, match_tokens
from ..models.offload import Placement, placed
from ..pairing import LayerPair
from ..types import Sides


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
            f"({type(error).__name__}: {str(error).splitlines()[0]}). Leave out `memory_budget`, or give one that "
            "holds both models."
        ) from error


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are allocated inside and still held.

    On the meta device, checks of one bool have the answer True: transformers checks that no token is padding and that
    no texts are packed into one row, to leave out a mask.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            return True
        result = func(*args, **kwargs)
        if func.is_view or func is torch.ops.aten.from_file.default:  # a mapped file: the system can evict it
            return result
        given = {id(tensor.untyped_storage()) for tensor in tensors_in([*args, kwargs])}
        for tensor in tensors_in(result):
            if id(tensor.untyped_storage()) not in given:
                self._add(tensor.untyped_storage())
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


@dataclass(eq=False)
class ShapeSum:
    """Stands for a CrossCovariance in a forecast: shape, tokens and dtype, no values."""

    shape: tuple[int, int]
    is_dense: Callable[[ShapeSum], bool]
    tokens: int = 0
    signal_dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        self.source_energy = self.target_energy = torch.zeros((), device="cpu")

    def update(self, source: Tensor, target: Tensor) -> None:
        self.tokens += len(target)
        self.signal_dtype = max((source.dtype, target.dtype), key=lambda dtype: torch.finfo(dtype).eps)
        if self.is_dense(self):  # the memory that the sum needs while it adds a batch
            size = work_bytes(len(target), self.shape, self.signal_dtype, target.device)
            _ = torch.empty(size, dtype=torch.uint8, device=target.device)


Sums = Mapping[Key, ShapeSum]


@dataclass(frozen=True, eq=False)
class Forecast:
    """Memory model of groups of layers, extrapolated from one batch.

    `sums` holds the tokens of `batch`, which has `size` samples, by (target layer, signal); `at_once` samples of the
    measurement's `samples` run together. Without `on_meta` the batch runs through the models themselves.
    """

    measurement: Measurement
    batch: PairedBatch | None
    size: int
    at_once: int
    samples: int
    on_meta: bool = True
    sums: Sums = field(default_factory=dict)
    _peaks: dict[Any, int] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, measurement: Measurement, *, on_meta: bool = True) -> Forecast:
        """Run one batch on the meta device; or one sample through the models, for those that need values."""
        if not measurement.signals:
            return cls(measurement, None, 1, 1, 1)
        batch = measurement.samples.largest_batch()
        # a part of a batch would fetch offloaded blocks again, so offloaded models run whole batches
        most = None if measurement.needs_placement else samples_at_once(measurement.models)
        batch, at_once = next(split_batch(batch, most))
        batch, size = (batch, at_once) if on_meta else next(split_batch(batch, 1))
        samples = len(measurement.samples) or size
        match = batch.match or measurement.calibration.match or match_tokens(None, None)
        if on_meta:
            source, target = (move_batch(side, torch.device("meta")) for side in (batch.source, batch.target))
            batch = replace(batch, source=source, target=target, match=by_shape(match))
        found = cls(measurement, replace(batch, size=size, match=batch.match or match), size, at_once, samples, on_meta)
        return replace(found, sums=found._run(measurement.plan.pairs, None, None)[0])

    def peak(self, pairs: Sequence[LayerPair], placements: Sides[Placement] | None = None) -> int:
        """The most bytes of signals, graphs and fetched weights while these pairs are measured on one batch."""
        if self.batch is None:
            return 0
        key = (tuple(pair.target.name for pair in pairs), *((p.blocks, p.fetched) for p in placements or ()))
        if key not in self._peaks:
            most = self.measurement.limits.max_tokens
            limit = None if most is None else TokenLimit(most, self.samples)
            self._peaks[key] = self._run(pairs, placements, limit)[1] * self.at_once // self.size
        return self._peaks[key]

    def statistics_bytes(self, pairs: Iterable[LayerPair]) -> int:
        """The statistics of these pairs after all tokens."""
        return sum(
            8 * math.prod(found.shape) if self._is_dense(found) else self._token_bytes(found)
            for _, found in self._of(pairs)
        )

    def signal_bytes(self, pairs: Iterable[LayerPair]) -> int:
        """The source's signals of one batch, which are kept for the target."""
        return sum(
            found.tokens * self.at_once // self.size * found.shape[0] * found.signal_dtype.itemsize
            for _, found in self._of(pairs)
        )

    def solving_bytes(self, pairs: Sequence[LayerPair]) -> int:
        """Maps, the work on them, and one update between source and target coordinates."""
        maps: Counter[tuple[str, int | None]] = Counter()
        works: dict[tuple[int, int], list[int]] = {}
        blocks = {pair.target.name: (pair.target.stack, pair.target.block) for pair in pairs}
        device, budget = self.measurement.runs_on, self.measurement.limits.memory_budget
        for layer, found in self._of(pairs):
            mapped, working = solving_bytes(found.shape, self._tokens(found), device)
            maps[blocks[layer]] += mapped
            works.setdefault(found.shape, []).append(working)
        sides = [[(layer.out_features, layer.in_features) for layer in (p.source, p.target)] for p in pairs]
        # a dense update in source, mixed and target coordinates
        moving = max((8 * (a * b + c * b + c * d) for (a, b), (c, d) in sides), default=0)
        together = 0 if device.type == "cpu" else together_bytes(device, budget)
        at_once = {shape: max(together // (8 * math.prod(shape)), 1) for shape in works}
        work = max((min(len(each), at_once[shape]) * max(each) for shape, each in works.items()), default=0)
        return min(maps.total(), held_bytes(device, budget) + max(maps.values(), default=0)) + max(work, moving)

    def _of(self, pairs: Iterable[LayerPair]) -> Iterator[tuple[str, ShapeSum]]:
        """Each sum of these pairs once, with the first target layer that has it."""
        names = {pair.target.name for pair in pairs}
        seen: set[int] = set()
        for (layer, _), found in self.sums.items():
            if layer in names and id(found) not in seen:
                seen.add(id(found))
                yield layer, found

    def _tokens(self, found: ShapeSum) -> int:
        """The tokens of all samples that enter a sum."""
        tokens = found.tokens * self.samples // self.size
        return min(tokens, self.measurement.limits.max_tokens or tokens)

    def _token_bytes(self, found: ShapeSum) -> int:
        return self._tokens(found) * sum(found.shape) * found.signal_dtype.itemsize

    def _is_dense(self, found: ShapeSum) -> bool:
        """Whether a sum is a matrix after all tokens, by the rule of CrossCovariance."""
        return not CrossCovariance.keeps_tokens(self._token_bytes(found), found.shape)

    def _run(
        self, pairs: Sequence[LayerPair], placements: Sides[Placement] | None, limit: TokenLimit | None
    ) -> tuple[Sums, int]:
        """Measure these pairs on the batch; the sums, and the peak of live bytes."""
        measurement = self.measurement
        assert measurement.calibration.losses is not None
        modules = Sides(*(shapes_of(model.module) if self.on_meta else model.module for model in measurement.models))

        def make_sum(_key: Key, source: int, target: int, _device: torch.device) -> ShapeSum:
            return ShapeSum((source, target), self._is_dense)

        with meta_errors(), ExitStack() as stack:
            for module, placement in zip(modules, placements or (), strict=False):
                stack.enter_context(placed(module, replace(placement, device=torch.device("meta"), home=None)))
            live = stack.enter_context(LiveBytes())
            request = Request(measurement.signals, limit=limit, make_sum=make_sum)
            found = measure_pairs(modules, pairs, [self.batch], measurement.calibration.losses, request)
        return cast(Sums, found.covariances), live.peak


def solving_bytes(shape: tuple[int, int], tokens: int, device: torch.device) -> tuple[int, int]:
    """Bytes of one map, and of the work on it: by eigenvectors on a CPU, by an iteration for any rank on a GPU."""
    short, long = sorted(shape)
    if 2 * tokens <= short:  # where `complete` has thin factors
        return 8 * 2 * tokens * (short + long), 8 * (5 * tokens * (short + long) + 12 * tokens**2)
    work = 2 * long + 5 * short if device.type == "cpu" else 5 * long + 8 * short
    return 8 * short * (short + long), 8 * short * work


def by_shape(match: Match) -> Match:
    """A match that gives the number of paired tokens, without their values; it is asked once per shape."""
    known: dict[Any, int] = {}

    def matched(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        shapes = source.shape[:2], target.shape[:2]
        if shapes not in known:  # the widths do not matter
            known[shapes] = len(match(*(torch.zeros(*shape, 1) for shape in shapes))[1])
        if known[shapes] == shapes[0].numel() == shapes[1].numel():
            return source.flatten(0, 1), target.flatten(0, 1)
        return source.new_empty(known[shapes], source.shape[-1]), target.new_empty(known[shapes], target.shape[-1])

    return matched


def shapes_of(module: nn.Module) -> nn.Module:
    """A copy of a module with its parameters and buffers on the meta device; no values are copied."""
    replaced: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        empty = torch.empty_like(tensor, device="meta")
        replaced[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(module, replaced)
