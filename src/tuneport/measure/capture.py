"""Measure two frozen models on the same batches, with one forward and one backward pass each.

The source's signals are kept for one batch, the target's are consumed as they arrive. Both models are restored.
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import CaptureError, first_of
from ..layers import Layer
from ..maps.statistics import CrossCovariance, Key, Statistics, WeightGradient
from ..pairing import LayerPair
from ..types import Loss, Progress, Sides, ignore
from .signals import NEEDS_BACKWARD, SIGNALS, WEIGHT_GRADIENT, Recorder, frozen
from .tokens import Match, TokenLimit, match_tokens


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


def split_batch(batch: PairedBatch, most: int | None) -> Iterator[tuple[PairedBatch, int]]:
    """The batch, or parts of at most `most` samples, each with its size."""
    size = count_samples(batch)
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


def count_samples(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of its first tensor that has one."""
    if isinstance(batch, PairedBatch):
        return batch.size or count_samples(batch.target)
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


MakeSum = Callable[[Key, int, int, torch.device], Any]  # of (target layer, signal), both widths and the device


@dataclass(frozen=True)
class Request:
    """What to measure at every pair of layers, and how to add it up."""

    signals: Collection[str]
    match: Match | None = None  # pairs the tokens of both models; a PairedBatch may bring its own
    limit: TokenLimit | None = None  # caps the tokens that enter covariances
    make_sum: MakeSum = lambda _, source, target, device: CrossCovariance(source, target, device=device)
    most_samples: int | None = None  # in one pass; a larger batch is run in parts if possible: other rounding only
    loose: Sequence[str] = ()  # parameters whose gradients are added up too; samples then pass one by one


def measure_pairs(
    modules: Sides[nn.Module],
    pairs: Sequence[LayerPair],
    batches: Iterable[Any],
    losses: Sides[Loss],
    request: Request,
    *,
    progress: Progress = ignore,
    start: Statistics | None = None,
    on_batch: Callable[[Statistics], None] | None = None,
) -> Statistics:
    """Accumulate the statistics that a request names, for every pair, over all batches.

    With forward signals only, no backward pass is run. A pair whose layers never run is absent from the result.

    Args:
        batches: each is an input of the losses, or a PairedBatch if source and target read samples differently.
        losses: the sum over samples of the per-sample loss, for each model.
        start: statistics of earlier batches, which these batches continue.
        on_batch: called after each batch with all statistics so far, valid until it returns.
    """
    signals, (source, target) = request.signals, modules
    if unknown := sorted(set(signals) - set(SIGNALS)):
        raise CaptureError(f"unknown signals {first_of(unknown)}; known: {', '.join(SIGNALS)}.")
    accumulator = _Accumulator(pairs, request)
    backward = bool(NEEDS_BACKWARD & set(signals))
    parameters = {name: target.get_parameter(name) for name in request.loose}
    start = start or Statistics()
    samples, passes = start.samples, start.passes.get("forward", 0)
    sums = dict(start.covariances), dict(start.weight_gradients)
    accumulator.covariances, accumulator.weight_gradients = copy.deepcopy(sums)  # shared sums stay shared

    def so_far() -> Statistics:
        runs = {"forward": passes, "backward": passes if backward else 0}
        return Statistics(accumulator.covariances, accumulator.weight_gradients, samples, runs)

    with frozen(source), frozen(target):
        for index, batch in enumerate(batches, start=passes):
            paired = batch if isinstance(batch, PairedBatch) else PairedBatch(batch, batch)
            for part, size in split_batch(paired, 1 if parameters else request.most_samples):
                rows, layers = part.rows or size, accumulator.layers
                accumulator.start(part.match or request.match or match_tokens(None, None), samples, size)
                if any(layers.source.values()):
                    Recorder(source, layers.source, accumulator.keep, rows, backward).run(part.source, losses.source)
                with _gradients(parameters, accumulator.weight_gradients):
                    Recorder(target, layers.target, accumulator.consume, rows, backward).run(part.target, losses.target)
                accumulator.finish(index)
                samples += size
                progress(size)
            passes += 1
            if on_batch is not None:
                on_batch(so_far())
    if passes == 0:
        raise CaptureError("there are no calibration batches; give at least one sample.")
    return so_far()


@contextmanager
def _gradients(parameters: Mapping[str, nn.Parameter], sums: dict[str, WeightGradient]) -> Iterator[None]:
    """Context in which a backward pass over one sample adds the gradients of parameters to their sums."""
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
        parameter.requires_grad_(True)
    try:
        yield
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                columns = parameter.shape[-1] if parameter.ndim else 1
                shape = (parameter.numel() // columns, columns)
                sums.setdefault(name, WeightGradient(shape, device=parameter.device)).add_sample(parameter.grad)
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(False)
            parameter.grad = before[name]


class _Accumulator:
    """Holds the source's signals of one batch and the sums over all batches."""

    def __init__(self, pairs: Sequence[LayerPair], request: Request) -> None:
        self.covariances: dict[Key, CrossCovariance] = {}
        self.weight_gradients: dict[str, WeightGradient] = {}
        self.layers: Sides[dict[Layer, frozenset[str]]] = Sides({}, {})
        self._pairs = {pair.target.name: pair for pair in pairs}
        self._make_sum, self._limit = request.make_sum, request.limit
        self._readers: Counter[Key] = Counter()
        for pair in pairs:
            wanted = pair.wanted(request.signals)
            self.layers.target[pair.target] = wanted
            known = self.layers.source.get(pair.source, frozenset())
            self.layers.source[pair.source] = known | wanted - {WEIGHT_GRADIENT}
            self._readers.update((pair.source.name, signal) for signal in wanted)

    def start(self, match: Match, samples: int, size: int) -> None:
        """Begin a batch of `size` samples that follows the first `samples`."""
        self._match, self._at = match, (samples, size)
        self._rows: dict[int, Tensor | None] = {}
        self._kept: dict[tuple[str, str, int], Tensor] = {}
        self._unread: Counter[tuple[str, str, int]] = Counter()
        self._ran: Counter[Key] = Counter()
        self._calls: Counter[Key] = Counter()
        self._copies: MutableMapping[Tensor, weakref.ref[Tensor]] = WeakIdKeyDictionary()
        self._added: dict[tuple[str, int, int, int], tuple[weakref.ref[Tensor], CrossCovariance]] = {}
        self._done: set[tuple[int, int]] = set()

    def keep(self, layer: Layer, signal: str, call: int, tensor: Tensor) -> None:
        """Store a source signal for this batch; layers that read the same tensor share one copy."""
        known = self._copies.get(tensor)
        copied = known() if known is not None else None
        if copied is None:
            copied = tensor.clone()
            self._copies[tensor] = weakref.ref(copied)
        self._kept[layer.name, signal, call] = copied
        self._unread[layer.name, signal, call] = self._readers[layer.name, signal]
        self._ran[layer.name, signal] += 1

    def consume(self, layer: Layer, signal: str, call: int, tensor: Tensor, inputs: Tensor | None = None) -> None:
        """Add a target signal, paired with the source's, to its sum; pairs of the same two tensors share a sum."""
        if signal == WEIGHT_GRADIENT:
            assert inputs is not None
            if layer.name not in self.weight_gradients:
                shape = (layer.out_features, layer.in_features)
                self.weight_gradients[layer.name] = WeightGradient(shape, device=tensor.device)
            self.weight_gradients[layer.name].update(inputs, tensor)
            return
        key, place = (layer.name, signal), (self._pairs[layer.name].source.name, signal, call)
        self._calls[key] += 1
        source = self._kept.get(place)
        if source is None:
            return
        tensors = (signal, call, id(source), id(tensor))
        added = self._added.get(tensors)
        shared = added[1] if added is not None and added[0]() is tensor else None
        if key not in self.covariances:
            widths = source.shape[-1], tensor.shape[-1]
            self.covariances[key] = shared or self._make_sum(key, *widths, tensor.device)
        covariance = self.covariances[key]
        if covariance is not shared:
            if (id(covariance), call) in self._done:
                raise CaptureError(
                    f"{layer.name} read the same tensor as another layer in the first batch but not in this one; "
                    "measure it in a run of its own."
                )
            self._done.add((id(covariance), call))
            self._added[tensors] = weakref.ref(tensor), covariance
            covariance.update(*self._limit_rows(*self._match(source, tensor)))
        self._unread[place] -= 1
        if not self._unread[place]:  # no layer needs it again: free its memory
            del self._kept[place]

    def _limit_rows(self, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The drawn tokens of a batch, the same for every layer with as many tokens."""
        if self._limit is None:
            return source, target
        if len(target) not in self._rows:
            self._rows[len(target)] = self._limit.rows(*self._at, len(target))
        rows = self._rows[len(target)]
        return (source, target) if rows is None else (source[rows.to(source.device)], target[rows.to(target.device)])

    def finish(self, index: int) -> None:
        """Check the batch and drop its signals."""
        for (name, signal), calls in self._calls.items():
            source = self._pairs[name].source.name
            if (expected := self._ran[source, signal]) and calls != expected:
                raise CaptureError(
                    f"source layer {source} ran {expected} times and target layer {name} {calls} times on batch "
                    f"{index} ({signal}); pair layers that run equally often."
                )
        energies = {key: found.source_energy * found.target_energy for key, found in self.covariances.items()}
        gradients = {(name, WEIGHT_GRADIENT): found.total.sum() for name, found in self.weight_gradients.items()}
        for numbers in (energies, gradients):
            if numbers and not bool(torch.stack(list(numbers.values())).isfinite().all()):
                broken = [f"{name} ({signal})" for (name, signal), one in numbers.items() if not bool(one.isfinite())]
                raise CaptureError(
                    f"NaN or Inf in batch {index} at {first_of(broken, 3)}: check the weights and the calibration data."
                )
        self._kept.clear()
        self._copies.clear()
