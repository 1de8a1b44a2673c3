"""`tuneport transfer`, and what it shares with `plan`.

Both hand their parameters to `prepare`, so that a plan shows the transfer that would run. Every input that can be
refused is refused before a model runs.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import typer

from ..errors import TuneportError
from ..types import OutputKind, ScaleRule
from . import options
from .terminal import as_options, emit_json, note, say, watched

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..job import Job
    from ..models.base import Model
    from ..task_vectors.lora_write import AdapterForm


HARM = 3  # the exit code of --fail-on-harm


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
    uniform_rank: options.UniformRank = False,
    adapter_dtype: options.AdapterDtype = "float32",
    completion: options.CompletionName = "svd",
    norms: options.NormsName = "keep",
    exclude: options.Exclude = None,
    roles: options.Roles = None,
    columns: options.Columns = None,
    max_length: options.MaxLength = None,
    max_tokens: options.MaxTokens = None,
    memory_budget: options.MemoryBudget = None,
    batch_size: options.BatchSize = 32,
    device: options.Device = "auto",
    dtype: options.DtypeName = "float32",
    resume: options.Resume = False,
    save_every: options.SaveEvery = 60.0,
    evaluate: options.Evaluate = None,
    fail_on_harm: options.FailOnHarm = False,
    accept_unlikely: options.AcceptUnlikely = False,
    overwrite: options.Overwrite = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Write the new base with the old base's fine-tuned skill."""
    asked = SimpleNamespace(**locals())
    options.check_usage(vars(asked))
    from ..runtime.distributed import processes

    with processes(device) as here:
        done = _run(asked, here.first)
    if done is None:
        return
    job, record = done
    if json:
        emit_json(record)
    else:
        _print_result(record)
        for command in next_commands(job.target, record, data, head, columns):
            say(f"next: {command}")
    if fail_on_harm and record["outcome"] == "harm":
        raise typer.Exit(HARM)


def _run(asked: SimpleNamespace, first: bool) -> tuple[Job, dict[str, Any]] | None:
    """The transfer that the options ask for: the first process writes it, the others only help to measure."""
    from ..io.output import claimed
    from ..pipeline.evaluation import USUAL, read_test, usual_test
    from ..pipeline.port import port
    from ..pipeline.prepare import prepare
    from ..pipeline.transfer import check_scale, run
    from ..task_vectors.lora_write import AdapterForm

    method, data, kind, steps = asked.method, asked.data, asked.as_, asked.distill
    form = AdapterForm(asked.rank, asked.energy, asked.uniform_rank, asked.adapter_dtype)
    strength = check_scale(asked.scale)
    columns, untested = options.parse_columns(asked.columns), ""
    test = read_test(data, columns) if asked.evaluate else None
    labelled = test is not None and test.labels is not None  # others are scored without a loss
    needed = isinstance(strength, str) or labelled or steps is not None
    given = options.prepare_options(vars(asked))
    inputs = (asked.source, asked.finetuned, asked.target, data)
    prepared = partial(prepare, *inputs, signals=method, scored=True if needed else None, **given)
    if not first:
        run(prepared(), method, scale=strength)
        return None
    with claimed(asked.out):
        read = (asked.source, *asked.finetuned, asked.target, data, asked.head)
        _check_output(asked.out, kind, form, asked.overwrite or asked.resume, *read)
        job = prepared()
        if asked.evaluate is None:
            usual = usual_test(job, data, columns)
            test, untested = (None, usual) if isinstance(usual, str) else (usual, "")
        _check_job(job, method, kind, form, test)
        with _measuring(job, method, strength, steps or 0) as callbacks:
            record = port(
                job,
                asked.out,
                method=method,
                scale=strength,
                kind=kind,
                form=form,
                distill=steps,
                overwrite=asked.overwrite,
                resume=asked.resume,
                save_every=asked.save_every,
                note=note,
                test=test,
                test_samples=None if asked.evaluate else USUAL,
                untested=untested,
                **callbacks,
            )
    return job, record


def _check_output(out: str, kind: OutputKind, form: AdapterForm, overwrite: bool, *inputs: str | None) -> None:
    """Refuse an output that must not be replaced, and options that do not fit its kind."""
    from ..models.open import path_of
    from ..pipeline.result import check_output

    check_output(out, kind, overwrite, inputs=[path_of(path) for path in inputs if path])
    form.check()


def _check_job(job: Job, method: str, kind: OutputKind, form: AdapterForm, test: Dataset | None) -> None:
    """Refuse, before a model runs, a job whose result could not be written or scored."""
    from ..methods import get_method
    from ..pipeline.adapter import check_adapter
    from ..pipeline.evaluation import check_test
    from ..pipeline.result import check_vector

    get_method(method).check(job.plan)
    check_vector(kind, job.fits_head)
    print_notes(job)
    if kind == "adapter":
        check_adapter(job, get_method(method), form)
    if test is not None:
        check_test(job, test)


@contextmanager
def _measuring(job: Job, method: str, scale: float | ScaleRule | None, steps: int) -> Iterator[dict[str, Any]]:
    """The passes that a job needs, and a progress bar over them and the steps after them."""
    from ..io.sizes import format_bytes
    from ..pipeline.transfer import scale_for
    from ..runtime.budget import passes_of

    passes = passes_of(job, method, scale_for(job, scale))
    runs = 1 if passes is None else len(passes.groups)
    words = f"{runs} runs" if runs > 1 else "one run"
    if passes is not None and job.memory_budget is None:
        note(f"{words} over the calibration data: all statistics at once would take too much of the free memory")
    elif passes is not None:
        note(f"expected peak {format_bytes(passes.peak_bytes)}, in {words} over the calibration data")
        if passes.fetched_bytes:
            note(f"the models are larger: {format_bytes(passes.fetched_bytes)} of weights will come and go")
    with watched("measuring", len(job.samples) * runs + steps) as (advance, watch):
        yield {"passes": passes, "progress": advance, "watch": watch, "step": watch}


def print_notes(job: Job) -> None:
    from ..report.summary import label_words

    if words := label_words(job.record):
        note(f"{len(job.samples)} samples {words}")
    for text in job.record.get("notes", ()):
        note(text)


def _print_result(record: dict[str, Any]) -> None:
    from ..report.summary import score_rows, score_words, summary_rows

    say(record["headline"])
    if scores := score_rows(record):
        width = max(len(label) for label, _ in scores)
        for label, text in scores:
            say(f"  {label:<{width}}  {text}")
        say(f"  {score_words(record)}")
    say(record["recommendation"])
    for label, text in summary_rows(record):
        say(f"{label:<12} {as_options(text)}")
    if record["scale"]:
        print_kept(record)
    say(f"written to {record['out']}" + ("" if record["as"] == "task-vector" else ", report in report.html"))


def next_commands(
    target: Model, record: dict[str, Any], data: str | None, head: str | None, columns: str | None = None
) -> list[str]:
    """Commands that work on an output: its evaluation if the data allow it, and for an adapter, that peft loads it."""
    from ..pipeline.adapter import loader_of

    found, out = [], record["out"]
    if data is not None and _can_evaluate(target, data, head, columns):
        longest = record.get("options", {}).get("max_length")
        given = {"--head": head, "--columns": columns, "--max-length": longest}
        more = [word for name, value in given.items() if value for word in (name, str(value))]
        found.append(["tuneport", "evaluate", out, "--data", data, *more])
    known = target.folder is not None and target.library == "transformers" and Path(target.name).is_dir()
    if record["as"] == "adapter" and known:
        name, settings = loader_of(target, record["finetuned"].get("adapter", {}).get("task_type"))
        found.append(["python", "-c", f"import peft; peft.{name}.from_pretrained({out!r}{settings})"])
    return [shlex.join(words) for words in found]


def _can_evaluate(target: Model, data: str, head: str | None, columns: str | None) -> bool:
    """Whether `tuneport evaluate` can score the test split of the data."""
    from ..data.dataset import align_labels
    from ..data.tasks import read_data
    from ..measure.accuracy import check_counted
    from ..measure.language import usual_protocol
    from ..models.heads import choose_head

    try:
        test = read_data(data, "test", labelled=False, columns=options.parse_columns(columns))
        if test.split == "all":  # calibration has used some of the samples
            return False
        protocol = usual_protocol(target, test, head)
        if protocol == "zero-shot" and test.labels is not None:
            chosen = choose_head(target, head, test)
            check_counted(target, chosen)
            align_labels(test, chosen.classes)
    except TuneportError:
        return False
    return protocol == "perplexity" or test.labels is not None


def print_kept(record: dict[str, Any]) -> None:
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")
