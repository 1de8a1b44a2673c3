"""What is measured: both models, the paired layers, the calibration samples with their losses, and the limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from ..models.base import Model
from ..models.heads import Head
from ..models.offload import Placement
from ..pairing import Plan
from ..types import Loss, Sides, Signal
from .samples import Samples, UserBatches
from .tokens import Match


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

    def __repr__(self) -> str:
        names, signals = " to ".join(model.name for model in self.models), sorted(self.signals)
        return f"Measurement({names}: {self.plan!r}, {self.samples!r}, measures {', '.join(signals) or 'nothing'})"

    @property
    def source(self) -> Model:
        return self.models.source

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

    def listed(self) -> Measurement:
        """Measure the same samples, which can be counted and iterated again."""
        return replace(self, calibration=replace(self.calibration, samples=self.samples.listed()))

    def halves(self) -> tuple[Measurement, Measurement]:
        """Measure each half of the samples; twice one object where there are too few to divide."""
        whole = self.listed()
        first, second = whole.samples.halves()
        return (whole, whole) if first is second else (whole.with_samples(first), whole.with_samples(second))

    @property
    def needs_placement(self) -> bool:
        """True if a model is not on the device that it will run on."""
        kind = None if self.limits.device is None else self.limits.device.type
        return any(model.weights.offloaded or kind not in (None, model.device.type) for model in self.models)

    @property
    def samples_at_once(self) -> int | None:
        """The number of samples in one pass through models in memory; None for all of a batch."""
        return samples_at_once(self.models)

    @property
    def runs_on(self) -> torch.device:
        """The device on which the models run and the maps are solved."""
        limits = self.limits
        if limits.device is None or not (limits.placements is not None or self.needs_placement):
            return self.target.device
        return limits.device


def samples_at_once(models: Sides[Model]) -> int | None:
    """The number of samples in one pass through models in memory; None for all of a batch.

    On a CPU a few are faster than many, since they stay in its caches, and need less memory: eight, or as many as have
    the units of eight in a layer of width 1,024, for narrow models, whose passes cost calls, not arithmetic.
    """
    if models.target.device.type != "cpu":
        return None
    layers = (layer for model in models for layer in model.architecture.layers)
    widest = max((max(layer.in_features, layer.out_features) for layer in layers), default=1024)
    return max(8, 8 * 1024 // widest)
