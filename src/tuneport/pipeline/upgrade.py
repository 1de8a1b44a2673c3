"""Upgrade: a new base is out, what becomes of the fine-tune? Try the routes on own samples, choose by evidence.

A part of the own samples is held out from all routes and judges them: by agreement with the old model (the fine-tuned
source), which needs no label, and by the labels of the data, where there are any. Few own samples are all taught, and
written ones judge. A route is taken if it is clearly nearer to the old model than the target as it is, by a paired
test, and has forgotten nothing; of several, the nearest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import DistillConfig, MeasureConfig, TransferConfig, TransferInputs, UpgradeConfig
from ..data.dataset import Dataset, joined
from ..data.samplers import select
from ..errors import DataError, MethodError, OptionError, PairingError, TuneportError
from ..io.output import claimed
from ..measure.accuracy import Evaluation, zero_shot
from ..measure.answers import is_choice, is_passages
from ..measure.chance import direction, share_interval, shift
from ..measure.language import likelihood, perplexity
from ..methods import get_method
from ..models.base import Model, ModelLike
from ..models.change import Finetuned, is_whole
from ..models.heads import Head, choose_head
from ..models.open import path_of
from ..models.weights import changed
from ..outputs import output_of
from ..report.samples import shown
from ..runtime.resume import Work, fingerprint
from ..synthetic.samples import WrittenSamples
from ..training.distill import Extra
from ..training.neutral import TOLERANCE, Neutral
from ..training.state import StateFile
from ..types import Events, Sides
from .distill import (
    Lessons,
    OldModel,
    about_upgrade,
    deciding,
    licences,
    read_extra,
    read_own,
    samples_of,
    taught,
    texts_of_test_split,
    with_answers_of_data,
    write,
)
from .heads import before_port, with_teacher_scores
from .inputs import conditions_of, open_models, read_change
from .result import Result
from .transfer import Setup, prepare, run

MOST_SAMPLES = 2000  # own samples that are used unless more are asked for
HELD_OUT, MOST_HELD_OUT, FEWEST = 0.25, 400, 16  # share of the samples that judges, at most, and of all at least
FEW = 64  # fewer own samples are all taught if written ones can judge
PORTED = 200  # samples at most that a port is measured on
RANK = 16  # of a LoRA
AGREES = 0.9  # a route whose agreement is above this, with certainty, ends the search
EXACT = 5.0  # percent of written answers that the old model has right, from which on they are counted
SHOWN = 50  # disagreements that are written
NEXT = (
    "Measure it on a test split before you use it; disagreements.jsonl has held-out samples that the old and the new "
    "model answer otherwise."
)


@dataclass(frozen=True, eq=False)
class RouteScore:
    """What one model does on the held-out samples.

    Args:
        name: "old", "target", or a route.
        score: accuracy in percent, or bits per character.
        agreement: share of samples, in percent, that are answered as by the old model.
        flips: samples that the old model has right and this one wrong.
        neutral: by how many percent the loss on neutral passages is higher than the target's.
        seconds: that the route took.
        memory: the most bytes on a GPU while it ran.
        found: the evaluation, sample by sample.
        own: the evaluation by the data's own written answers.
        note: why a route was not tried, or not taken.
    """

    name: str
    score: float | None = None
    agreement: float | None = None
    flips: int | None = None
    neutral: float | None = None
    seconds: float = 0.0
    memory: int | None = None
    found: Evaluation | None = None
    own: Evaluation | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """For the record."""
        keys = ("name", "score", "agreement", "flips", "neutral", "seconds", "memory", "note")
        return {key: getattr(self, key) for key in keys}


@dataclass(frozen=True, eq=False)
class Upgrade:
    """The table of routes, and the result of the chosen one, if one is worth it."""

    routes: tuple[RouteScore, ...]
    chosen: str | None
    decision: str
    result: Result | None
    disagreements: tuple[Mapping[str, Any], ...]

    def __repr__(self) -> str:
        rows = [f"{row.name}: score {row.score}, agreement {row.agreement}" for row in self.routes]
        return "\n".join([f"Upgrade({self.decision})", *rows])

    def save(self, out: str | Path, **options: Any) -> Path:
        """Write the chosen route; see `Result.save`."""
        if self.result is None:
            raise TuneportError(f"there is nothing to save: {self.decision}")
        return self.result.save(out, **options)


def upgrade(
    source: ModelLike,
    finetuned: Finetuned,
    target: ModelLike,
    data: str | Path | Dataset | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> Upgrade:
    """Bring a fine-tune to a new base by the best route: copy, port, or lessons of the old model.

    Args:
        source: the old base model.
        finetuned: the fine-tuned source, or an adapter of it.
        target: the new base model.
        data: own samples, which need no labels; those of the data are reported as scores. None, if the models write
            samples after the sentence `describe`.
        events: listens to the run.
        options: the fields of `UpgradeConfig`.

    Returns:
        The table of routes, the decision, and the result of the chosen route.
    """
    config = UpgradeConfig.of(**options)
    return _upgrade(source, finetuned, target, data, config, events or Events())


def upgrade_to_folder(inputs: TransferInputs, config: UpgradeConfig, events: Events | None = None) -> dict[str, Any]:
    """Upgrade and write the chosen route, with the table of routes in its record and report.

    Returns:
        The run record; without a chosen route, the table and the decision alone, and nothing is written.
    """
    events, out = events or Events(), Path(inputs.out)
    read = (inputs.source, *inputs.finetuned, inputs.target, inputs.data, config.head, config.extra, config.generator)
    paths = [path_of(place) for place in read if isinstance(place, (str, Path))]
    with claimed(out):
        output_of(_transfer_config(config)).check_place(out, config.overwrite, inputs=paths)
        tuned: Any = inputs.finetuned if len(inputs.finetuned) > 1 else inputs.finetuned[0]
        found = _upgrade(inputs.source, tuned, inputs.target, inputs.data, config, events, out)
        about = {"routes": [row.row() for row in found.routes], "chosen": found.chosen, "decision": found.decision}
        if found.result is None:
            Work(out, {}).remove()
            return {**about, "out": None}
        events.step("writing")
        said = {"headline": found.decision, "recommendation": NEXT}
        result = replace(found.result, record={**found.result.record, **about, **said})
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found.disagreements)
        written = result.write(out, texts={"disagreements.jsonl": lines}, overwrite=config.overwrite)
        Work(out, {}).remove()
        return dict(written)


def _upgrade(
    source: Any, tuned: Any, target: Any, data: Any, config: UpgradeConfig, events: Events, out: Path | None = None
) -> Upgrade:
    started = time.perf_counter()
    config.check_known(data)
    own, indices = (None, None) if data is None else _own_samples(data, config)
    asked = _transfer_config(config)
    models = open_models(source, target, asked)
    asked = _transfer_config(config, models.target)
    models, change = read_change(models, tuned, asked, has_samples=True)
    if not is_whole(models.source, change, config.exclude):
        raise TuneportError("an upgrade asks the old model, which must be whole: leave out `exclude`.")
    old = OldModel(models, change.vector)
    about = about_upgrade(models, tuned, data, own, indices, config)
    work = None
    if out is not None:
        work = Work(out, deciding(about, config), config.save_every)
        if not config.resume:
            work.remove()
    lessons = _Lessons(old, data, own, config, work, events)
    events.step("asking the old model")
    calibrating = lessons.own.subset(np.arange(min(len(lessons.own), PORTED)))
    asked, setup, unpaired, heads = replace(asked, samples=len(calibrating)), None, "", None
    try:
        setup = prepare(models.source, tuned, models.target, calibrating, asked)
    except PairingError as error:
        if not old.writes:
            raise
        unpaired = str(error)
    base = models.target
    if setup is not None:
        about = {**setup.about, **{key: about[key] for key in ("command", "options", "data")}}
        models, heads = setup.models, setup.calibration.heads
        setup = replace(setup, about=about)
        scored = with_teacher_scores(models, change, setup.calibration.samples)
        base = before_port(models.target, scored, fits=change.fits_head)
    if heads is not None:
        lessons = replace(lessons, old=replace(old, models=models, head=heads.source))
    judge = _Judge(models, heads, lessons.held_out, asked, lessons.raw_held_out)
    rows, made = [judge.old(lessons.old), judge.score("target", base, {})], dict[str, Result]()
    taking = _Routes(setup, unpaired, about, asked, config, lessons, judge, work, events)
    output = output_of(asked)
    for name in config.routes:
        if config.time is not None and time.perf_counter() - started > config.time:
            rows.append(RouteScore(name, note="the time was up"))
            continue
        events.step(f"route {name}")
        begun, memory = time.perf_counter(), _reset_memory(models.target)
        try:
            made[name] = taking.take(name, made.get("port"), rows)
        except (MethodError, OptionError, DataError) as error:
            rows.append(RouteScore(name, note=str(error)))
            continue
        row = judge.score(name, made[name].target, output.written(made[name].update))
        rows.append(replace(row, seconds=round(time.perf_counter() - begun, 3), memory=memory()))
        if judge.agrees(rows[-1]):
            rows += [RouteScore(rest, note=f"not needed: {name} agrees") for rest in _after(name, config)]
            break
    chosen = judge.choose(rows)
    decision = judge.decide(rows, chosen)
    result = None if chosen is None else made[chosen]
    stored = not lessons.few or config.keep_texts  # what was written is stored only if that is asked for
    return Upgrade(tuple(rows), chosen, decision, result, judge.disagreements(rows, chosen) if stored else ())


def _own_samples(data: Any, config: UpgradeConfig) -> tuple[Dataset, NDArray[np.int64]]:
    """Draw own samples from the training split, and say where they are."""
    whole = read_own(data, config)
    count = min(len(whole), config.samples or MOST_SAMPLES)
    indices = select(replace(whole, labels=None), samples=count, seed=config.seed)
    return whole.subset(indices), indices


def _transfer_config(config: UpgradeConfig, target: Model | None = None) -> TransferConfig:
    """The options of the transfer that the routes are made of; a language model is written as an adapter."""
    shared = (
        "columns",
        "max_length",
        "head",
        "classes",
        "exclude",
        "device",
        "dtype",
        "batch_size",
        "trust_remote_code",
    )
    given = {name: getattr(config, name) for name in (*shared, "seed", "accept_unlikely", "save_every", "overwrite")}
    writes = target is not None and target.generates is not None
    as_ = config.as_ or ("adapter" if writes else "model")
    rank = (config.rank or RANK) if as_ == "adapter" else None
    return TransferConfig(labels=None, as_=as_, rank=rank, **given)


def _after(name: str, config: UpgradeConfig) -> list[str]:
    return list(config.routes[config.routes.index(name) + 1 :])


@dataclass(frozen=True, eq=False)
class _Lessons:
    """The samples: own ones and written ones, those that are taught and those that judge.

    What a property needs is written or answered when it is read first.
    """

    old: OldModel
    data: Any
    drawn: Dataset | None
    config: UpgradeConfig
    work: Work | None
    events: Events

    @property
    def few(self) -> bool:
        """Whether own samples are too few to be divided, and written ones judge."""
        writes = "synthetic" in self.config.routes and self.old.writes
        return writes and (self.drawn is None or len(self.drawn) < FEW)

    @cached_property
    def written(self) -> WrittenSamples:
        """Samples that a generator has written; own ones that judge are not shown to it."""
        test = texts_of_test_split(self.data, self.config)
        return write(self.old, self._taught_raw, self.config, test=test, work=self.work, events=self.events)

    @cached_property
    def _judges(self) -> int:
        count = len(self.written.data) if self.few else len(self.drawn or ())
        if not self.few and count < FEWEST:
            raise DataError(f"an upgrade needs at least {FEWEST} own samples, and there are {count}.")
        return min(round(HELD_OUT * count), MOST_HELD_OUT)

    @cached_property
    def _taught_raw(self) -> Dataset | None:
        if self.drawn is None or self.few:
            return self.drawn
        return self.drawn.subset(np.arange(self._judges, len(self.drawn)))

    @cached_property
    def raw_held_out(self) -> Dataset:
        """The samples that judge, with the labels and answers of the data, without those that nobody can answer."""
        if self.few or self.drawn is None:
            return self.held_out
        return self.drawn.subset(np.arange(self._judges)).subset(self._answered[1])

    @cached_property
    def _answered(self) -> tuple[Dataset, NDArray[np.int64]]:
        assert self.drawn is not None
        return self.old.answers(self.drawn.subset(np.arange(self._judges)), self.events)

    @cached_property
    def held_out(self) -> Dataset:
        """The samples that judge, with the old model's answers."""
        if self.few:
            return self.written.data.subset(np.arange(self._judges))
        return self._answered[0]

    @cached_property
    def own(self) -> Dataset:
        """The own samples that are taught, with the old model's answers; written ones if there are none."""
        if self._taught_raw is None:
            return self._written_rest
        found, rows = self.old.answers(self._taught_raw, self.events)
        if self.config.labels == "data":
            return with_answers_of_data(self._taught_raw, found, rows)
        return found

    @property
    def _written_rest(self) -> Dataset:
        return self.written.data.subset(np.arange(self._judges if self.few else 0, len(self.written.data)))

    def of(self, route: str) -> Lessons:
        """What a route teaches: own samples, for synthetic also extra or written ones."""
        if route == "distill":
            if self.drawn is None or len(self.own) < FEWEST // 2:
                raise MethodError("there are too few own samples")
            return Lessons(self.own)
        extra = None if self._taught_raw is None else read_extra(self.old, self._taught_raw, self.config, self.events)
        if extra is not None and not self.config.describe and not self.config.generator and not self.old.writes:
            return Lessons(self.own, Extra(extra))
        about = {**self.written.record(), "licences": licences(self.old, self.config)}
        if self.drawn is None:
            return Lessons(self.own, None, about, self.written.texts)
        more = self._written_rest
        if extra is None:
            return Lessons(self.own, Extra(more, like_own=True), about, self.written.texts)
        return Lessons(self.own, Extra(joined(more, extra)), about, self.written.texts)


@dataclass(frozen=True, eq=False)
class _Routes:
    """Makes what a route makes; without a setup, layers cannot be paired, and `unpaired` says why."""

    setup: Setup | None
    unpaired: str
    about: Mapping[str, Any]
    asked: TransferConfig
    config: UpgradeConfig
    lessons: _Lessons
    judge: _Judge
    work: Work | None
    events: Events

    def take(self, name: str, port: Result | None, rows: list[RouteScore]) -> Result:
        """Make what a route makes; `port` and `rows` are what earlier ones have made."""
        if name == "copy":
            setup = self._paired
            _check_same_shapes(setup)
            return run(setup, replace(self.asked, method="naive", scale=1.0), events=self.events)
        if name == "port":
            return run(self._paired, self.asked, work=self._port_work, events=self.events)
        lessons = self.lessons.of(name)
        self.events.step(f"route {name}: teaching")
        ported = next((row for row in rows if row.name == "port"), None)
        helps = ported is not None and self.judge.better(rows[1], ported) > 0
        return self._teach(name, lessons, port if helps else None)

    @property
    def _paired(self) -> Setup:
        if self.setup is None:
            raise MethodError(self.unpaired)
        return self.setup

    @property
    def _port_work(self) -> Work | None:
        if self.work is None:
            return None
        conditions = conditions_of(self._paired.about, self.asked, get_method(self.asked.method), "upgrade")
        work = Work(self.work.out, conditions, self.work.every)
        work.check()
        return work

    def _teach(self, name: str, lessons: Lessons, start: Result | None) -> Result:
        """Teach a student that begins at the port, where that helps, or at the target."""
        lora = self.asked.rank if self.asked.as_ == "adapter" else None
        saved = None
        if self.work is not None:
            self.work.make_folder()
            place = self.work.training_state.with_name(f"{name}.safetensors")
            saved = StateFile(place, fingerprint({**self.work.conditions, "route": name}), self.work.every)
        samples = samples_of(self.judge.models, lessons.own, self.judge.heads)
        if start is None and self.lessons.old.writes:
            given = {"steps": self.config.steps, "lora": lora, "seed": self.config.seed}
            config = DistillConfig.of(**given, keep_texts=self.config.keep_texts)
            about = {**self.about, "fingerprint": fingerprint({} if self.work is None else self.work.conditions)}
            found = taught(samples, self.lessons.old.vector, lessons, config, about, self.events, saved)
            return replace(found, config=self.asked, setup=self.setup)
        if start is None:
            start = run(self._paired, self.asked, work=self._port_work, events=self.events)
            start = replace(start, update=replace(start.update, scale=0.0))
        change = self._paired.change
        asked: Any = with_teacher_scores(self.judge.models, change, samples) if change.fits_head else samples
        more = {"samples": asked, "extra": lessons.extra, "events": self.events, "saved": saved}
        found = start.distill(self.config.steps, lora=lora, **more)
        record = found.record if lessons.about is None else {**found.record, "synthetic": lessons.about}
        return replace(found, record=record, texts=lessons.files(self.config.keep_texts))


def _check_same_shapes(setup: Setup) -> None:
    """Refuse to copy a change between models of other shapes."""
    parameters = dict(setup.models.target.module.named_parameters())
    vector = setup.change.vector
    wrong = [name for name in vector if name not in parameters or vector.shape(name) != tuple(parameters[name].shape)]
    if wrong:
        raise MethodError(f"{len(wrong)} of {len(vector)} changed tensors have another shape in the target")


@dataclass
class _Judge:
    """Scores models on the held-out samples; the old model's answers are known after `old`.

    Args:
        models: both models.
        heads: of classifiers.
        data: the samples, with the old model's answers where it has written them.
        config: the options.
        raw: the samples with the labels and answers of the data.
    """

    models: Sides[Model]
    heads: Sides[Head] | None
    data: Dataset
    config: MeasureConfig
    raw: Dataset
    answers: NDArray[np.int64] | None = None
    right: NDArray[np.bool_] | None = None
    exact: bool = True  # whether written answers are counted, or measured in bits

    @cached_property
    def neutral(self) -> Neutral | None:
        target = self.models.target
        return Neutral(target) if target.generates is not None else None

    @property
    def writes(self) -> bool:
        """Whether models are compared by what they write."""
        return self.heads is None and not is_choice(self.data) and not is_passages(self.data)

    def old(self, model: OldModel) -> RouteScore:
        """Ask the old model."""
        with model.tuned():
            found, own = self._ask(model.models.source), self._own(model.models.source)
        if self.writes:
            self.answers = np.ones(len(self.data), dtype=np.int64)
        else:
            self.answers = found.predicted
        self.exact = own is None or own.accuracy >= EXACT
        self.right = own.right if own is not None and self.exact else None
        row = self._row("old", found, own)
        return replace(row, agreement=None if self.answers is None else 100.0, flips=None)

    def score(self, name: str, model: Model, tensors: Mapping[str, torch.Tensor]) -> RouteScore:
        """Score a model with some parameters changed."""
        base = None if self.neutral is None else self.neutral.base
        with changed(model.module, tensors):
            row = self._row(name, self._ask(model), self._own(model))
            if self.neutral is None or base is None:
                return row
            more = 100.0 * (self.neutral.loss(model.module) / base - 1)
        note = f"forgets: its loss on neutral text is higher by {more:.1f} %" if more > 100 * TOLERANCE else ""
        return replace(row, neutral=round(more, 3), note=note)

    def _ask(self, model: Model) -> Evaluation:
        """Compare a model with the old one: by classes, by the answers to choose from, or by what that has written."""
        data = self.data
        if self.heads is None and (is_passages(data) or self.writes):
            found = perplexity(model, data)
            if not self.writes or found.exact is None:
                return found
            ones = np.ones(len(data), dtype=np.int64)
            return replace(found, accuracy=100.0 * float(found.exact.mean()), predicted=found.exact * ones, labels=ones)
        return self._classify(model, replace(data, labels=self.raw.labels))

    def _classify(self, model: Model, data: Dataset) -> Evaluation:
        heads = self.heads
        if data.labels is None:  # scores need labels; these are not looked at
            classes = heads.target.classes if heads is not None else data.classes
            data = replace(data, labels=np.zeros(len(data), dtype=np.int64), classes=classes)
        if heads is not None:
            return zero_shot(model, choose_head(model, self.config.head, data), data)
        if not is_choice(self.data):
            raise TuneportError("an upgrade of an encoder needs classes: give a head with `head`, or data with labels.")
        return likelihood(model, data)

    def _own(self, model: Model) -> Evaluation | None:
        """Score a model by the answers or labels of the data; None if there are none."""
        if not self.writes:
            return self._ask(model) if self.raw.labels is not None else None
        if self.raw.answers != "data":
            return None
        found, ones = perplexity(model, self.raw), np.ones(len(self.raw), dtype=np.int64)
        assert found.exact is not None
        return replace(found, accuracy=100.0 * float(found.exact.mean()), predicted=found.exact * ones, labels=ones)

    def _row(self, name: str, found: Evaluation, own: Evaluation | None) -> RouteScore:
        if found.predicted is None:
            return RouteScore(name, found.bits_per_character, found=found)
        agreement, flips, score = None, None, None
        if self.answers is not None:
            agreement = round(100.0 * float(np.mean(found.predicted == self.answers)), 3)
        if own is not None:
            score = own.accuracy if self.exact else own.bits_per_character
        if self.right is not None and own is not None and own.right is not None:
            flips = int(np.sum(self.right & ~own.right))
        return RouteScore(name, score, agreement, flips, found=found, own=own)

    def better(self, first: RouteScore, second: RouteScore) -> int:
        """1 if the second is clearly nearer to the old model than the first, -1 if it is clearly farther, else 0."""
        one, two = first.found, second.found
        if one is None or two is None:
            return 0
        if one.predicted is not None and two.predicted is not None and self.answers is not None:
            before, after = one.predicted == self.answers, two.predicted == self.answers
            found = direction(int(np.sum(after & ~before)), int(np.sum(before & ~after)))
            if found or not self.writes:
                return found
        if one.bits is None or two.bits is None or one.characters is None or two.characters is None:
            return 0
        return shift((one.bits, one.characters), (two.bits, two.characters))

    def agrees(self, row: RouteScore) -> bool:
        """Whether a model agrees with the old one, with certainty."""
        if row.agreement is None or row.found is None:
            return False
        count = row.found.samples
        return share_interval(round(row.agreement * count / 100), count)[0] >= AGREES

    def choose(self, rows: list[RouteScore]) -> str | None:
        """The route that is nearest to the old model, if it is clearly better than the target as it is."""
        sound = [row for row in rows[2:] if row.found is not None and not row.note]
        tried = [row for row in sound if self.better(rows[1], row) > 0]
        best: RouteScore | None = None
        for row in tried:  # a later route is dearer, and is taken only for more
            if best is None or self._nearer(row, best):
                best = row
        return None if best is None else best.name

    def _nearer(self, row: RouteScore, best: RouteScore) -> bool:
        """Whether one route is nearer to the old model than another: by its answers, or by the bits of the old ones."""
        if not self.writes and row.agreement is not None and best.agreement is not None:
            return row.agreement > best.agreement
        one, other = (None if each.found is None else each.found.bits_per_character for each in (row, best))
        return one is not None and other is not None and one < other

    def decide(self, rows: list[RouteScore], chosen: str | None) -> str:
        """The decision in one sentence."""
        old, base = rows[0], rows[1]
        if chosen is None:
            return f"keep the old model: no route is clearly better than the target as it is ({_said(base, old)})"
        row = next(row for row in rows if row.name == chosen)
        flips = "" if not row.flips else f"; {row.flips} held-out samples that were right are wrong now"
        said, before = _said(row, old), _said(base, old)
        return f"use the new model by the route {chosen}: {said}, the target as it is {before}{flips}"

    def disagreements(self, rows: list[RouteScore], chosen: str | None) -> tuple[Mapping[str, Any], ...]:
        """Held-out samples that the old and the new model answer otherwise; without a new model, none."""
        row = next((row for row in rows if row.name == chosen), None)
        if row is None or row.found is None or row.found.predicted is None or self.answers is None:
            return ()
        places = np.flatnonzero(row.found.predicted != self.answers)
        if self.writes and row.found.bits is not None:  # what the new model expects least comes first
            places = places[np.argsort(-row.found.bits[places], kind="stable")]
        return tuple(self._shown(int(index), row.found) for index in places[:SHOWN])

    def _shown(self, index: int, found: Evaluation) -> Mapping[str, Any]:
        assert self.answers is not None
        assert found.predicted is not None
        if self.writes:
            chat = self.data.inputs[index]
            answer = chat[-1]["content"] if isinstance(chat, list) else (self.data.targets or ())[index]
            return {"old": answer, **shown(chat[:-1] if isinstance(chat, list) else chat)}
        known = found.classes if self.data.choices is None else self.data.choices[index]

        def said(number: int) -> str:
            return str(known[number]) if known else str(number)

        label = {} if self.raw.labels is None else {"label": said(int(self.raw.labels[index]))}
        old, new = int(self.answers[index]), int(found.predicted[index])
        return {"old": said(old), "new": said(new), **label, **shown(self.data.inputs[index])}


def _said(row: RouteScore, old: RouteScore) -> str:
    """A score in words."""
    if row.agreement is None:
        return f"{row.score:.3f} bits per character on held-out samples, the old model {old.score:.3f}"
    score = ""
    if row.score is not None:
        percent = row.own is None or row.score == row.own.accuracy
        score = f"{row.score:.1f} % right, " if percent else f"{row.score:.3f} bits per character, "
    said = f"{score}agrees with the old model on {row.agreement:.1f} %"
    bits = None if row.found is None or row.found.protocol != "perplexity" else row.found.bits_per_character
    return said if bits is None else f"{said} ({bits:.3f} bits per character of its answers)"


def _reset_memory(model: Model) -> Any:
    """A function that says the most bytes that were on the model's GPU since now."""
    if model.device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(model.device)
    return lambda: torch.cuda.max_memory_allocated(model.device)
