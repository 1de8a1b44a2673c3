"""Distillation: a fine-tuned source teaches a target on unlabelled samples.

Both models answer the same samples, augmented where that is possible, and the student's answers are drawn towards the
teacher's. Held-out samples judge (`training.exam`): the state whose answers are nearest to the teacher's is kept, or
the last one that is as near within chance; it is the start unless they have come nearer by more than a standard error.
Few own samples judge students that the other half of them has taught; a last student is taught on all of them, for the
steps that were best. A language model is anchored at what it predicts on neutral passages, and a state that has
forgotten them is not kept. A run can be saved and continued with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..config import DistillConfig
from ..data.dataset import joined
from ..errors import TuneportError
from ..io.state import StateFile
from ..measure.samples import DatasetSamples
from ..measure.signals import frozen
from ..models.base import Model
from ..models.tokenizer import Encoded
from ..models.weights import as_parts, finetuned, put_whole, shard, whole
from ..processes import by_first, divided
from ..task_vectors.vector import TaskVector
from ..types import Events, Sides
from .augment import Reader
from .captured import captured
from .division import Extra, comparable, divide, of_passages, schedule_of, warm_up
from .exam import Curve, Exam, Mark, answers_of, pooled, precision
from .loop import Pace, Schedule, run_steps
from .matching import NONE, Matching, matching_of, unlabelled
from .neutral import TOLERANCE, Neutral
from .student import student_of

FEWEST_OF_BATCH = 2  # a batch of one has no other sample to be compared or blended with
PASS_LETTERS = 6000  # characters of the texts of a pass, about 2,000 tokens
ANCHORED = 2  # an anchor every so many steps
MARKS = 10  # of the curve after the start, beside two early ones
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


def distill(
    samples: DatasetSamples,
    student: nn.Module,
    config: DistillConfig,
    *,
    fresh: Callable[[NDArray[np.int64]], nn.Module] | None = None,
    extra: Extra | None = None,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> dict[str, Any]:
    """Train the student in place on the answers of the teacher, and leave it in its best state; see `teach`.

    The entry for the run record has the `best` step, 0 for the start. With few own samples that is the best one of the
    students of two `folds`, and the student is taught `again` on all of them for so many steps.

    Args:
        samples: with both models; the module of the source is the teacher. Their labels are not used.
        student: a copy of the target's module; its parameters that need a gradient are trained.
        fresh: makes another student to begin with, given the places of the own samples that it will be taught.
    """
    events, own, target = events or Events(), len(samples), samples.models.target
    both = samples.chosen if extra is None else joined(samples.chosen, extra.data)
    samples = unlabelled(replace(samples, dataset=both, indices=np.arange(len(both)), base_scores=None))
    matching, images = matching_of(samples), samples.dataset.kind == "image"
    compared = comparable(samples, matching, own)
    folds, all_own = divide(compared, own, extra)
    count = len(folds[0].taught)
    kind = {"beside": images and extra is not None, "passages": of_passages(compared)}
    schedule = schedule_of(config, target, matching.batch_size, count, **kind)
    steps = schedule.steps
    events.plan(steps * (len(folds) + (all_own is not None)))
    neutral = Neutral(target, math.ceil(steps / ANCHORED)) if target.generates is not None else None
    if neutral is not None:
        neutral.prepare(predicted=config.shard)
    run = _Run(samples.models, student, matching, neutral, own, fresh, events, saved)
    played = captured(student) if target.generates == "causal" and not config.shard else nullcontext()
    del student  # where others take its place, it is not kept in memory
    with frozen(samples.models.source.module), played:
        marks = {round(steps * part / MARKS) for part in range(1, MARKS + 1)} | {10, 30}
        stops = {mark for mark in marks if 0 < mark <= steps}
        for fold in folds:
            exam = Exam(samples.models, matching, fold.held_out, config.seed, one_by_one=len(folds) > 1)
            run.learn(fold.taught, schedule, stops, exam, last=all_own is None)
        curve, last = pooled(run.curves, [len(fold.held_out) for fold in folds]), folds[0].taught
        if all_own is not None:
            best, last = curve.better[-1], all_own
            events.advance(steps - best)  # that are not taken
            shorter = replace(schedule, steps=best, warmup=warm_up(best))
            run.learn(all_own, shorter, set(curve.better[1:]), last=True)
        run.put(run.best)
    places = np.unique(last.indices)
    beside = int((places >= own).sum())
    views = beside if extra is not None and extra.views_of is not None else 0
    return {
        "matching": matching.name,
        "samples": len(places) - beside,
        "extra": beside - views,
        "views": views,
        "held_out": sum(len(fold.held_out) for fold in folds),
        "folds": len(folds),
        "left_out": len(samples) - len(compared),
        "steps": steps,
        "batch_size": min(schedule.batch_size, count),
        "learning_rate": schedule.learning_rate,
        "lora": config.lora,
        "best": run.best_step,
        "again": 0 if all_own is None else run.best_step,
        "neutral": None if neutral is None else neutral.base,
        "curve": [asdict(mark) for mark in curve.marks],
    }


@dataclass(eq=False)
class _Run:
    """Students that learn one after the other, each from the start: what changes while they do, which can be saved."""

    models: Sides[Model]
    student: nn.Module
    matching: Matching
    neutral: Neutral | None
    own: int  # places in the data set from here on are of other samples
    fresh: Callable[[NDArray[np.int64]], nn.Module] | None
    events: Events
    saved: StateFile | None

    def __post_init__(self) -> None:
        self.student.eval()
        self.losses: list[Tensor] = []  # since the last mark
        self.curves: list[Curve] = []  # of the students that are judged
        self.count = 0  # of students so far
        self.start = self.state() if self.fresh is None else {}  # of the students that are still to come
        self.best: dict[str, Tensor] = {}
        self.best_step = 0
        self.found = None if self.saved is None else self.saved.load()
        if self.found is not None:
            self.curves = [Curve.of_json(curve) for curve in self.found[1]["curves"]]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.student.named_parameters() if each.requires_grad}

    def state(self) -> dict[str, Tensor]:
        """A copy of what is trained, in memory."""
        return {name: whole(each.detach()).to("cpu", copy=True) for name, each in self.trained.items()}

    def put(self, state: dict[str, Tensor]) -> None:
        """Give the student such a state."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                put_whole(parameter, state[name])

    def learn(
        self,
        taught: DatasetSamples,
        schedule: Schedule,
        stops: Collection[int],
        exam: Exam | None = None,
        *,
        last: bool,
    ) -> None:
        """Teach the next student; keep the best state at the stops, or the last sound one if no exam judges it.

        What a saved run has done is not done again. After the `last` student none begins.
        """
        saved, number, self.count = self.saved, self.count, self.count + 1
        at = number if self.found is None else self.found[1]["student"]  # that was being taught
        if number < at:
            self.events.advance(schedule.steps)
            return
        self._begin(taught, last)
        optimizer, first = schedule.optimizer(self.student), 0
        if self.found is not None:
            first, self.found = self._restore(optimizer, *self.found), None
        elif exam is not None:
            self.curves.append(Curve(limit=self._limit))
            self._mark(0, exam)
        self.events.advance(first)
        for mark in self.curves[-1].marks if exam is not None else ():
            self.events.mark(mark)
        for step, loss in self._steps(taught, schedule, optimizer, first, stops):
            self.events.advance(1)
            if exam is not None:
                self.losses.append(loss)
            if step in stops and exam is not None:
                self._mark(step, exam)
                self.events.mark(self.curves[-1].marks[-1])
            elif step in stops and self.curves[-1].is_sound(self._neutral_loss()):
                self.best, self.best_step = self.state(), step
            if saved is not None and (step == schedule.steps or by_first(lambda: saved.due)):
                self.save(step, number, optimizer, saved)

    def _begin(self, taught: DatasetSamples, last: bool) -> None:
        """Let a student begin at the start."""
        if self.fresh is None:
            self.put(self.start)
            self.best = self.start
        else:
            places = np.unique(taught.indices)
            self.best = {}
            self.student = self.fresh(places[places < self.own]).eval()
            self.best = self.state()
        self.best_step = 0
        if last:
            self.start = {}

    def _restore(self, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], content: dict[str, Any]) -> int:
        """Continue a saved run; the number of steps that are done."""
        self.put({name: tensors[f"now.{name}"] for name in self.trained})
        for name, parameter in self.trained.items():
            moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
            optimizer.state[parameter] = {key: as_parts(value, parameter) for key, value in moments.items()}
            optimizer.state[parameter]["step"] = tensors[f"step.{name}"].to(parameter.device)
        if content["best"]:
            self.best, self.best_step = {name: tensors[f"best.{name}"] for name in self.trained}, content["best"]
        self.losses = list(tensors["losses"]) if "losses" in tensors else []
        return int(content["step"])

    def save(self, step: int, number: int, optimizer: torch.optim.Optimizer, saved: StateFile) -> None:
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()} if self.best_step else {}
        for name, parameter in self.trained.items():
            tensors[f"now.{name}"] = whole(parameter.detach())
            state = optimizer.state[parameter]
            tensors |= {f"{key}.{name}": whole(state[key]) for key in (*MOMENTS, "step")}
        if self.losses:
            tensors["losses"] = torch.stack(self.losses)
        curves = [curve.to_json() for curve in self.curves]
        saved.save(tensors, {"student": number, "step": step, "best": self.best_step, "curves": curves})

    def _steps(
        self,
        taught: DatasetSamples,
        schedule: Schedule,
        optimizer: torch.optim.Optimizer,
        first: int,
        stops: Collection[int],
    ) -> Iterator[tuple[int, Tensor]]:
        """Teach a student some samples, from a step on; the number of steps done and the loss of each."""
        reader, lengths, target = Reader(taught, schedule.steps, schedule.seed), None, self.models.target
        matching, pass_size = self.matching, self.matching.pass_size
        others = torch.from_numpy(taught.indices >= self.own)
        if taught.dataset.kind != "image":
            lengths = torch.tensor([len(str(text)) for text in taught.chosen.inputs])
        if target.generates is not None and lengths is not None:
            pass_size = max(FEWEST_OF_BATCH, min(pass_size, PASS_LETTERS // int(lengths.max())))
        known = self._ask_once(reader, pass_size) if matching.asking == "once" and first < schedule.steps else None

        def loss_of(step: int, rows: Tensor) -> Tensor:
            if matching.asking == "augmented":
                return self._loss(reader.view(rows.numpy(), step, others[rows]))
            return self._loss(reader.plain(rows.numpy()), None if known is None else known[rows])

        what, pace = f"the distillation of {target.name}", Pace(first, stops, pass_size, lengths)
        return run_steps(what, self.student, optimizer, schedule, len(taught), loss_of, pace, self._anchor)

    def _neutral_loss(self) -> float | None:
        """The student's loss on neutral passages, for a language model."""
        with precision(self.models.target):
            return None if self.neutral is None else self.neutral.loss(self.student)

    @property
    def _limit(self) -> float | None:
        """The highest loss on neutral passages of a student that has kept what it knew of them."""
        return None if self.neutral is None else (1 + TOLERANCE) * self.neutral.base

    def _anchor(self, step: int) -> Tensor | None:
        """What keeps a language model near to its start, every other step."""
        if self.neutral is None or step % ANCHORED:
            return None
        with precision(self.models.target):
            return ANCHORED * self.neutral.anchor(self.student, step // ANCHORED)

    def _ask_once(self, reader: Reader, size: int) -> Tensor:
        """The teacher's scores (N, K) of all samples, which stay as they are while the student learns."""

        def asked(part: Tensor) -> Tensor:
            found: Tensor = self.matching.ask.source(self.models.source.module, reader.plain(part.numpy()).source)
            return found.cpu()

        with torch.no_grad(), precision(self.models.target):
            parts = divided(torch.arange(len(reader.samples)).split(size), asked)
        scores = pad_sequence([row for part in parts for row in part], batch_first=True, padding_value=NONE)
        return scores.to(next(self.student.parameters()).device)

    def _loss(self, batch: Sides[Encoded], wanted: Tensor | None = None) -> Tensor:
        """The loss of the student on a batch; `wanted` are the teacher's scores where they are known."""
        wanted, found = answers_of(self.models, self.matching, self.student, batch, wanted)
        return self.matching.loss(wanted[:, : found.shape[1]] if self.matching.asking == "once" else wanted, found)

    def _mark(self, step: int, exam: Exam) -> None:
        """Add a point to the curve, and keep the state if none before it is better beyond chance."""
        loss, agreement, groups = exam.judge(self.student)
        if not math.isfinite(loss):
            raise TuneportError(
                f"the loss on held-out samples is NaN or infinite after {step} steps: check the weights of teacher and "
                "student, and the samples, or choose another `dtype`."
            )
        taught = float(torch.stack(self.losses).mean()) if self.losses else None
        self.losses.clear()
        curve = self.curves[-1]
        curve.marks.append(Mark(step, taught, loss, agreement, self._neutral_loss()))
        curve.groups.append(groups)
        if step and curve.last_is_best:
            self.best, self.best_step = self.state(), step


class Taught(NamedTuple):
    """A student as a change of the target, which has the head that was fitted for it, and an entry for the record."""

    change: TaskVector
    entry: dict[str, Any]
    target: Model


def teach(
    samples: DatasetSamples,
    change: TaskVector,
    start: TaskVector,
    config: DistillConfig,
    *,
    headed: Callable[[DatasetSamples], Model] | None = None,
    extra: Extra | None = None,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> Taught:
    """Distill, and return the student's change of the target with an entry for the run record.

    Args:
        samples: drawn for teacher and student, which come back as they were.
        change: of the source, which makes it the teacher.
        start: the change of the target that the student begins with.
        headed: gives the target a head that is fitted to some samples; those that judge must not have fitted it.
        extra: samples that are taught beside the own ones.
        saved: keeps the state of the run, and gives back that of a killed one.
    """
    drawn, (source, target) = samples, samples.models
    for model in drawn.models:
        if not config.shard:
            model.require_in_memory("a distillation", "give a larger one, or distill on a larger machine")
    student = student_of(target, start, config.lora, config.seed)
    if config.shard:
        shard(target, student.module, source.device)
        samples = replace(samples, models=Sides(source, target.with_module(student.module)))  # a LoRA begins at zero

    def fresh(places: NDArray[np.int64]) -> nn.Module:
        nonlocal target, student
        if headed is not None:
            target = headed(drawn.take(places))
            student = student_of(target, start, config.lora, config.seed)
        return student.module

    started, more = time.perf_counter(), None if headed is None else fresh
    with finetuned(source, change):
        entry = distill(samples, student.module, config, fresh=more, extra=extra, events=events, saved=saved)
    return Taught(student.change(), {**entry, "seconds": round(time.perf_counter() - started, 3)}, target)
