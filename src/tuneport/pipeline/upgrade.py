"""Upgrade: a new base is out, what becomes of the fine-tune? Try the routes on own samples, choose by evidence.

A part of the own samples is held out from all routes and judges them: by agreement with the old model (the fine-tuned
source), which needs no label, and by the labels of the data, where there are any. Few own samples are all taught, and
written ones judge. A route is taken if it is clearly nearer to the old model than the target as it is, by a paired
test (than a target under a fitted head: not clearly farther), and has forgotten nothing; of several, the nearest, and
of equals the last.
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

from ..config import DistillConfig, TransferConfig, TransferInputs, UpgradeConfig
from ..data.dataset import Dataset
from ..data.samplers import select
from ..errors import DataError, MethodError, OptionError, PairingError, TuneportError
from ..measure.fitted_heads import before_port, is_bare, with_teacher_scores
from ..measure.samples import Calibration
from ..measure.unseen import RouteJudge, RouteScore
from ..models.base import Model, ModelLike
from ..models.change import Change, Finetuned, is_whole
from ..models.weights import changed
from ..outputs import output_of
from ..pairing import Plan
from ..processes import by_first
from ..report.decision import decision, disagreements
from ..report.provenance import data_identity
from ..runtime.resume import Work, fingerprint
from ..synthetic.samples import OldModel
from ..training.neutral import TOLERANCE, Neutral
from ..training.student import require_lora
from ..types import FORMATS, Events, Sides
from .distill import about_others, told
from .estimate import check_same_shapes, why_unjudged
from .evaluate import with_protocol
from .inputs import about_inputs, conditions_of, open_models, read_change
from .lessons import MOST_SAMPLES, PORTED, Lessons, UpgradeSamples, divide, read_own, samples_of
from .run import check_out, claimed_by_first, write_result, write_taught
from .transfer import Result, Setup, prepare, run, untouched

RANK = 16  # of a LoRA
NEXT = (
    "Measure it on a test split before you use it; disagreements.jsonl has held-out samples that the old and the new "
    "model answer otherwise."
)


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

    def record(self) -> dict[str, Any]:
        """The table and the decision, as in the run record."""
        return {"routes": [row.row() for row in self.routes], "chosen": self.chosen, "decision": self.decision}

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
    return _upgrade(_open(source, finetuned, target, data, config), config, events or Events())


def upgrade_to_folder(
    inputs: TransferInputs,
    config: UpgradeConfig,
    events: Events | None = None,
    models: Sides[Model] | None = None,
) -> dict[str, Any]:
    """Upgrade and write the chosen route, with the table of routes in its record and report.

    A killed run can be resumed to the same bytes. `models` are the base models of `inputs`, if they are open already;
    they come back as they went in.

    Returns:
        The run record; without a chosen route, the table and the decision alone, and nothing is written.
    """
    events, out = events or Events(), Path(inputs.out)
    read = (inputs.source, *inputs.finetuned, inputs.target, inputs.data, config.head, config.extra, config.generator)
    with claimed_by_first(out):
        check_out(out, output_of(_transfer_config(config)), config, *read)
        tuned: Any = inputs.finetuned if len(inputs.finetuned) > 1 else inputs.finetuned[0]
        source, target = models or (inputs.source, inputs.target)
        opened = _open(source, tuned, target, inputs.data, config)
        files = [opened.about[side].get("sha256") for side in ("source", "target")]
        if files[0] and files[0] == files[1]:
            events.note("the target is the source: an upgrade can bring nothing but the old model")

        def make(work: Work) -> Mapping[str, Any]:
            found = _upgrade(opened, config, events, work)
            if found.result is None:
                return {**found.record(), "out": None}
            events.step("writing")
            record: Mapping[str, Any] = found.result.record
            if config.template is None:  # an evaluation has none
                record = with_protocol(record, found.result.target, inputs.data, config)
            return write_result(replace(found.result, record=dict(record)), out, events, overwrite=config.overwrite)

        work = Work(out, conditions_of(opened.about, config), config.save_every)
        return dict(write_taught(work, output_of(opened.asked), config, make))


def _upgrade(opened: _Opened, config: UpgradeConfig, events: Events, work: Work | None = None) -> Upgrade:
    started = time.perf_counter()
    routes = _prepare(opened, config, events, work)
    judge, rows, made = routes.judge, routes.first_rows(), dict[str, Result]()
    device = routes.setup.models.target.device
    for name in config.routes:
        if config.time is not None and by_first(lambda: time.perf_counter() - started) > config.time:
            rows.append(RouteScore(name, note="the time was up"))
            continue
        events.step(f"route {name}")
        begun, on_gpu = time.perf_counter(), device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        try:
            made[name] = routes.take(name, made.get("port"), rows)
        except (MethodError, OptionError, DataError) as error:
            rows.append(RouteScore(name, note=str(error)))
            continue
        row = routes.score(name, made[name])
        memory = torch.cuda.max_memory_allocated(device) if on_gpu else None
        rows.append(replace(row, seconds=round(time.perf_counter() - begun, 3), memory=memory))
        if judge.agrees(row):
            rest = config.routes[config.routes.index(name) + 1 :]
            rows += [RouteScore(other, note=f"not needed: {name} agrees") for other in rest]
            break
    chosen = judge.choose(rows)
    stored = not routes.lessons.few or config.keep_texts  # what was written is stored only if that is asked for
    shown = disagreements(judge, rows, chosen) if stored else ()
    found = Upgrade(tuple(rows), chosen, decision(judge, rows, chosen), None, shown)
    if chosen is None:
        return found
    # the options are those of an upgrade, not of the transfer that a route is
    about = {key: opened.about[key] for key in ("options", "fingerprint")} | found.record()
    about |= {"headline": found.decision, "recommendation": NEXT}
    lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in shown)
    texts = {**made[chosen].texts, "disagreements.jsonl": lines}
    return replace(found, result=replace(made[chosen], record={**made[chosen].record, **about}, texts=texts))


@dataclass(frozen=True, eq=False)
class _Opened:
    """The inputs, opened, and what the record says of them."""

    tuned: Any
    data: Any
    own: Dataset | None
    old: OldModel
    asked: TransferConfig
    about: Mapping[str, Any]


def _open(source: Any, tuned: Any, target: Any, data: Any, config: UpgradeConfig) -> _Opened:
    config.check_known(data)
    own, drawn = None, {"name": "written samples"}
    if data is not None:
        whole = read_own(data, config)
        count = min(len(whole), config.samples or MOST_SAMPLES)
        indices = select(replace(whole, labels=None), samples=count, seed=config.seed)
        own = whole.subset(indices)
        drawn = {**data_identity(data, own, np.arange(len(own))), "indices": indices.tolist()}
    models = open_models(source, target, _transfer_config(config))
    asked = _transfer_config(config, models.target)
    if asked.rank is not None and {"distill", "synthetic"} & set(config.routes):
        require_lora()
    models, change = read_change(models, tuned, asked, has_samples=True)
    if not is_whole(models.source, change, config.exclude):
        raise TuneportError("an upgrade asks the old model, which must be whole: leave out `exclude`.")
    if reason := why_unjudged(models.source):
        raise TuneportError(
            f"{reason}: use 'tuneport transfer', or 'tuneport distill', and score the output with your own metric."
        )
    about = about_inputs("upgrade", config, models, change.parts, drawn)
    about |= {"resolved": {"device": str(models.target.device), "dtype": config.dtype}, **about_others(config)}
    about["fingerprint"] = fingerprint(conditions_of(about, config))
    return _Opened(tuned, data, own, OldModel(models, change.vector), asked, about)


def _prepare(opened: _Opened, config: UpgradeConfig, events: Events, work: Work | None) -> _Routes:
    """Divide the samples, and prepare what the routes share."""
    old, asked, about, models = opened.old, opened.asked, opened.about, opened.old.models
    events.step("asking the old model")
    given = (opened.data, opened.own, config, work, events)
    lessons = divide(old, *given)
    calibrating = lessons.own.subset(np.arange(min(len(lessons.own), PORTED)))
    asked, unpaired = replace(asked, samples=len(calibrating)), ""
    try:
        setup = prepare(models.source, opened.tuned, models.target, calibrating, asked)
        kept = ("command", "options", "data", "extra", "generator")
        setup = replace(setup, about={**setup.about, **{key: about[key] for key in kept if key in about}})
    except PairingError as error:
        if not old.writes:
            raise
        setup, unpaired = Setup(models, Change(old.vector), Plan(()), Calibration(), about), str(error)
    if (heads := setup.calibration.heads) is not None:
        lessons = divide(replace(old, models=setup.models, head=heads.source), *given)
    bare = is_bare(setup.models.target, fits=setup.change.fits_head)
    judge = RouteJudge(lessons.held_out, lessons.raw_held_out, heads, asked.head, bare)
    return _Routes(setup, unpaired, asked, config, lessons, judge)


def _transfer_config(config: UpgradeConfig, target: Model | None = None) -> TransferConfig:
    """The options of the transfer that the routes are made of; a language model is written as an adapter."""
    other = {"samples", "labels", "as_", "rank", "resume"}  # of the same names, which mean something else there
    shared = {item.name for item, _ in TransferConfig.options()} - other
    given = {name: value for name, value in config.values().items() if name in shared}
    writes = target is not None and target.generates is not None
    as_ = config.as_ or ("adapter" if writes else "model")
    rank = (config.rank or RANK) if FORMATS[as_].shaped else None
    labels: Any = None if target is None or writes else "source"  # those of the data are reported, and not used
    return TransferConfig(labels=labels, as_=as_, rank=rank, **given)


@dataclass(frozen=True, eq=False)
class _Routes:
    """Makes what a route makes; where layers cannot be paired, `unpaired` says why."""

    setup: Setup
    unpaired: str
    asked: TransferConfig
    config: UpgradeConfig
    lessons: UpgradeSamples
    judge: RouteJudge

    @cached_property
    def neutral(self) -> Neutral | None:
        """Passages that a language model must not forget."""
        target = self.setup.models.target
        return None if target.generates is None else Neutral(target)

    @cached_property
    def target(self) -> Model:
        """The target as it is; a bare one under a head that is fitted to its own features."""
        models, change = self.setup.models, self.setup.change
        scored = with_teacher_scores(models, change, self.setup.calibration.samples)
        return before_port(models.target, scored, fits=change.fits_head)

    def first_rows(self) -> list[RouteScore]:
        """The old model, and the target as it is."""
        old = self.lessons.old
        with old.tuned():
            first = self.judge.ask_old(old.models.source)
        return [first, self._score("target", self.target, {})]

    def score(self, name: str, result: Result) -> RouteScore:
        """Score what a route has made, as it would be written."""
        return self._score(name, result.target, output_of(self.asked).new_parameters(result.update))

    def _score(self, name: str, model: Model, tensors: Mapping[str, torch.Tensor]) -> RouteScore:
        base = None if self.neutral is None else self.neutral.base
        with changed(model.module, tensors):
            row = self.judge.score(name, model)
            if self.neutral is None or base is None:
                return row
            more = 100.0 * (self.neutral.loss(model.module) / base - 1)
        note = f"forgets: its loss on neutral text is higher by {more:.1f} %" if more > 100 * TOLERANCE else ""
        return replace(row, neutral=round(more, 3), note=note)

    def take(self, name: str, port: Result | None, rows: list[RouteScore]) -> Result:
        """Make what a route makes; `port` and `rows` are what earlier ones have made."""
        if name == "copy":
            check_same_shapes(self._paired)
            setup, asked = replace(self._paired, scale=1.0), replace(self.asked, method="naive", scale=1.0)
            return run(setup, asked, events=self.lessons.events)
        if name == "port":
            return self._port()
        lessons = self.lessons.of(name)
        self.lessons.events.step(f"route {name}: teaching")
        ported = next((row for row in rows if row.name == "port"), None)
        helps = ported is not None and self.judge.better(rows[1], ported) > 0
        return self._teach(name, lessons, port, helps)

    @property
    def _paired(self) -> Setup:
        if self.unpaired:
            raise MethodError(self.unpaired)
        return self.setup

    def _port(self) -> Result:
        work = self.lessons.work
        if work is not None:
            work = replace(work, conditions=conditions_of(self._paired.about, self.asked, scale="upgrade"))
            work.check()
        return run(self._paired, self.asked, work=work, events=self.lessons.events)

    def _teach(self, name: str, lessons: Lessons, port: Result | None, helps: bool) -> Result:
        """Teach a student that begins at the port, where that helps, or at the target."""
        setup, work = self.setup, self.lessons.work
        saved = None if work is None else work.state(f"training/{name}", route=name)
        samples = with_teacher_scores(
            setup.models, setup.change, samples_of(setup.models, lessons.own, self.judge.heads)
        )
        config = DistillConfig.of(steps=self.config.steps, lora=self.asked.rank, seed=self.config.seed)
        if self.lessons.old.writes and not helps:
            start = untouched(setup, self.asked)
        else:  # a classifier is written as the port is
            start = port or self._port()
            start = start if helps else replace(start, update=replace(start.update, target=self.target, scale=0.0))
        more: Any = {"extra": lessons.extra, "events": self.lessons.events, "saved": saved}
        return told(start.taught(config, samples, **more), lessons, self.config)
