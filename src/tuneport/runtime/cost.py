"""The FLOPs of a transfer: one count for its plan, and the paper's formula.

The count runs both models once on the meta device, through the code that measures, so it includes attention, pooling
and the effect of frozen weights. A multiplication and an addition count as two operations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from ..job import Drawn, Job
from ..layers import Layer
from ..maps.covariance import CrossCovariance
from ..measure.batches import PairedBatch, count_samples, move_batch
from ..measure.signals import NEEDS_BACKWARD, WEIGHT_GRADIENT, watch
from ..measure.tokens import match_tokens
from ..models.base import MIXTURE
from ..pairing import LayerPair
from ..report.record import Cost, CountedCost, PaperCost
from ..types import Loss, Sides
from .forecast import NeedsValuesError, OnMeta, by_shape, meta_errors, shapes_of

FORWARD, BACKWARD = 2, 4  # FLOPs per parameter and token of a pass, in the paper's appendix
UPDATE = 10  # FLOPs per parameter of a step of Adam, for any number of tokens
FINE_TUNING_STEPS = 2000  # of the paper's protocol
SVD = 20  # FLOPs of a thin SVD with both factors, per min(d)^2 max(d); an estimate, it depends on the library


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a transfer; `dense` maps are solved from summed `statistics`, `thin` ones from few tokens."""

    forward: int = 0
    backward: int = 0
    statistics: int = 0
    dense: int = 0
    thin: int = 0
    transport: int = 0

    def record(self) -> CountedCost:
        """The kinds that a run record lists, and their total."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "statistics": self.statistics,
            "solves": self.dense + self.thin,
            "transport": self.transport,
            "total": sum(astuple(self)),
        }


@dataclass(frozen=True)
class BatchCost:
    """One batch on the meta device: FLOPs (forward by model), samples, and tokens of each model.

    `matched` counts the tokens that enter a sum by (target layer, signal), once for layers that read the same tensors.
    """

    forward: Sides[int]
    backward: int
    samples: int
    tokens: Sides[int]
    matched: Mapping[tuple[str, str], int]


def cost_of(job: Job, samples: int | None = None, once: BatchCost | None = None) -> Cost:
    """The FLOPs of a job on `samples` samples (default: those it has drawn), as plain numbers.

    `paper` follows the appendix on cost: 2 P FLOPs forward and 4 P backward per token and model, and
    2 L (M d_A d_B + d_A^2 d_B) + L (d_A^2 d_B + d_A d_B^2) for the alignment, with the most common widths; and
    2,000 steps of fine-tuning, each a pass over as many tokens and an update, 10 P_B. `counted` is the count for this
    plan; None if the models need data to run. A search for the scale is not counted.
    """
    samples = len(job.samples) if samples is None else samples
    once = once or (batch_cost(job) if samples else None)
    scale = samples / once.samples if once is not None else 0.0
    tokens = [round(count * scale) for count in once.tokens] if once is not None else _likely_tokens(job, samples)
    sizes = [sum(parameter.numel() for parameter in model.module.parameters()) for model in job.models]
    counted = flops_of(job, samples, once) if once is not None or not job.signals else None
    return {
        "parameters": {"source": sizes[0], "target": sizes[1]},
        "tokens": {"source": tokens[0], "target": tokens[1]},
        "paper": _paper(job, sizes, tokens),
        "statistics_bytes": sum(
            tokens * (rows + columns) * _itemsize(job) if kept else 8 * rows * columns
            for _, rows, columns, tokens, kept in _sums_after(job, samples, once)
        ),
        "counted": None if counted is None else counted.record(),
    }


def flops_of(job: Job, samples: int, once: BatchCost | None = None) -> Flops | None:
    """The FLOPs of a job on `samples` samples by kind; None if the models need data to run."""
    once = once or batch_cost(job)
    transport = sum(_transport(job, pair) for pair in job.plan.pairs)
    if once is None:
        return None if job.signals else Flops(transport=transport)
    scale = samples / once.samples
    statistics = dense = thin = 0
    for signal, rows, columns, tokens, kept in _sums_after(job, samples, once):
        short, long = sorted((rows, columns))
        if kept and CrossCovariance.is_thin(tokens, (short, long)):
            thin += thin_flops(short, long, tokens)
            continue
        statistics += 2 * tokens * short * long
        if signal != WEIGHT_GRADIENT:  # no map is solved from it
            dense += SVD * short**2 * long
    return Flops(round(sum(once.forward) * scale), round(once.backward * scale), statistics, dense, thin, transport)


def thin_flops(short: int, long: int, tokens: int) -> int:
    """A map from few tokens: two QR factorisations, small problems of their number, and the completion."""
    return 30 * (short + long) * tokens**2 + 100 * tokens**3


def _paper(job: Job, sizes: list[int], tokens: list[int]) -> PaperCost:
    """The formula of the paper's appendix on cost (eqs. 13 to 17)."""
    backward = BACKWARD if NEEDS_BACKWARD & job.signals else 0
    passes = (FORWARD + backward) * sum(size * count for size, count in zip(sizes, tokens, strict=True))
    sides = zip(*((pair.source.in_features, pair.target.in_features) for pair in job.plan.pairs), strict=True)
    d_A, d_B = sorted(Counter(widths).most_common(1)[0][0] for widths in sides)
    L, M = len(job.plan.pairs), tokens[1]
    maps = len(job.signals)  # each is a map: one or two for the bilinear methods
    alignment = maps * L * (M * d_A * d_B + d_A**2 * d_B) + L * (d_A**2 * d_B + d_A * d_B**2)
    tuning = FINE_TUNING_STEPS * ((FORWARD + BACKWARD) * tokens[1] + UPDATE) * sizes[1]
    return {"passes": passes, "alignment": alignment, "total": passes + alignment, "fine_tuning": tuning}


def _sums_after(job: Job, samples: int, once: BatchCost | None) -> Iterator[tuple[str, int, int, int, bool]]:
    """Every sum after all samples: signal, widths, tokens that enter it, and whether these are kept unsummed."""
    for pair, signal, rows, columns in _sums(job, once):
        tokens = 0 if once is None else round(once.matched[pair.target.name, signal] * samples / once.samples)
        kept = False
        if once is not None and signal != WEIGHT_GRADIENT:  # whose tokens are neither limited nor kept
            tokens = min(tokens, job.max_tokens or tokens)
            kept = CrossCovariance.keeps_tokens(tokens * (rows + columns) * _itemsize(job), (rows, columns))
        yield signal, rows, columns, tokens, kept


def _itemsize(job: Job) -> int:
    return next(job.target.module.parameters()).dtype.itemsize


def _sums(job: Job, once: BatchCost | None) -> Iterator[tuple[LayerPair, str, int, int]]:
    """Every sum once: pair, signal and the two widths. Without `once`, no two layers count as sharing one."""
    for pair in job.plan.pairs:
        source, target = pair.source, pair.target
        for signal in sorted(pair.wanted(job.signals)):
            if once is not None and (target.name, signal) not in once.matched:
                continue
            if signal == WEIGHT_GRADIENT:
                yield pair, signal, target.out_features, target.in_features
            elif signal.startswith("input"):
                yield pair, signal, source.in_features, target.in_features
            else:
                yield pair, signal, source.out_features, target.out_features


def _transport(job: Job, pair: LayerPair) -> int:
    """R_out^T tau R_in, left to right; a low-rank tau is multiplied by its factors."""
    out_A, in_A = pair.source.out_features, pair.source.in_features
    out_B, in_B = pair.target.out_features, pair.target.in_features
    rank = job.task_vector.spec(pair.source.weight).rank
    if rank is not None:
        return 2 * rank * (out_A * out_B + in_A * in_B)
    return 2 * out_B * out_A * in_A + 2 * out_B * in_A * in_B


def batch_cost(job: Job) -> BatchCost | None:
    """Count one batch; None if nothing is measured, or if the models need data to run."""
    batch = job.samples.typical() if job.signals else None
    mixture = any(MIXTURE in model.outside.values() for model in job.models)  # values choose the experts
    if batch is None or job.losses is None or mixture:
        return None
    with suppress(NeedsValuesError), meta_errors():
        return _count(job, batch, job.losses)
    return None


def _likely_tokens(job: Job, samples: int) -> list[int]:
    """Tokens of each model by the layout of its inputs, or one per sample; 0 if nothing is measured."""
    if not job.signals:
        return [0, 0]
    if not isinstance(job.samples, Drawn):
        return [samples, samples]
    first = next(iter(job.samples.take(slice(1))))
    sides = zip(job.models, (first.source, first.target), strict=True)
    layouts = [model.layout(batch[0]) if model.layout is not None else None for model, batch in sides]
    return [samples * (found.prefix + math.prod(found.grid) if found else 1) for found in layouts]


class _Counter(OnMeta):
    """Add up FLOPs by torch's formulas, without sorting them by module as its `FlopCounterMode` does."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if (flops := flop_registry.get(func._overloadpacket)) is not None:
            self.total += flops(*args, **(kwargs or {}), out_val=found)
        return found


def _count(job: Job, batch: PairedBatch, losses: Sides[Loss]) -> BatchCost:
    layers: Sides[dict[Layer, frozenset[str]]] = Sides({}, {})
    for pair in job.plan.pairs:
        layers.target[pair.target] = found = pair.wanted(job.signals)
        layers.source[pair.source] = layers.source.get(pair.source, frozenset()) | (found - {WEIGHT_GRADIENT})
    size = count_samples([batch])
    forward = [0, 0]
    signals: list[dict[tuple[str, str], list[Tensor]]] = []
    with _Counter() as counter:
        sides = zip(job.models, (batch.source, batch.target), losses, layers, strict=True)
        for number, (model, inputs, loss, own) in enumerate(sides):

            def counted(module: nn.Module, inputs: Any, loss: Loss = loss, number: int = number) -> Tensor:
                before = counter.total
                value = loss(module, inputs)
                forward[number] += counter.total - before
                return value

            on_meta = shapes_of(model.module), own, move_batch(inputs, torch.device("meta"))
            signals.append(watch(*on_meta, counted, job.signals, size) if any(own.values()) else {})
    match = by_shape(batch.match or job.match or match_tokens(None, None), job.target.device)
    matched: dict[tuple[str, str], int] = {}
    summed: set[tuple[int, ...]] = set()
    for pair in job.plan.pairs:
        for signal in job.signals:
            source = signals[0].get((pair.source.name, signal), [])
            target = signals[1].get((pair.target.name, signal), [])
            if signal == WEIGHT_GRADIENT:
                matched[pair.target.name, signal] = _tokens(target)
            elif len(source) == len(target) and (both := tuple(map(id, (*source, *target)))) not in summed:
                summed.add(both)
                matched[pair.target.name, signal] = sum(len(rows) for _, rows in map(match, source, target))
    tokens = Sides(*(max(map(_tokens, seen.values()), default=0) for seen in signals))
    return BatchCost(Sides(*forward), counter.total - sum(forward), size, tokens, matched)


def _tokens(calls: list[Tensor]) -> int:
    """The tokens of a signal (N, T, d) in all calls of a layer."""
    return sum(tensor.shape[:2].numel() for tensor in calls)
