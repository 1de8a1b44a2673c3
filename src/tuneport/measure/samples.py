"""Calibration samples for two models, read and encoded at each iteration: from a data set, or the caller's own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.dataset import Dataset, align_labels, with_prompts
from ..data.samplers import VIEWS, augmented
from ..errors import CaptureError, DataError
from ..models.base import Model
from ..models.heads import Head
from ..models.offload import Placement
from ..models.tokenizer import Encoded
from ..pairing import Plan
from ..types import Loss, Sides, Signal
from .capture import PairedBatch, count_samples
from .objectives import Objective, batch_for
from .tokens import Match, coverage, match_spans, match_tokens

FEWEST = 4  # samples that can be divided into halves
LOOKED_AT = 8  # samples whose tokens are counted


def first_half(count: int) -> int:
    """The number of samples in the first half; all of them if there are fewer than four.

    >>> [first_half(n) for n in (1, 3, 10, 25)]
    [1, 3, 5, 13]
    """
    return (count + 1) // 2 if count >= FEWEST else count


def by_length(dataset: Dataset, indices: NDArray[np.int64]) -> NDArray[np.int64]:
    """The samples with the long texts of each half first, so that little is padded and the first batch is large."""
    lengths = -np.array([len(str(dataset.inputs[index])) for index in indices])
    halves = np.split(np.arange(len(indices)), [first_half(len(indices))])
    order: NDArray[np.int64] = np.concatenate([half[np.argsort(lengths[half], kind="stable")] for half in halves])
    return np.take(indices, order)


@dataclass(frozen=True, eq=False)
class DatasetSamples:
    """Samples drawn from a data set, encoded for both models batch by batch."""

    models: Sides[Model]
    dataset: Dataset
    indices: NDArray[np.int64]
    heads: Sides[Head] | None
    size: int
    objective: Objective
    base_scores: NDArray[Any] | None = None  # like the scores of `dataset`, of the teacher's base with its head

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[PairedBatch]:
        return map(self._paired, self.encoded())

    @property
    def batch_sizes(self) -> list[int]:
        """The number of samples in each batch."""
        return [min(self.size, len(self) - start) for start in range(0, len(self), self.size)]

    @cached_property
    def tokens(self) -> Sides[float]:
        """The mean number of tokens of a sample as each model reads it, by a few samples; 1 where it is not known."""
        some = slice(None, None, max(len(self) // LOOKED_AT, 1))  # they may be in the order of their lengths
        return Sides(*map(_tokens, self.models, next(self.take(some).encoded())))

    @property
    def chosen(self) -> Dataset:
        """The drawn samples as a data set."""
        return self.dataset.subset(self.indices)

    def take(self, part: slice | NDArray[np.int64]) -> DatasetSamples:
        """The samples at these places of the draw, in batches of the same size."""
        return replace(self, indices=self.indices[part])

    def take_batches(self, start: int, stop: int | None = None) -> DatasetSamples:
        """The samples of some batches, in the same batches."""
        return self.take(slice(start * self.size, None if stop is None else stop * self.size))

    def halves(self) -> tuple[DatasetSamples, DatasetSamples]:
        """Two halves, or twice all samples where there are too few: then both are one object."""
        count = first_half(len(self))
        return (self, self) if count == len(self) else (self.take(slice(count)), self.take(slice(count, None)))

    def views(self, seed: int, copies: int = VIEWS, *, ordered: bool = False) -> DatasetSamples | None:
        """Augmented copies of the samples; None where there are none (own batches, pairs of texts)."""
        chosen = self.chosen
        if not len(self) or (chosen.kind != "image" and not isinstance(chosen.inputs[0], str)):
            return None
        copied = chosen.subset(np.tile(np.arange(len(chosen)), copies))
        more = replace(copied, inputs=augmented(chosen.inputs, copies, seed, ordered), scores=None)
        return replace(self, dataset=more, indices=np.arange(len(more)), base_scores=None)

    def largest_batch(self) -> PairedBatch:
        """The largest batch, which stands for the others."""
        return next(iter(self))

    def warnings(self, one_token: bool = False) -> Iterator[str]:
        """What makes samples too poor to align models on; it reads samples until two of them differ."""
        inputs, count, images = self.chosen.inputs, len(self), self.dataset.kind == "image"
        if images and all(np.ptp(np.asarray(image), axis=(0, 1)).max() == 0 for image in inputs):
            yield f"every image of the {count} samples has one colour: the maps say little about real images"
        elif count == 1:
            yield "there is one sample: the maps fit this sample and may say little about others"
        elif all(np.array_equal(inputs[0], other) if images else inputs[0] == other for other in inputs):
            yield f"all {count} samples are identical: the maps fit this sample and may say little about others"
        if one_token:
            yield "there is one token to measure: each map has one measured direction, and the rest is a guess"

    def coverage(self) -> Counter[str] | None:
        """The coverage over all samples, and how many were cut; None if a model reads no text."""
        if any(model.inputs.reader is None for model in self.models):
            return None
        total = Counter[str]()
        for source, target in self.encoded():
            total.update(coverage(source.spans, target.spans))
            total.update(source_cut=sum(source.cut), target_cut=sum(target.cut))
        return total

    def encoded(self) -> Iterator[Sides[Encoded]]:
        """The batches as each model reads them, not yet on its device."""
        return map(Sides, self.encoded_for(0), self.encoded_for(1))

    def encoded_for(self, side: int) -> Iterator[Encoded]:
        """The batches as one of the models reads them: the first (0) or the second (1)."""
        model, data = self.models[side], self.dataset
        if self.heads is not None and data.labels is not None:
            data = align_labels(data, self.heads[side].classes)
        for start in range(0, len(self), self.size):
            part = data.subset(self.indices[start : start + self.size])
            yield self.objective.encode(model, with_prompts(part) if model.inputs.prompted else part)

    def _paired(self, sides: Sides[Encoded]) -> PairedBatch:
        source, target = sides
        batches = [batch_for(model, side) for model, side in zip(self.models, sides, strict=True)]
        if source.spans and target.spans:
            match = match_spans(source.spans, target.spans)
        else:
            pairs = zip(self.models, batches, strict=True)
            match = match_tokens(
                *(layout(batch) if (layout := model.inputs.layout) else None for model, (batch, _) in pairs)
            )
        rows = len(next(iter(target.inputs.values())))
        size = len(target.labels) if target.labels is not None else rows

        def part(start: int, stop: int) -> PairedBatch:
            return self._paired(Sides(*(side.part(start, stop) for side in sides)))

        divides = rows == size and self.objective.together is None
        return PairedBatch(batches[0], batches[1], size, match, rows, part if divides else None)


def _tokens(model: Model, encoded: Encoded) -> float:
    """The mean number of tokens of a sample."""
    if (mask := encoded.inputs.get("attention_mask")) is not None:
        return float(mask.sum()) / max(len(mask), 1)
    layout = model.inputs.layout(encoded.inputs) if model.inputs.layout is not None else None
    return 1.0 if layout is None else float(layout.prefix + math.prod(layout.grid))


@dataclass(frozen=True, eq=False)
class UserBatches:
    """Batches that the caller gives, which do what `DatasetSamples` do."""

    batches: Sequence[Any] = ()
    tokens = Sides(1.0, 1.0)  # nobody knows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return sum(self.batch_sizes)

    @property
    def batch_sizes(self) -> list[int]:
        return [count_samples(batch) for batch in self.batches]

    def take_batches(self, start: int, stop: int | None = None) -> UserBatches:
        return UserBatches(self.batches[start:stop])

    def views(self, *_: Any, **__: Any) -> None:
        return None

    def largest_batch(self) -> PairedBatch:
        if not self.batches:
            raise CaptureError("there are no calibration batches; give at least one sample.")
        found = max(self.batches, key=count_samples)
        return found if isinstance(found, PairedBatch) else PairedBatch(found, found)

    def halves(self) -> tuple[UserBatches, UserBatches]:
        if not self.batches:
            raise DataError("choosing a scale needs labelled calibration data: pass `data`, or a number as `scale`.")
        count = (len(self.batches) + 1) // 2
        return (self, self) if count == len(self.batches) else (self.take_batches(0, count), self.take_batches(count))


Samples = DatasetSamples | UserBatches


@dataclass(frozen=True, eq=False)
class Calibration:
    """Samples, and what both models are asked about them."""

    samples: Samples = field(default_factory=UserBatches)  # in batches for both models
    signals: frozenset[Signal] = frozenset()  # that can be measured on them
    losses: Sides[Loss] | None = None  # of each model; None where nothing is measured
    heads: Sides[Head] | None = None  # of each model, where the samples have classes
    match: Match | None = None  # pairs the tokens of the caller's own batches
    by_source: bool = False  # the fine-tuned source labelled the samples
    loss_name: str | None = None  # the name of the objective, if it has one


@dataclass(frozen=True)
class Limits:
    """Limits of a measurement."""

    max_tokens: int | None = None  # most tokens that enter the maps
    memory_budget: int | None = None  # most bytes on the device
    device: torch.device | None = None  # where the models will run; None: where they are
    placements: Sides[Placement] | None = None  # of both models while they run
    seed: int = 0  # of random choices


@dataclass(frozen=True, eq=False)
class Measurement:
    """Two models, the pairs of their layers, and the samples that they are measured on."""

    models: Sides[Model]
    plan: Plan
    calibration: Calibration = field(default_factory=Calibration)
    limits: Limits = field(default_factory=Limits)

    @property
    def target(self) -> Model:
        return self.models.target

    @property
    def samples(self) -> Samples:
        return self.calibration.samples

    @property
    def signals(self) -> frozenset[Signal]:
        return self.calibration.signals

    def with_samples(self, samples: Samples) -> Measurement:
        """Measure other samples, with as large a share of the token limit."""
        limits = self.limits
        if limits.max_tokens is not None:
            share = max(limits.max_tokens * len(samples) // max(len(self.samples), 1), 1)
            limits = replace(limits, max_tokens=share)
        return replace(self, calibration=replace(self.calibration, samples=samples), limits=limits)

    def halves(self) -> tuple[Measurement, Measurement]:
        """Measure each half of the samples; twice one object where there are too few to divide."""
        first, second = self.samples.halves()
        return (self, self) if first is second else (self.with_samples(first), self.with_samples(second))

    @property
    def needs_placement(self) -> bool:
        """True if a model is not on the device that it will run on."""
        kind = None if self.limits.device is None else self.limits.device.type
        return any(model.weights.offloaded or kind not in (None, model.device.type) for model in self.models)

    @property
    def runs_on(self) -> torch.device:
        """The device on which the models run and the maps are solved."""
        limits = self.limits
        if limits.device is None or not (limits.placements is not None or self.needs_placement):
            return self.target.device
        return limits.device


def samples_at_once(models: Sides[Model]) -> int | None:
    """The number of samples in one pass through models in memory; None for all of a batch.

    On a CPU a few stay in its caches: eight, or as many units as eight have in a layer of width 1,024.
    """
    if models.target.device.type != "cpu":
        return None
    layers = (layer for model in models for layer in model.architecture.layers)
    widest = max((max(layer.in_features, layer.out_features) for layer in layers), default=1024)
    return max(8, 8 * 1024 // widest)
