"""From an old base to a new one: transfer, plan, compare.

`transfer` and `plan` take the same options, by name, to one job (`_prepare`), so that a plan is of the very transfer.
All that can be refused is refused before a model runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TuneportError
from ..types import OutputKind
from .options import (
    BatchSize,
    CompletionName,
    Data,
    Device,
    DtypeName,
    Exclude,
    Finetuned,
    HeadName,
    Json,
    LabelsName,
    LossName,
    MaxTokens,
    MemoryBudget,
    MethodName,
    Overwrite,
    SamplerName,
    Samples,
    Seed,
    Shots,
    Source,
    Target,
    TrustRemoteCode,
)
from .terminal import emit, note, progress, say, show, show_list

if TYPE_CHECKING:
    from ..job import Job
    from ..pipeline.preflight import Preflight
    from ..runtime.passes import Passes


def transfer(
    source: Source,
    finetuned: Finetuned,
    target: Target,
    out: Annotated[str, typer.Option(help="Where the new model goes; must not exist.")],
    data: Data = None,
    method: MethodName = "bico",
    samples: Samples = None,
    shots: Shots = None,
    sampler: SamplerName = "random",
    seed: Seed = 0,
    scale: Annotated[
        str | None,
        typer.Option(
            help="Strength of the transfer: a number, auto (chosen on calibration samples) or safe (the same, with "
            "caution). The method's own unless given: 1, or auto for bico+."
        ),
    ] = None,
    head: HeadName = None,
    labels: LabelsName = "data",
    loss: LossName = None,
    as_: Annotated[OutputKind, typer.Option("--as", help="What to write.")] = "model",
    rank: Annotated[int | None, typer.Option(help="With --as adapter: cut each update to this rank.", min=1)] = None,
    energy: Annotated[
        float | None, typer.Option(help="With --as adapter: cut to the least rank that keeps this share of |tau|².")
    ] = None,
    completion: CompletionName = "svd",
    exclude: Exclude = None,
    max_tokens: MaxTokens = None,
    memory_budget: MemoryBudget = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    dtype: DtypeName = "float32",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what a killed run of the same command has measured.")
    ] = False,
    save_every: Annotated[
        float, typer.Option(help="Seconds between two saves of what is measured, for --resume.", min=0)
    ] = 60.0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare the models first; the verdict goes into the report.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Score the target before and after, on the data's test split.")
    ] = False,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Write the new base with the old base's fine-tuned skill."""
    from ..io.output import check_new_file, check_new_folder, claimed
    from ..measure.accuracy import check_test_split, read_test_split
    from ..models.open import path_of
    from ..pipeline import transfer as pipeline
    from ..pipeline.result import check_adapter
    from ..report.record import to_json
    from ..runtime.budget import plan_passes
    from ..runtime.distributed import processes
    from ..task_vectors.low_rank import check_truncation

    check_new = check_new_file if as_ == "task-vector" else check_new_folder
    inputs = [path_of(path) for path in (source, finetuned, target, data, head) if path]
    with processes(device) as here:
        strength = pipeline.check_scale(scale, method)
        scored = isinstance(strength, str) or compare or evaluate
        if compare and here.size > 1:
            raise TuneportError("--compare runs in one process: leave it out, or start without torchrun.")
        if not here.first:  # the first process checks, writes and speaks
            pipeline.run(_prepare(locals(), scored=scored, tell=False), scale=strength)
            return
        with claimed(out):
            check_new(out, overwrite or resume, inputs=inputs)
            if as_ != "adapter" and (rank is not None or energy is not None):
                raise TuneportError("--rank and --energy shape an adapter; they go with --as adapter.")
            check_truncation(rank, energy)
            test = read_test_split(data) if evaluate else None
            job = _prepare(locals(), scored=scored)
            if as_ == "adapter":
                check_adapter(job, rank, energy)
            if test is not None:
                check_test_split(test, job.heads.target if job.heads is not None else None)
            verdict = _compared(job) if compare else None
            passes = plan_passes(job, job.memory_budget) if job.memory_budget is not None else None
            if passes is not None:
                _note_passes(passes)
            with progress("measuring", len(job.samples) * (len(passes.groups) if passes else 1)) as advance:
                record = pipeline.port(
                    job,
                    out,
                    scale=strength,
                    kind=as_,
                    rank=rank,
                    energy=energy,
                    overwrite=overwrite,
                    resume=resume,
                    save_every=save_every,
                    progress=advance,
                    note=note,
                    test=test,
                    verdict=verdict.record() if verdict is not None else None,
                    passes=passes,
                )
    if json:
        emit(to_json(record))
        return
    _print_summary(record)
    say(f"written to {out}" + ("" if as_ == "task-vector" else ", report in report.html"))
    if as_ == "adapter":
        say(f'next: peft.PeftModel.from_pretrained(model, "{out}")')
    if as_ == "model" and data is not None and labels == "data":
        chosen = f" --head {head}" if head else ""
        say(f"next: tuneport evaluate {out} --data {data}{chosen}")


def _note_passes(passes: Passes) -> None:
    from ..io.sizes import format_bytes

    runs = f"in {len(passes.groups)} runs" if len(passes.groups) > 1 else "in one run"
    note(f"expected peak {format_bytes(passes.peak_bytes)}, {runs} over the calibration data")
    if passes.fetched_bytes:
        note(f"the models are larger: {format_bytes(passes.fetched_bytes)} of weights will come and go")


def plan(
    source: Source,
    target: Target,
    finetuned: Annotated[
        str | None, typer.Option(help="The fine-tuned old base, an adapter of it, or a task-vector file.")
    ] = None,
    data: Data = None,
    method: MethodName = "bico",
    samples: Samples = None,
    shots: Shots = None,
    sampler: SamplerName = "random",
    seed: Seed = 0,
    head: HeadName = None,
    labels: LabelsName = "data",
    loss: LossName = None,
    completion: CompletionName = "svd",
    exclude: Exclude = None,
    max_tokens: MaxTokens = None,
    memory_budget: MemoryBudget = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    dtype: DtypeName = "float32",
    shapes_only: Annotated[
        bool,
        typer.Option("--shapes-only", help="Read config.json only, no weights and no data: text models of any size."),
    ] = False,
    length: Annotated[int, typer.Option(help="With --shapes-only: tokens per text.", min=1)] = 256,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the expected cost."""
    from ..pipeline.outlook import expected
    from ..report.record import to_json

    if shapes_only:
        _plan_shapes(locals())
        return
    if finetuned is None:
        raise TuneportError("--finetuned is needed; only --shapes-only does without it.")
    job = _prepare(locals())
    outlook = expected(job)
    if json:
        emit(to_json(outlook))
    else:
        _print_plan(outlook)


def _print_plan(outlook: dict[str, Any]) -> None:
    from ..io.sizes import format_bytes

    layers = outlook["layers"]
    rows = [(row["target"], _by(row["target_shape"]), row["source"], _by(row["source_shape"])) for row in layers]
    title = f"{outlook['method']}: {len(layers)} layers"
    show(rows, "target layer", "shape", "source layer", "shape", title=title, fold=True)
    _print_kept(outlook)
    cost = outlook["expected"]
    say(
        f"expected: {format_bytes(cost['statistics_bytes'])} of statistics, "
        f"{cost['flops'] / 1e9:.3g} GFLOP of model passes, "
        f"{cost['alignment_flops'] / 1e9:.3g} GFLOP of alignment, about {cost['seconds']:.0f} s on this machine"
    )
    paper = cost["cost"]["paper"]
    say(
        f"the paper's estimate: {paper['passes'] / 1e9:.3g} GFLOP of model passes, "
        f"{paper['alignment'] / 1e9:.3g} GFLOP of alignment; "
        f"2,000 steps of fine-tuning: {paper['fine_tuning'] / 1e9:.3g} GFLOP"
    )
    if "groups" in cost:
        runs = f"{len(cost['groups'])} runs" if len(cost["groups"]) > 1 else "one run"
        say(f"within the memory budget: {runs} over the calibration data, peak {format_bytes(cost['peak_bytes'])}")
        if cost["fetched_bytes"]:
            say(
                f"the models are larger: {format_bytes(cost['home_bytes'])} stay in {cost['home']}, and "
                f"{format_bytes(cost['fetched_bytes'])} of weights come from there, block by block"
            )


def _plan_shapes(options: dict[str, Any]) -> None:
    """Plans for several devices, from the options of `plan` by name."""
    from ..io.sizes import parse_bytes
    from ..models.open import pick_device, pick_dtype
    from ..pipeline.outlook import COLUMNS, describe_line, plan_devices, prepare_shapes
    from ..report.record import to_json
    from ..runtime.speed import probe

    budget = options["memory_budget"]
    names = ("method", "length", "batch_size", "max_tokens", "dtype")
    job = prepare_shapes(
        options["source"],
        options["target"],
        samples=options["samples"] or 100,
        memory_budget=None if budget is None else parse_bytes(budget),
        device="cuda" if options["device"] == "auto" else options["device"],
        **{name: options[name] for name in names},
    )
    rates = probe(pick_device("auto"), pick_dtype(options["dtype"]), options["batch_size"] * options["length"])
    lines = plan_devices(job, rates)
    if options["json"]:
        emit(to_json({"options": job.record["options"], "rates": vars(rates), "plans": lines}))
        return
    title = f"{len(job.plan.pairs)} layers, {len(job.samples)} texts of {options['length']} tokens"
    show(map(describe_line, lines), *COLUMNS, title=title)
    say("rates: " + ", ".join(f"{name} {value:.3g}" for name, value in vars(rates).items()))


def compare(
    source: Annotated[str, typer.Argument(help="The old base model.")],
    target: Annotated[str, typer.Argument(help="The new base model.")],
    data: Annotated[str, typer.Option(help="Labelled calibration data; the training split is read.")],
    finetuned: Annotated[
        str | None,
        typer.Option(help="The fine-tuned old base: its transfer is tried in memory. No verdict without it."),
    ] = None,
    method: MethodName = "bico",
    samples: Samples = None,
    seed: Seed = 0,
    head: HeadName = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """How alike two models are, layer by layer, and whether a transfer is likely to help. Writes nothing."""
    from ..pipeline import preflight
    from ..report.record import to_json

    job = preflight.prepare_pair(
        source,
        target,
        data,
        finetuned=finetuned,
        method=method,
        samples=samples,
        seed=seed,
        head=head,
        batch_size=batch_size,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    found = _compared(job, trial=finetuned is not None)
    means = preflight.summary(found.similarity)
    if json:
        emit(
            to_json(
                {"source": source, "target": target, "samples": len(job.samples), "summary": means, **found.record()}
            )
        )
        return
    show(preflight.similarity_rows(found.similarity), *preflight.SIMILARITY_COLUMNS)
    say(f"verdict: {found.verdict.verdict}")
    for reason in found.verdict.reasons:
        say(f"- {reason}")


def _compared(job: Job, *, trial: bool = True) -> Preflight:
    from ..pipeline import preflight

    with progress("comparing", 0) as advance:
        return preflight.compare(job, trial=trial, progress=advance)


def _prepare(options: dict[str, Any], *, scored: bool = False, tell: bool = True) -> Job:
    """The job of the options of `transfer` or `plan` by name; prints its notes on stderr."""
    from ..io.sizes import parse_bytes
    from ..pipeline.prepare import prepare
    from ..report.summary import label_words

    as_given = (
        *("method", "samples", "shots", "sampler", "seed", "head", "labels", "loss"),
        *("max_tokens", "batch_size", "device", "dtype", "trust_remote_code"),
    )
    job = prepare(
        options["source"],
        options["finetuned"],
        options["target"],
        options["data"],
        exclude=options["exclude"] or (),
        completion=options["completion"],
        scored=scored,
        memory_budget=None if options["memory_budget"] is None else parse_bytes(options["memory_budget"]),
        **{name: options[name] for name in as_given},
    )
    if not tell:
        return job
    if words := label_words(job.record):
        note(f"{len(job.samples)} samples {words}")
    for text in job.record.get("notes", ()):
        note(text)
    return job


def _print_summary(record: dict[str, Any]) -> None:
    from ..report.summary import summary_rows

    show_list(summary_rows(record), "dim")
    _print_kept(record)


def _print_kept(record: dict[str, Any]) -> None:
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")


def _by(shape: list[int]) -> str:
    return " x ".join(str(size) for size in shape)
