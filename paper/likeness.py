"""Similarity of two models, layer by layer: CKA, cosines before and after alignment, drift along a fine-tuning.

Tokens are matched and models restored as in a transfer. Numbers that the data do not determine are NaN.
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

from tuneport.data.dataset import Dataset
from tuneport.errors import TuneportError, first_of
from tuneport.maps.procrustes import solve_maps
from tuneport.maps.statistics import Key, Statistics
from tuneport.measure.accuracy import encode_batch
from tuneport.measure.capture import MakeSum, PairedBatch, Request, measure_pairs
from tuneport.measure.objectives import forward_only
from tuneport.measure.signals import INPUT, OUTPUT, OUTPUT_GRADIENT, SIGNALS
from tuneport.measure.tokens import Match, match_tokens
from tuneport.models.base import Model
from tuneport.pairing import LayerPair
from tuneport.types import Completion, Loss, Progress, Sides, ignore

from .similarity import NAN, Similarity, TokenAgreement

COMPARED = (INPUT, OUTPUT, OUTPUT_GRADIENT)


@dataclass(frozen=True)
class LayerSimilarity:
    """The similarity of one signal of two paired layers.

    `cosine_before` and `cosine_after` are means over tokens, without and with the Procrustes map of that signal;
    `cosine_held_out` is the latter on tokens that the map did not use. `rank` and `residual` are the map's.
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
    """The distance of a layer's input from the base model's after `step` steps of fine-tuning."""

    step: int
    layer: str
    role: str
    block: int | None
    direction: float
    magnitude: float


def compare_layers(
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
    progress: Progress = ignore,
) -> tuple[LayerSimilarity, ...]:
    """CKA, cosine, rank and residual of every pair and signal, over the batches.

    The models run over `batches` twice: once for the sums and the maps, once for the cosine under the maps; then over
    `held_out`. `aligned=False` leaves out the maps. The other arguments are those of `capture.measure_pairs`.
    """

    def run(over: Iterable[Any], make_sum: MakeSum) -> Mapping[Key, Any]:
        losses, request = Sides(source_loss, target_loss), Request(signals, match, make_sum=make_sum)
        return measure_pairs(Sides(source, target), pairs, over, losses, request, progress=progress).covariances

    def make_agreement(key: Key, source: int, target: int, _device: torch.device) -> TokenAgreement:
        return TokenAgreement(source, target, matrix=maps[key].map.dense())

    if aligned and iter(batches) is batches:
        raise TuneportError("compare_layers reads its batches twice; give a list, not an iterator.")
    found = run(batches, lambda _key, source, target, device: Similarity(source, target, device=device))
    maps = solve_maps(Statistics(found), found, completion) if aligned else {}
    after = run(batches, make_agreement) if aligned else {}
    held = run(held_out, make_agreement) if aligned and next(iter(held_out), None) is not None else {}
    return tuple(
        LayerSimilarity(
            pair.target.name,
            pair.source.name,
            pair.target.role,
            pair.target.block,
            signal,
            found[key].tokens,
            found[key].cka(),
            found[key].cka(debiased=True),
            found[key].cosine,
            after[key].cosine if key in after else NAN,
            held[key].cosine if key in held else NAN,
            maps[key].rank if aligned else None,
            maps[key].residual if aligned else None,
        )
        for pair, signal in product(pairs, SIGNALS)
        if (key := (pair.target.name, signal)) in found
    )


def compare_outputs(
    model: Model, reference: Model, data: Dataset, *, batch_size: int = 32
) -> tuple[LayerSimilarity, ...]:
    """CKA and cosine of every layer's outputs and those of a reference of the same architecture.

    The paper compares a ported target with the fine-tuned target. Both models run forward once over the data.
    """
    return compare_layers(
        reference.module,
        model.module,
        _pair_equal_layers(model, reference),
        _batches(model, data, batch_size),
        source_loss=forward_only(reference),
        target_loss=forward_only(model),
        signals=(OUTPUT,),
        aligned=False,
    )


def measure_drift(
    base: Model, checkpoints: Iterable[tuple[int, nn.Module]], data: Dataset, *, batch_size: int = 32
) -> tuple[Drift, ...]:
    """The change of every layer's inputs along a fine-tuning, for each (step, module) of the base's architecture.

    Direction is the mean over tokens of `1 - cos(x_t, x_pre)`, magnitude that of `| |x_t| - |x_pre| | / |x_pre|`.
    """
    found: list[Drift] = []
    for step, module in checkpoints:
        tuned = base.with_module(module)
        sums: Mapping[Key, Any] = measure_pairs(
            Sides(base.module, module),
            _pair_equal_layers(tuned, base),
            _batches(base, data, batch_size),
            Sides(forward_only(base), forward_only(tuned)),
            Request((INPUT,), make_sum=lambda _key, source, target, _device: TokenAgreement(source, target)),
        ).covariances
        found += [
            Drift(step, layer.name, layer.role, layer.block, moved.direction, moved.magnitude)
            for layer in tuned.architecture.layers
            if (moved := sums.get((layer.name, INPUT))) is not None
        ]
    return tuple(found)


def average_by_block(items: Iterable[Any], value: str) -> dict[int, float]:
    """The mean of a field over the layers of each block, without NaN and None."""
    groups: dict[int, list[float]] = defaultdict(list)
    for item in items:
        number = getattr(item, value)
        if item.block is not None and number is not None and math.isfinite(number):
            groups[item.block].append(number)
    return {block: sum(values) / len(values) for block, values in sorted(groups.items())}


def _pair_equal_layers(model: Model, reference: Model) -> list[LayerPair]:
    """Pair each layer with the layer of that name in the reference; different architectures are refused."""
    known = {layer.name: layer for layer in reference.architecture.layers}
    shapes = {name: layer.weight_shape for name, layer in known.items()}
    missing = [layer.name for layer in model.architecture.layers if shapes.get(layer.name) != layer.weight_shape]
    if missing or len(known) != len(model.architecture.layers):
        raise TuneportError(
            f"{model.name} and {reference.name} differ in architecture ({first_of(missing) or 'more layers'}); "
            "layers can only be compared one by one between two models of the same one."
        )
    return [LayerPair(known[layer.name], layer) for layer in model.architecture.layers]


def _batches(model: Model, data: Dataset, size: int) -> Iterator[PairedBatch]:
    """Batches for two models of one architecture, encoded by one of them."""
    for start in range(0, len(data), size):
        part = data.subset(range(len(data))[start : start + size])
        batch = encode_batch(model, part)
        layout = model.inputs.layout(batch) if model.inputs.layout is not None else None
        yield PairedBatch((batch,), (batch,), len(part), match_tokens(layout, layout))
