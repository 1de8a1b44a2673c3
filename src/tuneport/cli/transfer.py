"""`tuneport transfer`, and what it shares with `plan` and `compare`.

All three hand their parameters to `prepare`, so that a plan shows the transfer that would run. Every input that can be
refused is refused before a model runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import TuneportError
from ..types import OutputKind, Signal
from . import options
from .terminal import emit_json, next_evaluation, note, progress, say, show_list, watched

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..job import Job
    from ..pipeline.preflight import Preflight


def transfer(
    source: options.Source,
    finetuned: options.Finetuned,
    target: options.Target,
    out: options.Out,
    data: options.Data = None,
    method: options.MethodName = "bico",
    samples: options.Samples = None,
    shots: options.Shots = None,
    sampler: options.SamplerName = "random",
    seed: options.Seed = 0,
    scale: options.Scale = None,
    head: options.HeadName = None,
    head_fit: options.HeadFit = "auto",
    labels: options.LabelsName = None,
    loss: options.LossName = None,
    as_: options.As = "model",
    rank: options.Rank = None,
    energy: options.Energy = None,
    distill: options.Distill = None,
    completion: options.CompletionName = "svd",
    exclude: options.Exclude = None,
    columns: options.Columns = None,
    max_length: options.MaxLength = None,
    max_tokens: options.MaxTokens = None,
    memory_budget: options.MemoryBudget = None,
    batch_size: options.BatchSize = 32,
    device: options.Device = "auto",
    dtype: options.DtypeName = "float32",
    resume: options.Resume = False,
    save_every: options.SaveEvery = 60.0,
    compare: options.Compare = False,
    evaluate: options.Evaluate = False,
    overwrite: options.Overwrite = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Write the new base with the old base's fine-tuned skill."""
    given = options.prepare_options(locals())
    from ..io.output import claimed
    from ..pipeline.evaluation import read_test
    from ..pipeline.port import port
    from ..pipeline.prepare import prepare
    from ..pipeline.transfer import check_scale, run
    from ..runtime.distributed import processes

    with processes(device) as here:
        if compare and here.size > 1:
            raise TuneportError("--compare runs in one process: leave it out, or start without torchrun.")
        strength = check_scale(scale, method)
        signals = _signals(method, scored=isinstance(strength, str) or compare or evaluate or distill is not None)
        prepared = partial(prepare, source, finetuned, target, data, signals=signals, **given)
        if not here.first:
            run(prepared(), method, scale=strength)
            return
        with claimed(out):
            _check_output(out, as_, rank, energy, overwrite or resume, source, finetuned, target, data, head)
            test, job = read_test(data, given.get("columns")) if evaluate else None, prepared()
            _check_job(job, method, as_, rank, energy, test)
            verdict = compare_models(job, method).record() if compare else None
            with _measuring(job, method, distill or 0) as callbacks:
                record = port(
                    job,
                    out,
                    method=method,
                    scale=strength,
                    kind=as_,
                    rank=rank,
                    energy=energy,
                    distill=distill,
                    overwrite=overwrite,
                    resume=resume,
                    save_every=save_every,
                    note=note,
                    test=test,
                    verdict=verdict,
                    **callbacks,
                )
    if json:
        emit_json(record)
    else:
        _print_result(record, data if "labels" not in record["data"] else None, head)


def _signals(method: str, scored: bool) -> frozenset[Signal]:
    """The signals of a method, and those of a job whose samples are scored."""
    from ..methods import get_method
    from ..pipeline.prepare import SCORED

    return get_method(method).signals | (SCORED if scored else frozenset())


def _check_output(
    out: str, kind: OutputKind, rank: int | None, energy: float | None, overwrite: bool, *inputs: str | None
) -> None:
    """Refuse an output that must not be replaced, and options that do not fit its kind."""
    from ..models.open import path_of
    from ..pipeline.result import check_output
    from ..task_vectors.low_rank import check_truncation

    check_output(out, kind, overwrite, inputs=[path_of(path) for path in inputs if path])
    if kind != "adapter" and (rank is not None or energy is not None):
        raise TuneportError("--rank and --energy shape an adapter; they go with --as adapter.")
    check_truncation(rank, energy)


def _check_job(
    job: Job, method: str, kind: OutputKind, rank: int | None, energy: float | None, test: Dataset | None
) -> None:
    """Refuse, before a model runs, a job whose result could not be written or scored."""
    from ..methods import get_method
    from ..pipeline.evaluation import check_test
    from ..pipeline.result import check_adapter, check_vector

    get_method(method).check(job.plan)
    check_vector(kind, job.fits_head)
    print_notes(job)
    if kind == "adapter":
        check_adapter(job, get_method(method), rank, energy)
    if test is not None:
        check_test(job, test)


@contextmanager
def _measuring(job: Job, method: str, steps: int) -> Iterator[dict[str, Any]]:
    """The passes that a job's budget needs, and a progress bar over them and the steps after them."""
    from ..io.sizes import format_bytes
    from ..runtime.budget import plan_passes

    passes, runs = None, 1
    if job.memory_budget is not None:
        passes = plan_passes(job, job.memory_budget, method=method)
        runs = len(passes.groups)
        words = f"{runs} runs" if runs > 1 else "one run"
        note(f"expected peak {format_bytes(passes.peak_bytes)}, in {words} over the calibration data")
        if passes.fetched_bytes:
            note(f"the models are larger: {format_bytes(passes.fetched_bytes)} of weights will come and go")
    with watched("measuring", len(job.samples) * runs + steps) as (advance, watch):
        yield {"passes": passes, "progress": advance, "watch": watch}


def compare_models(job: Job, method: str, *, trial: bool = True) -> Preflight:
    from ..pipeline import preflight

    with progress("comparing", 0) as advance:
        return preflight.compare(job, method, trial=trial, progress=advance)


def print_notes(job: Job) -> None:
    from ..report.summary import label_words

    if words := label_words(job.record):
        note(f"{len(job.samples)} samples {words}")
    for text in job.record.get("notes", ()):
        note(text)


def _print_result(record: dict[str, Any], data: str | None, head: str | None) -> None:
    from ..report.summary import summary_rows

    show_list(summary_rows(record), "dim")
    print_kept(record)
    out, kind = record["out"], record["as"]
    say(f"written to {out}" + ("" if kind == "task-vector" else ", report in report.html"))
    if kind == "adapter":
        say(f"next: peft.PeftModel.from_pretrained(model, {out!r})")
    if kind == "model" and data is not None:
        next_evaluation(out, data, head)


def print_kept(record: dict[str, Any]) -> None:
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")
