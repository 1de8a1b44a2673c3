"""Before a transfer: what it would do and cost (`plan`), and whether it is likely to help (`compare`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TuneportError
from .options import (
    BatchSize,
    CompletionName,
    Data,
    Device,
    DtypeName,
    Exclude,
    HeadName,
    Json,
    LabelsName,
    LossName,
    MaxTokens,
    MemoryBudget,
    MethodName,
    SamplerName,
    Samples,
    Seed,
    Shots,
    Source,
    Target,
    TrustRemoteCode,
)
from .terminal import emit_json, say, show
from .transfer import compare_models, parse_budget, prepare_job, print_kept, print_notes

if TYPE_CHECKING:
    from ..pipeline.options import Options


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
    from ..pipeline.prepare import signals_of

    options: Options = {
        "samples": samples,
        "shots": shots,
        "sampler": sampler,
        "seed": seed,
        "head": head,
        "labels": labels,
        "loss": loss,
        "completion": completion,
        "exclude": exclude or (),
        "max_tokens": max_tokens,
        "memory_budget": parse_budget(memory_budget),
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    if shapes_only:
        _plan_shapes(source, target, method, length, options, json)
        return
    if finetuned is None:
        raise TuneportError("--finetuned is needed; only --shapes-only does without it.")
    job = prepare_job((source, finetuned, target, data), method, signals_of(method), options)
    print_notes(job)
    outlook = expected(job, method)
    if json:
        emit_json(outlook)
    else:
        _print_plan(outlook)


def _print_plan(outlook: dict[str, Any]) -> None:
    from ..io.sizes import format_bytes

    layers = outlook["layers"]
    rows = [(row["target"], _by(row["target_shape"]), row["source"], _by(row["source_shape"])) for row in layers]
    title = f"{outlook['method']}: {len(layers)} layers"
    show(rows, "target layer", "shape", "source layer", "shape", title=title, fold=True)
    print_kept(outlook)
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


def _plan_shapes(source: str, target: str, method: str, length: int, options: Options, json: bool) -> None:
    """Plans for several devices."""
    from ..models.open import pick_device, pick_dtype
    from ..pipeline.outlook import COLUMNS, describe_line, plan_devices, prepare_shapes
    from ..runtime.speed import probe

    job = prepare_shapes(
        source,
        target,
        method=method,
        samples=options["samples"] or 100,
        length=length,
        batch_size=options["batch_size"],
        max_tokens=options["max_tokens"],
        memory_budget=options["memory_budget"],
        device="cuda" if options["device"] == "auto" else options["device"],
        dtype=options["dtype"],
    )
    rates = probe(pick_device("auto"), pick_dtype(options["dtype"]), options["batch_size"] * length)
    lines = plan_devices(job, rates, method=method)
    if json:
        emit_json({"options": job.record["options"], "rates": vars(rates), "plans": lines})
        return
    show(
        map(describe_line, lines),
        *COLUMNS,
        title=f"{len(job.plan.pairs)} layers, {len(job.samples)} texts of {length} tokens",
    )
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
    """Compare two models layer by layer, and say whether a transfer is likely to help. Writes nothing."""
    from ..pipeline import preflight

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
    found = compare_models(job, method, trial=finetuned is not None)
    means = preflight.summary(found.similarity)
    if json:
        about = {"source": source, "target": target, "samples": len(job.samples), "summary": means}
        emit_json({**about, **found.record()})
        return
    show(preflight.similarity_rows(found.similarity), *preflight.SIMILARITY_COLUMNS)
    say(f"verdict: {found.verdict.verdict}")
    for reason in found.verdict.reasons:
        say(f"- {reason}")


def _by(shape: list[int]) -> str:
    return " x ".join(str(size) for size in shape)
