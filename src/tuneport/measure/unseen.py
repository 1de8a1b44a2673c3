"""Test samples that calibration does not use, found by their content; and routes, judged on such samples.

Models are compared sample by sample: by the classes or the answers that they choose, or by the bits of what the old
model has written. A difference counts if a paired test tells it from chance.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.answers import prompt_of
from ..data.dataset import Dataset
from ..data.images import files_of
from ..errors import DataError, TuneportError
from ..io.fingerprint import file_digests
from ..models.base import Model
from ..models.heads import Head, choose_head
from ..types import Sides
from .accuracy import Evaluation, direction, likelihood, perplexity, share_interval, shift, usual_protocol, zero_shot
from .answers import is_choice, is_passages
from .samples import Calibration, DatasetSamples

FEWEST = 20  # samples to score, where others were left out
PAIRED = 3  # samples of a fidelity, which correlates the cosines of their pairs


@dataclass(frozen=True, eq=False)
class Unseen:
    """Test samples that calibration does not use, their indices in the whole split, and how many others it uses."""

    test: Dataset
    indices: NDArray[np.int64]
    shared: int = 0

    @property
    def held_out(self) -> bool:
        """True if the data have one split, of which these samples are held out."""
        return self.shared > 0 and self.test.origin.split == "all"

    @property
    def digest(self) -> str:
        """SHA-256 of the samples and their labels."""
        labels = None if self.test.labels is None else self.test.labels.tolist()
        return hashlib.sha256(json.dumps([[*_contents(self.test)], labels, [*self.test.classes]]).encode()).hexdigest()

    @property
    def note(self) -> str:
        """For the user, where samples are left out."""
        if self.held_out:
            return (
                f"{self.test.name} has no test split: {len(self.test)} samples that calibration does not use are scored"
            )
        return f"{self.shared} test samples are also calibration samples: they are not scored" if self.shared else ""


def unseen(target: Model, calibration: Calibration, test: Dataset, samples: int | None = None) -> Unseen:
    """Choose the test samples that are scored, `samples` at most, in a fixed draw, without those of calibration."""
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(0)).numpy()
    used = calibration.samples
    seen = frozenset(_contents(used.chosen)) if isinstance(used, DatasetSamples) else frozenset()
    chosen, shared = [], 0
    for index, content in zip(order, _contents(test.subset(order)) if seen else order, strict=True):
        if content in seen:
            shared += 1
        else:
            chosen.append(index)
        if len(chosen) == samples:
            break
    if shared and len(chosen) < min(FEWEST, samples or FEWEST):
        raise DataError(
            f"calibration uses all but {len(chosen)} of the {len(test)} samples of {test}, and a score needs {FEWEST} "
            "others: calibrate on fewer, or add a test split."
        )
    if len(chosen) < PAIRED and calibration.heads is None and usual_protocol(target, test) == "zero-shot":
        raise DataError(f"a fidelity needs {PAIRED} test samples, and {test} has {len(chosen)}.")
    indices = np.sort(np.array(chosen, dtype=np.int64))
    return Unseen(test.subset(indices), indices, shared)


def others(data: Dataset, known: Dataset) -> NDArray[np.int64]:
    """The places of the samples that ask what none of the `known` ones asks, whatever the answers."""
    by_file = bool(files_of(data) and files_of(known))
    seen = frozenset(_contents(known, by_file=by_file, answered=False))
    asked = _contents(data, by_file=by_file, answered=False)
    return np.array([place for place, content in enumerate(asked) if content not in seen], dtype=np.int64)


def distinct(data: Dataset) -> NDArray[np.int64]:
    """The places of the samples that ask what none before them asks."""
    first: dict[str, int] = {}
    for place, content in enumerate(_contents(data, answered=False)):
        first.setdefault(content, place)
    return np.array([*first.values()], dtype=np.int64)


def _contents(data: Dataset, *, by_file: bool = True, answered: bool = True) -> Iterator[str]:
    """Yield what tells each sample from others: a digest of its image, or its texts; labels do not count."""
    if by_file and (files := files_of(data)):
        for file in files:
            yield from file_digests([file]).values()
        return
    for index, value in enumerate(data.inputs):
        if data.kind == "image":
            yield f"{value.size} {hashlib.sha256(value.tobytes()).hexdigest()}"
        elif not answered:
            yield json.dumps(prompt_of(value) if isinstance(value, list) else value, sort_keys=True, default=str)
        else:
            more = [None if items is None else items[index] for items in (data.targets, data.choices)]
            yield json.dumps([value, *more], sort_keys=True, default=str)


AGREES = 90.0  # percent: a route whose agreement is above this, with certainty, ends the search
EXACT = 5.0  # percent of written answers that the old model has right, from which on they are counted


@dataclass(frozen=True, eq=False)
class RouteScore:
    """What one model does on the held-out samples."""

    name: str  # "old", "target", or a route
    score: float | None = None  # accuracy in percent, or bits per character
    agreement: float | None = None  # share of samples, in percent, that are answered as by the old model
    flips: int | None = None  # samples that the old model has right and this one wrong
    neutral: float | None = None  # by how many percent the loss on neutral passages is higher than the target's
    seconds: float = 0.0  # that the route took
    memory: int | None = None  # the most bytes on a GPU while it ran
    found: Evaluation | None = None  # the evaluation, sample by sample
    own: Evaluation | None = None  # the evaluation by the data's own written answers
    note: str = ""  # why a route was not tried, or not taken

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the agreement, in percent; none for the old model, which agrees with itself."""
        if self.agreement is None or self.found is None or self.name == "old":
            return None
        count = self.found.samples
        low, high = share_interval(round(self.agreement * count / 100), count)
        return 100 * low, 100 * high

    def row(self) -> dict[str, Any]:
        """For the record."""
        keys = ("name", "score", "agreement", "interval", "flips", "neutral", "seconds", "memory", "note")
        ends = None if self.interval is None else [round(end, 3) for end in self.interval]
        return {**{key: getattr(self, key) for key in keys}, "interval": ends}


@dataclass
class RouteJudge:
    """Scores models on the held-out samples; the old model's answers are known after `ask_old`."""

    data: Dataset  # the samples, with the old model's answers where it has written them
    raw: Dataset  # the samples with the labels and answers of the data
    heads: Sides[Head] | None  # of classifiers
    head: str | None  # the name of the head that is asked for
    bare: bool = False  # whether the target has no head of its own: it is compared, and written, with a fitted one
    answers: NDArray[np.int64] | None = None
    right: NDArray[np.bool_] | None = None
    exact: bool = True  # whether written answers are counted, or measured in bits

    @property
    def writes(self) -> bool:
        """Whether models are compared by what they write."""
        return self.heads is None and not is_choice(self.data) and not is_passages(self.data)

    def ask_old(self, model: Model) -> RouteScore:
        """Ask the old model: the source, while it has its fine-tune."""
        found = self._ask(model)
        own = self._own(model, found)
        self.answers = np.ones(len(self.data), dtype=np.int64) if self.writes else found.by_sample.predicted
        self.exact = own is None or own.accuracy >= EXACT
        self.right = own.by_sample.right if own is not None and self.exact else None
        row = self._row("old", found, own)
        return replace(row, agreement=None if self.answers is None else 100.0, flips=None)

    def score(self, name: str, model: Model) -> RouteScore:
        """Score a model as it is."""
        found = self._ask(model)
        return self._row(name, found, self._own(model, found))

    def _ask(self, model: Model) -> Evaluation:
        """Compare a model with the old one: by classes, by the answers to choose from, or by what that has written."""
        data, heads = self.data, self.heads
        if heads is None and (is_passages(data) or self.writes):
            found = perplexity(model, data)
            return _by_exact_texts(found) if self.writes else found
        data = replace(data, labels=self.raw.labels)
        if data.labels is None:  # scores need labels; these are not looked at
            classes = heads.target.classes if heads is not None else data.classes
            data = replace(data, labels=np.zeros(len(data), dtype=np.int64), classes=classes)
        if heads is not None:
            return _among(zero_shot(model, choose_head(model, self.head, data), data), heads.source.classes)
        if not is_choice(self.data):
            raise TuneportError("an upgrade of an encoder needs classes: give a head with `head`, or data with labels.")
        return likelihood(model, data)

    def _own(self, model: Model, found: Evaluation) -> Evaluation | None:
        """The score by the answers or labels of the data, where it was `found` by labels; None if there are none."""
        if not self.writes:
            return found if self.raw.labels is not None else None
        return _by_exact_texts(perplexity(model, self.raw)) if self.raw.answers == "data" else None

    def _row(self, name: str, found: Evaluation, own: Evaluation | None) -> RouteScore:
        if found.by_sample.predicted is None:
            return RouteScore(name, found.bits_per_character, found=found)
        agreement, flips, score = None, None, None
        if self.answers is not None:
            agreement = round(100.0 * float(np.mean(found.by_sample.predicted == self.answers)), 3)
        if own is not None:
            score = own.accuracy if self.exact else own.bits_per_character
        if self.right is not None and own is not None and own.by_sample.right is not None:
            flips = int(np.sum(self.right & ~own.by_sample.right))
        return RouteScore(name, score, agreement, flips, found=found, own=own)

    def better(self, first: RouteScore, second: RouteScore) -> int:
        """1 if the second is clearly nearer to the old model than the first, -1 if it is clearly farther, else 0."""
        one, two = first.found, second.found
        if one is None or two is None:
            return 0
        if one.by_sample.predicted is not None and two.by_sample.predicted is not None and self.answers is not None:
            found = direction(one.by_sample.predicted == self.answers, two.by_sample.predicted == self.answers)
            if found or not self.writes:
                return found
        before, after = one.by_sample.spelled, two.by_sample.spelled
        return 0 if before is None or after is None else shift(before, after)

    def agrees(self, row: RouteScore) -> bool:
        """Whether a model agrees with the old one, with certainty."""
        return row.interval is not None and row.interval[0] >= AGREES

    def choose(self, rows: list[RouteScore]) -> str | None:
        """The route that is nearest to the old model, if it is clearly better than the target as it is.

        A bare target is no model of the task yet: there a route must only not be clearly worse. Of equals it is the
        last, which has learnt from the most samples: few held-out ones tell little.
        """
        sound = [row for row in rows[2:] if row.found is not None and not row.note]
        tried = [row for row in sound if self.better(rows[1], row) >= (0 if self.bare else 1)]
        return max(reversed(tried), key=self._nearness).name if tried else None

    def _nearness(self, row: RouteScore) -> float:
        """How near a model is to the old one: by its answers, or by the bits of the old ones."""
        if not self.writes and row.agreement is not None:
            return row.agreement
        bits = None if row.found is None else row.found.bits_per_character
        return -math.inf if bits is None else -bits


def _among(found: Evaluation, classes: tuple[str, ...]) -> Evaluation:
    """An evaluation whose classes are numbered as these are; others come last, and those without a name in common stay.

    Heads of two models may have the same classes in another order.
    """
    of = found.by_sample
    if of.classes == classes or not set(classes) & set(of.classes) or of.predicted is None or of.labels is None:
        return found
    names = tuple(dict.fromkeys((*classes, *of.classes)))
    places = np.array([names.index(name) for name in of.classes], dtype=np.int64)
    by_sample = replace(of, predicted=places[of.predicted], labels=places[of.labels], classes=names)
    return replace(found, by_sample=by_sample)


def _by_exact_texts(found: Evaluation) -> Evaluation:
    """A perplexity as an accuracy: a text is right where the model writes just that."""
    exact = found.by_sample.exact
    assert exact is not None
    by_sample = replace(found.by_sample, predicted=exact.astype(np.int64), labels=np.ones(len(exact), dtype=np.int64))
    return replace(found, accuracy=100.0 * float(exact.mean()), by_sample=by_sample)
