"""How alike two models are inside, layer by layer: CKA and cosines before and after alignment, drift. No verdicts.

The models run through `capture.measure_pairs`, with the sums of `similarity` in the place of its own: token matching,
shared inputs and restoring are those of a transfer. Numbers that the data leave open are NaN.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from ..data.dataset import Dataset
from ..errors import TuneportError, first_of
from ..maps.procrustes import MapSolver
from ..maps.statistics import Key, S, Statistics
from ..models.base import Model
from ..pairing import LayerPair
from ..types import Completion, Loss, Progress
from .accuracy import encoded
from .batches import PairedBatch
from .capture import MakeSum, measure_pairs
from .objectives import forward_only
from .signals import INPUT, OUTPUT, OUTPUT_GRADIENT, SIGNALS
from .similarity import NAN, Similarity, TokenAgreement
from .tokens import Match, match_tokens

COMPARED = (INPUT, OUTPUT, OUTPUT_GRADIENT)


@dataclass(frozen=True)
class LayerSimilarity:
    """How alike one signal of two paired layers is.

    `cosine_before` and `cosine_after` are means over tokens, without and with the Procrustes map of that signal;
    `cosine_held_out` is the latter on tokens that the map has not seen. `rank` and `residual` are the map's.
    """

    target: str
    source: str
    role: str
    block: int | None
    signal: str
    tokens: int
    cka: float
    cka_debiased: float
    cosine_before: float
    cosine_after: float = NAN
    cosine_held_out: float = NAN
    rank: int | None = None
    residual: float | None = None


@dataclass(frozen=True)
class Drift:
    """How far a layer's input has moved from the base model's after so many steps of fine-tuning."""

    step: int
    layer: str
    role: str
    block: int | None
    direction: float
    magnitude: float


def layer_similarity(
    source: nn.Module,
    target: nn.Module,
    pairs: Sequence[LayerPair],
    batches: Iterable[Any],
    *,
    source_loss: Loss,
    target_loss: Loss,
    signals: Collection[str] = COMPARED,
    held_out: Iterable[Any] = (),
    aligned: bool = True,
    completion: Completion = "svd",
    match: Match | None = None,
    progress: Progress | None = None,
) -> tuple[LayerSimilarity, ...]:
    """CKA, cosine, rank and residual of every pair and signal, over the batches.

    The models run over `batches` twice: once for the sums and the maps, once for the cosine under the maps
    (`aligned=False` leaves that out), and over `held_out` for the cosine that counts: the maps have not seen it.
    Batches and losses are those of `capture.measure_pairs`; batches that can be read only once do not serve.
    """

    def run(over: Iterable[Any], make_sum: MakeSum[S]) -> Statistics[S]:
        return measure_pairs(
            source,
            target,
            pairs,
            over,
            signals=signals,
            source_loss=source_loss,
            target_loss=target_loss,
            match=match,
            progress=progress,
            make_sum=make_sum,
        )

    if aligned and iter(batches) is batches:
        raise TuneportError("layer_similarity reads its batches twice; give a list, not an iterator.")
    found = run(batches, lambda _pair, _signal, source, target, device: Similarity(source, target, device=device))
    if not aligned:
        return tuple(_similarities(pairs, found))
    solver = MapSolver(Statistics(found.covariances), completion)

    def mapped(pair: LayerPair, signal: str, source: int, target: int, _device: torch.device) -> TokenAgreement:
        key = (pair.target.name, signal)
        return TokenAgreement(source, target, matrix=solver.solve([key])[key].matrix)

    after = run(batches, mapped).covariances
    unseen = run(held_out, mapped).covariances if _any(held_out) else {}
    return tuple(_similarities(pairs, found, solver, after, unseen))


def _similarities(
    pairs: Sequence[LayerPair],
    statistics: Statistics[Similarity],
    solver: MapSolver | None = None,
    after: Mapping[Key, TokenAgreement] | None = None,
    held_out: Mapping[Key, TokenAgreement] | None = None,
) -> Iterator[LayerSimilarity]:
    """In the order of the pairs, not of the signals' arrival."""
    for pair, signal in product(pairs, SIGNALS):
        key = (pair.target.name, signal)
        found = statistics.covariances.get(key)
        if found is None:
            continue
        aligned = solver.solve([key])[key] if solver is not None else None
        yield LayerSimilarity(
            pair.target.name,
            pair.source.name,
            pair.target.role,
            pair.target.block,
            signal,
            found.tokens,
            found.cka(),
            found.cka(debiased=True),
            found.cosine,
            _cosine_of(after, key),
            _cosine_of(held_out, key),
            aligned.rank if aligned else None,
            aligned.residual if aligned else None,
        )


def _cosine_of(sums: Mapping[Key, TokenAgreement] | None, key: Key) -> float:
    return sums[key].cosine if sums and key in sums else NAN


def output_similarity(
    model: Model, reference: Model, data: Dataset, *, batch_size: int = 32
) -> tuple[LayerSimilarity, ...]:
    """CKA and cosine of every layer's outputs to those of a reference of the same architecture.

    The paper compares a ported target with the fine-tuned target. Both models run forward once over the data.
    """
    pairs = _same_layers(model, reference)
    return layer_similarity(
        reference.module,
        model.module,
        pairs,
        _batches(model, data, batch_size),
        source_loss=forward_only(reference),
        target_loss=forward_only(model),
        signals=(OUTPUT,),
        aligned=False,
    )


def activation_drift(
    base: Model, checkpoints: Iterable[tuple[int, nn.Module]], data: Dataset, *, batch_size: int = 32
) -> tuple[Drift, ...]:
    """How layer inputs move along a fine-tuning trajectory: for each (step, module), each layer.

    Direction is the mean over tokens of `1 - cos(x_t, x_pre)`, magnitude that of `| |x_t| - |x_pre| | / |x_pre|`.
    Checkpoints are modules of the base's architecture, taken one at a time.
    """
    found = []
    for step, module in checkpoints:
        tuned = base.with_module(module)
        pairs = _same_layers(tuned, base)
        sums = measure_pairs(
            base.module,
            module,
            pairs,
            _batches(base, data, batch_size),
            signals=(INPUT,),
            source_loss=forward_only(base),
            target_loss=forward_only(tuned),
            make_sum=lambda _pair, _signal, source, target, _device: TokenAgreement(source, target),
        ).covariances
        for pair in pairs:
            moved = sums.get((pair.target.name, INPUT))
            if moved is not None:
                layer = pair.target
                found.append(Drift(step, layer.name, layer.role, layer.block, moved.direction, moved.magnitude))
    return tuple(found)


def by_block(items: Iterable[Any], value: str) -> dict[int, float]:
    """The mean of a field over the layers of each block, as the paper's figures show it; NaN does not count."""
    groups: dict[int, list[float]] = defaultdict(list)
    for item in items:
        number = getattr(item, value)
        if item.block is not None and number is not None and math.isfinite(number):
            groups[item.block].append(number)
    return {block: sum(values) / len(values) for block, values in sorted(groups.items())}


def _same_layers(model: Model, reference: Model) -> list[LayerPair]:
    """Each layer with itself in the reference; models of other architectures are refused."""
    theirs = {layer.name: layer for layer in reference.layers}
    missing = [
        layer.name
        for layer in model.layers
        if layer.name not in theirs or theirs[layer.name].weight_shape != layer.weight_shape
    ]
    if missing or len(theirs) != len(model.layers):
        raise TuneportError(
            f"{model.name} and {reference.name} differ in architecture ({first_of(missing) or 'more layers'}); "
            "layers can only be compared one by one between two models of the same one."
        )
    return [LayerPair(theirs[layer.name], layer) for layer in model.layers]


def _batches(model: Model, data: Dataset, size: int) -> Iterator[PairedBatch]:
    """The data as one model reads it, for both of two models of one architecture."""
    for batch, labels in encoded(model, data, size):
        layout = model.layout(batch) if model.layout is not None else None
        yield PairedBatch((batch, labels), (batch, labels), len(labels), match_tokens(layout, layout))


def _any(batches: Iterable[Any]) -> bool:
    return next(iter(batches), None) is not None
