"""Measure two frozen models on the same batches: one forward and one backward pass each, sums kept, signals dropped.

The source's signals live for one batch; the target's are consumed as they arrive, so memory does not grow with the
number of samples. Models come back as they went in, also after an error.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Generic, cast

import torch
from torch import Tensor, nn

from ..errors import CaptureError, first_of
from ..layers import Layer
from ..maps.covariance import CrossCovariance, are_half
from ..maps.statistics import Key, S, Statistics, WeightGradient
from ..pairing import LayerPair
from ..types import Loss, Progress
from .batches import PairedBatch, parts_of
from .signals import (
    NEEDS_BACKWARD,
    SIGNALS,
    WEIGHT_GRADIENT,
    Recorder,
    frozen,
)
from .tokens import Match, TokenLimit, match_tokens

MakeSum = Callable[[LayerPair, str, int, int, torch.device], S]


def measure_pairs(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[LayerPair],
    batches: Iterable[Any],
    *,
    signals: Collection[str],
    source_loss: Loss,
    target_loss: Loss,
    match: Match | None = None,
    progress: Progress | None = None,
    start: Statistics[S] | None = None,
    on_batch: Callable[[Statistics[S]], None] | None = None,
    limit: TokenLimit | None = None,
    make_sum: MakeSum[S] | None = None,
    most_samples: int | None = None,
) -> Statistics[S]:
    """Accumulate the statistics that `signals` name, for every pair, over all batches.

    With forward signals only, no backward pass is run. A pair whose layers never run is absent from the result.

    Args:
        batches: each is anything the losses take, or a PairedBatch where source and target read samples differently.
        source_loss, target_loss: the sum over samples of the per-sample loss.
        match: pairs the tokens of both models; a PairedBatch may bring its own.
        start: statistics of earlier batches, which these batches continue.
        on_batch: called after each batch with all statistics so far, valid until it returns.
        limit: caps the tokens that enter covariances.
        make_sum: called with (pair, signal, source width, target width, device); CrossCovariance by default.
        most_samples: the largest number of samples in one pass. A larger batch is run in parts, which changes rounding
            only. A PairedBatch with its own match stays whole unless it can divide itself.
    """
    if unknown := sorted(set(signals) - set(SIGNALS)):
        raise CaptureError(f"unknown signals {first_of(unknown)}; known: {', '.join(SIGNALS)}.")
    usual = match or match_tokens(None, None)
    make = make_sum or cast("MakeSum[S]", _make_covariance)
    accumulator = _Accumulator(pairs, frozenset(signals), usual, make, limit)
    backward = bool(NEEDS_BACKWARD & set(signals))
    samples = passes = 0
    if start is not None:
        samples, passes = start.samples, start.passes.get("forward", 0)
        accumulator.go_on_from(start)

    def so_far() -> Statistics[S]:
        runs = {"forward": passes, "backward": passes if backward else 0}
        return Statistics(accumulator.covariances, accumulator.weight_gradients, samples, runs)

    with frozen(source), frozen(target):
        for index, batch in enumerate(batches, start=passes):
            paired = batch if isinstance(batch, PairedBatch) else PairedBatch(batch, batch)
            for part, size in parts_of(paired, most_samples):
                rows = part.rows or size
                accumulator.start(part.match, samples, size)
                ours, theirs = accumulator.source_layers, accumulator.target_layers
                if any(ours.values()):
                    Recorder(source, ours, accumulator.keep, rows, backward).run(part.source, source_loss)
                Recorder(target, theirs, accumulator.consume, rows, backward).run(part.target, target_loss)
                accumulator.finish(index)
                samples += size
                if progress is not None:
                    progress(size)
            passes += 1
            if on_batch is not None:
                on_batch(so_far())
    if passes == 0:
        raise CaptureError("there are no calibration batches; give at least one sample.")
    return so_far()


def _make_covariance(_pair: LayerPair, _signal: str, source: int, target: int, device: torch.device) -> CrossCovariance:
    return CrossCovariance(source, target, device=device)


class _Accumulator(Generic[S]):
    """Holds the source's signals of one batch and the sums over all batches."""

    def __init__(
        self,
        pairs: Sequence[LayerPair],
        signals: frozenset[str],
        match: Match,
        make_sum: MakeSum[S],
        limit: TokenLimit | None = None,
    ) -> None:
        self.covariances: dict[Key, S] = {}
        self.weight_gradients: dict[str, WeightGradient] = {}
        self._pairs = {pair.target.name: pair for pair in pairs}
        self._default_match, self._make_sum, self._limit = match, make_sum, limit
        self.source_layers: dict[Layer, frozenset[str]] = {}
        self.target_layers: dict[Layer, frozenset[str]] = {}
        for pair in pairs:
            self.target_layers[pair.target] = wanted = pair.wanted(signals)
            paired = wanted - {WEIGHT_GRADIENT}
            self.source_layers[pair.source] = self.source_layers.get(pair.source, frozenset()) | paired
        self._readers = Counter(
            (pair.source.name, signal) for pair in pairs for signal in self.target_layers[pair.target]
        )

    def go_on_from(self, start: Statistics[S]) -> None:
        """Take over the sums of earlier batches, in copies that share what was shared."""
        copies: dict[int, Any] = {}
        self.covariances = copy.deepcopy(dict(start.covariances), copies)
        self.weight_gradients = copy.deepcopy(dict(start.weight_gradients), copies)

    def start(self, match: Match | None, samples: int, size: int) -> None:
        """Forget the signals of the last batch; `size` samples come after the first `samples`."""
        self._match = match or self._default_match
        self._at = (samples, size)
        self._rows: dict[tuple[int, torch.device], Tensor | None] = {}
        self._unread: Counter[tuple[str, str, int]] = Counter()
        self._ran: Counter[Key] = Counter()
        self._kept: dict[tuple[str, str, int], Tensor] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._resized: dict[int, tuple[weakref.ref[Tensor], torch.Size, Tensor]] = {}
        self._shared: dict[tuple[str, int, int], tuple[weakref.ref[Tensor], S]] = {}
        self._added: dict[tuple[int, int], tuple[int, weakref.ref[Tensor]]] = {}
        self._calls: Counter[Key] = Counter()

    def keep(self, layer: Layer, signal: str, call: int, tensor: Tensor) -> None:
        """Store a source signal for this batch; layers that read the same tensor share one copy."""
        known = self._copies.get(id(tensor))
        copied = known[1]() if known is not None and known[0]() is tensor else None
        if copied is None:
            copied = tensor.clone()
            self._copies[id(tensor)] = (weakref.ref(tensor), weakref.ref(copied))
        self._kept[layer.name, signal, call] = copied
        self._unread[layer.name, signal, call] = self._readers[layer.name, signal]
        self._ran[layer.name, signal] += 1

    def consume(self, layer: Layer, signal: str, call: int, tensor: Tensor, inputs: Tensor | None = None) -> None:
        """Add a target signal, paired with the source's, to its sum."""
        if signal == WEIGHT_GRADIENT:
            assert inputs is not None
            if layer.name not in self.weight_gradients:
                shape = (layer.out_features, layer.in_features)
                self.weight_gradients[layer.name] = WeightGradient(shape, device=tensor.device)
            self.weight_gradients[layer.name].update(inputs, tensor)
            return
        pair = self._pairs[layer.name]
        self._calls[layer.name, signal] += 1
        ours = self._kept.get((pair.source.name, signal, call))
        if ours is None:
            return
        covariance = self._covariance(pair, signal, ours, tensor)
        added = self._added.get((id(covariance), call))
        if added is None:
            self._added[id(covariance), call] = (id(ours), weakref.ref(tensor))
            again = self._unread[pair.source.name, signal, call] > 1
            covariance.update(*self._limited(*self._matched(ours, tensor, again)))
        elif added[0] != id(ours) or added[1]() is not tensor:
            raise CaptureError(
                f"{layer.name} read the same tensor as another layer in the first batch but not in this one; "
                "measure it in a run of its own."
            )
        self._unread[pair.source.name, signal, call] -= 1
        if not self._unread[pair.source.name, signal, call]:  # the last reader: let its memory go
            del self._kept[pair.source.name, signal, call]
            self._resized.pop(id(ours), None)

    def _matched(self, ours: Tensor, theirs: Tensor, again: bool) -> tuple[Tensor, Tensor]:
        """Paired rows of both; where a deeper target reads a source layer several times, its side is resized once.

        On an accelerator, where converting takes a quarter of the time of summing up, that is done once too, unless
        the signals are half-precision, which are multiplied as they are.
        """
        known = self._resized.get(id(ours))
        if known is not None and known[0]() is ours and known[1] == theirs.shape[:2]:
            return known[2], theirs.flatten(0, 1)
        found = self._match(ours, theirs)
        if again and ours.device.type != "cpu" and self._limit is None and not are_half(ours.dtype):
            found = found[0].double(), found[1]
        if found[1].data_ptr() == theirs.data_ptr() and len(found[1]) == theirs.shape[:2].numel():  # as they came
            self._resized[id(ours)] = (weakref.ref(ours), theirs.shape[:2], found[0])
        return found

    def _limited(self, ours: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of a batch that are looked at, the same ones for every layer with so many."""
        if self._limit is None:
            return ours, theirs
        key = (len(theirs), theirs.device)
        if key not in self._rows:
            rows = self._limit.rows(*self._at, len(theirs))
            self._rows[key] = rows if rows is None else rows.to(theirs.device)
        rows = self._rows[key]
        return (ours, theirs) if rows is None else (ours[rows.to(ours.device)], theirs[rows])

    def _covariance(self, pair: LayerPair, signal: str, ours: Tensor, theirs: Tensor) -> S:
        key, tensors = (pair.target.name, signal), (signal, id(ours), id(theirs))
        if key not in self.covariances:
            shared = self._shared.get(tensors)
            if shared is not None and shared[0]() is theirs:
                self.covariances[key] = shared[1]
            else:
                self.covariances[key] = self._make_sum(pair, signal, ours.shape[-1], theirs.shape[-1], theirs.device)
        self._shared[tensors] = (weakref.ref(theirs), self.covariances[key])
        return self.covariances[key]

    def finish(self, index: int) -> None:
        """Check the batch, and let its signals go."""
        self._check_calls(index)
        self._check_sums(index)
        self._kept.clear()
        self._copies.clear()
        self._resized.clear()

    def _check_calls(self, index: int) -> None:
        """Paired layers ran equally often."""
        for (name, signal), calls in self._calls.items():
            expected = self._ran[self._pairs[name].source.name, signal]
            if expected and calls != expected:
                raise CaptureError(
                    f"source layer {self._pairs[name].source.name} ran {expected} times and target layer {name} "
                    f"{calls} times on batch {index} ({signal}); pair layers that run alike."
                )

    def _check_sums(self, index: int) -> None:
        """Every sum is finite."""
        energies = [cov.source_energy * cov.target_energy for cov in self.covariances.values()]
        if energies and not bool(torch.isfinite(torch.stack(energies).sum())):
            broken = [
                f"{layer} ({signal})"
                for (layer, signal), cov in self.covariances.items()
                if not math.isfinite(float(cov.source_energy * cov.target_energy))
            ]
            raise CaptureError(
                f"NaN or Inf in batch {index} at {first_of(broken, 3)}: check the weights and the calibration data."
            )
        lost = [name for name, found in self.weight_gradients.items() if not bool(found.total.sum().isfinite())]
        if lost:
            raise CaptureError(
                f"NaN or Inf in batch {index} at {first_of(lost, 3)} ({WEIGHT_GRADIENT}): check the weights and the "
                "calibration data."
            )
