"""From an old base to a new one: transfer, plan, compare.

`transfer` and `plan` hand the same options to one function (`_prepare`), so that a plan shows the very transfer. All
that can be refused is refused before a model runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import TuneportError
from ..types import OutputKind
from .options import (
    As,
    BatchSize,
    Compare,
    CompletionName,
    Data,
    Device,
    DtypeName,
    Energy,
    Evaluate,
    Exclude,
    Finetuned,
    HeadName,
    Json,
    LabelsName,
    LossName,
    MaxTokens,
    MemoryBudget,
    MethodName,
    Out,
    Overwrite,
    Rank,
    Resume,
    SamplerName,
    Samples,
    SaveEvery,
    Scale,
    Seed,
    Shots,
    Source,
    Target,
    TrustRemoteCode,
)
from .terminal import emit_json, note, progress, say, show, show_list

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..job import Job
    from ..pipeline.preflight import Preflight
    from ..pipeline.prepare import Options
    from ..runtime.passes import Passes
    from ..types import ScaleRule, Signal


def transfer(
    source: Source,
    finetuned: Finetuned,
    target: Target,
    out: Out,
    data: Data = None,
    method: MethodName = "bico",
    samples: Samples = None,
    shots: Shots = None,
    sampler: SamplerName = "random",
    seed: Seed = 0,
    scale: Scale = None,
    head: HeadName = None,
    labels: LabelsName = "data",
    loss: LossName = None,
    as_: As = "model",
    rank: Rank = None,
    energy: Energy = None,
    completion: CompletionName = "svd",
    exclude: Exclude = None,
    max_tokens: MaxTokens = None,
    memory_budget: MemoryBudget = None,
    batch_size: BatchSize = 32,
    device: Device = "auto",
    dtype: DtypeName = "float32",
    resume: Resume = False,
    save_every: SaveEvery = 60.0,
    compare: Compare = False,
    evaluate: Evaluate = False,
    overwrite: Overwrite = False,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Write the new base with the old base's fine-tuned skill."""
    from ..runtime.distributed import processes

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
        "memory_budget": _bytes(memory_budget),
        "batch_size": batch_size,
        "device": device,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    output = _Output(out, as_, rank, energy, overwrite, resume, save_every)
    run = _Run((source, finetuned, target, data), method, scale, options, output, compare, evaluate)
    with processes(device) as here:
        if not here.first:
            run.other()
            return
        record = run.first()
    if json:
        emit_json(record)
        return
    _print_summary(record)
    output.print_next(data if labels == "data" else None, head)


@dataclass(frozen=True)
class _Output:
    """What is written, and where."""

    out: str
    kind: OutputKind
    rank: int | None
    energy: float | None
    overwrite: bool
    resume: bool
    save_every: float

    def check(self, inputs: list[Any]) -> None:
        """Refuse an output that must not be replaced, and options that do not fit its kind."""
        from ..io.output import check_new_file, check_new_folder
        from ..task_vectors.low_rank import check_truncation

        check_new = check_new_file if self.kind == "task-vector" else check_new_folder
        check_new(self.out, self.overwrite or self.resume, inputs=inputs)
        if self.kind != "adapter" and (self.rank is not None or self.energy is not None):
            raise TuneportError("--rank and --energy shape an adapter; they go with --as adapter.")
        check_truncation(self.rank, self.energy)

    def print_next(self, data: str | None, head: str | None) -> None:
        say(f"written to {self.out}" + ("" if self.kind == "task-vector" else ", report in report.html"))
        if self.kind == "adapter":
            say(f'next: peft.PeftModel.from_pretrained(model, "{self.out}")')
        if self.kind == "model" and data is not None:
            say(f"next: tuneport evaluate {self.out} --data {data}" + (f" --head {head}" if head else ""))


@dataclass(frozen=True)
class _Run:
    """One `transfer` command: in the first process, which checks, writes and prints, and in the others."""

    inputs: tuple[str, str, str, str | None]
    method: str
    scale: str | None
    options: Options
    output: _Output
    compare: bool
    evaluate: bool

    def first(self) -> dict[str, Any]:
        from ..io.output import claimed
        from ..measure.accuracy import check_test_split, read_test_split
        from ..methods import get_method
        from ..models.open import path_of
        from ..pipeline.result import check_adapter
        from ..runtime.budget import plan_passes

        strength, output = self._strength(), self.output
        with claimed(output.out):
            output.check([path_of(path) for path in (*self.inputs, self.options["head"]) if path])
            data = self.inputs[3]
            test = read_test_split(data) if self.evaluate else None
            job = self._job(strength)
            _print_notes(job)
            if output.kind == "adapter":
                check_adapter(job, get_method(self.method), output.rank, output.energy)
            if test is not None:
                check_test_split(test, job.heads.target if job.heads is not None else None)
            verdict = _compared(job, self.method).record() if self.compare else None
            passes = None
            if job.memory_budget is not None:
                passes = plan_passes(job, job.memory_budget, method=self.method)
                _note_passes(passes)
            return self._ported(job, strength, test, verdict, passes)

    def other(self) -> None:
        from ..pipeline.transfer import run

        strength = self._strength()
        run(self._job(strength), self.method, scale=strength)

    def _strength(self) -> float | ScaleRule:
        from ..pipeline.transfer import check_scale
        from ..runtime.distributed import ranks

        if self.compare and ranks().size > 1:
            raise TuneportError("--compare runs in one process: leave it out, or start without torchrun.")
        return check_scale(self.scale, self.method)

    def _job(self, strength: float | ScaleRule) -> Job:
        from ..methods import get_method
        from ..pipeline.prepare import SCORED

        signals = get_method(self.method).signals
        scored = isinstance(strength, str) or self.compare or self.evaluate
        return _prepare(self.inputs, self.method, signals | SCORED if scored else signals, self.options)

    def _ported(
        self,
        job: Job,
        strength: float | ScaleRule,
        test: Dataset | None,
        verdict: dict[str, Any] | None,
        passes: Passes | None,
    ) -> dict[str, Any]:
        from ..pipeline.port import port

        output = self.output
        with progress("measuring", len(job.samples) * (len(passes.groups) if passes else 1)) as advance:
            return port(
                job,
                output.out,
                method=self.method,
                scale=strength,
                kind=output.kind,
                rank=output.rank,
                energy=output.energy,
                overwrite=output.overwrite,
                resume=output.resume,
                save_every=output.save_every,
                progress=advance,
                note=note,
                test=test,
                verdict=verdict,
                passes=passes,
            )


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
        "memory_budget": _bytes(memory_budget),
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
    job = _prepare((source, finetuned, target, data), method, signals_of(method), options)
    _print_notes(job)
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
    """How alike two models are, layer by layer, and whether a transfer is likely to help. Writes nothing."""
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
    found = _compared(job, method, trial=finetuned is not None)
    means = preflight.summary(found.similarity)
    if json:
        about = {"source": source, "target": target, "samples": len(job.samples), "summary": means}
        emit_json({**about, **found.record()})
        return
    show(preflight.similarity_rows(found.similarity), *preflight.SIMILARITY_COLUMNS)
    say(f"verdict: {found.verdict.verdict}")
    for reason in found.verdict.reasons:
        say(f"- {reason}")


def _compared(job: Job, method: str, *, trial: bool = True) -> Preflight:
    from ..pipeline import preflight

    with progress("comparing", 0) as advance:
        return preflight.compare(job, method, trial=trial, progress=advance)


def _prepare(
    inputs: tuple[str, str, str, str | None], method: str, signals: frozenset[Signal], options: Options
) -> Job:
    """The job of a transfer or a plan, which its method can serve."""
    from ..methods import get_method
    from ..pipeline.prepare import prepare

    job = prepare(*inputs, signals=signals, **options)
    get_method(method).check(job.plan)
    return job


def _print_notes(job: Job) -> None:
    from ..report.summary import label_words

    if words := label_words(job.record):
        note(f"{len(job.samples)} samples {words}")
    for text in job.record.get("notes", ()):
        note(text)


def _bytes(budget: str | None) -> int | None:
    from ..io.sizes import parse_bytes

    return None if budget is None else parse_bytes(budget)


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
