"""What an old model teaches: own samples with its answers, samples of others, and samples that models write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..config import LessonsConfig, UpgradeConfig
from ..data.answers import candidates_of, prompt_of
from ..data.dataset import Dataset, as_prompts, joined
from ..data.samplers import augmented
from ..data.tasks import read_data
from ..errors import DataError, MethodError, OptionError
from ..measure.answers import is_choice, is_passages
from ..measure.objectives import choose_objective
from ..measure.samples import DatasetSamples
from ..measure.unseen import distinct, others
from ..models.base import Model
from ..models.heads import Head
from ..models.open import open_model
from ..report.provenance import identity_of
from ..runtime.resume import Work
from ..synthetic.generators import Generator, LocalGenerator, ServerGenerator
from ..synthetic.samples import Frame, OldModel, WrittenSamples, better_generator, write_samples
from ..training.division import Extra
from ..types import Events, Sides

HELD_OUT, MOST_HELD_OUT, FEWEST = 0.25, 400, 16  # share of the samples that judges, at most, and of all at least
MOST_SAMPLES = 2000  # own samples that are used unless more are asked for
PORTED = 200  # samples at most that a port is measured on
FEW = 64  # fewer own samples are all taught if written ones can judge
VIEWS, VIEWED, MOST_VIEWED = 4, 400, 2000  # views of a prompt at most, and of all; of more prompts none
Rows = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lessons:
    """All that is taught: own samples with the old model's answers, and further ones, some of them written."""

    own: Dataset
    extra: Extra | None = None
    written: WrittenSamples | None = None


def read_own(data: str | Path | Dataset, config: LessonsConfig) -> Dataset:
    """Own samples, from the training split."""
    read = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False, columns=config.columns)
    return read if config.template is None else as_prompts(read, config.template)


def texts_of_test_split(data: Any, config: LessonsConfig) -> Sequence[str]:
    """The texts of the test split of the data, with which written samples are compared; none without one."""
    if not isinstance(data, (str, Path)):
        return ()
    try:
        found = read_data(data, "test", labelled=False, columns=config.columns)
    except DataError:
        return ()
    return (
        [] if found.origin.split == "all" or found.kind != "text" else [Frame().text(sample) for sample in found.inputs]
    )


def read_extra(old: OldModel, own: Dataset, config: LessonsConfig, events: Events, *judging: Dataset) -> Dataset | None:
    """The samples of `extra` that are neither own ones nor judge, in their form and with the old model's answers."""
    if config.extra is None:
        return None
    found = replace(read_data(config.extra, "train", labelled=False), labels=None, classes=(), choices=None)
    if found.kind != own.kind:
        raise DataError(f"`extra` has {found.kind}s, and the own samples are {own.kind}s: give {own.kind}s.")
    if not old.writes:
        found = replace(found, targets=None)
    elif is_passages(own):
        raise DataError("own samples are passages, which teach themselves: `extra` would teach what it says.")
    else:
        frame, bare = Frame.of(own, config.template), Frame()
        found = replace(found, inputs=[frame.sample(bare.text(sample)) for sample in found.inputs])
    for known in (own, *judging):
        found = found.subset(others(found, known))
    if not len(found):
        raise DataError("`extra` has only own samples: give others, or leave it out.")
    if not old.writes:
        return found
    choices = [candidates_of(own)[0]] * len(found) if is_choice(own) else None
    return _answered(old, replace(found, choices=choices), events)[0]


def views_each(count: int) -> int:
    """The most views of each of so many own prompts."""
    return min(max(VIEWED // count, 1), VIEWS) if 0 < count <= MOST_VIEWED else 0


def views_of(old: OldModel, own: Dataset, config: LessonsConfig, events: Events) -> Extra | None:
    """Own prompts with some words left out and the old model's answers; None of many samples, or of longer texts."""
    count = len(own)
    plain = old.writes and not is_passages(own) and config.labels != "data"
    if not plain or not views_each(count) or isinstance(own.inputs[0], tuple):
        return None
    frame = Frame.of(own, config.template)
    texts = [frame.text(sample) for sample in own.inputs]
    prompts = [prompt_of(sample) if isinstance(sample, list) else sample for sample in own.inputs]
    if [frame.sample(text) for text in texts] != prompts or any("\n" in text for text in texts):
        return None
    views = augmented(texts, views_each(count), config.seed, ordered=True)
    rows = np.array([row for row, view in enumerate(views) if view != texts[row % count]], dtype=np.int64)
    if not len(rows):
        return None
    places = rows % count
    asked = replace(own.subset(places), inputs=[frame.sample(views[row]) for row in rows], labels=None, targets=None)
    choices = [candidates_of(own)[place] for place in places] if is_choice(own) else None
    found, kept = _answered(old, replace(asked, choices=choices), events)
    return Extra(found, views_of=places[kept])


def _answered(old: OldModel, asked: Dataset, events: Events) -> tuple[Dataset, Rows]:
    """Further prompts, with the old model's answers if there are none to choose from, and the places of those kept."""
    if asked.choices is not None:
        return asked, np.arange(len(asked))
    return old.answers(replace(asked, answers="none"), events)


def _own_answered(old: OldModel, own: Dataset, config: LessonsConfig, events: Events) -> Dataset:
    """Own samples with the old model's answers; each before the same with the answer of the data, if that is wanted."""
    taught, rows = old.answers(own, events)
    return with_answers_of_data(own, taught, rows) if config.labels == "data" else taught


def with_answers_of_data(own: Dataset, taught: Dataset, rows: Rows) -> Dataset:
    """The samples that the old model has answered, each before the same with the answer of the data."""
    if is_choice(own) or own.answers == "none" or is_passages(own):
        raise DataError(f'{own} has no written answers: `labels="data"` goes with chats, or prompts with a target.')
    both = joined(taught, replace(own.subset(rows), answers="teacher"))
    return both.subset(np.arange(len(both)).reshape(2, -1).T.ravel())


def write(
    old: OldModel, own: Dataset | None, config: LessonsConfig, data: Any, work: Work | None, events: Events
) -> WrittenSamples:
    """Let a generator write samples, which are compared with the test split of the data, and the old model answer."""
    generator, state = _generator(old, own, config), None if work is None else work.state("training/texts")
    events.step(f"{generator.name} writes samples")
    test = texts_of_test_split(data, config)
    found = write_samples(old, generator, own, config, test=test, state=state, events=events)
    models: dict[str, Any] = {"source": old.models.source, "target": old.models.target, "generator": config.generator}
    licences = {name: identity_of(model).get("license") for name, model in models.items() if model is not None}
    return replace(found, record={**found.record, "licences": licences})


def _generator(old: OldModel, own: Dataset | None, config: LessonsConfig) -> Generator:
    """What writes: as asked for, or the better of target and source."""
    if config.generator_url is not None:
        return ServerGenerator(config.generator_url)
    source, target = old.models
    if config.generator is not None:
        dtype = next(target.module.parameters()).dtype
        code = config.trust_remote_code
        return LocalGenerator(open_model(config.generator, device=target.device, dtype=dtype, trust_remote_code=code))
    if not old.writes or source.generates != "causal":
        raise OptionError("a classifier writes no samples: name a model that does with `generator`, or leave them out.")
    return LocalGenerator(better_generator(target, source, own, config))


def _beside(written: Dataset | None, extra: Dataset | None) -> Extra | None:
    """Further samples: written ones are like the own ones, those of others may not be."""
    if written is None:
        return None if extra is None else Extra(extra)
    return Extra(written, like_own=True) if extra is None else Extra(joined(written, extra))


def lessons_of(
    old: OldModel, own: Dataset | None, config: LessonsConfig, data: Any, work: Work | None, events: Events
) -> Lessons:
    """What is taught: own samples as the old model answers them, extra ones, and those that a generator writes."""
    written = write(old, own, config, data, work, events) if config.synthetic is not None else None
    if own is None:
        assert written is not None
        return Lessons(written.data, None, written)
    events.step("the old model answers")
    taught = _own_answered(old, own, config, events)
    extra = read_extra(old, own, config, events)
    if written is None and extra is None:
        return Lessons(taught, views_of(old, taught, config, events))
    return Lessons(taught, _beside(None if written is None else written.data, extra), written)


def samples_of(models: Sides[Model], data: Dataset, heads: Sides[Head] | None) -> DatasetSamples:
    """All samples of a data set, for both models."""
    return DatasetSamples(models, data, np.arange(len(data)), heads, len(data), choose_objective(data, models))


@dataclass(frozen=True, eq=False)
class UpgradeSamples:
    """The samples of an upgrade, divided into those that are taught and those that judge."""

    old: OldModel
    config: UpgradeConfig
    work: Work | None
    events: Events
    taught: Dataset | None  # own samples as they were given, if there are any
    own: Dataset  # the same with the old model's answers; written ones if there are none
    held_out: Dataset  # the samples that judge, with the old model's answers
    raw_held_out: Dataset  # the same with the labels and answers of the data
    few: WrittenSamples | None  # written samples, which judge where own ones are too few to be divided
    write: Callable[[], WrittenSamples]  # further ones; own samples that judge are not shown to the generator

    @cached_property
    def written(self) -> WrittenSamples:
        """Samples that a generator writes when they are needed first."""
        return self.few or self.write()

    def of(self, route: str) -> Lessons:
        """What a route teaches: own samples, for synthetic also extra or written ones."""
        if route == "distill":
            if self.taught is None or len(self.own) < FEWEST // 2:
                raise MethodError("there are too few own samples")
            return Lessons(self.own, views_of(self.old, self.own, self.config, self.events))
        given = (self.config, self.events, self.held_out)
        extra = None if self.taught is None else read_extra(self.old, self.taught, *given)
        if extra is not None and not self.config.describe and not self.config.generator and not self.old.writes:
            return Lessons(self.own, Extra(extra))
        data = self.written.data
        if self.few is not None:  # some of them judge
            data = data.subset(others(data, self.held_out))
        return Lessons(self.own, None if self.taught is None else _beside(data, extra), self.written)


def divide(
    old: OldModel, data: Any, drawn: Dataset | None, config: UpgradeConfig, work: Work | None, events: Events
) -> UpgradeSamples:
    """Divide own samples; few are all taught, and written ones judge, or own ones after all if none can be written."""
    count, few, failed = len(() if drawn is None else distinct(drawn)), None, None

    def more(own: Dataset | None) -> WrittenSamples:
        if failed is not None:
            raise failed
        return write(old, own, config, data, work, events)

    can_write = old.writes or (old.reads and (config.generator or config.generator_url) is not None)
    if "synthetic" in config.routes and can_write and count < FEW:
        try:
            few = more(drawn)
        except DataError as error:
            if count < FEWEST:
                raise
            failed = error
    elif count < FEWEST:
        other = ", or the route synthetic" if can_write else ""
        needed = f"an upgrade needs at least {FEWEST} own samples that differ, and there are {count}"
        raise DataError(f"{needed}: give more `data`{other}.")
    divided = drawn if few is None else few.data
    assert divided is not None
    first = distinct(divided)
    judging = divided.subset(first[: min(round(HELD_OUT * len(first)), MOST_HELD_OUT)])
    rest = divided.subset(others(divided, judging))
    taught = drawn if few is not None else rest
    own = rest if taught is None else _own_answered(old, taught, config, events)
    held_out, raw = judging, judging
    if few is None:
        held_out, rows = old.answers(judging, events)
        raw = judging.subset(rows)  # without those that nobody can answer
    return UpgradeSamples(old, config, work, events, taught, own, held_out, raw, few, lambda: more(taught))
