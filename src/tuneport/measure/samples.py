"""Calibration samples for two models, read and encoded at each iteration: from a data set, or the caller's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.dataset import Dataset, align_labels, with_prompts
from ..data.views import VIEWS, augmented
from ..errors import DataError
from ..models.base import Model
from ..models.heads import Head
from ..models.tokenizer import Encoded
from ..types import Sides
from .batches import PairedBatch, count_samples
from .objectives import Objective, batch_for
from .tokens import Coverage, coverage, match_spans, match_tokens

FEWEST = 4  # samples that can be divided into halves


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


@dataclass(frozen=True, eq=False, repr=False)
class DatasetSamples:
    """Samples drawn from a data set, encoded for both models batch by batch."""

    models: Sides[Model]
    dataset: Dataset
    indices: NDArray[np.int64]
    heads: Sides[Head] | None
    size: int
    objective: Objective

    def __repr__(self) -> str:
        return _words(self)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[PairedBatch]:
        return map(self._paired, self.encoded())

    @property
    def batch_sizes(self) -> Sequence[int]:
        """The number of samples in each batch; empty where it is not known."""
        return [min(self.size, len(self) - start) for start in range(0, len(self), self.size)]

    @property
    def chosen(self) -> Dataset:
        """The drawn samples as a data set."""
        return self.dataset.subset(self.indices)

    def listed(self) -> DatasetSamples:
        """The same samples, which can be counted and iterated again."""
        return self

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
        more = replace(copied, inputs=augmented(chosen.inputs, copies, seed, ordered), scores=None, base_scores=None)
        return replace(self, dataset=more, indices=np.arange(copies * len(chosen)))

    def largest_batch(self) -> PairedBatch | None:
        """The largest batch, which stands for the others; None where batches can be read only once."""
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
        if any(model.inputs.reader is None for model in self.models):
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
            prompted = ((model, with_prompts(part) if model.inputs.prompted else part) for model, part in pairs)
            yield Sides(*(self.objective.encode(model, part) for model, part in prompted))

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


@dataclass(frozen=True, eq=False, repr=False)
class UserBatches:
    """Batches that the caller gives; they are iterated more than once only where they are a list.

    They do what `DatasetSamples` do; their number, `len`, is 0 where it is not known.
    """

    batches: Iterable[Any] = ()

    def __repr__(self) -> str:
        return _words(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return sum(self.batch_sizes)

    @property
    def batch_sizes(self) -> Sequence[int]:
        return [count_samples([batch]) for batch in self.batches] if isinstance(self.batches, (list, tuple)) else ()

    def listed(self) -> UserBatches:
        return self if isinstance(self.batches, (list, tuple)) else UserBatches(list(self.batches))

    def take(self, part: slice | NDArray[np.int64]) -> DatasetSamples:
        del part
        raise DataError("own batches cannot be divided by samples: pass a data set or a path, not batches.")

    def take_batches(self, start: int, stop: int | None = None) -> UserBatches:
        return UserBatches(list(islice(self.batches, start, stop)))

    def views(self, *_: Any, **__: Any) -> None:
        return None

    def largest_batch(self) -> PairedBatch | None:
        if iter(self.batches) is self.batches:
            return None
        batches = self.batches if isinstance(self.batches, (list, tuple)) else islice(self.batches, 1)
        found = max(batches, key=lambda batch: count_samples([batch]), default=None)
        return found if found is None or isinstance(found, PairedBatch) else PairedBatch(found, found)

    def halves(self) -> tuple[UserBatches, UserBatches]:
        batches = list(self.batches)
        if not batches:
            raise DataError("choosing a scale needs labelled calibration data: pass `data`, or a number as `scale`.")
        if len(batches) == 1:
            return (whole := UserBatches(batches)), whole
        count = (len(batches) + 1) // 2
        return UserBatches(batches[:count]), UserBatches(batches[count:])


Samples = DatasetSamples | UserBatches


def _words(samples: Samples) -> str:
    return f"{type(samples).__name__}({len(samples) or 'an unknown number of'} samples)"
