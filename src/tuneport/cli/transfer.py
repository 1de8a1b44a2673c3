"""From an old base to a new one: `tuneport transfer`.

`transfer` and `plan` hand the same options to `prepare_job`, so that a plan shows the very transfer. All that can be
refused is refused before a model runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
from .terminal import emit_json, note, progress, say, show_list

if TYPE_CHECKING:
    from ..data.dataset import Dataset
    from ..job import Job
    from ..pipeline.options import Options
    from ..pipeline.preflight import Preflight
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
        "memory_budget": parse_budget(memory_budget),
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
            print_notes(job)
            if output.kind == "adapter":
                check_adapter(job, get_method(self.method), output.rank, output.energy)
            if test is not None:
                check_test_split(test, job.heads.target if job.heads is not None else None)
            verdict = compare_models(job, self.method).record() if self.compare else None
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
        return prepare_job(self.inputs, self.method, signals | SCORED if scored else signals, self.options)

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


def compare_models(job: Job, method: str, *, trial: bool = True) -> Preflight:
    from ..pipeline import preflight

    with progress("comparing", 0) as advance:
        return preflight.compare(job, method, trial=trial, progress=advance)


def prepare_job(
    inputs: tuple[str, str, str, str | None], method: str, signals: frozenset[Signal], options: Options
) -> Job:
    """The job of a transfer or a plan, which its method can serve."""
    from ..methods import get_method
    from ..pipeline.prepare import prepare

    job = prepare(*inputs, signals=signals, **options)
    get_method(method).check(job.plan)
    return job


def print_notes(job: Job) -> None:
    from ..report.summary import label_words

    if words := label_words(job.record):
        note(f"{len(job.samples)} samples {words}")
    for text in job.record.get("notes", ()):
        note(text)


def parse_budget(budget: str | None) -> int | None:
    from ..io.sizes import parse_bytes

    return None if budget is None else parse_bytes(budget)


def _print_summary(record: dict[str, Any]) -> None:
    from ..report.summary import summary_rows

    show_list(summary_rows(record), "dim")
    print_kept(record)


def print_kept(record: dict[str, Any]) -> None:
    from ..report.summary import kept_rows

    for reason, count in kept_rows(record):
        say(f"  kept {count}: {reason}")
