"""A transfer from end to end: prepare, measure, transport (Algorithm 1 of the paper), hand back a Result.

Works on paths and on live modules; nothing given is changed.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .alignment import Statistics
from .capture import PairedBatch, Progress, frozen, measure
from .checkpoint import (
    check_finite,
    describe,
    file_digests,
    open_checkpoint,
    read_json,
    write_checkpoint,
)
from .data import Dataset
from .errors import DataError, TuneportError
from .families import Model
from .hub import local
from .methods import LayerRecord, Problem, Transfer
from .output import check_new_file, check_new_folder, claimed, new_folder
from .pairing import KEPT_BY_KIND, Kept
from .preparation import Job, ModelLike, PairedBatches, package_version, pick_device, prepare, versions
from .report import copy_companions, model_card, report_page, to_json, write_record
from .resume import SAVE_EVERY, Work, fingerprint
from .scaling import HOLD_OUT, ScaleChoice, Scaled, Score, choose_scale, fitting_samples
from .task_vector import TaskVector, load_task_vector, save_task_vector

__all__ = [
    "Job",
    "Result",
    "apply",
    "check_scale",
    "extract",
    "left_behind",
    "measure_job",
    "not_transported_by",
    "pick_device",
    "port",
    "prepare",
    "problem_of",
    "run",
    "split_samples",
    "transfer",
    "transfer_auto",
]


@dataclass(frozen=True, eq=False)
class Result:
    """A finished transfer: the target's task vector, the evidence per layer, and the ways to use it."""

    target: Model
    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    not_transported: tuple[Kept, ...]
    scale: float
    record: Mapping[str, Any]

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        vector = self.task_vector.rename({name: self.target.file_names[name] for name in self.task_vector})
        return vector.apply_to(self.target.tensors, self.scale if scale is None else scale)

    def apply(self, scale: float | None = None) -> nn.Module:
        """A copy of the target with the skill, holding exactly the numbers that `save` writes."""
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.file_names[name]])
        return module

    def save(self, out: str | Path, *, kind: str = "model", overwrite: bool = False) -> Path:
        """Write the new model as a folder that from_pretrained loads, or the task vector as one file."""
        out = Path(out)
        record = {**self.record, "out": str(out), "as": kind}
        if kind == "task-vector":
            names = {name: self.target.file_names[name] for name in self.task_vector}
            save_task_vector(out, self.task_vector.rename(names), {"record": to_json(record)}, overwrite=overwrite)
            return out
        if kind != "model":
            raise TuneportError(f"a transfer can be saved as model or task-vector, not as {kind!r}.")
        with new_folder(out, overwrite=overwrite) as folder:
            write_checkpoint(folder, self.tensors())
            copy_companions(self.target.folder, folder, self.target.module)
            (folder / "README.md").write_text(model_card(record), encoding="utf-8")
            (folder / "report.html").write_text(report_page(record), encoding="utf-8")
            write_record(folder / "tuneport.json", record)
        return out


def transfer(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    scale: float | Literal["auto"] = 1.0,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Port a fine-tune of `source` to `target`: Algorithm 1 of the paper.

    `data` is a path or a Dataset, of which samples are drawn, or an iterable of batches for `loss`. The
    options are those of `prepare`. Trap: with very few samples a full-strength transfer can harm;
    `scale="auto"` chooses the strength on part of the calibration samples, and may choose zero.
    """
    check_scale(scale)
    job = prepare(source, finetuned, target, data, scored=scale == "auto", **options)
    return run(job, scale=scale, progress=progress)


def check_scale(scale: float | str) -> float | Literal["auto"]:
    """A finite number, or "auto"."""
    if scale == "auto":
        return "auto"
    try:
        number = float(scale)
    except ValueError:
        raise TuneportError(f"the scale must be a number or auto, got {scale!r}.") from None
    if not math.isfinite(number):
        raise TuneportError(f"the scale must be a finite number or auto, got {scale}.")
    return number


def run(
    job: Job,
    *,
    scale: float | Literal["auto"] = 1.0,
    progress: Progress | None = None,
    work: Work | None = None,
) -> Result:
    """Measure both models, align, and carry the task vector over.

    `work` keeps what is measured, and gives back what an earlier run under the same conditions has measured.
    """
    started = time.perf_counter()
    choice = None

    def solve(statistics: Statistics) -> Transfer:
        return job.method.transfer(problem_of(job, statistics))

    if scale == "auto":
        fit, rest = split_samples(job)
        part = measure_job(fit, progress=progress, work=work, stage="fit")
        statistics = part if rest is fit else part + measure_job(rest, progress=progress, work=work, stage="rest")
        measured = time.perf_counter()
        moved, choice = transfer_auto(rest, solve, part, statistics, held_out=rest is not fit)
        number = choice.scale
    else:
        statistics, number = measure_job(job, progress=progress, work=work), scale
        measured = time.perf_counter()
        moved = solve(statistics)
    done = time.perf_counter()
    kept = not_transported_by(job, moved.task_vector, moved.kept)
    record = {
        **job.record,
        "scale": number,
        "samples": statistics.samples,
        "seconds": round(done - started, 3),
        "fingerprint": fingerprint(_conditions(job, scale)),
        "seconds_by_stage": {"measure": round(measured - started, 3), "transport": round(done - measured, 3)},
        "passes": dict(statistics.passes),
        "layers": [asdict(layer) for layer in moved.records],
        "not_transported": [asdict(item) for item in kept],
        "left_behind": [asdict(item) for item in left_behind(job)],
    }
    if choice is not None:
        record["scale_choice"] = {
            "samples": choice.samples,
            "held_out": choice.held_out,
            "candidates": [{"scale": value, **asdict(found)} for value, found in choice.scores.items()],
        }
    return Result(job.target, moved.task_vector, moved.records, kept, number, record)


def port(
    job: Job,
    out: str | Path,
    *,
    scale: float | Literal["auto"] = 1.0,
    kind: str = "model",
    overwrite: bool = False,
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Run a job, write its result to `out` and return the run record; a killed run can be resumed.

    What is measured is saved every so many seconds in a hidden folder beside `out`, which a finished run
    removes. With `resume`, a run goes on from there and ends in the same files as if it had never stopped.
    `note` gets a line where that is worth one.
    """
    out, say = Path(out), note or (lambda _: None)
    conditions = _conditions(job, scale)
    work = Work(out, conditions, save_every)
    with claimed(out):
        done = _finished(out, kind) if resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            say(f"{out} was complete already")
            return done
        if kind == "model":
            size = sum(describe(job.target.tensors, name).nbytes for name in job.target.tensors)
            check_new_folder(out, overwrite, needed_bytes=size)
        else:
            check_new_file(out, overwrite)
        if resume:
            work.check()
            say("going on from what was measured before" if work.exists() else "nothing to resume: starting anew")
        elif work.exists():
            say(f"what an unfinished run for {out} has measured is dropped; --resume would have gone on from it")
            work.remove()
        try:
            result = run(job, scale=scale, progress=progress, work=work)
        except KeyboardInterrupt:
            if work.exists():
                say("what was measured is kept; the same command with --resume goes on from it")
            raise
        result.save(out, kind=kind, overwrite=overwrite)
        work.remove()
    return {**result.record, "out": str(out), "as": kind}


def _conditions(job: Job, scale: float | str) -> dict[str, Any]:
    """Everything that shapes the result, as JSON values; where the inputs lie does not."""
    kept = ("tuneport", "method", "options", "versions")
    inputs = {key: dict(job.record[key]) for key in ("source", "finetuned", "target", "data")}
    for identity in inputs.values():
        identity.pop("path", None)
    plain: dict[str, Any] = json.loads(to_json({**{key: job.record[key] for key in kept}, **inputs, "scale": scale}))
    return plain


def _finished(out: Path, kind: str) -> dict[str, Any] | None:
    """The run record of an output that is there already."""
    try:
        if kind == "model":
            record = read_json(out / "tuneport.json", "a run record", limit=10**8)
        else:
            record = json.loads(open_checkpoint(out).metadata["record"])
    except (TuneportError, KeyError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def split_samples(job: Job) -> tuple[Job, Job]:
    """The job with the samples that make the maps, and with those that choose the scale (the same where few)."""
    if isinstance(job.batches, PairedBatches):
        count = fitting_samples(len(job.batches.indices))
        if count == len(job.batches.indices):
            return job, job
        first, rest = np.split(job.batches.indices, [count])
        sides = (replace(job.batches, indices=first), replace(job.batches, indices=rest))
        return tuple(replace(job, batches=side, samples=len(side.indices)) for side in sides)  # type: ignore[return-value]
    batches = list(job.batches)
    if not batches:
        raise DataError("choosing a scale needs labelled calibration data; pass --data, or a number as the scale.")
    held_out = int(len(batches) * HOLD_OUT)
    if held_out == 0:
        return (whole := replace(job, batches=batches)), whole
    return replace(job, batches=batches[:-held_out]), replace(job, batches=batches[-held_out:])


def transfer_auto(
    rest: Job, solve: Callable[[Statistics], Transfer], part: Statistics, whole: Statistics, *, held_out: bool
) -> tuple[Transfer, ScaleChoice]:
    """Choose the scale of a transfer on the samples of the job `rest`, which maps from `part` have not seen.

    The maps that ship come from the `whole` statistics, unless those score below the target itself on `rest`;
    then the maps from `part` stand.
    """
    batches = [batch.target if isinstance(batch, PairedBatch) else batch for batch in rest.batches]
    moved = solve(part)
    with Scaled(rest.target.module, moved.task_vector) as scaled:
        choice = choose_scale(
            lambda scale: _score(rest, scaled, scale, batches), samples=rest.samples, held_out=held_out
        )
    if choice.scale == 0 or part is whole:
        return moved, choice
    final = solve(whole)
    with Scaled(rest.target.module, final.task_vector) as scaled:
        found, floor = _score(rest, scaled, choice.scale, batches), choice.scores[0.0]
    worse = found.loss > floor.loss or (found.accuracy or 0.0) < (floor.accuracy or 0.0)
    return (moved if worse else final), choice


def _score(job: Job, scaled: Scaled, scale: float, batches: Sequence[Any]) -> Score:
    """Mean loss and accuracy of the target at one scale, forward passes only."""
    scaled.set(scale)
    assert job.target_loss is not None
    loss, right, samples = 0.0, 0, 0
    with frozen(scaled.module), torch.no_grad():
        for batch in batches:
            loss += float(job.target_loss(scaled.module, batch))
            size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
            samples += size
            if job.target_head is not None:
                scores = job.target_head.scores(job.target, scaled.module, batch[0])
                right += int((scores.argmax(-1) == batch[1]).sum())
    return Score(loss / max(samples, 1), right / max(samples, 1) if job.target_head is not None else None)


def problem_of(job: Job, statistics: Statistics) -> Problem:
    """What the job's method, or any other on the same job, is to solve."""
    return Problem(
        job.plan,
        job.task_vector,
        statistics,
        job.completion,
        source_weights=dict(job.source.module.named_parameters()),
        target_weights=dict(job.target.module.named_parameters()),
    )


def measure_job(
    job: Job,
    *,
    signals: Iterable[str] | None = None,
    progress: Progress | None = None,
    work: Work | None = None,
    stage: str = "all",
) -> Statistics:
    """The statistics that a job's method needs (or the given signals, to serve several methods at once).

    With `work`, they are saved under the name of the `stage` from time to time, and begin with what it holds.
    """
    wanted = frozenset(job.method.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    assert job.source_loss is not None
    assert job.target_loss is not None
    earlier = work.load(stage, job.target.device) if work is not None else None
    if earlier is not None and progress is not None:
        progress(earlier.samples)
    return measure(
        job.source.module,
        job.target.module,
        job.plan.pairs,
        _batches_after(job.batches, earlier),
        signals=wanted,
        source_loss=job.source_loss,
        target_loss=job.target_loss,
        match=job.match,
        progress=progress,
        start=earlier,
        on_batch=work.keeper(stage) if work is not None else None,
    )


def _batches_after(batches: Iterable[Any], earlier: Statistics | None) -> Iterable[Any]:
    """The batches that were not measured yet, cut where they were cut before."""
    if earlier is None:
        return batches
    done = earlier.passes["forward"]
    if isinstance(batches, PairedBatches):
        return replace(batches, indices=batches.indices[done * batches.size :])
    return islice(batches, done, None)


def extract(base: str | Path, finetuned: str | Path, *, exclude: Sequence[str] = ()) -> TaskVector:
    """The task vector `finetuned - base` of two checkpoints, read lazily, under their names in the files."""
    ours, theirs = open_checkpoint(local(base)), open_checkpoint(local(finetuned))
    vector = TaskVector.between(ours, theirs, exclude)
    check_finite(theirs, list(vector))
    check_finite(ours, list(vector))
    return vector


def apply(
    vector: TaskVector | str | Path, base: str | Path, out: str | Path, *, scale: float = 1.0, overwrite: bool = False
) -> Path:
    """Write `base + scale * vector` as a folder like the base's own; the vector may be a file."""
    base, file = local(base), None if isinstance(vector, TaskVector) else Path(vector)
    vector = vector if isinstance(vector, TaskVector) else load_task_vector(vector)
    stored = open_checkpoint(base)
    tensors = vector.apply_to(stored, scale)
    size = sum(describe(stored, name).nbytes for name in stored)
    check_new_folder(out, overwrite, needed_bytes=size, inputs=[base])
    folder_of_base = Path(base) if Path(base).is_dir() else None
    with new_folder(out, overwrite=overwrite) as folder:
        write_checkpoint(folder, tensors)
        copy_companions(folder_of_base, folder, None)
        record = {
            "tuneport": package_version("tuneport"),
            "command": "apply",
            "out": str(out),
            "scale": scale,
            "tensors": len(vector),
            "base": _place(base, stored.files),
            "vector": _place(file, [file]) if file is not None else {"name": "TaskVector"},
            "versions": versions(),
        }
        write_record(folder / "tuneport.json", record)
    return Path(out)


def _place(path: Path, files: Iterable[Path]) -> dict[str, Any]:
    digests = {Path(name).name: digest for name, digest in file_digests(files).items()}
    return {"name": path.absolute().name, "path": str(path), "sha256": digests}


def left_behind(job: Job) -> tuple[Kept, ...]:
    """What the fine-tune changed in the source that no target tensor takes up."""
    taken = {pair.source.name for pair in job.plan.loose} if job.method.moves_loose else set()
    stays = [
        Kept(part.name, KEPT_BY_KIND[part.kind].replace("the target keeps its own", "not moved by this method"))
        for part in job.source.loose
        if part.name in job.task_vector and part.name not in taken and bool(job.task_vector.dense(part.name).any())
    ]
    named = (Kept(job.source.file_names.get(item.tensor, item.tensor), item.reason) for item in stays)
    return (*job.plan.dropped, *named)


def not_transported_by(job: Job, moved: TaskVector, kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """Every tensor of the target's files that stays as it was, with the reason, in the order of the files."""
    reasons: dict[str, str] = {}
    whole = {layer.name: layer.weight for layer in job.target.layers if layer.weight not in moved}
    for item in (*job.plan.kept, *kept):
        tensor = whole.get(item.tensor, item.tensor)  # all parts of a fused weight stay: name it once
        stored = job.target.file_names.get(tensor, tensor)
        if item.tensor not in moved:
            reasons.setdefault(stored, item.reason)
    changed = {job.target.file_names.get(name, name) for name in moved}
    listed = [Kept(name, reasons.pop(name, "not a parameter")) for name in job.target.tensors if name not in changed]
    return (*listed, *(Kept(name, reason) for name, reason in reasons.items()))
