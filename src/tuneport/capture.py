"""Measure two frozen models on the same batches: one forward and one backward pass each, sums kept, signals dropped.

A layer is recognised by its weight, not by its module: every linear map that a model computes with a watched
parameter is seen (Linear, Conv1D, patch convolutions, bare matrices, fused projections, the inside of
nn.MultiheadAttention). The source's signals live for one batch; the target's are consumed as they arrive, so
memory does not grow with the number of samples. Models come back as they went in, also after an error.
"""

from __future__ import annotations

import copy
import math
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .alignment import CrossCovariance, Statistics, WeightGradient
from .errors import CaptureError, first_of
from .layers import Layer
from .offload import watched
from .pairing import LayerPair
from .products import are_half
from .tokens import Match, match_tokens

INPUT = "input"
OUTPUT = "output"
OUTPUT_GRADIENT = "output_gradient"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"
SIGNALS = (INPUT, OUTPUT, OUTPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT)
NEEDS_BACKWARD = frozenset({OUTPUT_GRADIENT, INPUT_GRADIENT, WEIGHT_GRADIENT})

Loss = Callable[[nn.Module, Any], Tensor]
Progress = Callable[[int], None]
OnBatch = Callable[[Statistics], None]
MakeSum = Callable[[LayerPair, str, int, int, torch.device], Any]


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


@dataclass(frozen=True)
class TokenLimit:
    """How many tokens of all samples together are looked at: a share of each sample's, drawn by seed.

    The same tokens serve both models and every signal, and the draw depends on the sample's place, not on the
    batches. With `first`, a sample's first token (the class token of a vision model, in which alone its last
    gradients live) is always among its share.
    """

    tokens: int
    samples: int
    seed: int = 0
    first: bool = False
    offset: int = 0  # samples that other processes have before ours

    def rows(self, start: int, size: int, count: int) -> Tensor | None:
        """Which of the `count` rows of a batch of `size` samples, `start` samples in, are used; None for all."""
        start += self.offset
        shares = [self._share(start + sample) for sample in range(size)]
        if count <= sum(shares):
            return None
        if count % size:
            return _draw(count, sum(shares), (self.seed, start, count), False)
        each = count // size
        drawn = [
            sample * each + _draw(each, share, (self.seed, start + sample, each), self.first)
            for sample, share in enumerate(shares)
        ]
        return torch.cat(drawn)

    def _share(self, sample: int) -> int:
        return self.tokens * (sample + 1) // self.samples - self.tokens * sample // self.samples


def _draw(count: int, share: int, seed: tuple[int, ...], first: bool) -> Tensor:
    """`share` of `count` indices in order, the first of them included where asked."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))
    kept = int(first and share > 0)
    order = torch.randperm(count - kept, generator=generator)[: max(share - kept, 0)] + kept
    return torch.cat([torch.arange(kept), order]).sort().values


def measure(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[LayerPair],
    batches: Iterable[Any],
    *,
    signals: Collection[str],
    source_loss: Loss,
    target_loss: Loss,
    match: Match | None = None,
    dtype: torch.dtype = torch.float64,
    progress: Progress | None = None,
    start: Statistics | None = None,
    on_batch: OnBatch | None = None,
    limit: TokenLimit | None = None,
    make_sum: MakeSum | None = None,
    most_samples: int | None = None,
) -> Statistics:
    """Accumulate the statistics that `signals` name, for every pair, over all batches.

    A batch is anything the losses take, or a PairedBatch when source and target read the samples
    differently. Losses are sums over samples of the per-sample loss. With forward signals only, no backward
    pass is run. A pair whose layers never run is absent from the result.

    `start` holds the statistics of earlier batches, to which these are added as if there had been no pause;
    `on_batch` gets all statistics so far after each batch, to be used before it returns. `limit` caps the tokens
    that enter covariances. `make_sum(pair, signal, source width, target width, device)` puts other sums in the place
    of CrossCovariance, for diagnostics. At most `most_samples` go through the models at once: a larger batch is run in
    parts, which for a sum over samples is the same but for rounding. A PairedBatch with a match of its own stays whole
    unless it brings a way to divide it.
    """
    if unknown := sorted(set(signals) - set(SIGNALS)):
        raise CaptureError(f"unknown signals {first_of(unknown)}; known: {', '.join(SIGNALS)}.")
    usual = match or match_tokens(None, None)
    accumulator = _Accumulator(pairs, frozenset(signals), usual, dtype, limit, make_sum)
    backward = bool(NEEDS_BACKWARD & set(signals))
    samples = passes = 0
    if start is not None:
        samples, passes = start.samples, start.passes.get("forward", 0)
        accumulator.go_on_from(start)

    def so_far() -> Statistics:
        runs = {"forward": passes, "backward": passes if backward else 0}
        return Statistics(accumulator.covariances, accumulator.weight_gradients, samples, runs)

    with frozen(source), frozen(target):
        for index, batch in enumerate(batches, start=passes):
            paired = batch if isinstance(batch, PairedBatch) else PairedBatch(batch, batch)
            for part, size in _parts(paired, most_samples):
                rows = part.rows or size
                accumulator.start(part.match, samples, size)
                if any(accumulator.source_layers.values()):
                    _run(source, part.source, source_loss, accumulator.source_layers, accumulator.keep, rows, backward)
                _run(target, part.target, target_loss, accumulator.target_layers, accumulator.consume, rows, backward)
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


def samples_at_once(device: torch.device) -> int | None:
    """How many samples go through the models at once, whatever the batches; None for all of a batch.

    On a CPU a few are faster than many, since they stay in its caches, and need less memory.
    """
    return 8 if device.type == "cpu" else None


def _parts(batch: PairedBatch, most: int | None) -> Iterator[tuple[PairedBatch, int]]:
    """The batch, or parts of at most so many samples, each with its size."""
    size = batch.size or _first_dimension(batch.target)
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
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim and len(batch) == size else batch
    if isinstance(batch, Mapping):
        return {key: part_of(value, size, start, stop) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [part_of(value, size, start, stop) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def watch(
    model: nn.Module,
    layers: Iterable[Layer] | Mapping[Layer, Collection[str]],
    batch: Any,
    loss: Loss,
    signals: Collection[str],
    size: int | None = None,
) -> dict[tuple[str, str], list[Tensor]]:
    """Run one model once and return the raw signals (N, T, d) by (layer name, signal), a list entry per call.

    For diagnostics and tests; `measure` never keeps signals. Layers that read one tensor get one copy of it. Layers
    may come with signals of their own.
    """
    kept: dict[tuple[str, str], dict[int, Tensor]] = {}
    copies: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def keep(layer: Layer, signal: str, call: int, tensor: Tensor, inputs: Tensor | None = None) -> None:
        del inputs
        known = copies.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = copies[id(tensor)] = (weakref.ref(tensor), tensor.clone())
        kept.setdefault((layer.name, signal), {})[call] = known[1]

    own = layers if isinstance(layers, Mapping) else dict.fromkeys(layers, signals)
    wanted = {layer: frozenset(names) for layer, names in own.items()}
    with frozen(model):
        backward = bool(NEEDS_BACKWARD & set(signals))
        _run(model, batch, loss, wanted, keep, size or _first_dimension(batch), backward)
    return {key: [calls[call] for call in sorted(calls)] for key, calls in kept.items()}


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with parameters that need no gradient; everything restored on the way out."""
    training = {module: module.training for module in model.modules()}
    required = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.eval()
        model.requires_grad_(False)
        yield
    finally:
        for module, mode in training.items():
            module.training = mode
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)


class _Accumulator:
    """Holds the source's signals of one batch and the sums over all batches."""

    def __init__(
        self,
        pairs: Sequence[LayerPair],
        signals: frozenset[str],
        match: Match,
        dtype: torch.dtype,
        limit: TokenLimit | None = None,
        make_sum: MakeSum | None = None,
    ) -> None:
        self.covariances: dict[tuple[str, str], CrossCovariance] = {}
        self._make_sum = make_sum
        self.weight_gradients: dict[str, WeightGradient] = {}
        self._pairs = {pair.target.name: pair for pair in pairs}
        self._default_match, self._dtype, self._limit = match, dtype, limit
        self.source_layers: dict[Layer, frozenset[str]] = {}
        self.target_layers: dict[Layer, frozenset[str]] = {}
        for pair in pairs:
            wanted = signals - ({INPUT, INPUT_GRADIENT} if pair.input_map is not None else set())
            wanted -= {OUTPUT, OUTPUT_GRADIENT} if pair.output_map is not None else set()
            self.target_layers[pair.target] = wanted
            paired = wanted - {WEIGHT_GRADIENT}
            self.source_layers[pair.source] = self.source_layers.get(pair.source, frozenset()) | paired
        self._readers = Counter(
            (pair.source.name, signal) for pair in pairs for signal in self.target_layers[pair.target]
        )

    def go_on_from(self, start: Statistics) -> None:
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
        self._ran: Counter[tuple[str, str]] = Counter()
        self._kept: dict[tuple[str, str, int], Tensor] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Tensor]]] = {}
        self._resized: dict[int, tuple[weakref.ref[Tensor], torch.Size, Tensor]] = {}
        self._shared: dict[tuple[str, int, int], tuple[weakref.ref[Tensor], CrossCovariance]] = {}
        self._added: dict[tuple[int, int], tuple[int, weakref.ref[Tensor]]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()

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
            found = found[0].to(self._dtype), found[1]
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

    def _covariance(self, pair: LayerPair, signal: str, ours: Tensor, theirs: Tensor) -> CrossCovariance:
        key, tensors = (pair.target.name, signal), (signal, id(ours), id(theirs))
        if key not in self.covariances:
            shared = self._shared.get(tensors)
            if shared is not None and shared[0]() is theirs:
                self.covariances[key] = shared[1]
            elif self._make_sum is not None:
                self.covariances[key] = self._make_sum(pair, signal, ours.shape[-1], theirs.shape[-1], theirs.device)
            else:
                self.covariances[key] = CrossCovariance(
                    ours.shape[-1], theirs.shape[-1], device=theirs.device, dtype=self._dtype
                )
        self._shared[tensors] = (weakref.ref(theirs), self.covariances[key])
        return self.covariances[key]

    def finish(self, index: int) -> None:
        """Check that paired layers ran equally often and that every sum is finite."""
        for (name, signal), calls in self._calls.items():
            expected = self._ran[self._pairs[name].source.name, signal]
            if expected and calls != expected:
                raise CaptureError(
                    f"source layer {self._pairs[name].source.name} ran {expected} times and target layer {name} "
                    f"{calls} times on batch {index} ({signal}); pair layers that run alike."
                )
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
        self._kept.clear()
        self._copies.clear()
        self._resized.clear()


Sink = Callable[..., None]


def _run(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    layers: Mapping[Layer, frozenset[str]],
    sink: Sink,
    size: int,
    backward: bool,
) -> None:
    """One forward pass and, where asked, one backward pass, reporting every wanted signal to the sink."""
    recorder = _Recorder(model, layers, sink, size, backward)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.set_grad_enabled(backward):
            with watched(recorder):
                value = loss(model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise CaptureError(f"the loss must return one number (a sum over samples), got {_describe(value)}.")
            if backward and not value.requires_grad:
                raise CaptureError("the loss does not depend on any paired layer: no gradient can be measured.")
            if backward:
                value.sum().backward()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


_MATMUL = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)
_ADDMM = (torch.addmm, Tensor.addmm)


class _Recorder(TorchFunctionMode):
    """Sees every linear map computed with a watched weight and reports its signals as (N, T, d)."""

    def __init__(
        self, model: nn.Module, layers: Mapping[Layer, frozenset[str]], sink: Sink, size: int, backward: bool
    ) -> None:
        super().__init__()
        self.paused = False
        parameters = dict(model.named_parameters(remove_duplicate=False))
        self._parameters = {layer: parameters[layer.weight] for layer in layers}
        self._watched: dict[int, list[Layer]] = {}
        for layer, parameter in self._parameters.items():
            self._watched.setdefault(id(parameter), []).append(layer)
        self._wanted, self._sink, self._size, self._backward = layers, sink, size, backward
        self._calls: Counter[Layer] = Counter()
        self._views: deque[tuple[weakref.ref[Tensor], int, Tensor]] = deque(maxlen=4)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._attention(func, args, kwargs)
        result = func(*args, **kwargs)
        if func is F.linear:
            return self._see(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), result)
        if func in (F.conv2d, torch.conv2d):
            return self._see(_argument(args, kwargs, 0, "input"), _argument(args, kwargs, 1, "weight"), result)
        if func in _MATMUL and len(args) == 2:
            return self._see(args[0], args[1], result, in_by_out=True)
        if func in _ADDMM and len(args) == 3:
            return self._see(args[1], args[2], result, in_by_out=True)
        return result

    def watches(self, module: nn.Module) -> bool:
        """Whether a part of the model holds a watched weight."""
        return any(id(parameter) in self._watched for parameter in module.parameters())

    def _attention(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """nn.MultiheadAttention computes its projections inside one function, on (L, N, E) tensors."""
        query = _argument(args, kwargs, 0, "query")
        samples = query.shape[1] if query.ndim == 3 else 1
        linear = F.linear

        def seen(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
            return self._see(input, weight, linear(input, weight, bias), sequence_first=samples)

        F.linear = seen
        try:
            return func(*args, **kwargs)
        finally:
            F.linear = linear

    def _see(
        self, x: Any, weight: Any, result: Any, *, in_by_out: bool = False, sequence_first: int | None = None
    ) -> Any:
        layers, first_row = self._layers_of(weight, in_by_out)
        if not layers:
            return result
        if self._backward and not result.requires_grad:
            result = result.detach().requires_grad_(True).clone()

        def tokens(tensor: Tensor) -> Tensor:
            return _tokens(tensor, self._size, sequence_first)

        convolution = layers[0].kernel is not None
        shaped = (lambda y: y.flatten(2).transpose(1, 2)) if convolution else tokens
        calls = {layer: self._calls[layer] for layer in layers}
        self._calls.update(layers)
        inputs: Tensor | None = None
        for layer in layers:
            wanted = self._wanted[layer]
            if wanted & {INPUT, WEIGHT_GRADIENT}:
                inputs = self._view(x, layer, tokens)
            if INPUT in wanted:
                self._sink(layer, INPUT, calls[layer], inputs)
            if OUTPUT in wanted:
                self._sink(layer, OUTPUT, calls[layer], shaped(_rows(result.detach(), layer, first_row)))
        if self._backward and any(self._wanted[layer] & NEEDS_BACKWARD for layer in layers):
            kept = inputs.clone() if inputs is not None and WEIGHT_GRADIENT in self._wanted[layers[0]] else None

            def gradient(grad: Tensor) -> None:
                for layer in layers:
                    g = shaped(_rows(grad.detach(), layer, first_row))
                    self._report_gradient(layer, calls[layer], g, kept)

            result.register_hook(gradient)
        return result

    def _report_gradient(self, layer: Layer, call: int, gradient: Tensor, inputs: Tensor | None) -> None:
        wanted = self._wanted[layer]
        if OUTPUT_GRADIENT in wanted:
            self._sink(layer, OUTPUT_GRADIENT, call, gradient)
        if INPUT_GRADIENT in wanted:
            weight = layer.matrix(self._parameters[layer].detach())
            self._sink(layer, INPUT_GRADIENT, call, gradient @ weight)
        if WEIGHT_GRADIENT in wanted:
            self._sink(layer, WEIGHT_GRADIENT, call, gradient, inputs)

    def _view(self, x: Tensor, layer: Layer, tokens: Callable[[Tensor], Tensor]) -> Tensor:
        """The layer's input as (N, T, d): the same object for layers that read the same, unchanged tensor."""
        version = 0 if x.is_inference() else x._version  # counts the changes in place
        for seen, seen_version, view in self._views:
            if seen() is x and seen_version == version:
                return view
        if layer.kernel is not None:
            view = F.unfold(x.detach(), kernel_size=layer.kernel[1:], stride=layer.kernel[1:]).transpose(1, 2)
        else:
            view = tokens(x.detach())
        self._views.append((weakref.ref(x), version, view))
        return view

    def _layers_of(self, weight: Any, in_by_out: bool) -> tuple[list[Layer], int]:
        """The watched layers computed by this use of a weight, itself or a view of it, and its first row."""
        if not isinstance(weight, Tensor):
            return [], 0
        base, first_row = weight, 0
        if id(weight) not in self._watched:
            base = weight._base  # type: ignore[assignment]
            if base is None or id(base) not in self._watched:
                return [], 0
            if weight.ndim == 2 and weight.shape == base.shape[::-1] and weight.stride() == base.stride()[::-1]:
                in_by_out = not in_by_out
            elif weight.shape[1:] == base.shape[1:] and weight.stride() == base.stride():
                first_row = (weight.storage_offset() - base.storage_offset()) // base.stride(0)
            else:
                return [], 0
        rows = (first_row, first_row + weight.shape[0])
        whole = weight.shape == base.shape or weight.shape == base.shape[::-1]
        layers = [
            layer
            for layer in self._watched[id(base)]
            if layer.transposed == in_by_out and (whole or _inside(layer, rows))
        ]
        return layers, first_row


def _inside(layer: Layer, rows: tuple[int, int]) -> bool:
    return layer.rows is not None and all(rows[0] <= start and stop <= rows[1] for start, stop in layer.rows)


def _rows(result: Tensor, layer: Layer, first_row: int) -> Tensor:
    """The part of a fused output (or its gradient) that belongs to one layer."""
    if layer.rows is None:
        return result
    parts = [result[..., start - first_row : stop - first_row] for start, stop in layer.rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _tokens(tensor: Tensor, size: int, sequence_first: int | None) -> Tensor:
    """Any activation as (N, T, d). `sequence_first` is the batch size of a (L, N, E) or (L*N, E) tensor."""
    if sequence_first is not None:
        return tensor.reshape(-1, sequence_first, tensor.shape[-1]).transpose(0, 1)
    if tensor.ndim == 3 and tensor.shape[0] != size and tensor.shape[1] == size:
        return tensor.transpose(0, 1)
    if tensor.ndim >= 2 and tensor.shape[0] % size == 0:
        return tensor.reshape(size, -1, tensor.shape[-1])
    return tensor.reshape(1, -1, tensor.shape[-1])


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs[name]


def count_samples(batches: Iterable[Any]) -> int:
    """The number of samples in all batches."""
    return sum(
        (batch.size or _first_dimension(batch.target)) if isinstance(batch, PairedBatch) else _first_dimension(batch)
        for batch in batches
    )


def _first_dimension(batch: Any) -> int:
    """The number of samples in a batch: the first dimension of the first tensor in it."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0])
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for value in values:
        if isinstance(value, (Tensor, Mapping, tuple, list)):
            return _first_dimension(value)
    raise CaptureError(f"cannot tell the size of a batch of type {type(batch).__name__}; use PairedBatch(size=...).")


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
