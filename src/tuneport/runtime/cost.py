"""What a transfer costs in floating-point operations: the paper's estimate, and the count for one plan.

The count runs both models once on the meta device, where tensors have shapes and no numbers, through the very
code that measures; so it knows what attention, pooling and frozen weights really cost, and takes no time to
speak of. A multiplication with its addition counts two, as everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..job import Job, PairedBatches
from ..layers import Layer
from ..measure.batches import PairedBatch, count_samples
from ..measure.signals import (
    INPUT,
    INPUT_GRADIENT,
    NEEDS_BACKWARD,
    OUTPUT,
    OUTPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Loss,
    watch,
)
from ..measure.tokens import match_tokens
from ..pairing import LayerPair
from .forecast import WithoutNumbers, first_batch, shapes_of, to_meta

FORWARD, BACKWARD, UPDATE = 2, 4, 10  # FLOPs per parameter and token in the paper's appendix
FINE_TUNING_STEPS = 2000  # of the paper's protocol
SVD = 20  # FLOPs of a thin SVD with both factors, per min(d)^2 max(d); an estimate, it depends on the library


@dataclass(frozen=True)
class BatchCost:
    """One batch on the meta device: FLOPs, samples, tokens of each model, and what each pair adds to its sums.

    `matched` counts the tokens by (target layer, signal); of layers that read the same tensors only the first is there.
    """

    forward: int
    backward: int
    samples: int
    tokens: tuple[int, int]
    matched: Mapping[tuple[str, str], int]


def cost_of(job: Job, samples: int | None = None) -> dict[str, Any]:
    """The FLOPs of a job on `samples` samples (those it has drawn, unless told), as plain numbers.

    `paper` follows the appendix on cost: 2 P FLOPs forward and 4 P backward per token and model, and
    2 L (M d_A d_B + d_A^2 d_B) + L (d_A^2 d_B + d_A d_B^2) for the alignment, with the most common widths; beside it
    2,000 steps of fine-tuning at 16 P_B, each a pass over as many tokens. `counted` is the sum over what this plan
    does; None where the models do not run without data. A search for the scale is not counted.
    """
    samples = job.samples if samples is None else samples
    once = _batch_cost(job) if job.method.signals and samples else None
    scale = samples / once.samples if once is not None else 0.0
    tokens = [round(count * scale) for count in once.tokens] if once is not None else _likely_tokens(job, samples)
    sizes = [sum(parameter.numel() for parameter in model.module.parameters()) for model in (job.source, job.target)]
    return {
        "parameters": dict(zip(("source", "target"), sizes, strict=True)),
        "tokens": dict(zip(("source", "target"), tokens, strict=True)),
        "paper": _paper(job, sizes, tokens),
        "statistics_bytes": sum(8 * ours * theirs for _, _, ours, theirs in _maps(job, once)),
        "counted": _counted(job, once, scale) if once is not None or not job.method.signals else None,
    }


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a transfer by kind, as it is really done: few tokens are kept, not summed, and solved as factors."""

    forward: int
    backward: int
    sums: int
    dense: int
    thin: int
    transport: int


def flops_of(job: Job, samples: int) -> Flops | None:
    """The FLOPs of a job on so many samples; None where the models do not run without data."""
    once = _batch_cost(job)
    if once is None:
        return None
    scale = samples / once.samples
    sums = dense = thin = 0
    for pair, signal, ours, theirs in _maps(job, once):
        tokens = round(once.matched[pair.target.name, signal] * scale)
        tokens = min(tokens, job.max_tokens or tokens)
        short, long = sorted((ours, theirs))
        if 5 * tokens <= 4 * short:
            thin += thin_flops(short, long, tokens)
        else:
            dense += SVD * short**2 * long
            sums += 2 * tokens * short * long
    moving = sum(_transport(job, pair) for pair in job.plan.pairs)
    return Flops(round(once.forward * scale), round(once.backward * scale), sums, dense, thin, moving)


def thin_flops(short: int, long: int, tokens: int) -> int:
    """A map from few tokens: two QR factorisations, small problems of their number, and the completion."""
    return 30 * (short + long) * tokens**2 + 100 * tokens**3


def _paper(job: Job, sizes: list[int], tokens: list[int]) -> dict[str, int]:
    backward = BACKWARD if NEEDS_BACKWARD & job.method.signals else 0
    passes = (FORWARD + backward) * sum(size * count for size, count in zip(sizes, tokens, strict=True))
    sides = [[pair.source for pair in job.plan.pairs], [pair.target for pair in job.plan.pairs]]
    d_A, d_B = sorted(Counter(layer.in_features for layer in layers).most_common(1)[0][0] for layers in sides)
    L, M = len(job.plan.pairs), tokens[1]
    maps = len(job.method.signals)  # each is a map: one or two for the bilinear methods
    alignment = maps * L * (M * d_A * d_B + d_A**2 * d_B) + L * (d_A**2 * d_B + d_A * d_B**2)
    step = (FORWARD + BACKWARD + UPDATE) * sizes[1] * tokens[1]
    return {
        "passes": passes,
        "alignment": alignment,
        "total": passes + alignment,
        "fine_tuning": FINE_TUNING_STEPS * step,
    }


def _counted(job: Job, once: BatchCost | None, scale: float) -> dict[str, int]:
    statistics = solves = 0
    for pair, signal, ours, theirs in _maps(job, once):
        matched = once.matched[pair.target.name, signal] if once is not None else 0
        statistics += round(2 * matched * scale * ours * theirs)
        solves += SVD * min(ours, theirs) ** 2 * max(ours, theirs) if signal != WEIGHT_GRADIENT else 0
    found = {
        "forward": round(once.forward * scale) if once is not None else 0,
        "backward": round(once.backward * scale) if once is not None else 0,
        "statistics": statistics,
        "solves": solves,
        "transport": sum(_transport(job, pair) for pair in job.plan.pairs),
    }
    return {**found, "total": sum(found.values())}


def _maps(job: Job, once: BatchCost | None) -> Iterator[tuple[LayerPair, str, int, int]]:
    """Every sum that is kept, once: pair, signal and the two widths; without `once`, as if no two layers shared one."""
    for pair in job.plan.pairs:
        source, target = pair.source, pair.target
        for signal in sorted(job.method.signals):
            fixed = pair.input_map if signal.startswith("input") else pair.output_map
            if fixed is not None and signal != WEIGHT_GRADIENT:
                continue
            if once is not None and (target.name, signal) not in once.matched:
                continue
            if signal == WEIGHT_GRADIENT:
                yield pair, signal, target.out_features, target.in_features
            elif signal.startswith("input"):
                yield pair, signal, source.in_features, target.in_features
            else:
                yield pair, signal, source.out_features, target.out_features


def _transport(job: Job, pair: LayerPair) -> int:
    """R_out^T tau R_in from the left to the right; a low-rank tau moves as its factors."""
    out_A, in_A = pair.source.out_features, pair.source.in_features
    out_B, in_B = pair.target.out_features, pair.target.in_features
    rank = job.task_vector.spec(pair.source.weight).rank
    if rank is not None:
        return 2 * rank * (out_A * out_B + in_A * in_B)
    return 2 * out_B * out_A * in_A + 2 * out_B * in_A * in_B


def _batch_cost(job: Job) -> BatchCost | None:
    batch = first_batch(job)
    if batch is None or job.source_loss is None or job.target_loss is None:
        return None
    try:
        return _count(job, batch, job.source_loss, job.target_loss)
    except Exception:  # a model or a loss from elsewhere may look at numbers, and there are none
        return None


def _likely_tokens(job: Job, samples: int) -> list[int]:
    """Tokens of each model by what their families know of the inputs, else one per sample; none if none is measured."""
    if not job.method.signals:
        return [0, 0]
    if not isinstance(job.batches, PairedBatches):
        return [samples, samples]
    first = next(iter(replace(job.batches, indices=job.batches.indices[:1])))
    layouts = [
        model.layout(batch[0]) if model.layout is not None else None
        for model, batch in ((job.source, first.source), (job.target, first.target))
    ]
    return [samples * (found.prefix + found.grid[0] * found.grid[1] if found else 1) for found in layouts]


def _count(job: Job, batch: PairedBatch, source_loss: Loss, target_loss: Loss) -> BatchCost:
    backward = bool(NEEDS_BACKWARD & job.method.signals)
    forward_flops = backward_flops = 0
    signals: list[dict[tuple[str, str], list[Tensor]]] = []
    ours_by_layer, theirs_by_layer = _wanted(job)
    sides = (
        (job.source.module, batch.source, source_loss, ours_by_layer),
        (job.target.module, batch.target, target_loss, theirs_by_layer),
    )
    size = count_samples([batch])
    wanted = set(job.method.signals)
    for module, inputs, loss, layers in sides:
        if not any(layers.values()):
            signals.append({})
            continue
        counter = _PassCounter()
        with WithoutNumbers(), counter:
            seen = watch(shapes_of(module), layers, to_meta(inputs), counter.split(loss), wanted, size)
        signals.append(seen)
        forward_flops += counter.forward
        backward_flops += counter.get_total_flops() - counter.forward if backward else 0
    match = batch.match or job.match or match_tokens(None, None)
    matched: dict[tuple[str, str], int] = {}
    known: dict[Any, int] = {}

    def paired(ours: Tensor, theirs: Tensor) -> int:
        shapes = ours.shape[:2], theirs.shape[:2]
        if shapes not in known:  # the widths do not matter
            known[shapes] = len(match(*(torch.zeros(*shape, 1, device=job.target.device) for shape in shapes))[1])
        return known[shapes]

    summed: set[tuple[int, ...]] = set()
    for pair in job.plan.pairs:
        for signal in wanted:
            ours = signals[0].get((pair.source.name, signal), [])
            theirs = signals[1].get((pair.target.name, signal), [])
            if signal == WEIGHT_GRADIENT:
                matched[pair.target.name, signal] = sum(tensor.shape[0] * tensor.shape[1] for tensor in theirs)
            elif len(ours) == len(theirs) and (both := tuple(map(id, (*ours, *theirs)))) not in summed:
                summed.add(both)
                matched[pair.target.name, signal] = sum(map(paired, ours, theirs))
    tokens = [
        max((sum(tensor.shape[0] * tensor.shape[1] for tensor in calls) for calls in seen.values()), default=0)
        for seen in signals
    ]
    return BatchCost(forward_flops, backward_flops, size, (tokens[0], tokens[1]), matched)


def _wanted(job: Job) -> tuple[dict[Layer, frozenset[str]], dict[Layer, frozenset[str]]]:
    """The signals that are measured at each layer of the source and of the target: none where a map is fixed."""
    ours: dict[Layer, frozenset[str]] = {}
    theirs: dict[Layer, frozenset[str]] = {}
    for pair in job.plan.pairs:
        wanted = job.method.signals
        wanted -= {INPUT, INPUT_GRADIENT} if pair.input_map is not None else set()
        wanted -= {OUTPUT, OUTPUT_GRADIENT} if pair.output_map is not None else set()
        ours[pair.source] = ours.get(pair.source, frozenset()) | (wanted - {WEIGHT_GRADIENT})
        theirs[pair.target] = wanted
    return ours, theirs


class _PassCounter(FlopCounterMode):
    """Counts FLOPs, and remembers how many there were when the loss was known: those of the forward pass."""

    def __init__(self) -> None:
        super().__init__(display=False)
        self.forward = 0

    def split(self, loss: Loss) -> Loss:
        def counted(module: nn.Module, batch: Any) -> Tensor:
            value = loss(module, batch)
            self.forward = self.get_total_flops()
            return value

        return counted
