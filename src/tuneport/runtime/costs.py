"""What the steps of a transfer cost beside one another, so that a bar can show the share of the whole.

Counted are millions of operations of large matrix products; those in float64 count twice. The operations of a step that
are missing here (attention, softmax, files) are few beside them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..data.dataset import UNLABELLED
from ..measure.samples import DatasetSamples, Measurement
from ..models.base import Model
from ..pairing import LayerPair
from ..types import Sides

LOOKED_AT = 8  # samples whose tokens are counted
MILLION = 1e6


# The teaching of a LoRA as it was measured on one GPU, results/speed/distill-8b-cuda.json.
GPU = "NVIDIA H200"
SECONDS, TOKENS = 141.66, 409_600  # that were taught
WEIGHTS = 16_027_010_048  # of teacher and student
BESIDE = 10_528_190_464  # bytes beside both models
FEATURES = 2_727_936  # that all layers of the student read and write


def teaching_hours(tokens: int, weights: int) -> float:
    """The hours for other texts and models: proportional to both."""
    return SECONDS / 3600 * (tokens / TOKENS) * (weights / WEIGHTS)


def teaching_bytes(student: Model) -> int:
    """The bytes beside other models: proportional to what the layers of the student read and write."""
    features = sum(layer.in_features + layer.out_features for layer in student.architecture.layers)
    return round(BESIDE * (features / FEATURES))


@dataclass(frozen=True)
class Costs:
    """Millions of operations."""

    answer: Sides[float]  # of a forward pass of each model over one sample
    tokens: float  # of a sample in the target
    backward: bool  # whether gradients are measured
    signals: frozenset[str]  # that are summed up

    @classmethod
    def of(cls, measurement: Measurement) -> Costs:
        """The costs of a measurement; samples without a known number of tokens count as one token each."""
        samples = measurement.samples
        some = slice(None, None, max(len(samples) // LOOKED_AT, 1))  # they may be in the order of their lengths
        first = next(iter(samples.take(some)), None) if isinstance(samples, DatasetSamples) else None
        batches: Sides[Any] = Sides(None, None) if first is None else Sides(first.source, first.target)
        counts = Sides(*(_tokens(*each) for each in zip(measurement.models, batches, strict=True)))
        answers = [_operations(model, *count) for model, count in zip(measurement.models, counts, strict=True)]
        signals = frozenset(str(signal) for signal in measurement.signals)
        backward = any("gradient" in signal for signal in signals)
        return cls(Sides(*answers), counts.target[0], backward, signals)

    def measure(self, pairs: Sequence[LayerPair]) -> float:
        """Of one sample, for some pairs of layers: both models forward and back, and the sums."""
        sums = sum(math.prod(pair.widths(signal)) for pair in pairs for signal in pair.wanted(self.signals))
        return (3 if self.backward else 1) * sum(self.answer) + 4 * self.tokens * sums / MILLION

    def solve(self, pairs: Sequence[LayerPair]) -> float:
        """Of all maps of some pairs: half a Gram matrix, its eigenvectors, and the other side's vectors."""
        widths = (sorted(pair.widths(signal)) for pair in pairs for signal in pair.wanted(self.signals))
        return sum(2 * (3 * n * n * m + 9 * n**3) for n, m in widths) / MILLION


def _tokens(model: Model, batch: Any) -> tuple[float, float]:
    """The mean number of tokens of a sample, and of those whose next token is predicted."""
    if not isinstance(batch, (tuple, list)) or not isinstance(batch[0], dict):
        return 1.0, 0.0
    inputs, labels = batch
    if "attention_mask" in inputs:
        rows = max(len(inputs["attention_mask"]), 1)
        predicted = float((labels != UNLABELLED).sum()) / rows if model.generates else 0.0
        return float(inputs["attention_mask"].sum()) / rows, predicted
    layout = model.inputs.layout(inputs) if model.inputs.layout is not None else None
    return float(layout.prefix + math.prod(layout.grid)) if layout is not None else 1.0, 0.0


def _operations(model: Model, tokens: float, predicted: float) -> float:
    """Millions of operations of a forward pass over a sample: its layers, and the scores of predicted tokens."""
    layers = sum(layer.in_features * layer.out_features for layer in model.architecture.layers)
    reader = model.inputs.reader
    vocabulary = (reader.vocabulary or 0) * (model.outputs.width or 0) if reader is not None else 0
    return 2 * (tokens * layers + predicted * vocabulary) / MILLION
