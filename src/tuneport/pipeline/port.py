"""A transfer whose result is written to files, and that can be resumed after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..data.dataset import Dataset
from ..errors import TuneportError
from ..io.checkpoint import LARGEST_INDEX, open_checkpoint, read_json
from ..io.output import claimed
from ..job import Job
from ..methods import Method, get_method
from ..runtime.distributed import ranks
from ..runtime.passes import Passes
from ..runtime.resume import SAVE_EVERY, Work, fingerprint
from ..task_vectors.lora_write import UNCUT, AdapterForm
from ..training.distill import Mark
from ..training.state import StateFile
from ..types import OutputKind, Progress, Say, ScaleRule
from .evaluation import Evaluated, Role, evaluate
from .outcome import outcome_of
from .result import Result, check_output, check_vector, output_bytes, rewrite, updates_of
from .transfer import conditions_of, run, scale_for
from .unseen import Unseen, unseen
from .written import open_written


def port(
    job: Job,
    out: str | Path,
    *,
    method: str | Method = "bico",
    scale: float | ScaleRule | None = None,
    kind: OutputKind = "model",
    form: AdapterForm = UNCUT,
    distill: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Progress | None = None,
    note: Say | None = None,
    test: Dataset | None = None,
    test_samples: int | None = None,
    untested: str = "",
    passes: Passes | None = None,
    watch: Callable[[Mark], None] | None = None,
    step: Say | None = None,
) -> dict[str, Any]:
    """Run a job, write its result to `out` and return the run record; a killed run can be resumed.

    What is measured is saved in a hidden folder next to `out`, which a finished run removes.

    Args:
        job, method, scale, progress, passes: see `run`.
        out: a folder, or a file where the kind is "task-vector".
        kind, form: what to write, and of an adapter, how.
        distill, watch: steps of a distillation (of an adapter, of its LoRA), and what gets its curve.
        overwrite, resume: replace an existing output, or continue what a killed run has measured, with the same files;
            a complete output is only scored, if it was not.
        save_every: seconds between two saves of what is measured.
        note, step: called with lines for the user, and with the name of each step as it begins.
        test, test_samples, untested: data that are scored, how many of them if not all, and why there are none. Samples
            that calibration uses are left out, see `unseen`.
    """
    out, method, asked, scale = Path(out), get_method(method), scale, scale_for(job, scale)
    say, begin = (call or (lambda _: None) for call in (note, step))
    if asked is None and isinstance(scale, float):
        say("the scale is 1, as in the paper: no sample can be scored to choose it")
    _check(job, kind, form, test, distill)
    scored, untested = _to_score(job, test, test_samples, untested, say)
    form_of = asdict(form) if kind == "adapter" else {}
    conditions = {**conditions_of(job, method, scale), **({} if distill is None else {"distill": distill}), **form_of}
    job = replace(job, form=form if kind == "adapter" else None)
    work = Work(out, conditions, save_every)
    with claimed(out):
        done = finished(out, kind) if resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            say(f"{out} was complete already")
            if scored is None or done.get("evaluation", {}).get("samples") == len(scored.test):
                return done
            begin("scoring the test split")
            return _score_finished(job, out, kind, done, scored, scale)
        size = output_bytes(job.target, kind, updates_of(job, method, kind, form.rank))
        check_output(out, kind, overwrite, needed_bytes=size)
        _resume(work, resume, say)
        try:
            kept = work if ranks().size == 1 else None
            ported = result = run(
                job, method, scale=scale, progress=progress, work=kept, passes=passes, note=note, step=step
            )
            if distill is not None:
                lora = form_of.get("rank")
                result = result.distill(distill, lora=lora, progress=progress, watch=watch, saved=state_file(work))
            found = None
            if scored is not None:
                begin("scoring the test split")
                made: dict[Role, Result] = {"port": ported, **({} if ported is result else {"distilled": result})}
                outputs = {role: (each.target, each.written(kind, form)) for role, each in made.items()}
                try:
                    found = evaluate(ported.job or job, outputs, scored)
                except TuneportError as error:  # the port is not lost for it
                    untested = _reason(error, say)
            more = {"fingerprint": fingerprint(conditions)}
            more |= _outcome(result.record, found, result.scale, scale, untested)
            result = replace(result, record={**result.record, **more})
            begin("writing")
            result.save(out, kind=kind, overwrite=overwrite, **asdict(form))
        except KeyboardInterrupt:
            if work.exists():
                say("what was measured is kept; the same call with `resume=True` continues from it")
            raise
        work.remove()
    return finished(out, kind) or {**result.record, "out": str(out), "as": kind}  # what is written says more


def _to_score(
    job: Job, test: Dataset | None, samples: int | None, untested: str, say: Say
) -> tuple[Unseen | None, str]:
    """Choose the test samples that are scored, and say which; where there are none, the reason."""
    if test is None:
        return None, untested
    try:
        scored = unseen(job, test, samples)
    except TuneportError as error:
        return None, _reason(error, say)
    if scored.note:
        say(scored.note)
    return scored, ""


def _reason(error: TuneportError, say: Say) -> str:
    """Say why there are no scores, and return it for the record."""
    reason = str(error).rstrip(".")
    say(f"there will be no scores: {reason}")
    return reason


def _score_finished(
    job: Job, out: Path, kind: OutputKind, done: dict[str, Any], scored: Unseen, scale: float | str
) -> dict[str, Any]:
    """Score an output that is there already, and write what it has come to into its record, card and report."""
    dtype = next(job.target.module.parameters()).dtype
    base = None if kind == "model" else done["target"].get("path")
    model = replace(open_written(out, base, device=job.target.device, dtype=dtype), name=job.target.name)
    if job.target.reader is not None:
        model = model.cut_at(job.target.reader.max_length)
    taught = done.get("distilled", {})
    role: Role = "distilled" if taught.get("best") or taught.get("lora") else "port"
    found = evaluate(job, {role: (model, {})}, scored)
    strength = done["scale"] if role == "port" else 1.0
    record = {**done, **_outcome(done, found, strength, scale, "")}
    rewrite(out, kind, record, job.target.library)
    return record


def _outcome(
    record: Mapping[str, Any], found: Evaluated | None, strength: float, scale: float | str, reason: str
) -> dict[str, Any]:
    """What the record says of the scores, and of what the transfer has come to."""
    told = outcome_of(
        found,
        scale=strength,
        rule=scale if isinstance(scale, str) else None,
        head="head" in record,
        distilled=bool(record.get("distilled", {}).get("best")),
        reason=reason,
    )
    return {**({} if found is None else found.record()), **asdict(told)}


def _resume(work: Work, resume: bool, say: Say) -> None:
    """Check what an unfinished run has saved, or remove it."""
    if resume:
        work.check()
        say("continuing what an earlier run has saved" if work.exists() else "nothing to resume: starting over")
    elif work.exists():
        say(f"what an unfinished run for {work.out} has measured is dropped; `resume=True` continues from it")
        work.remove()


def _check(job: Job, kind: OutputKind, form: AdapterForm, test: Dataset | None, distill: int | None) -> None:
    """Refuse outputs that cannot be written, and for an offloaded model, what needs it whole."""
    check_vector(kind, job.fits_head)
    if distill is not None and kind == "adapter" and form.rank is None:
        raise TuneportError("a distilled adapter is a LoRA of one rank: pass `rank=R`.")
    if test is not None:
        job.target.require_in_memory("an evaluation", "evaluate the result afterwards, with 'tuneport evaluate'")
    for model in job.models if distill is not None else ():
        model.require_in_memory("a distillation", "give a larger one, or leave `distill` out")


def state_file(work: Work) -> StateFile:
    """Where a run keeps the state of its distillation."""
    work.make_folder()
    return StateFile(work.training_state, fingerprint(work.conditions), work.every)


def finished(out: Path, kind: OutputKind) -> dict[str, Any] | None:
    """The run record of an output that is there already."""
    try:
        if kind in ("model", "adapter"):
            record = read_json(out / "tuneport.json", "a run record", limit=LARGEST_INDEX)
        else:
            record = json.loads(open_checkpoint(out).metadata["record"])
    except (TuneportError, KeyError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
