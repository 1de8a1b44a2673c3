"""A checked transfer, and the samples that it is measured on, which are read and encoded at each iteration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .data.dataset import Dataset, align_labels, with_prompts
from .data.views import VIEWS, Views
from .errors import DataError, MethodError
from .measure.batches import PairedBatch, count_samples
from .measure.objectives import Objective, batch_for
from .measure.tokens import Coverage, Match, coverage, match_spans, match_tokens
from .methods import Method, name_of
from .models.base import Model
from .models.heads import Head
from .models.offload import Placement
from .models.tokenizer import Encoded
from .pairing import Plan
from .task_vectors.lora_write import AdapterForm
from .task_vectors.vector import TaskVector
from .types import Completion, Loss, Sides, Signal

FEWEST = 4  # samples that can be divided into halves


def first_half(count: int) -> int:
    """The number of samples in the first half; all of them if there are fewer than four.

    >>> [first_half(n) for n in (1, 3, 10, 25)]
    [1, 3, 5, 13]
    """
    return (count + 1) // 2 if count >= FEWEST else count


class Samples(ABC):
    """Calibration samples in batches for both models. `len` is the number of samples, 0 where it is not known."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self) or 'an unknown number of'} samples)"

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    @abstractmethod
    def batch_sizes(self) -> Sequence[int]:
        """The number of samples in each batch; empty where it is not known."""

    @abstractmethod
    def take_batches(self, start: int, stop: int | None = None) -> Samples:
        """The samples of some batches, in the same batches."""

    @abstractmethod
    def take(self, part: slice | NDArray[np.int64]) -> Drawn:
        """The samples at these places of the draw, in batches of the same size."""

    @abstractmethod
    def halves(self) -> tuple[Samples, Samples]:
        """Two halves, or twice all samples where there are too few: then both are one object."""

    def listed(self) -> Samples:
        """The same samples, which can be counted and iterated again."""
        return self

    def views(self, seed: int, copies: int = VIEWS, *, ordered: bool = False) -> Samples | None:
        """Augmented copies of the samples; None where there are none (own batches, pairs of texts)."""
        del seed, copies, ordered
        return None

    @abstractmethod
    def typical(self) -> PairedBatch | None:
        """The largest batch, which stands for the others; None where batches can be read only once."""


@dataclass(frozen=True, eq=False, repr=False)
class Drawn(Samples):
    """Samples drawn from a data set, encoded for both models batch by batch."""

    models: Sides[Model]
    dataset: Dataset
    indices: NDArray[np.int64]
    heads: Sides[Head] | None
    size: int
    objective: Objective

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[PairedBatch]:
        return map(self._paired, self.encoded())

    @property
    def batch_sizes(self) -> Sequence[int]:
        return [min(self.size, len(self) - start) for start in range(0, len(self), self.size)]

    @property
    def chosen(self) -> Dataset:
        """The drawn samples as a data set."""
        return self.dataset.subset(self.indices)

    def take(self, part: slice | NDArray[np.int64]) -> Drawn:
        return replace(self, indices=self.indices[part])

    def take_batches(self, start: int, stop: int | None = None) -> Drawn:
        return self.take(slice(start * self.size, None if stop is None else stop * self.size))

    def halves(self) -> tuple[Drawn, Drawn]:
        count = first_half(len(self))
        return (self, self) if count == len(self) else (self.take(slice(count)), self.take(slice(count, None)))

    def views(self, seed: int, copies: int = VIEWS, *, ordered: bool = False) -> Drawn | None:
        chosen = self.chosen
        if not len(self) or (chosen.kind != "image" and not isinstance(chosen.inputs[0], str)):
            return None
        copied = chosen.subset(np.tile(np.arange(len(chosen)), copies))
        more = replace(copied, inputs=Views(chosen.inputs, copies, seed, ordered), scores=None, base_scores=None)
        return replace(self, dataset=more, indices=np.arange(copies * len(chosen)))

    def typical(self) -> PairedBatch | None:
        return next(iter(self.take_batches(0, 1)), None)

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

    def coverage(self) -> Coverage | None:
        """The coverage over all samples; None if a model reads no text."""
        if any(model.reader is None for model in self.models):
            return None
        total = Coverage()
        for source, target in self.encoded():
            cut = Coverage(source_cut=sum(source.cut), target_cut=sum(target.cut))
            total += coverage(source.spans, target.spans) + cut
        return total

    def encoded(self) -> Iterator[Sides[Encoded]]:
        """The batches as each model reads them, not yet on its device."""
        labelled = [self.dataset, self.dataset]
        if self.heads is not None and self.dataset.labels is not None:
            labelled = [align_labels(self.dataset, head.classes) for head in self.heads]
        for start in range(0, len(self), self.size):
            parts = [data.subset(self.indices[start : start + self.size]) for data in labelled]
            pairs = zip(self.models, parts, strict=True)
            prompted = ((model, with_prompts(part) if model.prompted else part) for model, part in pairs)
            yield Sides(*(self.objective.encode(model, part) for model, part in prompted))

    def _paired(self, sides: Sides[Encoded]) -> PairedBatch:
        source, target = sides
        batches = [batch_for(model, side) for model, side in zip(self.models, sides, strict=True)]
        if source.spans and target.spans:
            match = match_spans(source.spans, target.spans)
        else:
            pairs = zip(self.models, batches, strict=True)
            match = match_tokens(*(model.layout(batch) if model.layout else None for model, (batch, _) in pairs))
        rows = len(next(iter(target.inputs.values())))
        size = len(target.labels) if target.labels is not None else rows

        def part(start: int, stop: int) -> PairedBatch:
            return self._paired(Sides(*(side.part(start, stop) for side in sides)))

        divides = rows == size and self.objective.together is None
        return PairedBatch(batches[0], batches[1], size, match, rows, part if divides else None)


@dataclass(frozen=True, eq=False, repr=False)
class Given(Samples):
    """Batches that the caller gives; they are iterated more than once only where they are a list."""

    batches: Iterable[Any] = ()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return sum(self.batch_sizes)

    @property
    def batch_sizes(self) -> Sequence[int]:
        return [count_samples([batch]) for batch in self.batches] if isinstance(self.batches, (list, tuple)) else ()

    def listed(self) -> Given:
        return self if isinstance(self.batches, (list, tuple)) else Given(list(self.batches))

    def take(self, part: slice | NDArray[np.int64]) -> Drawn:
        del part
        raise DataError("own batches cannot be divided by samples: pass a data set or a path, not batches.")

    def take_batches(self, start: int, stop: int | None = None) -> Given:
        return Given(list(islice(self.batches, start, stop)))

    def typical(self) -> PairedBatch | None:
        if iter(self.batches) is self.batches:
            return None
        batches = self.batches if isinstance(self.batches, (list, tuple)) else islice(self.batches, 1)
        found = max(batches, key=lambda batch: count_samples([batch]), default=None)
        return found if found is None or isinstance(found, PairedBatch) else PairedBatch(found, found)

    def halves(self) -> tuple[Given, Given]:
        batches = list(self.batches)
        if not batches:
            raise DataError("choosing a scale needs labelled calibration data: pass `data`, or a number as `scale`.")
        if len(batches) == 1:
            return (whole := Given(batches)), whole
        count = (len(batches) + 1) // 2
        return Given(batches[:count]), Given(batches[count:])


@dataclass(frozen=True)
class Part:
    """A tensor that the fine-tune changed, or the part of a fused one that is a layer.

    Args:
        tensor: its name in the source's files; of a layer, the layer's name.
        kind: what it is, in the plural.
        square: the squared norm of its change.
        targets: the parameters of the target that take it up.
        reason: why there are none.
    """

    tensor: str
    kind: str
    square: float
    targets: tuple[str, ...]
    reason: str


@dataclass(frozen=True, eq=False)
class AddedTokens:
    """Tokens that the fine-tune added: the change that puts their rows into the target, and the account of them."""

    vector: TaskVector = field(default_factory=lambda: TaskVector({}))
    parts: tuple[Part, ...] = ()
    rows: frozenset[int] = frozenset()  # of the fine-tune's tables


@dataclass(frozen=True, eq=False)
class Job:
    """A checked transfer: what will be moved, and how it will be measured."""

    models: Sides[Model]
    task_vector: TaskVector
    plan: Plan
    signals: frozenset[Signal]  # that can be measured on it
    samples: Samples = field(default_factory=Given)
    losses: Sides[Loss] | None = None
    heads: Sides[Head] | None = None
    teacher: TaskVector | None = None  # the whole change of the source, if the target's head is fitted to its scores
    added: AddedTokens | None = None
    match: Match | None = None
    completion: Completion = "svd"
    max_tokens: int | None = None
    memory_budget: int | None = None
    seed: int = 0
    device: torch.device | None = None  # where the models will run; None: where they are
    placements: Sides[Placement] | None = None  # of both models while they run
    by_source: bool = False  # the fine-tuned source labelled the samples
    accept_unlikely: bool = False  # move also what looks like no fine-tune of the source
    form: AdapterForm | None = None  # of the adapter that the result will be written as
    record: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        names = " to ".join(model.name for model in self.models)
        return f"Job({names}: {self.plan!r}, {self.samples!r}, measures {', '.join(sorted(self.signals)) or 'nothing'})"

    @property
    def source(self) -> Model:
        return self.models.source

    @property
    def target(self) -> Model:
        return self.models.target

    @property
    def fits_head(self) -> bool:
        """True if the target's classification layer is fitted to the scores of the samples."""
        return self.teacher is not None

    def for_(self, method: Method) -> Job:
        """The job with the signals of a method only; a MethodError where the method cannot serve it."""
        if missing := sorted(method.signals - self.signals):
            raise MethodError(
                f"method {name_of(method)} needs {', '.join(missing)}, and the job was prepared for "
                f"{', '.join(sorted(self.signals)) or 'no signals'}: prepare it with `signals={name_of(method)!r}`."
            )
        method.check(self.plan)
        return replace(self, signals=method.signals)

    def on(self, samples: Samples) -> Job:
        """The job on other samples, with as large a share of the token limit."""
        if self.max_tokens is None:
            return replace(self, samples=samples)
        limit = max(self.max_tokens * len(samples) // max(len(self.samples), 1), 1)
        return replace(self, samples=samples, max_tokens=limit)

    def halves(self) -> tuple[Job, Job]:
        """The job on each half of its samples; twice one job where there are too few to divide."""
        job = replace(self, samples=self.samples.listed())
        first, second = job.samples.halves()
        return (job, job) if first is second else (job.on(first), job.on(second))

    @property
    def needs_placement(self) -> bool:
        """True if a model is not on the device that it will run on."""
        kind = None if self.device is None else self.device.type
        return any(model.offloaded or kind not in (None, model.device.type) for model in self.models)

    @property
    def samples_at_once(self) -> int | None:
        """The number of samples in one pass through models in memory; None for all of a batch.

        On a CPU a few are faster than many, since they stay in its caches, and need less memory: eight, or as many as
        have the units of eight in a layer of width 1,024, for narrow models, whose passes cost calls, not arithmetic.
        """
        if self.target.device.type != "cpu":
            return None
        layers = (layer for model in self.models for layer in model.layers)
        widest = max((max(layer.in_features, layer.out_features) for layer in layers), default=1024)
        return max(8, 8 * 1024 // widest)

    @property
    def runs_on(self) -> torch.device:
        """The device on which the models run and the maps are solved."""
        if self.device is None or not (self.placements is not None or self.needs_placement):
            return self.target.device
        return self.device
