"""`tuneport plan`: what a transfer would do, and what memory it would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TuneportError
from . import options
from .terminal import emit_json, say, show
from .transfer import print_kept, print_notes

if TYPE_CHECKING:
    from ..pipeline.options import Options


def plan(
    source: options.Source,
    target: options.Target,
    finetuned: Annotated[
        list[str] | None,
        typer.Option(help="The fine-tuned old base, an adapter of it, or a task-vector file."),
    ] = None,
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
    completion: options.CompletionName = "svd",
    norms: options.NormsName = "keep",
    exclude: options.Exclude = None,
    columns: options.Columns = None,
    max_length: options.MaxLength = None,
    roles: options.Roles = None,
    max_tokens: options.MaxTokens = None,
    memory_budget: options.MemoryBudget = None,
    batch_size: options.BatchSize = 32,
    device: options.Device = "auto",
    dtype: options.DtypeName = "float32",
    shapes_only: Annotated[
        bool,
        typer.Option(
            "--shapes-only",
            help="Read config.json only, no weights and no data: text models of any size. Needs --memory-budget.",
        ),
    ] = False,
    length: Annotated[int, typer.Option(help="With --shapes-only: tokens per text.", min=1)] = 256,
    layers: options.Layers = False,
    accept_unlikely: options.AcceptUnlikely = False,
    trust_remote_code: options.TrustRemoteCode = False,
    json: options.Json = False,
) -> None:
    """Show what a transfer would do, without doing it: the pairing, what stays and why, the memory."""
    given = options.prepare_options(locals())
    if shapes_only:
        _plan_shapes(source, target, method, length, given, json)
        return
    if finetuned is None:
        raise TuneportError("--finetuned is needed; only --shapes-only does without it.")
    from ..pipeline.evaluation import USUAL, usual_test
    from ..pipeline.outlook import expected
    from ..pipeline.prepare import prepare
    from ..pipeline.sanity import check_weights
    from ..pipeline.transfer import check_scale

    strength = check_scale(scale)
    job = prepare(source, finetuned, target, data, signals=method, **given)
    check_weights(job)
    test = usual_test(job, data, given.get("columns"))
    outlook = expected(job, method, scale=strength, tested=0 if isinstance(test, str) else min(len(test), USUAL))
    print_notes(job)
    if json:
        emit_json(outlook)
    else:
        _print_plan(outlook, layers)


def _print_plan(outlook: dict[str, Any], layers: bool) -> None:
    from ..io.sizes import format_bytes
    from ..report.summary import PLAN_COLUMNS, moved_words, plan_rows

    title = f"{outlook['method']}: {len(outlook['layers'])} layers"
    if layers:
        rows = [
            [word for side in ("target", "source") for word in (row[side], "{} x {}".format(*row[f"{side}_shape"]))]
            for row in outlook["layers"]
        ]
        show(rows, "target layer", "shape", "source layer", "shape", title=title, fold=True)
    else:
        show(plan_rows(outlook["layers"]), *PLAN_COLUMNS, title=title, fold=True)
    say(f"would move: {moved_words(outlook)}")
    print_kept(outlook)
    if "same_tokenizer" in outlook:
        words = "the models have one tokenizer" if outlook["same_tokenizer"] else "the tokenizers differ"
        if found := outlook.get("tokens"):
            share = "{target_matched} of the {target_tokens} tokens of the target have a partner".format(**found)
            words += f": {share} in the source ({100 * found['share']:.0f} %)"
        say(words)
    cost = outlook["expected"]
    say(
        f"expected: {format_bytes(cost['statistics_bytes'])} of statistics; for the scale and the scores, the source "
        f"answers {cost['answers']['source']} samples and the target {cost['answers']['target']}"
    )
    if "groups" in cost:
        runs = f"{len(cost['groups'])} runs" if len(cost["groups"]) > 1 else "one run"
        if "peak_bytes" in cost:
            say(f"within the memory budget: {runs} over the calibration data, peak {format_bytes(cost['peak_bytes'])}")
        else:
            say(f"{runs} over the calibration data: all statistics at once would take too much of the free memory")
        if cost.get("fetched_bytes"):
            say(
                f"the models are larger: {format_bytes(cost['home_bytes'])} stay in {cost['home']}, and "
                f"{format_bytes(cost['fetched_bytes'])} of weights come from there, block by block"
            )


def _plan_shapes(source: str, target: str, method: str, length: int, given: Options, json: bool) -> None:
    """Plans for several devices."""
    from ..io.sizes import format_bytes
    from ..pipeline.outlook import plan_devices, prepare_shapes

    device = "cuda" if given["device"] == "auto" else given["device"]
    names = ("batch_size", "dtype", "max_tokens", "memory_budget", "samples")
    known: dict[str, Any] = {name: value for name, value in given.items() if name in names}
    job = prepare_shapes(source, target, method=method, length=length, device=device, **known)
    lines = plan_devices(job, method=method)
    if json:
        emit_json({"options": job.record["options"], "plans": lines})
        return
    rows = []
    for line in lines:
        cells = [line.get("error", ""), "", "", ""]
        if "error" not in line:
            sizes = [format_bytes(line[name]) for name in ("peak_bytes", "home_bytes", "fetched_bytes")]
            cells = [str(line["runs"]), *sizes]
        rows.append([str(line["devices"]), *cells])
    columns = ("devices", "runs over the data", "peak of a device", "off the device", "fetched by a device")
    show(rows, *columns, title=f"{len(job.plan.pairs)} layers, {len(job.samples)} texts of {length} tokens")
