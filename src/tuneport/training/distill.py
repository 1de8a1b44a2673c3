"""Distillation: a fine-tuned source teaches a target on unlabelled samples.

Both models answer the same samples, augmented where that is possible, and the student's answers are drawn towards the
teacher's. A part of the own samples is held out: the state whose held-out answers are nearest to the teacher's is kept,
or the last one that is as near within chance; it is the start unless they have come nearer by more than a standard
error. If own samples are few, the held-out ones only decide: the student is then taught again on all of them. Other
samples, of anything, can be taught beside the own ones. A language model is anchored at what it predicts
on neutral passages, and a state that has forgotten them is not kept. A run can be saved and continued with the same
bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain, product
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..config import DistillConfig
from ..data.dataset import Dataset, joined
from ..errors import DataError, TuneportError
from ..measure.samples import DatasetSamples, Samples
from ..measure.signals import frozen
from ..models.base import Model
from ..models.sharding import as_parts, put_whole, shard, whole
from ..models.tokenizer import Encoded
from ..models.weights import finetuned
from ..processes import by_first, divided
from ..task_vectors.vector import TaskVector
from ..types import Events, Sides
from .augment import Reader
from .captured import captured
from .loop import Pace, Schedule, passes, run_steps
from .matching import NONE, Matching, matching_of, unlabelled
from .neutral import TOLERANCE, Neutral
from .state import StateFile
from .student import student_of

FEWEST = 8  # samples
FEWEST_OF_BATCH = 2  # a batch of one has no other sample to be compared or blended with
READ = 128  # samples that are read at once to see which can be compared
HELD_OUT, FEWEST_HELD_OUT, MOST_HELD_OUT = 0.1, 10, 200  # share of the samples; never more than half of them
FEW = 50  # fewer own samples are all taught if written ones can judge
OWN, OWN_OF_WRITTEN = 2, 8  # own samples are at least one of so many that are taught; beside written ones, fewer
PASS_LETTERS = 6000  # characters of the texts of a pass, about 2,000 tokens
ANCHORED = 2  # an anchor every so many steps
STEPS, MOST_STEPS, EPOCHS = 300, 2000, 10  # of a run whose steps follow from the samples
STEPS_BESIDE = 1000  # at least, if other images are taught beside the own ones
RATE = 0.12  # the learning rate of a model of width one
LORA_RATE = 5.0  # times that of all weights
MARKS = 10  # of the curve after the start, beside two early ones
VIEWS = 4  # augmented copies of each held-out sample
GROUPS = 10  # of held-out samples, whose losses show how sure their mean is
ERRORS = 2.0  # standard errors by which a later state may seem worse than the best


@dataclass(frozen=True)
class Mark:
    """A point of the curve: the mean training loss since the last, loss and agreement on held-out samples.

    `neutral` is the loss on neutral passages, in nats per token.
    """

    step: int
    loss: float | None
    held_out_loss: float
    agreement: float
    neutral: float | None = None


@dataclass(frozen=True, eq=False)
class Distilled:
    """How a student got to its best state; `best` is 0 if that is the start.

    With few own samples, a student that `best` steps have helped is taught `again` as long on all of them.
    """

    matching: str
    schedule: Schedule
    samples: int
    extra: int
    held_out: int
    left_out: int
    curve: tuple[Mark, ...]
    best: int
    again: int
    neutral: float | None


@dataclass(frozen=True, eq=False)
class Extra:
    """Samples that are taught beside the own ones, answered as those are; they judge too if they are `like_own`.

    `views_of` are the places of the own samples that each one is a view of: those of held-out samples are not taught.
    """

    data: Dataset
    like_own: bool = False
    views_of: NDArray[np.int64] | None = None


def schedule_of(config: DistillConfig, model: Model, usual: int, count: int, least: int = STEPS) -> Schedule:
    """Ten steps of warm-up, no weight decay: the start is where the student shall stay near.

    The learning rate follows from the student's width unless it is given, the batch size is the `usual` one, and steps,
    at `least` so many, follow from the number of samples.
    """
    batch = config.batch_size or usual
    steps = config.steps or min(max(round(EPOCHS * count / batch), least), MOST_STEPS)
    rate = RATE / median_low(layer.in_features for layer in model.architecture.layers)
    rate *= LORA_RATE if config.lora is not None else 1.0
    return Schedule(
        steps,
        batch,
        config.learning_rate or rate,
        weight_decay=0.0,
        seed=config.seed,
        warmup=min(10, steps // 3),
    )


def distill(
    samples: DatasetSamples,
    student: nn.Module,
    config: DistillConfig,
    *,
    extra: Extra | None = None,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> Distilled:
    """Train the student in place on the answers of the teacher, and leave it in its best state.

    Args:
        samples: with both models; the module of the source is the teacher. Their labels are not used.
        student: a copy of the target's module; its parameters that need a gradient are trained.
        config: steps, learning rate, batch size and seed.
        extra: samples that are taught beside the own ones.
        events: listens to the run.
        saved: keeps the state of the run, and gives back that of a killed one.
    """
    events, own, target = events or Events(), len(samples), samples.models.target
    if extra is not None:
        both = joined(samples.chosen, extra.data)
        samples = replace(samples, dataset=both, indices=np.arange(len(both)))
    samples = unlabelled(samples)
    matching = matching_of(samples)
    compared = _comparable(samples, matching, own)
    lessons = _lessons(compared, own, extra)
    bound = own if extra is not None else len(samples.dataset)  # others come from here on
    least = STEPS_BESIDE if extra is not None and samples.dataset.kind == "image" else STEPS
    schedule = schedule_of(config, target, matching.batch_size, len(lessons.taught), least)
    steps = schedule.steps
    events.plan(steps)
    teacher, precision = samples.models.source.module, _autocast(target)
    exam = Reader(lessons.held_out, VIEWS, config.seed)
    marks = {round(steps * part / MARKS) for part in range(1, MARKS + 1)} | {10, 30}
    stops = {mark for mark in marks if 0 < mark <= steps}
    neutral = Neutral(target) if target.generates is not None else None
    if neutral is not None:
        neutral.prepare(predicted=config.shard)
    run = _Run(teacher, student, matching, precision, neutral)

    def anchor(step: int) -> Tensor | None:
        if neutral is None or step % ANCHORED:
            return None
        with precision:
            return ANCHORED * neutral.anchor(student, step // ANCHORED)

    def learn(taught: DatasetSamples, schedule: Schedule, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        reader, pass_size, lengths = Reader(taught, steps, config.seed), matching.pass_size, None
        others = torch.from_numpy(taught.indices >= bound)
        if samples.dataset.kind != "image":
            lengths = torch.tensor([len(str(text)) for text in taught.chosen.inputs])
        if target.generates is not None and lengths is not None:
            pass_size = max(FEWEST_OF_BATCH, min(pass_size, PASS_LETTERS // int(lengths.max())))
        known = run.ask_once(reader, pass_size) if matching.asking == "once" else None

        def loss_of(step: int, rows: Tensor) -> Tensor:
            if matching.asking == "augmented":
                return run.loss(reader.view(rows.numpy(), step, others[rows]))
            return run.loss(reader.plain(rows.numpy()), None if known is None else known[rows])

        what, pace = f"the distillation of {target.name}", Pace(first, stops, pass_size, lengths)
        return run_steps(what, student, run.optimizer, schedule, len(taught), loss_of, pace, anchor)

    played = captured(student) if target.generates == "causal" and not config.shard else nullcontext()
    with frozen(teacher), played:
        student.eval()
        start = run.state() if lessons.all_own is not None else {}
        first = run.begin(schedule, exam, saved)
        events.advance(first)
        for mark in run.curve:
            events.mark(mark)
        for step, loss in learn(lessons.taught, schedule, first):
            events.advance(1)
            run.losses.append(loss)
            if step in stops:
                run.mark(step, exam)
                events.mark(run.curve[-1])
            if saved is not None and (step == steps or by_first(lambda: saved.due)):
                run.save(step, saved)
        again = run.best_step if lessons.all_own is not None else 0
        if lessons.all_own is not None and again:
            events.extend(again)
            shorter = replace(schedule, steps=again, warmup=min(10, again // 3))
            run.put(start)
            run.optimizer = shorter.optimizer(student)
            for _ in learn(lessons.all_own, shorter):
                events.advance(1)
            again *= run.sound()
    if not again:
        run.put(run.best)
    taught = lessons.all_own if again and lessons.all_own is not None else lessons.taught
    places = np.unique(taught.indices)
    others = int((places >= bound).sum())
    return Distilled(
        matching.name,
        replace(schedule, batch_size=min(schedule.batch_size, len(lessons.taught))),
        len(places) - others,
        others,
        len(lessons.held_out),
        len(samples) - len(compared),
        tuple(run.curve),
        run.best_step,
        again,
        None if neutral is None else neutral.base,
    )


class _Run:
    """What changes while a student learns: its parameters, the optimizer, the best state, and the curve."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        matching: Matching,
        precision: AbstractContextManager[Any],
        neutral: Neutral | None = None,
    ) -> None:
        self.teacher, self.student, self.matching, self.precision = teacher, student, matching, precision
        self.neutral = neutral
        self.trained = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
        self.losses: list[Tensor] = []  # since the last mark
        self.known: dict[int, Any] = {}  # answers of the teacher to held-out batches
        self.curve: list[Mark] = []
        self.groups: list[list[float]] = []  # losses of the groups of held-out samples, of each mark
        self.best: Mapping[str, Tensor] = {}
        self.best_step = 0

    def state(self) -> dict[str, Tensor]:
        """A copy of what is trained, in memory."""
        return {name: whole(each.detach()).to("cpu", copy=True) for name, each in self.trained.items()}

    def put(self, state: Mapping[str, Tensor]) -> None:
        """Give the student such a state."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                put_whole(parameter, state[name])

    def sound(self) -> bool:
        """Whether the student has kept what it knew of neutral passages."""
        if self.neutral is None:
            return True
        with self.precision:
            return self.neutral.loss(self.student) <= (1 + TOLERANCE) * self.neutral.base

    def begin(self, schedule: Schedule, exam: Reader, saved: StateFile | None) -> int:
        """Start, or continue at the step of a saved state; the number of steps that are done."""
        self.optimizer = schedule.optimizer(self.student)
        found = saved.load() if saved is not None else None
        if found is None:
            self.mark(0, exam)
            return 0
        tensors, content = found
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.trained.items()):
                put_whole(parameter, tensors[f"now.{name}"])
                self.optimizer.state[parameter] = {
                    key: as_parts(tensors[f"adam.{number}.{key}"].to(parameter.device), parameter)
                    for key in ("exp_avg", "exp_avg_sq")
                }
                self.optimizer.state[parameter]["step"] = tensors[f"adam.{number}.step"]
        self.best = {name: tensors[f"best.{name}"] for name in self.trained}
        self.losses = list(tensors["losses"]) if "losses" in tensors else []
        self.curve, self.best_step = [Mark(**mark) for mark in content["curve"]], content["best"]
        self.groups = content["groups"]
        return int(content["step"])

    def save(self, step: int, saved: StateFile) -> None:
        tensors = {f"now.{name}": whole(parameter.detach()) for name, parameter in self.trained.items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        for number, parameter in enumerate(self.trained.values()):
            state = self.optimizer.state[parameter]
            tensors |= {f"adam.{number}.{key}": whole(torch.as_tensor(value)) for key, value in state.items()}
        if self.losses:
            tensors["losses"] = torch.stack(self.losses)
        curve = [asdict(mark) for mark in self.curve]
        saved.save(tensors, {"step": step, "best": self.best_step, "curve": curve, "groups": self.groups})

    def ask_once(self, reader: Reader, size: int) -> Tensor:
        """The teacher's scores (N, K) of all samples, which stay as they are while the student learns."""
        rows = torch.arange(len(reader.samples))
        with torch.no_grad(), self.precision:
            parts = divided(rows.split(size), lambda part: self._asked(reader, part).cpu())
        scores = pad_sequence([row for part in parts for row in part], batch_first=True, padding_value=NONE)
        return scores.to(next(self.student.parameters()).device)

    def _asked(self, reader: Reader, part: Tensor) -> Tensor:
        scores: Tensor = self.matching.ask.source(self.teacher, reader.plain(part.numpy()).source)
        return scores

    def loss(self, batch: Sides[Encoded], wanted: Tensor | None = None) -> Tensor:
        """The loss of the student on a batch; `wanted` are the teacher's scores where they are known."""
        wanted, found = self._answers(batch, wanted)
        return self.matching.loss(wanted[:, : found.shape[1]] if self.matching.asking == "once" else wanted, found)

    def mark(self, step: int, exam: Reader) -> None:
        """Add a point to the curve, and keep the state if none before it is better beyond chance."""
        with torch.no_grad():
            found = divided([*enumerate(self._batches(exam))], lambda item: self._judged(item[0], *item[1]))
        judged = [*chain(*found)]
        counts = sum(count for count, _, _ in judged)
        loss = float(sum(count * value for count, value, _ in judged) / counts)
        agreement = float(sum(count * value for count, _, value in judged) / counts)
        if not math.isfinite(loss):
            raise TuneportError(
                f"the loss on held-out samples is NaN or infinite after {step} steps: check the weights of teacher and "
                "student, and the samples, or choose another `dtype`."
            )
        taught = float(torch.stack(self.losses).mean()) if self.losses else None
        self.losses.clear()
        neutral = None
        if self.neutral is not None:
            with self.precision:
                neutral = self.neutral.loss(self.student)
        self.curve.append(Mark(step, taught, loss, agreement, neutral))
        rounds = 1 + VIEWS * (self.matching.asking == "augmented")
        views = np.reshape([float(value) for _, value, _ in judged], (rounds, -1))
        self.groups.append(views.mean(0).tolist() if self.matching.apart else [])
        most = math.inf if self.neutral is None else (1 + TOLERANCE) * self.neutral.base
        if last_is_best(self.curve, self.groups, most):
            self.best = self.state()
            self.best_step = step

    def _judged(
        self, number: int, sizes: Sequence[int], read: Callable[[], Sides[Encoded]]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Of each group of a held-out batch: the count of samples, their loss and agreement."""
        answers, exam = self._answers(read(), self.known.get(number)), self.matching.exam or self.matching.loss
        if self.matching.asking != "plain":  # the scores of a sample are few, unlike those of its tokens
            self.known[number] = answers[0]
        ends = [*accumulate(sizes)]
        groups = [[_rows(side, end - size, end) for side in answers] for size, end in zip(sizes, ends, strict=True)]
        return [
            (size, exam(*group).cpu(), self.matching.agreement(*group).cpu())
            for size, group in zip(sizes, groups, strict=True)
        ]

    def _batches(self, exam: Reader) -> Iterator[tuple[list[int], Callable[[], Sides[Encoded]]]]:
        """The held-out samples and, where the teacher can judge them, the same views of them each time.

        Each batch comes with the sizes of the groups that it holds.
        """
        size, count = self.matching.pass_size, len(exam.samples)
        groups = passes(torch.arange(count), min(size, math.ceil(count / GROUPS)) if self.matching.apart else size)
        many = max(size // len(groups[0]), 1)
        rows = [groups[at : at + many] for at in range(0, len(groups), many)]

        def view(copy: int, part: Tensor) -> Sides[Encoded]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(exam.seed * 1_000_003 + copy * len(exam.samples) + int(part[0]))
                return exam.view(part.numpy(), copy)

        yield from (([*map(len, part)], partial(exam.plain, torch.cat(part).numpy())) for part in rows)
        for copy, part in product(range(VIEWS if self.matching.asking == "augmented" else 0), rows):
            yield [*map(len, part)], partial(view, copy, torch.cat(part))

    def _answers(self, batch: Sides[Encoded], wanted: Any = None) -> tuple[Any, Any]:
        with self.precision:
            if wanted is None:
                with torch.no_grad():
                    wanted = self.matching.ask.source(self.teacher, batch.source)
            return wanted, self.matching.ask.target(self.student, batch.target)


def _rows(answers: Any, begin: int, end: int) -> Any:
    """The answers to some of the samples of a batch."""
    if isinstance(answers, tuple):
        return tuple(_rows(each, begin, end) for each in answers)
    return answers[begin:end] if isinstance(answers, Tensor) else answers


def last_is_best(curve: Sequence[Mark], groups: Sequence[Sequence[float]], most: float) -> bool:
    """Whether the last state is better than the start by a standard error, and none better than it beyond chance.

    Args:
        curve: the states so far; the first one is the start.
        groups: of each state, the losses of groups of held-out samples; empty if they are judged together.
        most: the loss on neutral passages above which a state has forgotten too much.
    """
    first, last = curve[0], curve[-1]
    if last is first:
        return True
    sound = [number for number, mark in enumerate(curve) if mark.neutral is None or mark.neutral <= most or not number]
    if sound[-1] != len(curve) - 1 or not first.held_out_loss - last.held_out_loss > _error(groups[0], groups[-1]):
        return False
    lowest = min(sound, key=lambda number: curve[number].held_out_loss)
    return last.held_out_loss - curve[lowest].held_out_loss <= ERRORS * _error(groups[-1], groups[lowest])


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """The standard error of the difference of two states' mean losses, given those of the same groups."""
    apart = np.subtract(one, other)
    return float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0


def _comparable(samples: DatasetSamples, matching: Matching, own: int) -> DatasetSamples:
    """The samples on which teacher and student can be compared; the first ones are the `own` ones."""
    if matching.comparable is None:
        return samples
    kept = torch.cat([matching.comparable(sides) for sides in replace(samples, size=READ).encoded()])
    found = samples.take(kept.nonzero()[:, 0].numpy())
    if len(found) < FEWEST <= len(samples):
        count = int(kept[:own].sum())
        raise DataError(
            f"teacher and student can be compared on {count} of {own} samples, and a distillation needs at least "
            f"{FEWEST}: a text needs a token that both models predict, and a question two answers."
        )
    return found


def divide(samples: DatasetSamples) -> tuple[DatasetSamples, DatasetSamples]:
    """The samples that are held out, and those that the student learns from."""
    if len(samples) < FEWEST:
        raise DataError(
            f"a distillation needs at least {FEWEST} samples, of which some are held out; got {len(samples)}."
        )
    count = min(max(round(HELD_OUT * len(samples)), FEWEST_HELD_OUT), len(samples) // 2, MOST_HELD_OUT)
    return samples.take(slice(len(samples) - count, None)), samples.take(slice(len(samples) - count))


class _Lessons(NamedTuple):
    """The samples that are held out, those that are taught, and the latter with all own ones where these are few."""

    held_out: DatasetSamples
    taught: DatasetSamples
    all_own: DatasetSamples | None


def _lessons(samples: DatasetSamples, own: int, extra: Extra | None) -> _Lessons:
    """Divide the samples; the first ones are the `own` ones.

    Beside extra ones, own samples are repeated until they are a fixed share of what is taught. Of few own samples none
    is held out if extra ones are like them.
    """
    if extra is None:
        held_out, taught = divide(samples)
        return _Lessons(held_out, taught, samples if len(samples) < FEW else None)
    kept, more = (samples.take(np.flatnonzero(part)) for part in (samples.indices < own, samples.indices >= own))
    few = len(kept) < FEW
    if extra.like_own and few:
        held_out, more = divide(more)
        return _Lessons(held_out, _beside(kept, more, OWN_OF_WRITTEN), None)
    parts = OWN_OF_WRITTEN if extra.like_own else OWN
    held_out, taught = divide(kept)
    rest = more
    if extra.views_of is not None:
        shown = np.isin(extra.views_of[more.indices - own], held_out.indices)
        rest = more.take(np.flatnonzero(~shown))
    return _Lessons(held_out, _beside(taught, rest, parts), _beside(kept, more, parts) if few else None)


def _beside(own: DatasetSamples, more: DatasetSamples, parts: int) -> DatasetSamples:
    """Own samples, repeated until they are one of so many `parts`, and others."""
    times = max(1, math.ceil(len(more) / ((parts - 1) * max(len(own), 1))))
    return replace(own, indices=np.concatenate([np.tile(own.indices, times), more.indices]))


def _autocast(model: Model) -> AbstractContextManager[Any]:
    """Half-precision models compute in their dtype, while what is trained stays in float32."""
    dtype = next(model.module.parameters()).dtype
    half, kind = dtype in (torch.float16, torch.bfloat16), model.device.type
    return torch.autocast(kind, dtype, enabled=half, cache_enabled=kind != "cuda")  # a graph keeps no cache


def teach(
    samples: Samples,
    target: Model,
    change: TaskVector,
    start: TaskVector,
    config: DistillConfig,
    *,
    extra: Extra | None = None,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> tuple[TaskVector, dict[str, Any]]:
    """Distill, and return the student's change of the target with an entry for the run record.

    Args:
        samples: drawn for both models, which come back as they were.
        target: the student's model; its head may be another than that of the samples' target.
        change: of the source, which makes it the teacher.
        start: the change of the target that the student begins with.
        config: the options.
        extra: samples that are taught beside the own ones.
        events: listens to the run.
        saved: keeps the state of the run, and gives back that of a killed one.
    """
    if not isinstance(samples, DatasetSamples):
        raise TuneportError("a distillation draws its own samples: pass a data set or a path, not batches.")
    source, events = samples.models.source, events or Events()
    samples = replace(samples, models=Sides(source, target))
    for model in samples.models:
        if not config.shard:
            model.require_in_memory("a distillation", "give a larger one, or distill on a larger machine")
    student = student_of(target, start, config.lora, config.seed)
    if config.shard:
        shard(target, student.module, source.device)
        samples = replace(samples, models=Sides(source, target.with_module(student.module)))  # a LoRA begins at zero
    started = time.perf_counter()
    with finetuned(source, change):
        found = distill(samples, student.module, config, extra=extra, events=events, saved=saved)
    return student.change(), {
        "matching": found.matching,
        "samples": found.samples,
        "extra": found.extra if extra is None or extra.views_of is None else 0,
        "views": 0 if extra is None or extra.views_of is None else found.extra,
        "held_out": found.held_out,
        "left_out": found.left_out,
        "steps": found.schedule.steps,
        "batch_size": found.schedule.batch_size,
        "learning_rate": found.schedule.learning_rate,
        "lora": config.lora,
        "best": found.best,
        "again": found.again,
        "neutral": found.neutral,
        "curve": [asdict(mark) for mark in found.curve],
        "seconds": round(time.perf_counter() - started, 3),
    }
