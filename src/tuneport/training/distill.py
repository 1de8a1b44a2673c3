"""Distillation: a fine-tuned source teaches a target on unlabelled samples.

Both models answer the same samples, augmented where that is possible, and the student's answers are drawn towards the
teacher's. A part of the samples is held out: the state whose held-out answers are nearest to the teacher's is kept,
or the last one that is as near within chance; it is the start unless they have come nearer by more than a standard
error. A language model is anchored at what it predicts on neutral passages, and a state that has forgotten them is not
kept. A run can be saved and continued with the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, chain, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..config import DistillConfig
from ..data.dataset import joined
from ..errors import TuneportError
from ..io.state import StateFile
from ..measure.samples import DatasetSamples, Samples
from ..measure.signals import frozen
from ..models.base import Model
from ..models.tokenizer import Encoded
from ..models.weights import as_parts, finetuned, put_whole, shard, whole
from ..processes import by_first, divided
from ..task_vectors.vector import TaskVector
from ..types import Events, Sides
from .augment import Reader
from .captured import captured
from .division import Extra, comparable, divide, schedule_of
from .loop import Pace, Schedule, passes, run_steps
from .matching import NONE, Matching, matching_of, unlabelled
from .neutral import TOLERANCE, Neutral
from .student import student_of

FEWEST_OF_BATCH = 2  # a batch of one has no other sample to be compared or blended with
PASS_LETTERS = 6000  # characters of the texts of a pass, about 2,000 tokens
ANCHORED = 2  # an anchor every so many steps
MARKS = 10  # of the curve after the start, beside two early ones
VIEWS = 4  # augmented copies of each held-out sample
GROUPS = 10  # of held-out samples, whose losses show how sure their mean is
ERRORS = 2.0  # standard errors by which a later state may seem worse than the best
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW


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


def distill(
    samples: DatasetSamples,
    student: nn.Module,
    config: DistillConfig,
    *,
    extra: Extra | None = None,
    events: Events | None = None,
    saved: StateFile | None = None,
) -> dict[str, Any]:
    """Train the student in place on the answers of the teacher, and leave it in its best state; see `teach`.

    The entry for the run record has the `best` step, 0 for the start. With few own samples, a student that `best` steps
    have helped is taught `again` as long on all of them.

    Args:
        samples: with both models; the module of the source is the teacher. Their labels are not used.
        student: a copy of the target's module; its parameters that need a gradient are trained.
    """
    events, own, target = events or Events(), len(samples), samples.models.target
    bound = len(samples.dataset)  # others come from here on
    if extra is not None:
        bound, both = own, joined(samples.chosen, extra.data)
        samples = replace(samples, dataset=both, indices=np.arange(len(both)))
    samples = unlabelled(samples)
    matching, images = matching_of(samples), samples.dataset.kind == "image"
    compared = comparable(samples, matching, own)
    held_out, taught, all_own = divide(compared, own, extra)
    schedule = schedule_of(config, target, matching.batch_size, len(taught), images and extra is not None)
    events.plan(steps := schedule.steps)
    marks = {round(steps * part / MARKS) for part in range(1, MARKS + 1)} | {10, 30}
    stops = {mark for mark in marks if 0 < mark <= steps}
    neutral = Neutral(target) if target.generates is not None else None
    if neutral is not None:
        neutral.prepare(predicted=config.shard)
    run = _Run(samples.models, student, matching, Reader(held_out, VIEWS, config.seed), neutral)

    def learn(taught: DatasetSamples, schedule: Schedule, first: int = 0) -> Iterator[tuple[int, Tensor]]:
        reader, pass_size, lengths = Reader(taught, steps, config.seed), matching.pass_size, None
        others = torch.from_numpy(taught.indices >= bound)
        if not images:
            lengths = torch.tensor([len(str(text)) for text in taught.chosen.inputs])
        if target.generates is not None and lengths is not None:
            pass_size = max(FEWEST_OF_BATCH, min(pass_size, PASS_LETTERS // int(lengths.max())))
        known = run.ask_once(reader, pass_size) if matching.asking == "once" else None

        def loss_of(step: int, rows: Tensor) -> Tensor:
            if matching.asking == "augmented":
                return run.loss(reader.view(rows.numpy(), step, others[rows]))
            return run.loss(reader.plain(rows.numpy()), None if known is None else known[rows])

        what, pace = f"the distillation of {target.name}", Pace(first, stops, pass_size, lengths)
        return run_steps(what, student, run.optimizer, schedule, len(taught), loss_of, pace, run.anchor)

    played = captured(student) if target.generates == "causal" and not config.shard else nullcontext()
    with frozen(samples.models.source.module), played:
        student.eval()
        start = run.state() if all_own is not None else {}
        first = run.begin(schedule, saved)
        events.advance(first)
        for mark in run.curve:
            events.mark(mark)
        for step, loss in learn(taught, schedule, first):
            events.advance(1)
            run.losses.append(loss)
            if step in stops:
                run.mark(step)
                events.mark(run.curve[-1])
            if saved is not None and (step == steps or by_first(lambda: saved.due)):
                run.save(step, saved)
        last = taught
        if all_own is not None and run.best_step:
            events.extend(run.best_step)
            run.put(start)
            shorter = replace(schedule, steps=run.best_step, warmup=min(10, run.best_step // 3))
            run.optimizer = shorter.optimizer(student)
            for _ in learn(all_own, shorter):
                events.advance(1)
            last = all_own if run.is_sound(run.neutral_loss()) else taught
    again = run.best_step if last is all_own else 0
    if not again:
        run.put(run.best)
    places = np.unique(last.indices)
    beside = int((places >= bound).sum())
    views = beside if extra is not None and extra.views_of is not None else 0
    return {
        "matching": matching.name,
        "samples": len(places) - beside,
        "extra": beside - views,
        "views": views,
        "held_out": len(held_out),
        "left_out": len(samples) - len(compared),
        "steps": steps,
        "batch_size": min(schedule.batch_size, len(taught)),
        "learning_rate": schedule.learning_rate,
        "lora": config.lora,
        "best": run.best_step,
        "again": again,
        "neutral": None if neutral is None else neutral.base,
        "curve": [asdict(mark) for mark in run.curve],
    }


@dataclass(eq=False)
class _Run:
    """What changes while a student learns: its parameters, the optimizer, the best state, and the curve."""

    models: Sides[Model]
    student: nn.Module
    matching: Matching
    exam: Reader
    neutral: Neutral | None

    def __post_init__(self) -> None:
        self.trained = {name: each for name, each in self.student.named_parameters() if each.requires_grad}
        self.losses: list[Tensor] = []  # since the last mark
        self.known: dict[int, Any] = {}  # answers of the teacher to held-out batches
        self.curve: list[Mark] = []
        self.groups: list[list[float]] = []  # losses of the groups of held-out samples, of each mark
        self.best: dict[str, Tensor] = {}
        self.best_step = 0

    def precision(self) -> AbstractContextManager[Any]:
        """Half-precision models compute in their dtype, while what is trained stays in float32."""
        model = self.models.target
        dtype, kind = next(model.module.parameters()).dtype, model.device.type
        half = dtype in (torch.float16, torch.bfloat16)
        return torch.autocast(kind, dtype, enabled=half, cache_enabled=kind != "cuda")  # a graph keeps no cache

    def state(self) -> dict[str, Tensor]:
        """A copy of what is trained, in memory."""
        return {name: whole(each.detach()).to("cpu", copy=True) for name, each in self.trained.items()}

    def put(self, state: dict[str, Tensor]) -> None:
        """Give the student such a state."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                put_whole(parameter, state[name])

    def neutral_loss(self) -> float | None:
        """The student's loss on neutral passages, for a language model."""
        with self.precision():
            return None if self.neutral is None else self.neutral.loss(self.student)

    def is_sound(self, neutral: float | None) -> bool:
        """Whether a student with this loss on neutral passages has kept what it knew of them."""
        return self.neutral is None or neutral is None or neutral <= (1 + TOLERANCE) * self.neutral.base

    def anchor(self, step: int) -> Tensor | None:
        """What keeps a language model near to its start, every other step."""
        if self.neutral is None or step % ANCHORED:
            return None
        with self.precision():
            return ANCHORED * self.neutral.anchor(self.student, step // ANCHORED)

    def begin(self, schedule: Schedule, saved: StateFile | None) -> int:
        """Start, or continue at the step of a saved state; the number of steps that are done."""
        self.optimizer = schedule.optimizer(self.student)
        found = saved.load() if saved is not None else None
        if found is None:
            self.mark(0)
            return 0
        tensors, content = found
        self.put({name: tensors[f"now.{name}"] for name in self.trained})
        for name, parameter in self.trained.items():
            moments = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in MOMENTS}
            self.optimizer.state[parameter] = {key: as_parts(value, parameter) for key, value in moments.items()}
            self.optimizer.state[parameter]["step"] = tensors[f"step.{name}"].to(parameter.device)
        self.best = {name: tensors[f"best.{name}"] for name in self.trained}
        self.losses = list(tensors["losses"]) if "losses" in tensors else []
        self.curve, self.best_step = [Mark(**mark) for mark in content["curve"]], content["best"]
        self.groups = content["groups"]
        return int(content["step"])

    def save(self, step: int, saved: StateFile) -> None:
        tensors = {f"best.{name}": tensor for name, tensor in self.best.items()}
        for name, parameter in self.trained.items():
            tensors[f"now.{name}"] = whole(parameter.detach())
            state = self.optimizer.state[parameter]
            tensors |= {f"{key}.{name}": whole(state[key]) for key in (*MOMENTS, "step")}
        if self.losses:
            tensors["losses"] = torch.stack(self.losses)
        curve = [asdict(mark) for mark in self.curve]
        saved.save(tensors, {"step": step, "best": self.best_step, "curve": curve, "groups": self.groups})

    def ask_once(self, reader: Reader, size: int) -> Tensor:
        """The teacher's scores (N, K) of all samples, which stay as they are while the student learns."""

        def asked(part: Tensor) -> Tensor:
            found: Tensor = self.matching.ask.source(self.models.source.module, reader.plain(part.numpy()).source)
            return found.cpu()

        with torch.no_grad(), self.precision():
            parts = divided(torch.arange(len(reader.samples)).split(size), asked)
        scores = pad_sequence([row for part in parts for row in part], batch_first=True, padding_value=NONE)
        return scores.to(next(self.student.parameters()).device)

    def _answers(self, batch: Sides[Encoded], wanted: Any) -> tuple[Any, Any]:
        """Of the teacher, unless they are known, and of the student."""
        with self.precision():
            if wanted is None:
                with torch.no_grad():
                    wanted = self.matching.ask.source(self.models.source.module, batch.source)
            return wanted, self.matching.ask.target(self.student, batch.target)

    def loss(self, batch: Sides[Encoded], wanted: Tensor | None = None) -> Tensor:
        """The loss of the student on a batch; `wanted` are the teacher's scores where they are known."""
        wanted, found = self._answers(batch, wanted)
        return self.matching.loss(wanted[:, : found.shape[1]] if self.matching.asking == "once" else wanted, found)

    def mark(self, step: int) -> None:
        """Add a point to the curve, and keep the state if none before it is better beyond chance."""
        with torch.no_grad():
            judged = [*chain(*divided([*enumerate(self._batches())], lambda item: self._judged(item[0], *item[1])))]
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
        self.curve.append(Mark(step, taught, loss, agreement, self.neutral_loss()))
        rounds = 1 + VIEWS * (self.matching.asking == "augmented")
        views = np.reshape([float(value) for _, value, _ in judged], (rounds, -1))
        self.groups.append(views.mean(0).tolist() if self.matching.apart else [])
        if last_is_best(self.curve, self.groups, [self.is_sound(mark.neutral) for mark in self.curve]):
            self.best, self.best_step = self.state(), step

    def _judged(
        self, number: int, sizes: Sequence[int], read: Callable[[], Sides[Encoded]]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Of each group of a held-out batch: the count of samples, their loss and agreement."""
        answers, exam = self._answers(read(), self.known.get(number)), self.matching.exam or self.matching.loss
        if self.matching.asking != "plain":  # the scores of a sample are few, unlike those of its tokens
            self.known[number] = answers[0]
        groups = [
            (size, [_rows(side, end - size, end) for side in answers])
            for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        return [(size, exam(*group).cpu(), self.matching.agreement(*group).cpu()) for size, group in groups]

    def _batches(self) -> Iterator[tuple[list[int], Callable[[], Sides[Encoded]]]]:
        """The held-out samples and, where the teacher can judge them, the same views of them each time.

        Each batch comes with the sizes of the groups that it holds.
        """
        size, exam, count = self.matching.pass_size, self.exam, len(self.exam.samples)
        groups = passes(torch.arange(count), min(size, math.ceil(count / GROUPS)) if self.matching.apart else size)
        many = max(size // len(groups[0]), 1)
        rows = [groups[at : at + many] for at in range(0, len(groups), many)]

        def view(copy: int, part: Tensor) -> Sides[Encoded]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(exam.seed * 1_000_003 + copy * count + int(part[0]))
                return exam.view(part.numpy(), copy)

        yield from (([*map(len, part)], partial(exam.plain, torch.cat(part).numpy())) for part in rows)
        for copy, part in product(range(VIEWS if self.matching.asking == "augmented" else 0), rows):
            yield [*map(len, part)], partial(view, copy, torch.cat(part))


def _rows(answers: Any, begin: int, end: int) -> Any:
    """The answers to some of the samples of a batch."""
    if isinstance(answers, tuple):
        return tuple(_rows(each, begin, end) for each in answers)
    return answers[begin:end] if isinstance(answers, Tensor) else answers


def last_is_best(curve: Sequence[Mark], groups: Sequence[Sequence[float]], sound: Sequence[bool]) -> bool:
    """Whether the last state is better than the start by a standard error, and none better than it beyond chance.

    Args:
        curve: the states so far; the first one is the start.
        groups: of each state, the losses of groups of held-out samples; empty if they are judged together.
        sound: of each state, whether it has kept what it knew of neutral passages.
    """
    first, last = curve[0], curve[-1]
    if last is first:
        return True
    if not sound[-1] or not first.held_out_loss - last.held_out_loss > _error(groups[0], groups[-1]):
        return False
    kept = [number for number in range(len(curve)) if sound[number] or not number]
    lowest = min(kept, key=lambda number: curve[number].held_out_loss)
    return last.held_out_loss - curve[lowest].held_out_loss <= ERRORS * _error(groups[-1], groups[lowest])


def _error(one: Sequence[float], other: Sequence[float]) -> float:
    """The standard error of the difference of two states' mean losses, given those of the same groups."""
    apart = np.subtract(one, other)
    return float(apart.std(ddof=1)) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0


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
        extra: samples that are taught beside the own ones.
        saved: keeps the state of the run, and gives back that of a killed one.
    """
    if not isinstance(samples, DatasetSamples):
        raise TuneportError("a distillation draws its own samples: pass a data set or a path, not batches.")
    source = samples.models.source
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
        entry = distill(samples, student.module, config, extra=extra, events=events, saved=saved)
    return student.change(), {**entry, "seconds": round(time.perf_counter() - started, 3)}
