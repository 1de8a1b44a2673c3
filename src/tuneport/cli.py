"""The commands: parse, call one library function, print. The only importer of typer and rich.

Results go to stdout (`--json`: one JSON object and nothing else), progress to stderr. Exit codes: 0 done,
1 a TuneportError (one clear line), 2 wrong usage. Heavy imports happen inside the commands, so that help
answers at once.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from . import __version__
from .errors import TuneportError

if TYPE_CHECKING:
    from .pipeline import Job

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
    task_vector = "task-vector"


Source = Annotated[str, typer.Option(help="The old base model: a folder that from_pretrained loads.")]
Finetuned = Annotated[str, typer.Option(help="The fine-tuned old base, or a task-vector file.")]
Target = Annotated[str, typer.Option(help="The new base model.")]
Data = Annotated[str | None, typer.Option(help="Calibration data: image folder, .npz, table or HF dataset folder.")]
MethodName = Annotated[str, typer.Option(help="Transfer method; see 'tuneport methods'.")]
Samples = Annotated[int | None, typer.Option(help="Number of calibration samples (100 unless --shots is given).")]
Shots = Annotated[int | None, typer.Option(help="Calibration samples per class, instead of --samples.")]
SamplerName = Annotated[str, typer.Option(help="How samples are drawn; see 'tuneport samplers'.")]
Seed = Annotated[int, typer.Option(help="Seed of the draw.")]
HeadName = Annotated[str | None, typer.Option(help="Zero-shot head: a name in the models' heads/ folder, or a file.")]
Exclude = Annotated[list[str] | None, typer.Option(help="Name pattern of tensors to leave alone; may be repeated.")]
BatchSize = Annotated[int, typer.Option(help="Samples per pass through the models.", min=1)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let a checkpoint's own code run. Off unless you ask for it.")
]


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.", is_eager=True)] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Port a fine-tune to a new base model, without training.

    [bold]Start here:[/bold] tuneport demo
    """
    global DEBUG
    DEBUG = debug
    if version:
        out_console.print(f"tuneport {__version__}")
        raise typer.Exit


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
    scale: Annotated[float, typer.Option(help="Strength of the transfer.")] = 1.0,
    head: HeadName = None,
    as_: Annotated[OutputKind, typer.Option("--as", help="What to write.")] = OutputKind.model,
    completion: Annotated[Completion, typer.Option(help="What fills directions the data leave open.")] = Completion.svd,
    exclude: Exclude = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Write the new base with the old base's fine-tuned skill."""
    from . import pipeline
    from .checkpoint import check_new_folder
    from .report import to_json

    check_new_folder(out, overwrite, inputs=[path for path in (source, finetuned, target, data) if path])
    job = _prepare(locals())
    with _progress("measuring", job.samples) as advance:
        result = pipeline.run(job, scale=scale, progress=advance)
    result.save(out, kind=as_.value, overwrite=overwrite)
    record = {**result.record, "out": out}
    if json:
        _emit(to_json(record))
        return
    _print_summary(record)
    out_console.print(f"written to [bold]{out}[/bold]" + (", report in report.html" if as_ is OutputKind.model else ""))
    if as_ is OutputKind.model and data is not None:
        chosen = f" --head {head}" if head else ""
        out_console.print(f"next: tuneport evaluate {out} --data {data}{chosen}", highlight=False)


@app.command(epilog="Example: tuneport plan --source old-base --finetuned old-base-cars --target new-base --data cars/")
def plan(
    source: Source,
    finetuned: Finetuned,
    target: Target,
    data: Data = None,
    method: MethodName = "bico",
    samples: Samples = None,
    shots: Shots = None,
    sampler: SamplerName = "random",
    seed: Seed = 0,
    head: HeadName = None,
    completion: Annotated[Completion, typer.Option(help="What fills directions the data leave open.")] = Completion.svd,
    exclude: Exclude = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the expected cost."""
    from .pipeline import expected
    from .report import to_json

    job = _prepare(locals())
    outlook = expected(job)
    if json:
        _emit(to_json(outlook))
        return
    table = Table(
        "target layer", "shape", "source layer", "shape", title=f"{outlook['method']}: {len(outlook['layers'])} layers"
    )
    for row in outlook["layers"]:
        table.add_row(row["target"], _by(row["target_shape"]), row["source"], _by(row["source_shape"]))
    out_console.print(table)
    _print_kept(outlook)
    cost = outlook["expected"]
    out_console.print(
        f"expected: {cost['statistics_bytes'] / 2**20:.0f} MiB of statistics, "
        f"{cost['flops'] / 1e12:.2f} TFLOP of model passes and {cost['alignment_flops'] / 1e12:.2f} TFLOP of alignment"
    )


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
    from .task_vector import save_task_vector

    vector = pipeline.extract(base, finetuned, exclude=exclude or ())
    save_task_vector(out, vector, {"base": base, "finetuned": finetuned}, overwrite=overwrite)
    result = {"out": out, "tensors": len(vector), "norm": vector.norm()}
    _emit(json_module.dumps(result)) if json else out_console.print(
        f"{len(vector)} tensors, norm {result['norm']:.4g}, written to [bold]{out}[/bold]"
    )


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
    from .task_vector import load_task_vector

    loaded = load_task_vector(vector)
    pipeline.apply(loaded, base, out, scale=scale, overwrite=overwrite)
    result = {"out": out, "tensors": len(loaded), "scale": scale}
    _emit(json_module.dumps(result)) if json else out_console.print(f"written to [bold]{out}[/bold]")


@app.command(epilog="Example: tuneport evaluate new-base-cars --data cars/ --head cars")
def evaluate(
    model: Annotated[str, typer.Argument(help="A model folder.")],
    data: Annotated[str, typer.Option(help="Labelled data; the test split is scored.")],
    head: HeadName = None,
    protocol: Annotated[str, typer.Option(help="zero-shot or linear-probe.")] = "zero-shot",
    samples: Annotated[int | None, typer.Option(help="Linear probe: training samples (all unless given).")] = None,
    seed: Seed = 0,
    batch_size: BatchSize = 128,
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Accuracy of a model: with its zero-shot head, or of a linear probe on its features."""
    from dataclasses import asdict

    from . import evaluation
    from .calibration import select
    from .data import align_labels, read_data
    from .families import choose_head, open_model
    from .pipeline import pick_device

    chosen = evaluation.check_protocol(protocol)
    test = read_data(data, "test")
    opened = open_model(model, device=pick_device(device), trust_remote_code=trust_remote_code)
    if chosen == "zero-shot":
        scorer = choose_head(opened, head, test.name, test.classes)
        align_labels(test, scorer.classes)
        with _progress("evaluating", len(test)) as advance:
            result = evaluation.zero_shot(opened, scorer, test, batch_size=batch_size, progress=advance)
    else:
        train = read_data(data, "train")
        if samples is not None:
            train = train.subset(select(train, samples=samples, seed=seed))
        with _progress("evaluating", len(train) + len(test)) as advance:
            result = evaluation.linear_probe(opened, train, test, batch_size=batch_size, progress=advance)
    if json:
        _emit(json_module.dumps({"model": model, "data": data, "head": head, **asdict(result)}))
    else:
        out_console.print(f"{result.accuracy:.2f} % of {result.samples} samples right ({result.protocol})")


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
    table = Table("", "accuracy", title="rotated digits on the larger model")
    for row in result["table"]:
        table.add_row(row["model"], f"{row['accuracy']:.1f} %")
    out_console.print(table)
    out_console.print(f"the ported model: [bold]{result['out']}[/bold], its report: {result['report']}")
    out_console.print(f"next: {result['next']}", highlight=False)


def _prepare(options: dict[str, Any]) -> Job:
    from .pipeline import prepare

    names = ("method", "samples", "shots", "sampler", "seed", "head", "batch_size", "device", "trust_remote_code")
    return prepare(
        options["source"],
        options["finetuned"],
        options["target"],
        options["data"],
        exclude=options["exclude"] or (),
        completion=options["completion"].value,
        **{name: options[name] for name in names},
    )


def _print_summary(record: dict[str, Any]) -> None:
    from .report import summary_rows

    table = Table(show_header=False, box=None, pad_edge=False)
    for label, text in summary_rows(record):
        table.add_row(f"[dim]{label}[/dim]", text)
    out_console.print(table)
    _print_kept(record)


def _print_kept(record: dict[str, Any]) -> None:
    from .report import kept_rows

    for reason, count in kept_rows(record):
        out_console.print(f"  [dim]kept {count}:[/dim] {reason}", highlight=False)


def _print_names(names: dict[str, str], json: bool) -> None:
    if json:
        _emit(json_module.dumps(names))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in names.items():
        table.add_row(f"[bold]{name}[/bold]", text)
    out_console.print(table)


def _emit(text: str) -> None:
    sys.stdout.write(text + "\n")


def _by(shape: list[int]) -> str:
    return " x ".join(str(size) for size in shape)


@contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that a callback advances by so many samples."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err_console, transient=True) as bar:
        task = bar.add_task(words, total=total or None)
        yield lambda done: bar.advance(task, done)


@contextmanager
def _stages() -> Iterator[Callable[[str, int, int], None]]:
    """A bar per named stage; the callback says (stage, done, total)."""
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err_console) as bar:
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
        err_console.print(f"[red]{type(error).__name__}:[/red] ", end="")
        err_console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        err_console.print("interrupted; nothing was written")
        sys.exit(130)


if __name__ == "__main__":
    main()
