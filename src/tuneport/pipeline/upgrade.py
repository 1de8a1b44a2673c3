"""Upgrade: a new base is out, what becomes of the fine-tune? Try the routes on own samples, choose by evidence.

A part of the own samples is held out from all routes and judges them: by agreement with the old model (the fine-tuned
source), which needs no label, and by the labels of the data, where there are any. A route is taken if it is clearly
better than the target as it is, by a paired test; of several, the one that agrees with the old model most.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import MeasureConfig, TransferConfig, TransferInputs, UpgradeConfig
from ..data.dataset import Dataset
from ..data.samplers import select
from ..data.tasks import read_data
from ..errors import DataError, MethodError, TuneportError
from ..io.output import claimed
from ..measure.accuracy import Evaluation, zero_shot
from ..measure.chance import direction, share_interval, shift
from ..measure.language import likelihood, perplexity, usual_protocol
from ..methods import get_method
from ..models.base import Model, ModelLike
from ..models.change import Finetuned, is_whole
from ..models.heads import choose_head
from ..models.open import path_of
from ..models.weights import changed, finetuned
from ..outputs import output_of
from ..report.samples import shown
from ..runtime.resume import Work
from ..types import Events
from .heads import before_port, with_teacher_scores
from .inputs import conditions_of
from .result import Result
from .run import state_file
from .transfer import Setup, prepare, run

Route = Literal["copy", "port", "distill"]
MOST_SAMPLES = 2000  # own samples that are used unless more are asked for
HELD_OUT, MOST_HELD_OUT, FEWEST = 0.25, 400, 16  # share of the samples that judges, at most, and of all at least
RANK = 16  # of a LoRA
EPOCHS, LEAST_STEPS, MOST_STEPS = 60, 300, 2000  # of a distillation: passes over the samples, in batches of 16
AGREES = 0.9  # a route whose agreement is above this, with certainty, ends the search
SHOWN = 50  # disagreements that are written


@dataclass(frozen=True, eq=False)
class RouteScore:
    """What one model does on the held-out samples.

    Args:
        name: "old", "target", or a route.
        score: accuracy in percent, or bits per character.
        agreement: share of samples, in percent, that are answered as by the old model.
        flips: samples that the old model has right and this one wrong.
        seconds: that the route took.
        memory: the most bytes on a GPU while it ran.
        found: the evaluation, sample by sample.
        note: why a route was not tried.
    """

    name: str
    score: float | None = None
    agreement: float | None = None
    flips: int | None = None
    seconds: float = 0.0
    memory: int | None = None
    found: Evaluation | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """For the record."""
        keys = ("name", "score", "agreement", "flips", "seconds", "memory", "note")
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
    data: str | Path | Dataset,
    *,
    events: Events | None = None,
    **options: Any,
) -> Upgrade:
    """Bring a fine-tune to a new base by the best route: copy, port, or distillation by the old model.

    Args:
        source: the old base model.
        finetuned: the fine-tuned source, or an adapter of it.
        target: the new base model.
        data: own samples; labels, where there are any, calibrate the port and are reported as scores.
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
    if inputs.data is None:
        raise TuneportError(NO_DATA)
    read = (inputs.source, *inputs.finetuned, inputs.target, inputs.data, config.head)
    paths = [path_of(place) for place in read if isinstance(place, (str, Path))]
    with claimed(out):
        output_of(_transfer_config(config, None)).check_place(out, config.overwrite, inputs=paths)
        tuned: Any = inputs.finetuned if len(inputs.finetuned) > 1 else inputs.finetuned[0]
        found = _upgrade(inputs.source, tuned, inputs.target, inputs.data, config, events, out)
        about = {"routes": [row.row() for row in found.routes], "chosen": found.chosen, "decision": found.decision}
        if found.result is None:
            return {**about, "out": None}
        events.step("writing")
        result = replace(found.result, record={**found.result.record, **about, "headline": found.decision})
        lines = "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in found.disagreements)
        written = result.write(out, texts={"disagreements.jsonl": lines}, overwrite=config.overwrite)
        _work(out, {}).remove()
        return dict(written)


NO_DATA = (
    "an upgrade needs samples of the task: pass `data` with at least 16 of them. They need no labels: chats, texts, or "
    "images as the fine-tune reads them."
)


def _upgrade(
    source: Any, tuned: Any, target: Any, data: Any, config: UpgradeConfig, events: Events, out: Path | None = None
) -> Upgrade:
    started = time.perf_counter()
    own, held_out, indices = _own_samples(data, config)
    asked = _transfer_config(config, len(own))
    setup = prepare(source, tuned, target, own, asked)
    setup = replace(setup, about={**setup.about, "data": _identity(data, own, indices, setup)})
    (old_model, new_model), change = setup.models, setup.change
    if not is_whole(old_model, change, config.exclude):
        raise TuneportError("an upgrade asks the old model, which must be whole: leave out `exclude`.")
    judge = _Judge(setup, held_out, asked)
    events.step("asking the old model")
    scored = with_teacher_scores(setup.models, change, setup.calibration.samples)
    old, base = judge.old(), judge.score("target", before_port(new_model, scored, fits=change.fits_head), {})
    rows, made = [old, base], dict[str, Result]()
    asked = _transfer_config(config, len(own), new_model)
    output = output_of(asked)
    work = (
        None
        if out is None
        else _work(out, conditions_of(setup.about, asked, get_method(asked.method), "upgrade"), config)
    )
    for name in config.routes:
        if config.time is not None and time.perf_counter() - started > config.time:
            rows.append(RouteScore(name, note="the time was up"))
            continue
        events.step(f"route {name}")
        begun, memory = time.perf_counter(), _reset_memory(new_model)
        try:
            made[name] = _take(name, setup, asked, config, made.get("port"), judge, rows, work, events)
        except MethodError as error:
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
    return Upgrade(tuple(rows), chosen, decision, result, judge.disagreements(rows, chosen))


def _own_samples(data: Any, config: UpgradeConfig) -> tuple[Dataset, Dataset, NDArray[np.int64]]:
    """Draw own samples from the training split: those that routes may use, those that judge, and where they are."""
    whole = data if isinstance(data, Dataset) else read_data(data, "train", labelled=False, columns=config.columns)
    count = min(len(whole), config.samples or MOST_SAMPLES)
    indices = select(replace(whole, labels=None), samples=count, seed=config.seed)
    judges = min(round(HELD_OUT * count), MOST_HELD_OUT)
    if count < FEWEST:
        raise DataError(f"an upgrade needs at least {FEWEST} own samples, and {whole} has {count}.")
    return whole.subset(indices[judges:]), whole.subset(indices[:judges]), indices


def _transfer_config(config: UpgradeConfig, samples: int | None, target: Model | None = None) -> TransferConfig:
    """The options of the transfer that the routes are made of; a language model is written as an adapter."""
    shared = ("columns", "max_length", "head", "exclude", "device", "dtype", "batch_size", "trust_remote_code")
    given = {name: getattr(config, name) for name in (*shared, "seed", "accept_unlikely", "save_every", "overwrite")}
    writes = target is not None and target.generates is not None
    as_ = config.as_ or ("adapter" if writes else "model")
    rank = (config.rank or RANK) if as_ == "adapter" else None
    return TransferConfig(samples=samples, labels=None, as_=as_, rank=rank, **given)


def _identity(data: Any, own: Dataset, indices: NDArray[np.int64], setup: Setup) -> Mapping[str, Any]:
    """What was read and drawn, for the record."""
    known = dict(setup.about["data"])
    if isinstance(data, (str, Path)):
        known |= {"path": str(data), "name": own.name}
    return {**known, "indices": indices.tolist()}


def _work(out: Path, conditions: Mapping[str, Any], config: UpgradeConfig | None = None) -> Work:
    """Where a killed run leaves what it has measured and learnt."""
    work = Work(out, conditions, 60.0 if config is None else config.save_every)
    if config is not None and config.resume:
        work.check()
    elif config is not None:
        work.remove()
    return work


def _after(name: str, config: UpgradeConfig) -> list[str]:
    return list(config.routes[config.routes.index(name) + 1 :])


def _take(
    name: str,
    setup: Setup,
    asked: TransferConfig,
    config: UpgradeConfig,
    port: Result | None,
    judge: _Judge,
    rows: list[RouteScore],
    work: Work | None,
    events: Events,
) -> Result:
    """Make what a route makes."""
    if name == "copy":
        _check_same_shapes(setup)
        return run(setup, replace(asked, method="naive", scale=1.0), events=events)
    if name == "port":
        return run(setup, asked, work=work, events=events)
    start = port or run(setup, asked, work=work, events=events)
    ported = next((row for row in rows if row.name == "port"), None)
    if ported is None or judge.better(rows[1], ported) <= 0:  # the port is no better start than the target
        start = replace(start, update=replace(start.update, scale=0.0))
    lora = asked.rank if asked.as_ == "adapter" else None
    steps = config.steps or min(MOST_STEPS, max(LEAST_STEPS, EPOCHS * len(setup.calibration.samples) // 16))
    events.plan(steps)
    saved = None if work is None else state_file(work)
    return start.distill(steps, lora=lora, events=events, saved=saved)


def _check_same_shapes(setup: Setup) -> None:
    """Refuse to copy a change between models of other shapes."""
    parameters = dict(setup.models.target.module.named_parameters())
    vector = setup.change.vector
    wrong = [name for name in vector if name not in parameters or vector.shape(name) != tuple(parameters[name].shape)]
    if wrong:
        raise MethodError(f"{len(wrong)} of {len(vector)} changed tensors have another shape in the target")


@dataclass
class _Judge:
    """Scores models on the held-out samples; the old model's answers are known after `old`."""

    setup: Setup
    data: Dataset
    config: MeasureConfig
    answers: NDArray[np.int64] | None = None
    right: NDArray[np.bool_] | None = None

    def old(self) -> RouteScore:
        """Ask the old model."""
        source, change = self.setup.models.source, self.setup.change
        with finetuned(source, change.vector):
            found = self._ask(source)
        self.answers, self.right = found.predicted, found.right if self.data.labels is not None else None
        return replace(self._row("old", found), agreement=None if self.answers is None else 100.0, flips=None)

    def score(self, name: str, model: Model, tensors: Mapping[str, torch.Tensor]) -> RouteScore:
        """Score a model with some parameters changed."""
        with changed(model.module, tensors):
            return self._row(name, self._ask(model))

    def _ask(self, model: Model) -> Evaluation:
        data, heads = self.data, self.setup.calibration.heads
        protocol = "zero-shot" if heads is not None else usual_protocol(model, data)
        if protocol == "perplexity":
            return perplexity(model, data)
        if data.labels is None:  # scores need labels; these are not looked at
            classes = heads.target.classes if heads is not None else data.classes
            data = replace(data, labels=np.zeros(len(data), dtype=np.int64), classes=classes)
        if protocol == "likelihood":
            return likelihood(model, data)
        if heads is None:
            raise TuneportError("an upgrade of an encoder needs classes: give a head with `head`, or data with labels.")
        return zero_shot(model, choose_head(model, self.config.head, data), data)

    def _row(self, name: str, found: Evaluation) -> RouteScore:
        if found.predicted is None:
            return RouteScore(name, found.bits_per_character, found=found)
        labelled = self.data.labels is not None
        agreement, flips = None, None
        if self.answers is not None:
            agreement = round(100.0 * float(np.mean(found.predicted == self.answers)), 3)
        if self.right is not None and found.right is not None:
            flips = int(np.sum(self.right & ~found.right))
        return RouteScore(name, found.accuracy if labelled else None, agreement, flips, found=found)

    def better(self, first: RouteScore, second: RouteScore) -> int:
        """1 if the second is clearly nearer to the old model than the first, -1 if it is clearly farther, else 0."""
        one, two = first.found, second.found
        if one is None or two is None:
            return 0
        if one.predicted is not None and two.predicted is not None and self.answers is not None:
            before, after = one.predicted == self.answers, two.predicted == self.answers
            return direction(int(np.sum(after & ~before)), int(np.sum(before & ~after)))
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
        tried = [row for row in rows[2:] if row.found is not None and self.better(rows[1], row) > 0]
        best: RouteScore | None = None
        for row in tried:  # a later route is dearer, and is taken only for more
            if best is None or _nearer(row, best):
                best = row
        return None if best is None else best.name

    def decide(self, rows: list[RouteScore], chosen: str | None) -> str:
        """The decision in one sentence."""
        old, base = rows[0], rows[1]
        if chosen is None:
            return f"keep the old model: no route is clearly better than the target as it is ({_said(base, old)})"
        row = next(row for row in rows if row.name == chosen)
        flips = "" if not row.flips else f"; {row.flips} held-out samples that were right are wrong now"
        return (
            f"use the new model by the route {chosen}: {_said(row, old)}, the target as it is {_said(base, old)}{flips}"
        )

    def disagreements(self, rows: list[RouteScore], chosen: str | None) -> tuple[Mapping[str, Any], ...]:
        """Held-out samples that the old and the new model answer otherwise; without a new model, none."""
        row = next((row for row in rows if row.name == chosen), None)
        if row is None or row.found is None or row.found.predicted is None or self.answers is None:
            return ()
        names = row.found.classes
        places = np.flatnonzero(row.found.predicted != self.answers)[:SHOWN]

        def said(number: int, index: int) -> str:
            known = names if self.data.choices is None else self.data.choices[index]
            return str(known[int(number)]) if known else str(number)

        return tuple(
            {
                "old": said(int(self.answers[index]), int(index)),
                "new": said(int(row.found.predicted[index]), int(index)),
                **({"label": said(int(self.data.labels[index]), int(index))} if self.data.labels is not None else {}),
                **shown(self.data.inputs[index]),
            }
            for index in places
        )


def _nearer(row: RouteScore, best: RouteScore) -> bool:
    if row.agreement is not None and best.agreement is not None:
        return row.agreement > best.agreement
    return row.score is not None and best.score is not None and row.score < best.score


def _said(row: RouteScore, old: RouteScore) -> str:
    """A score in words."""
    if row.agreement is None:
        return f"{row.score:.3f} bits per character on held-out samples, the old model {old.score:.3f}"
    score = "" if row.score is None else f"{row.score:.1f} % right, "
    return f"{score}agrees with the old model on {row.agreement:.1f} %"


def _reset_memory(model: Model) -> Any:
    """A function that says the most bytes that were on the model's GPU since now."""
    if model.device.type != "cuda":
        return lambda: None
    torch.cuda.reset_peak_memory_stats(model.device)
    return lambda: torch.cuda.max_memory_allocated(model.device)
