"""What a transfer does on the test split: the row that decides.

The fine-tuned source, the target, the port and what a distillation made of it answer the same samples, so that two of
them are compared sample by sample. Language models are scored by bits per character or by their likeliest answers,
encoders without classes by their fidelity to the fine-tuned source. A change counts as a gain or as harm where chance
makes it in fewer than one of twenty cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import MeasureConfig
from ..data.dataset import Dataset, align_labels
from ..data.tasks import read_data
from ..errors import DataError, TuneportError
from ..measure.accuracy import (
    LEAST,
    LEVEL,
    BySample,
    Evaluation,
    check_counted,
    compute_features,
    direction,
    likelihood,
    perplexity,
    share_interval,
    shift,
    tail,
    usual_protocol,
    zero_shot,
)
from ..measure.fitted_heads import before_port, is_bare
from ..measure.samples import Calibration
from ..measure.unseen import Unseen
from ..models.base import Model
from ..models.change import Change, is_whole
from ..models.heads import choose_head
from ..models.weights import changed, finetuned
from ..report.decision import shown
from ..report.summary import SCORE_FORMS
from ..training.division import STEPS
from ..types import Progress, Sides, ignore

Metric = Literal["accuracy", "bits per character", "fidelity"]
Role = Literal["finetuned", "target", "port", "distilled"]
HeadOf = Literal["own", "fitted"]
WORDS: dict[Role, str] = {
    "finetuned": "the fine-tuned source",
    "target": "the target as it was",
    "port": "the port",
    "distilled": "the port, distilled",
}
BARE = "the target with a head fitted as the port's"
USUAL = 500  # most samples of the test split that are scored unless all of them are asked for
SHOWN = 12  # samples that turned right, and that turned wrong
Word = Literal["gain", "harm", "no clear change", "nothing moved", "not measured"]
MORE = f"--distill {STEPS}"  # what a user can add to the command
SMALL = 0.01  # a change of fidelity, which has no interval, that says nothing


def read_test(data: str | Path | None, columns: Mapping[str, str] | None = None) -> Dataset:
    """The test split; images must have labels, and `check_test` looks at texts when the models are known."""
    if data is None:
        raise DataError("an accuracy needs labelled data and a head for it: pass `data`.")
    test = read_data(data, "test", labelled=False, columns=columns)
    return read_data(data, "test") if test.kind == "image" and test.labels is None else test


def usual_test(
    target: Model, calibration: Calibration, data: str | Path | None, columns: Mapping[str, str] | None = None
) -> Dataset | str:
    """A labelled test split that the models can be scored on; where there is none, the reason."""
    try:
        test = read_test(data, columns)
        if test.origin.split == "all":
            return "the data have no test split; --evaluate scores samples that calibration does not use"
        check_test(target, calibration, test)
        if test.labels is None:
            return "the test split has no labels"
    except TuneportError as error:
        return str(error).partition(": ")[0].rstrip(".")
    return test


def check_test(target: Model, calibration: Calibration, test: Dataset) -> None:
    """Refuse a test split that cannot be scored."""
    if (heads := calibration.heads) is not None:
        check_counted(target, heads.target)
        align_labels(test, heads.target.classes)
    elif target.outputs.features is None:
        raise DataError("an accuracy needs labelled data and a head for it: pass `data`.")
    target.require_in_memory("an evaluation", "evaluate the result afterwards, with 'tuneport evaluate'")


def fidelity(features: Tensor, reference: Tensor) -> float:
    """The correlation of the cosines between all pairs of samples with those of a reference.

    >>> turned = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 0.0, 2.0]])
    >>> round(fidelity(turned, turned[:, 1:].double()), 6)
    1.0
    """
    cosines = []
    for rows in (features, reference):
        unit = F.normalize(rows.double(), dim=-1)
        cosines.append((unit @ unit.T)[tuple(torch.triu_indices(len(rows), len(rows), 1))])
    return float(torch.corrcoef(torch.stack(cosines))[0, 1])


@dataclass(frozen=True, eq=False)
class ModelScore:
    """What one model does on the test split."""

    role: Role
    name: str
    value: float
    found: Evaluation | None = None
    head: HeadOf | None = None  # of a classification layer: the model's own, or fitted on the calibration samples

    @property
    def words(self) -> str:
        """What the model is."""
        return BARE if self.role == "target" and self.head == "fitted" else WORDS[self.role]

    @property
    def by_sample(self) -> BySample:
        """What is known of each sample."""
        return BySample() if self.found is None else self.found.by_sample

    def row(self, samples: int) -> dict[str, Any]:
        """For the record, with a 95 % interval where it is known."""
        low, high, right = None, None, self.by_sample.right
        if right is not None:
            low, high = (100 * end for end in share_interval(int(right.sum()), len(right)))
        elif self.found is not None and self.found.error is not None:
            low, high = self.value - 1.96 * self.found.error, self.value + 1.96 * self.found.error
        found: dict[str, Any] = {"role": self.role, "name": self.name, "words": self.words, "value": self.value}
        found |= {"low": low, "high": high}
        return {**found, "samples": samples, **({} if self.head is None else {"head": self.head})}


@dataclass(frozen=True, eq=False)
class Comparison:
    """The scores of all models on the same test samples; the last is that of what is written."""

    on: Unseen
    protocol: str
    metric: Metric
    scored: Mapping[Role, ModelScore]

    @property
    def written(self) -> ModelScore:
        return self.scored["distilled" if "distilled" in self.scored else "port"]

    def shown(self, score: ModelScore) -> str:
        """The value of a score with its unit."""
        form, unit = SCORE_FORMS[self.metric]
        return f"{score.value:{form}}{unit}"

    def better(self, first: ModelScore, second: ModelScore) -> int:
        """1 if the second is clearly better than the first, -1 if it is clearly worse, else 0."""
        one, two = first.by_sample, second.by_sample
        if one.right is not None and two.right is not None:
            return direction(one.right, two.right)
        if one.spelled is not None and two.spelled is not None:
            return shift(one.spelled, two.spelled)
        return int(np.sign(second.value - first.value)) if abs(second.value - first.value) > SMALL else 0

    @property
    def guessed(self) -> int:
        """The number of classes, if what is written is no better than a guess among them; else, or not known, 0."""
        right, count = self.written.by_sample.right, len(self.written.by_sample.classes)
        if right is None or count < 2 or len(right) < LEAST:
            return 0
        return count if tail(len(right), int(right.sum()), 1 / count) >= LEVEL else 0

    def record(self) -> dict[str, Any]:
        """The entries of the run record."""
        before, after, samples = self.scored["target"], self.written, len(self.on.test)
        entry: dict[str, Any] = {"data": self.on.test.name, "samples": samples, "sha256": self.on.digest}
        if self.on.shared:
            entry |= {"shared": self.on.shared, "held_out": self.on.held_out}
        entry |= {"protocol": self.protocol, "metric": self.metric, "before": before.value, "after": after.value}
        if "finetuned" in self.scored:
            entry["source"] = self.scored["finetuned"].value
        if before.by_sample.bits is not None:
            names = {"target": "before", "finetuned": "source"}
            details = ("accuracy", "perplexity", "tokens", "bits_per_character", "cut")
            entry["scores"] = {
                names.get(role, "after"): {key: getattr(each.found, key) for key in details}
                for role, each in self.scored.items()
            }
        rows = [each.row(samples) for each in self.scored.values()]
        return {"evaluation": entry, "accuracies": rows, **self._by_sample(before.by_sample, after.by_sample)}

    def _by_sample(self, before: BySample, after: BySample) -> dict[str, Any]:
        """Accuracy by class, and samples that turned right or wrong, where samples have classes."""
        if before.right is None or after.right is None:
            return {}
        flips = {"right": after.right & ~before.right, "wrong": before.right & ~after.right}
        turned: dict[str, Any] = {f"{name}_count": int(which.sum()) for name, which in flips.items()}
        for name, which in flips.items():
            turned[name] = [self._turned(int(index), before, after) for index in np.flatnonzero(which)[:SHOWN]]
        if not before.classes:  # a label is a place among the answers of its sample
            return {"turned": turned}
        classes = [
            {"class": old["class"], "samples": old["samples"], "before": old["accuracy"], "after": new["accuracy"]}
            for old, new in zip(before.by_class(), after.by_class(), strict=True)
        ]
        return {"by_class": classes, "turned": turned}

    def _turned(self, index: int, before: BySample, after: BySample) -> dict[str, Any]:
        names = before.classes if self.on.test.choices is None else self.on.test.choices[index]
        found = {"label": before.labels, "before": before.predicted, "after": after.predicted}
        numbers = {key: values[index] for key, values in found.items() if values is not None}
        words = {key: str(names[int(number)]) for key, number in numbers.items()}
        return {"index": int(self.on.indices[index]), **words, **shown(self.on.test.inputs[index])}


def compare(
    models: Sides[Model],
    change: Change,
    calibration: Calibration,
    made: Mapping[Role, tuple[Model, Mapping[str, Tensor]]],
    on: Unseen,
    config: MeasureConfig,
    *,
    name: str = "",
    progress: Progress = ignore,
) -> Comparison:
    """Score the fine-tuned source where it is whole and in memory, the target, and what was made of it.

    A target without a head for the classes is scored with one that is fitted as that of the port, see `before_port`.
    `made` has each output, as a model and the parameters that it gets; `name` is that of the fine-tuned source.
    """
    test = on.test
    wanted: Tensor | None = None  # what a fidelity is to
    protocol = "zero-shot" if calibration.heads is not None else usual_protocol(models.target, test)
    scored: dict[Role, ModelScore] = {}

    def score(role: Role, model: Model) -> ModelScore:
        if wanted is not None:
            return ModelScore(role, model.name, fidelity(compute_features(model, test), wanted))
        if protocol == "zero-shot":
            found = zero_shot(model, choose_head(model, config.head, test), test, progress=progress)
        else:
            found = (likelihood if protocol == "likelihood" else perplexity)(model, test, progress=progress)
        value = found.bits_per_character if protocol == "perplexity" else found.accuracy
        assert value is not None
        return ModelScore(role, model.name, value, found)

    metric: Metric = "bits per character" if protocol == "perplexity" else "accuracy"
    if protocol == "zero-shot" and calibration.heads is None:  # an encoder without classes
        models.source.require_in_memory("a comparison with the fine-tuned source", "evaluate the result afterwards")
        metric = "fidelity"
        with finetuned(models.source, change.vector):
            wanted = compute_features(models.source, test)
    elif is_whole(models.source, change, config.exclude):
        with finetuned(models.source, change.vector):
            scored["finetuned"] = replace(score("finetuned", models.source), name=name)
    scored["target"] = score("target", before_port(models.target, calibration.samples, fits=change.fits_head))
    for role, (model, tensors) in made.items():
        with changed(model.module, tensors):
            scored[role] = score(role, model)
    if change.fits_head:
        own = {"finetuned"} if is_bare(models.target, fits=True) else {"finetuned", "target"}
        scored = {role: replace(each, head="own" if role in own else "fitted") for role, each in scored.items()}
    if not all(math.isfinite(each.value) for each in scored.values()) and metric == "fidelity":
        raise DataError(f"{test} shows no fidelity: a model gives all pairs of its samples one cosine.")
    return Comparison(on, "fidelity" if metric == "fidelity" else protocol, metric, scored)


@dataclass(frozen=True)
class Outcome:
    """The outcome, the sentence that comes first everywhere, and a recommendation."""

    outcome: Word
    headline: str
    recommendation: str


def summarize(
    evaluated: Comparison | None,
    *,
    scale: float,
    rule: str | None = None,
    head: bool = False,
    distilled: bool = False,
    reason: str = "",
) -> Outcome:
    """The outcome of a transfer with the scores `evaluated`; there are none for a `reason`.

    A `rule` may have chosen the scale, a `head` may be fitted, and a distillation may have changed the port.
    """
    same = scale == 0 and not head and not distilled
    zero = f"the {'chosen ' if rule else ''}scale is 0, and the output is the target as it was"
    advice, other = (NOTHING, f"more samples or {MORE}") if rule else (GIVEN, f"another scale, or {MORE}")
    alone = "; only the head changed: the scale is 0" if scale == 0 and head and not distilled else ""
    if evaluated is None:
        if same:
            return Outcome("nothing moved", f"nothing moved: {zero}; try {other}", advice)
        why = f": {reason}" if reason else ""
        return Outcome("not measured", f"the gain was not measured{why}{alone}", UNKNOWN)
    before, after = evaluated.scored["target"], evaluated.written
    kind = "held-out" if evaluated.on.held_out else "test"
    where = f"held-out samples of {evaluated.on.test.name}" if evaluated.on.held_out else evaluated.on.test.name
    found = f"{evaluated.metric} on {where}: {evaluated.shown(before)}"
    if same:
        return Outcome("nothing moved", f"{found}, as before: nothing moved; {zero}; try {other}", advice)
    form, _ = SCORE_FORMS[evaluated.metric]
    what = f"{evaluated.metric} on {where}: {before.value:{form}} -> {evaluated.shown(after)}"
    change = evaluated.better(before, after)
    if change > 0 and (guessed := evaluated.guessed):
        said = f"no better than a guess among {guessed} classes"
        return Outcome("no clear change", f"{what}: {said}{alone}", GUESSED)
    safer = "" if rule == "safe" or scale == 0 else "--scale safe, "
    words: dict[int, tuple[Word, str]] = {
        1: ("gain", "the transfer helped"),
        -1: ("harm", f"the transfer did harm; try {safer}more samples, or {MORE}"),
        0: ("no clear change", f"no clear change on {len(evaluated.on.test)} {kind} samples"),
    }
    outcome, said = words[change]
    return Outcome(outcome, f"{what}: {said}{alone}", _recommended(evaluated, change, distilled))


NOTHING = f"Keep the old model: no strength of this change helps the target. {MORE} may, or fine-tuning."
GIVEN = "Leave the scale to the samples, or give one above 0: nothing was added to the target."
GUESSED = (
    "Do not use the output: check --head, and that the classes of the data are those of the fine-tune, in its order; "
    "else keep the old model."
)
UNKNOWN = "Evaluate the output before you use it: tuneport evaluate needs data with a labelled test split."


def _recommended(evaluated: Comparison, change: int, distilled: bool) -> str:
    after, old = evaluated.written, evaluated.scored.get("finetuned")
    on = "more texts" if evaluated.metric == "bits per character" else "labels"
    more = f"fine-tune the target on {on}" if distilled else f"add {MORE}, or fine-tune the port on {on}"
    if change < 0:
        keep = evaluated.scored["target"].words if old is None else f"the old model ({evaluated.shown(old)})"
        return f"Keep {keep}, or {more}: this output is worse than the target without it."
    if old is not None and evaluated.better(old, after) < 0:
        return f"Keep the old model while you can ({evaluated.shown(old)} against {evaluated.shown(after)}), or {more}."
    if change == 0:
        shows = "The held-out samples show" if evaluated.on.held_out else "The test split shows"
        return f"{shows} no gain: {more}, or give more samples."
    against = "" if old is None else f": the old model has {evaluated.shown(old)}"
    return f"Use {'the distilled port' if distilled else 'the port'}{against}."
