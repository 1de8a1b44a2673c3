"""The commands: parse, call one library function, print. The only importer of typer and rich.

Results go to stdout (`--json`: one JSON object and nothing else), progress to stderr. Exit codes: 0 done,
1 a TuneportError (one clear line), 2 wrong usage. Heavy imports happen inside the commands, so that help
answers at once.
"""

from __future__ import annotations

import csv
import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__
from .errors import TuneportError

if TYPE_CHECKING:
    from .preflight import Preflight
    from .preparation import Job

app = typer.Typer(
    name="tuneport",
    help="Port a fine-tune to a new base model, without training.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out_console = Console()
err_console = Console(stderr=True)
DEBUG = False


class Completion(str, Enum):
    none = "none"
    svd = "svd"


class OutputKind(str, Enum):
    model = "model"
    adapter = "adapter"
    task_vector = "task-vector"


Source = Annotated[
    str, typer.Option(help="The old base model: a folder, open_clip's NAME:TAG or NAME:FILE, timm:NAME.")
]
Finetuned = Annotated[
    str, typer.Option(help="The fine-tuned old base, in the same ways, a LoRA adapter of it, or a task-vector file.")
]
Target = Annotated[str, typer.Option(help="The new base model.")]
Data = Annotated[
    str | None, typer.Option(help="Calibration data: image folder, .npz, table, HF dataset folder, or TASK:PATH.")
]
MethodName = Annotated[str, typer.Option(help="Transfer method; see 'tuneport methods'.")]
Samples = Annotated[int | None, typer.Option(help="Number of calibration samples (100 unless --shots is given).")]
Shots = Annotated[int | None, typer.Option(help="Calibration samples per class, instead of --samples.")]
SamplerName = Annotated[str, typer.Option(help="How samples are drawn; see 'tuneport samplers'.")]
Seed = Annotated[int, typer.Option(help="Seed of the draw.", min=0, max=2**63 - 1)]
HeadName = Annotated[str | None, typer.Option(help="Zero-shot head: a name in the models' heads/ folder, or a file.")]
LossName = Annotated[
    str | None,
    typer.Option(help="classification, contrastive, causal, seq2seq or MODULE:FUNCTION; else by the data."),
]
Exclude = Annotated[list[str] | None, typer.Option(help="Name pattern of tensors to leave alone; may be repeated.")]
BatchSize = Annotated[int, typer.Option(help="Samples per pass through the models.", min=1)]
MaxTokens = Annotated[
    int | None, typer.Option(help="Most tokens of all samples together that maps are made from.", min=1)
]
MemoryBudget = Annotated[
    str | None, typer.Option(help="Memory of the device that models, statistics and result may take, such as 8GiB.")
]
LabelsName = Annotated[
    str, typer.Option(help="Whose labels the samples have: those of the data, or of the fine-tuned source.")
]
DtypeName = Annotated[
    str, typer.Option(help="What models run in: float32, bfloat16 or float16; what is written does not change.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a checkpoint's own code run. Off unless you ask for it.")
]


def _version(wanted: bool) -> None:
    if wanted:
        _emit(f"tuneport {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Port a fine-tune to a new base model, without training.

    [bold]Start here:[/bold] tuneport demo
    """
    del version
    global DEBUG
    DEBUG = debug


@app.command(
    epilog="Example: tuneport transfer --source old-base --finetuned old-base-cars --target new-base "
    "--data cars/ --out new-base-cars"
)
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
    as_: Annotated[OutputKind, typer.Option("--as", help="What to write.")] = OutputKind.model,
    rank: Annotated[int | None, typer.Option(help="With --as adapter: cut each update to this rank.", min=1)] = None,
    energy: Annotated[
        float | None, typer.Option(help="With --as adapter: cut to the least rank that keeps this share of |tau|².")
    ] = None,
    completion: Annotated[Completion, typer.Option(help="What fills directions the data leave open.")] = Completion.svd,
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
    from . import pipeline
    from .budget import format_bytes, plan_passes
    from .distributed import processes
    from .evaluation import read_test_split
    from .families import place_of
    from .low_rank import check_truncation
    from .output import check_new_file, check_new_folder, claimed
    from .report import to_json

    check_new = check_new_file if as_ is OutputKind.task_vector else check_new_folder
    inputs = [place_of(path) for path in (source, finetuned, target, data, head) if path]
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
            if as_ is not OutputKind.adapter and (rank is not None or energy is not None):
                raise TuneportError("--rank and --energy shape an adapter; they go with --as adapter.")
            check_truncation(rank, energy)
            job = _prepare(locals(), scored=scored)
            if as_ is OutputKind.adapter:
                pipeline.check_adapter(job, rank, energy)
            test = read_test_split(data, job.target_head) if evaluate else None
            verdict = _compared(job) if compare else None
            passes = plan_passes(job, job.memory_budget) if job.memory_budget is not None else None
            if passes is not None:
                runs = f"in {len(passes.groups)} runs" if len(passes.groups) > 1 else "in one run"
                _note(f"expected peak {format_bytes(passes.peak_bytes)}, {runs} over the calibration data")
                if passes.fetched_bytes:
                    _note(f"the models are larger: {format_bytes(passes.fetched_bytes)} of weights will come and go")
            with _progress("measuring", job.samples * (len(passes.groups) if passes else 1)) as advance:
                record = pipeline.port(
                    job,
                    out,
                    scale=strength,
                    kind=as_.value,
                    rank=rank,
                    energy=energy,
                    overwrite=overwrite,
                    resume=resume,
                    save_every=save_every,
                    progress=advance,
                    note=_note,
                    test=test,
                    verdict=verdict.record() if verdict is not None else None,
                    passes=passes,
                )
    if json:
        _emit(to_json(record))
        return
    _print_summary(record)
    _say(f"written to {out}" + ("" if as_ is OutputKind.task_vector else ", report in report.html"))
    if as_ is OutputKind.adapter:
        _say(f'next: peft.PeftModel.from_pretrained(model, "{out}")')
    if as_ is OutputKind.model and data is not None and labels == "data":
        chosen = f" --head {head}" if head else ""
        _say(f"next: tuneport evaluate {out} --data {data}{chosen}")


@app.command(epilog="Example: tuneport plan --source old-base --finetuned old-base-cars --target new-base --data cars/")
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
    completion: Annotated[Completion, typer.Option(help="What fills directions the data leave open.")] = Completion.svd,
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
    rate: Annotated[
        list[str] | None,
        typer.Option(help="With --shapes-only: how fast the machine is, such as passes=4e14; else measured."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the expected cost."""
    from .outlook import expected
    from .report import to_json

    if shapes_only:
        _plan_shapes(locals())
        return
    if finetuned is None:
        raise TuneportError("--finetuned is needed; only --shapes-only does without it.")
    job = _prepare(locals())
    outlook = expected(job)
    if json:
        _emit(to_json(outlook))
        return
    table = Table(title=f"{outlook['method']}: {len(outlook['layers'])} layers")
    for column in ("target layer", "shape", "source layer", "shape"):
        table.add_column(column, overflow="fold")
    for row in outlook["layers"]:
        cells = (row["target"], _by(row["target_shape"]), row["source"], _by(row["source_shape"]))
        table.add_row(*map(escape, cells))
    out_console.print(table)
    _print_kept(outlook)
    cost = outlook["expected"]
    _say(
        f"expected: {_bytes(cost['statistics_bytes'])} of statistics, {cost['flops'] / 1e9:.3g} GFLOP of model passes, "
        f"{cost['alignment_flops'] / 1e9:.3g} GFLOP of alignment, about {cost['seconds']:.0f} s on this machine"
    )
    paper = cost["cost"]["paper"]
    _say(
        f"the paper's estimate: {paper['passes'] / 1e9:.3g} GFLOP of model passes, "
        f"{paper['alignment'] / 1e9:.3g} GFLOP of alignment; "
        f"2,000 steps of fine-tuning: {paper['fine_tuning'] / 1e9:.3g} GFLOP"
    )
    if "groups" in cost:
        runs = f"{len(cost['groups'])} runs" if len(cost["groups"]) > 1 else "one run"
        _say(f"within the memory budget: {runs} over the calibration data, peak {_bytes(cost['peak_bytes'])}")
        if cost["fetched_bytes"]:
            _say(
                f"the models are larger: {_bytes(cost['home_bytes'])} stay in {cost['home']}, and "
                f"{_bytes(cost['fetched_bytes'])} of weights come from there, block by block"
            )


def _plan_shapes(options: dict[str, Any]) -> None:
    from .budget import parse_bytes
    from .rates import parse_rates
    from .report import to_json
    from .shapes import COLUMNS, describe_line, plan_devices, prepare_shapes, rates_for

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
    rates = rates_for(job, parse_rates(options["rate"] or []))
    lines = plan_devices(job, rates)
    if options["json"]:
        _emit(to_json({"options": job.record["options"], "rates": vars(rates), "plans": lines}))
        return
    table = Table(*COLUMNS, title=f"{len(job.plan.pairs)} layers, {job.samples} texts of {options['length']} tokens")
    for line in lines:
        table.add_row(*map(escape, describe_line(line)))
    out_console.print(table)
    _say("rates: " + ", ".join(f"{name} {value:.3g}" for name, value in vars(rates).items()))


@app.command(epilog="Example: tuneport compare old-base new-base --data cars/ --finetuned old-base-cars")
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
    from . import preflight
    from .report import to_json

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
        _emit(to_json({"source": source, "target": target, "samples": job.samples, "summary": means, **found.record()}))
        return
    table = Table(*preflight.LAYER_COLUMNS)
    for row in preflight.layer_rows(found.similarity):
        table.add_row(*map(escape, row))
    out_console.print(table)
    _say(f"verdict: {found.verdict.verdict}")
    for reason in found.verdict.reasons:
        _say(f"- {reason}")


def _compared(job: Job, *, trial: bool = True) -> Preflight:
    from . import preflight

    with _progress("comparing", 0) as advance:
        return preflight.compare(job, trial=trial, progress=advance)


@app.command(epilog="Example: tuneport extract old-base old-base-cars -o cars.safetensors")
def extract(
    base: Annotated[str, typer.Argument(help="The base model: folder or weight file.")],
    finetuned: Annotated[str, typer.Argument(help="The fine-tuned model.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The task-vector file to write (.safetensors).")],
    exclude: Exclude = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write the task vector: fine-tuned minus base, one safetensors file."""
    from . import pipeline
    from .families import place_of
    from .output import check_new_file
    from .task_vector import save_task_vector

    check_new_file(out, overwrite, inputs=[place_of(base), place_of(finetuned)])
    vector = pipeline.extract(base, finetuned, exclude=exclude or ())
    norm = save_task_vector(out, vector, {"base": base, "finetuned": finetuned}, overwrite=overwrite)
    result = {"out": out, "tensors": len(vector), "norm": norm}
    if json:
        _emit(json_module.dumps(result))
    else:
        _say(f"{len(vector)} tensors, norm {norm:.4g}, written to {out}")


@app.command(epilog="Example: tuneport apply cars.safetensors old-base -o old-base-cars --scale 0.7")
def apply(
    vector: Annotated[str, typer.Argument(metavar="TAU", help="A task-vector file.")],
    base: Annotated[str, typer.Argument(help="The model it belongs to.")],
    out: Annotated[str, typer.Option("--out", "-o", help="The folder to write.")],
    scale: Annotated[float, typer.Option(help="Strength.")] = 1.0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write base + scale * task vector as a model folder."""
    from . import pipeline
    from .families import place_of
    from .output import check_new_folder
    from .task_vector import load_task_vector

    check_new_folder(out, overwrite, inputs=[vector, place_of(base)])
    loaded = load_task_vector(vector)
    pipeline.apply(vector, base, out, scale=scale, overwrite=overwrite)
    result = {"out": out, "tensors": len(loaded), "scale": scale}
    if json:
        _emit(json_module.dumps(result))
    else:
        _say(f"written to {out}")


@app.command(epilog="Example: tuneport evaluate new-base-cars --data cars/ --head cars")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model folder.")],
    data: Annotated[str, typer.Option(help="Labelled data; the test split is scored.")],
    head: HeadName = None,
    protocol: Annotated[str, typer.Option(help="zero-shot, linear-probe or perplexity.")] = "zero-shot",
    samples: Annotated[int | None, typer.Option(help="Linear probe: training samples (all unless given).")] = None,
    seed: Seed = 0,
    batch_size: Annotated[
        int | None, typer.Option(help="Samples per pass through the model (128; 16 for perplexity).", min=1)
    ] = None,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Accuracy of a model: with its zero-shot head, or of a linear probe on its features."""
    from dataclasses import asdict

    from . import evaluation
    from .calibration import select
    from .data import align_labels
    from .families import choose_head, open_model
    from .preparation import pick_device
    from .tasks import read_data

    chosen = evaluation.check_protocol(protocol)
    size = batch_size or (16 if chosen == "perplexity" else 128)
    if samples is not None and chosen != "linear-probe":
        raise TuneportError(f"--samples goes with --protocol linear-probe; {chosen} scores the whole test split.")
    test = read_data(data, "test", labelled=chosen != "perplexity")
    opened = open_model(model, device=pick_device(device), trust_remote_code=trust_remote_code)
    if chosen == "zero-shot":
        scorer = choose_head(opened, head, test.name, test.classes, test.prompts, test.label_texts)
        align_labels(test, scorer.classes)
        with _progress("evaluating", len(test)) as advance:
            result = evaluation.zero_shot(opened, scorer, test, batch_size=size, progress=advance)
    elif chosen == "perplexity":
        with _progress("evaluating", len(test)) as advance:
            result = evaluation.perplexity(opened, test, batch_size=size, progress=advance)
    else:
        train = read_data(data, "train")
        if samples is not None:
            train = train.subset(select(train, samples=samples, seed=seed))
        with _progress("evaluating", len(train) + len(test)) as advance:
            result = evaluation.linear_probe(opened, train, test, batch_size=size, progress=advance)
    if json:
        found = {key: value for key, value in asdict(result).items() if value is not None}
        _emit(json_module.dumps({"model": model, "data": data, "head": head, **found}))
    elif result.perplexity is not None:
        _say(f"perplexity {result.perplexity:.4g} over {result.tokens} tokens of {result.samples} samples")
    else:
        _say(f"{result.accuracy:.2f} % of {result.samples} samples right ({result.protocol})")


@app.command(epilog="Example: tuneport finetune old-base --data cars/ --out old-base-cars")
def finetune(
    model: Annotated[str, typer.Argument(help="The model to fine-tune.")],
    data: Annotated[str, typer.Option(help="Labelled data; the training split is learnt.")],
    out: Annotated[str, typer.Option(help="The folder to write; must not exist.")],
    head: HeadName = None,
    steps: Annotated[int, typer.Option(help="Updates.", min=1)] = 2000,
    batch_size: Annotated[int, typer.Option(help="Samples per update.", min=1)] = 128,
    learning_rate: Annotated[float, typer.Option(help="The highest, after the warm-up.")] = 1e-5,
    weight_decay: Annotated[float, typer.Option(help="Of AdamW.", min=0)] = 0.1,
    warmup: Annotated[int | None, typer.Option(help="Steps of rising rate: 200, or a tenth if fewer.", min=0)] = None,
    checkpoint_every: Annotated[
        int, typer.Option(help="Also keep the model every so many steps; 0: never.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the order of samples.", min=0, max=2**63 - 1)] = 0,
    device: Device = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Fine-tune a model's tower with its head frozen, by the paper's protocol, and write it as a folder."""
    from .families import place_of
    from .finetuning import Schedule
    from .output import check_new_folder
    from .report import to_json
    from .training import prepare_training, run_training

    if not 0 < learning_rate < float("inf"):
        raise TuneportError(f"--learning-rate must be a number above 0, got {learning_rate}.")
    check_new_folder(out, overwrite, inputs=[place_of(path) for path in (model, data, head) if path])
    slow = min(200, steps // 10) if warmup is None else warmup
    schedule = Schedule(steps, batch_size, learning_rate, weight_decay, seed=seed, warmup=slow)
    training = prepare_training(model, data, schedule, head=head, device=device, trust_remote_code=trust_remote_code)
    with _progress("fine-tuning", steps) as advance:
        record = run_training(training, out, checkpoint_every=checkpoint_every, overwrite=overwrite, progress=advance)
    if json:
        _emit(to_json(record))
        return
    found = record.get("validation_accuracy")
    told = "" if found is None else f", {found:.2f} % of the validation split right"
    _say(f"{steps} steps in {record['seconds']:.1f} s, loss {record['losses'][-1]['loss']:.4g}{told}")
    _say(f"written to {out}" + (f", {len(record['checkpoints'])} checkpoints in it" if checkpoint_every else ""))


@app.command(
    epilog="Example: tuneport bench --source old --target new --finetuned cars=old-cars --data cars=cars/ "
    "--methods naive,theseus,bico --samples 20,100 --seeds 0,1,2 --out comparison"
)
def bench(
    recipe: Annotated[str | None, typer.Argument(help="A TOML file with the keys below; or give them here.")] = None,
    out: Annotated[str, typer.Option(help="The folder for tables, JSON and plots.")] = "comparison",
    small: Annotated[bool, typer.Option("--small", help="Take the recipe's small variant.")] = False,
    root: Annotated[str | None, typer.Option(help="Where the recipe's paths begin.")] = None,
    cache: Annotated[str | None, typer.Option(help="Where models that the recipe fine-tunes are kept.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the cells that a killed run finished.")] = False,
    source: Annotated[str | None, typer.Option(help="The old base model.")] = None,
    target: Annotated[str | None, typer.Option(help="The new base model.")] = None,
    finetuned: Annotated[list[str] | None, typer.Option(help="TASK=PATH of a fine-tuned old base; repeatable.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="TASK=PATH of that task's data; repeatable.")] = None,
    reference: Annotated[
        list[str] | None, typer.Option(help="TASK=PATH of a fine-tuned target, for a last row.")
    ] = None,
    head: Annotated[list[str] | None, typer.Option(help="TASK=NAME of the head, where it is not the default.")] = None,
    methods: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "naive,theseus,bico",
    samples: Annotated[str, typer.Option(help="Calibration budgets N, separated by commas.")] = "",
    shots: Annotated[str, typer.Option(help="Or budgets K per class.")] = "",
    samplers: Annotated[str, typer.Option(help="How samples are drawn, separated by commas.")] = "random",
    seeds: Annotated[str, typer.Option(help="Seeds of the draw.")] = "0",
    scales: Annotated[str, typer.Option(help="Scale rules: numbers, auto and safe.")] = "1,auto",
    protocol: Annotated[str, typer.Option(help="zero-shot, or linear-probe on the same samples.")] = "zero-shot",
    steps: Annotated[str, typer.Option(help="Few-shot fine-tuning runs of so many steps on the same samples.")] = "",
    warm_start: Annotated[str | None, typer.Option(help="Also fine-tune from this method's result.")] = None,
    learning_rate: Annotated[float, typer.Option(help="Of the fine-tuning runs.")] = 1e-5,
    device: Device = "auto",
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Run a recipe, or compare methods on equal terms: the same samples, seeds and scale rules, one capture for all."""
    from .bench import read_recipe, run_recipe
    from .output import check_new_folder
    from .recipe import make_recipe

    check_new_folder(out, overwrite)
    if recipe is not None:
        wanted = read_recipe(recipe, small=small, root=root)
    else:
        content: dict[str, Any] = {
            "finetuned": _by_task("finetuned", finetuned),
            "data": _by_task("data", data),
            "reference": _by_task("reference", reference),
            "heads": _by_task("head", head),
            "methods": _words(methods),
            "samples": _numbers("samples", samples),
            "shots": _numbers("shots", shots),
            "samplers": _words(samplers),
            "seeds": _numbers("seeds", seeds),
            "scales": _words(scales),
            "protocol": protocol,
            "steps": _numbers("steps", steps),
            "learning_rate": learning_rate,
            "device": device,
        }
        named = {"source": source, "target": target, "warm_start": warm_start}
        content |= {key: value for key, value in named.items() if value is not None}
        wanted = make_recipe(content, "tuneport bench", root=root)
    given = None if device == "auto" else device
    with _stages() as stage:
        run_recipe(
            wanted, out, cache=cache, device=given, resume=resume, overwrite=overwrite, stage=stage, note=_progress_line
        )
    _print_results(Path(out), json)


def _print_results(out: Path, json: bool) -> None:
    """The tables of a recipe, or what they are made of."""
    records = sorted(out.rglob("results.json"))
    contents = {path.parent.name: json_module.loads(path.read_text(encoding="utf-8")) for path in records}
    if json:
        only = next(iter(contents.values())) if len(contents) == 1 else {"pairs": contents}
        _emit(json_module.dumps({"out": str(out), **only}))
        return
    for path in sorted(out.rglob("table.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            columns, *lines = csv.reader(file)
        table = Table(*columns, title=None if len(contents) == 1 else path.parent.name)
        for line in lines:
            table.add_row(*map(escape, line))
        out_console.print(table)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    _say(f"written to {out}: {', '.join(files)}")


def _progress_line(text: str) -> None:
    """One line on stderr as it is."""
    err_console.print(_harmless(text), markup=False, highlight=False, soft_wrap=True)


def _by_task(option: str, given: list[str] | None) -> dict[str, str]:
    """TASK=PATH options as a table; a bare path is a task of its own name."""
    table = {}
    for item in given or []:
        name, mark, path = item.partition("=")
        table[name if mark else Path(item).stem] = path if mark else item
    if given and len(table) != len(given):
        raise TuneportError(f"--{option} names a task twice; give each task once as TASK=PATH.")
    return table


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise TuneportError(f"--{option} takes whole numbers separated by commas, got {text!r}.") from None


@app.command()
def methods(json: Json = False) -> None:
    """What methods there are, one line each."""
    from .methods import METHODS

    _print_names({name: method.summary for name, method in METHODS.items()}, json)


@app.command()
def samplers(json: Json = False) -> None:
    """How calibration samples can be drawn, one line each."""
    from .calibration import SAMPLERS

    _print_names({name: sampler.description for name, sampler in SAMPLERS.items()}, json)


@app.command(epilog="Example: tuneport demo")
def demo(
    out: Annotated[str, typer.Option(help="The folder to write.")] = "tuneport-demo",
    seed: Seed = 0,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """The main job from end to end, offline, on what the package carries: about a minute on two cores."""
    from . import demo as demo_module

    with _stages() as stage:
        result = demo_module.run_demo(Path(out), seed=seed, overwrite=overwrite, stage=stage)
    if json:
        _emit(json_module.dumps(result))
        return
    table = Table("", "accuracy", title="mirrored digits, the larger model")
    for row in result["table"]:
        table.add_row(row["model"], f"{row['accuracy']:.1f} %")
    out_console.print(table)
    _say(f"the ported model: {result['out']}, its report: {result['report']}")
    _say(f"next: {result['next']}")


def _prepare(options: dict[str, Any], *, scored: bool = False, tell: bool = True) -> Job:
    from .budget import parse_bytes
    from .preparation import prepare
    from .report import label_words

    names = ("method", "samples", "shots", "sampler", "seed", "head", "loss", "max_tokens", "batch_size", "device")
    job = prepare(
        options["source"],
        options["finetuned"],
        options["target"],
        options["data"],
        exclude=options["exclude"] or (),
        completion=options["completion"].value,
        scored=scored,
        memory_budget=None if options["memory_budget"] is None else parse_bytes(options["memory_budget"]),
        trust_remote_code=options["trust_remote_code"],
        dtype=options["dtype"],
        labels=options["labels"],
        **{name: options[name] for name in names},
    )
    if tell and (words := label_words(job.record)):
        _note(f"{job.samples} samples {words}")
    return job


def _print_summary(record: dict[str, Any]) -> None:
    from .report import summary_rows

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, text in summary_rows(record):
        table.add_row(f"[dim]{label}[/dim]", escape(text))
    out_console.print(table)
    for note in record.get("notes", ()):
        _say(f"note: {note}")
    _print_kept(record)


def _print_kept(record: dict[str, Any]) -> None:
    from .report import kept_rows

    for reason, count in kept_rows(record):
        _say(f"  kept {count}: {reason}")


def _print_names(names: dict[str, str], json: bool) -> None:
    if json:
        _emit(json_module.dumps(names))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in names.items():
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    out_console.print(table)


def _emit(text: str) -> None:
    sys.stdout.write(text + "\n")


def _say(text: str) -> None:
    """One line on stdout as it is: paths are neither wrapped nor read as markup."""
    out_console.print(_harmless(text), markup=False, highlight=False, soft_wrap=True)


def _harmless(text: str) -> str:
    """One line without control characters: names from files must not steer the terminal."""
    return "".join(
        mark if mark.isprintable() else " " if mark.isspace() else "\N{REPLACEMENT CHARACTER}" for mark in text
    )


def _note(text: str) -> None:
    """One line on stderr that is no error."""
    err_console.print(f"note: {_harmless(text)}", markup=False, highlight=False, soft_wrap=True)


def _fail(kind: str, text: str) -> None:
    err_console.print(f"[red]{kind}:[/red] ", end="")
    err_console.print(_harmless(text), markup=False, highlight=False, soft_wrap=True)
    sys.exit(1)


def _bytes(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _by(shape: list[int]) -> str:
    return " x ".join(str(size) for size in shape)


@contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that a callback advances by so many samples."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err_console, transient=True, disable=not err_console.is_terminal) as bar:
        task = bar.add_task(words, total=total or None)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per named stage; the callback says (stage, done, total)."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err_console, disable=not err_console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def stage(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield stage


def main() -> None:
    """Entry point: run a command and turn errors into one clear line and an exit code."""
    try:
        app()
    except TuneportError as error:
        if DEBUG:
            raise
        _fail(type(error).__name__, str(error))
    except Exception as error:
        if DEBUG:
            raise
        _fail(type(error).__name__, f"{error} (unexpected: run tuneport --debug ... for the traceback and report it)")
    except KeyboardInterrupt:
        err_console.print("interrupted; no output was written")
        sys.exit(130)


if __name__ == "__main__":
    main()
