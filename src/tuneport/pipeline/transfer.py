"""A transfer from end to end: prepare, measure and move (Algorithm 1 of the paper), hand back a Result or write it.

Works on paths and on live modules; nothing given is changed. What is written can be resumed after a kill.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..errors import TuneportError
from ..io.checkpoint import open_checkpoint, read_json
from ..io.output import check_new_file, check_new_folder, claimed
from ..io.tensors import describe
from ..job import Given, Job
from ..measure.accuracy import before_and_after
from ..methods import LayerRecord, Method, get_method
from ..models.base import ModelLike
from ..report.record import to_json
from ..runtime.budget import plan_passes
from ..runtime.cost import cost_of
from ..runtime.distributed import ranks
from ..runtime.passes import Passes
from ..runtime.resume import SAVE_EVERY, Work, fingerprint
from ..task_vectors.vector import TaskVector
from ..types import OutputKind, Progress, ScaleRule
from .move import move
from .plan import left_behind, not_transported_by
from .prepare import prepare
from .result import Result
from .scale import RULES, ScaleChoice


def transfer(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    scale: float | ScaleRule | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Port a fine-tune of `source` to `target`: Algorithm 1 of the paper.

    `data` is a path or a Dataset, of which samples are drawn, or an iterable of batches for `loss`. The
    options are those of `prepare`; without a `scale`, the method's own is used. Trap: with very few samples a
    full-strength transfer can harm; `scale="auto"` chooses the strength on calibration samples, and may choose zero;
    `scale="safe"` does too, and goes beyond a quarter on evidence only.
    """
    strength = check_scale(scale, options.get("method", "bico"))
    job = prepare(source, finetuned, target, data, scored=isinstance(strength, str), **options)
    result = run(job, scale=strength, progress=progress)
    if isinstance(job.samples, Given) or options.get("loss") is not None:
        return result  # counting would run a loss that is not ours once more
    return replace(result, record={**result.record, "cost": cost_of(job, result.record["samples"])})


def check_scale(scale: float | str | None, method: str | Method = "bico") -> float | ScaleRule:
    """A finite number, or the name of a rule that chooses one; None is the method's own."""
    if scale is None:
        return (get_method(method) if isinstance(method, str) else method).usual_scale
    if scale in RULES:
        return scale
    try:
        number = float(scale)
    except ValueError:
        raise TuneportError(f"the scale must be a number, auto or safe, got {scale!r}.") from None
    if not math.isfinite(number):
        raise TuneportError(f"the scale must be a finite number, auto or safe, got {scale}.")
    return number


def run(
    job: Job,
    *,
    scale: float | ScaleRule | None = None,
    progress: Progress | None = None,
    work: Work | None = None,
    passes: Passes | None = None,
) -> Result:
    """Measure both models, align, and carry the task vector over.

    `work` keeps what is measured, and gives back what an earlier run under the same conditions has measured.
    `passes` says which layers are measured together; a job with a memory budget makes its own. Without a `scale`, the
    method's own is used.
    """
    scale = check_scale(scale, job.method)
    at_once = job.method.signals and not job.method.by_layer
    if ranks().size > 1 and (isinstance(scale, str) or work is not None or at_once):
        raise TuneportError(
            'scale="auto", scale="safe", resuming and methods that move all layers at once are not supported with '
            "several processes: pass a number as `scale` and no `resume`, choose another method, or use one process."
        )
    started = time.perf_counter()
    if passes is None and job.memory_budget is not None:
        passes = plan_passes(job, job.memory_budget)
    moved = move(job, scale, passes=passes, progress=progress, work=work)
    seconds = time.perf_counter() - started
    done = moved.transfer
    kept = not_transported_by(job, done.task_vector, done.kept)
    record = {
        **job.record,
        "scale": moved.scale,
        "samples": moved.counted.samples,
        "seconds": round(seconds, 3),
        "fingerprint": fingerprint(_conditions(job, scale)),
        "seconds_by_stage": {"measure": round(moved.measuring, 3), "transport": round(seconds - moved.measuring, 3)},
        "passes": dict(moved.counted.passes),
        "layers": _layer_entries(job, done.records),
        "not_transported": [asdict(item) for item in kept],
        "left_behind": [asdict(item) for item in left_behind(job)],
    }
    if moved.choice is not None:
        record["scale_choice"] = _choice_entry(moved.choice)
    return Result(job.target, done.task_vector, done.records, kept, moved.scale, record)


def _layer_entries(job: Job, records: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The records of the layers, with where each stands and how wide its maps can be at most."""
    pairs = {pair.target.name: pair for pair in job.plan.pairs}
    entries = []
    for record in records:
        pair = pairs.get(record.target)
        place: dict[str, Any] = {}
        if pair is not None:
            source, target = pair.source, pair.target
            place = {"role": target.role, "stack": target.stack, "block": target.block}
            place["width_in"] = min(source.in_features, target.in_features)
            place["width_out"] = min(source.out_features, target.out_features)
        entries.append({**asdict(record), **place})
    return entries


def _choice_entry(choice: ScaleChoice) -> dict[str, Any]:
    return {
        "rule": choice.rule,
        "samples": choice.samples,
        "held_out": choice.held_out,
        "candidates": [
            {"scale": value, "loss": found.loss, "accuracy": found.accuracy, "sharpness": found.sharpness}
            for value, found in choice.scores.items()
        ],
    }


def port(
    job: Job,
    out: str | Path,
    *,
    scale: float | ScaleRule | None = None,
    kind: OutputKind = "model",
    rank: int | None = None,
    energy: float | None = None,
    overwrite: bool = False,
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    test: Dataset | None = None,
    verdict: Mapping[str, Any] | None = None,
    passes: Passes | None = None,
) -> dict[str, Any]:
    """Run a job, write its result to `out` and return the run record; a killed run can be resumed.

    What is measured is saved every so many seconds in a hidden folder beside `out`, which a finished run
    removes. With `resume`, a run goes on from there and ends in the same files as if it had never stopped.
    `note` gets a line where that is worth one. Accuracy on `test`, before and after, goes into the record, and so
    does the `verdict` of a pre-flight.
    """
    out, say = Path(out), note or (lambda _: None)
    scale = check_scale(scale, job.method)
    if test is not None:
        job.target.require_in_memory("an evaluation", "evaluate the result afterwards, with 'tuneport evaluate'")
    conditions = _conditions(job, scale) | ({"rank": rank, "energy": energy} if kind == "adapter" else {})
    work = Work(out, conditions, save_every)
    several = ranks().size > 1
    with claimed(out):
        done = _finished(out, kind) if resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            say(f"{out} was complete already")
            return done
        _check_place(job, out, kind, overwrite)
        if resume:
            work.check()
            say("continuing from saved statistics" if work.exists() else "nothing to resume: starting over")
        elif work.exists():
            say(f"what an unfinished run for {out} has measured is dropped; `resume=True` continues from it")
            work.remove()
        try:
            result = run(job, scale=scale, progress=progress, work=None if several else work, passes=passes)
        except KeyboardInterrupt:
            if work.exists():
                say("what was measured is kept; the same call with `resume=True` continues from it")
            raise
        more: dict[str, Any] = {"fingerprint": fingerprint(conditions)}
        more["cost"] = cost_of(job, result.record["samples"])
        if test is not None:
            assert job.heads is not None
            more["evaluation"] = before_and_after(job.target, result.apply(), job.heads.target, test)
        if verdict is not None:
            more |= verdict
        result = replace(result, record={**result.record, **more})
        result.save(out, kind=kind, rank=rank, energy=energy, overwrite=overwrite)
        work.remove()
    if kind == "adapter":  # its record says more: ranks and what they cost
        written: dict[str, Any] = read_json(out / "tuneport.json", "a run record", limit=10**8)
        return written
    return {**result.record, "out": str(out), "as": kind}


def _conditions(job: Job, scale: float | str) -> dict[str, Any]:
    """Everything that shapes the result, as JSON values; where the inputs lie does not."""
    kept = ("tuneport", "method", "options", "versions")
    inputs = {key: dict(job.record[key]) for key in ("source", "finetuned", "target", "data")}
    for identity in inputs.values():
        identity.pop("path", None)
    plain: dict[str, Any] = json.loads(to_json({**{key: job.record[key] for key in kept}, **inputs, "scale": scale}))
    return plain


def _check_place(job: Job, out: Path, kind: OutputKind, overwrite: bool) -> None:
    """Refuse an output that must not be replaced, or has no room on the disk."""
    if kind == "model":
        size = sum(describe(job.target.tensors, name).nbytes for name in job.target.tensors)
        check_new_folder(out, overwrite, needed_bytes=size)
    elif kind == "adapter":
        check_new_folder(out, overwrite)
    else:
        check_new_file(out, overwrite)


def _finished(out: Path, kind: OutputKind) -> dict[str, Any] | None:
    """The run record of an output that is there already."""
    try:
        if kind in ("model", "adapter"):
            record = read_json(out / "tuneport.json", "a run record", limit=10**8)
        else:
            record = json.loads(open_checkpoint(out).metadata["record"])
    except (TuneportError, KeyError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
