"""A transfer from end to end: prepare, measure, transport (Algorithm 1 of the paper), hand back a Result.

Works on paths and on live modules; nothing given is changed.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .adapter import Adapter, is_adapter, open_adapter, write_adapter
from .alignment import Statistics
from .budget import Passes, in_blocks, in_groups, plan_passes, runs_on
from .capture import Progress
from .checkpoint import file_digests, open_checkpoint, read_json
from .cost import cost_of
from .crossfit import halves, transfer_auto
from .data import Dataset
from .distributed import moved_by_all, ranks
from .errors import CheckpointError, TuneportError, first_of
from .evaluation import before_and_after
from .families import Model, open_model, open_stored, place_of
from .hub import local
from .lora import task_vector_of, transposed_weights
from .low_rank import check_truncation
from .measuring import measure_job, problem_of
from .methods import LayerRecord, Method, Transfer, get_method
from .offload import is_hollow, pinned, shelved
from .output import check_new_file, check_new_folder, claimed, new_folder
from .packing import Packed, no_place, pack
from .page import report_page
from .pairing import KEPT_BY_KIND, Kept
from .preparation import Job, ModelLike, PairedBatches, package_version, pick_device, prepare, versions
from .report import copy_companions, model_card, to_json, write_record
from .resume import SAVE_EVERY, Work, fingerprint
from .scaling import RULES, Rule, ScaleChoice
from .solver import within
from .soundness import check_finite
from .task_vector import TaskVector, load_task_vector, save_task_vector
from .tensors import LazyTensors, describe

__all__ = [
    "Job",
    "Result",
    "apply",
    "check_adapter",
    "check_scale",
    "extract",
    "halves",
    "left_behind",
    "measure_job",
    "not_transported_by",
    "pick_device",
    "port",
    "prepare",
    "problem_of",
    "run",
    "transfer",
    "transfer_auto",
]


@dataclass(frozen=True, eq=False)
class Result:
    """A finished transfer: the target's task vector, the evidence per layer, and the ways to use it."""

    target: Model
    task_vector: TaskVector
    records: tuple[LayerRecord, ...]
    not_transported: tuple[Kept, ...]
    scale: float
    record: Mapping[str, Any]

    def tensors(self, scale: float | None = None) -> Mapping[str, Tensor]:
        """The new model's tensors under their names in the files, in the target's dtypes, computed when read."""
        vector = self.task_vector.rename({name: self.target.file_names[name] for name in self.task_vector})
        return vector.apply_to(self.target.tensors, self.scale if scale is None else scale)

    def apply(self, scale: float | None = None) -> nn.Module:
        """A copy of the target with the skill: the numbers that `save` writes, in the dtype that the target runs in."""
        if is_hollow(self.target.module):
            raise TuneportError("the target was too large for the memory budget: use save() instead of apply().")
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.file_names[name]])
        return module

    def save(
        self,
        out: str | Path,
        *,
        kind: str = "model",
        rank: int | None = None,
        energy: float | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write the new model as a folder that its own library loads, a LoRA adapter, or the task vector as one file.

        An adapter takes low-rank updates as they are; others, and all where `rank` or `energy` is given, are cut
        by SVD to that rank, or to the least rank that keeps this share of |tau|^2.
        """
        out = Path(out)
        record = {**self.record, "out": str(out), "as": kind}
        if kind == "task-vector":
            names = {name: self.target.file_names[name] for name in self.task_vector}
            save_task_vector(out, self.task_vector.rename(names), {"record": to_json(record)}, overwrite=overwrite)
            return out
        if kind not in ("model", "adapter"):
            raise TuneportError(f"a transfer can be saved as model, adapter or task-vector, not as {kind!r}.")
        packed = self._packed(rank, energy) if kind == "adapter" else None
        with new_folder(out, overwrite=overwrite) as folder:
            if packed is not None:
                write_adapter(folder, packed.adapter)
                asked = {"as": kind, "rank": rank, "energy": energy}
                record["options"] = {**record.get("options", {}), **asked}
                record = _adapter_record(record, packed, self.target)
            else:
                copy_companions(self.target.folder, folder)
                self.target.write(folder, self.tensors())
            (folder / "README.md").write_text(model_card(record), encoding="utf-8")
            (folder / "report.html").write_text(report_page(record), encoding="utf-8")
            write_record(folder / "tuneport.json", record)
        return out

    def _packed(self, rank: int | None, energy: float | None) -> Packed:
        names = self.target.file_names
        base = LazyTensors(
            names, lambda n: self.target.tensors[names[n]], lambda n: describe(self.target.tensors, names[n])
        )
        source = self.record.get("finetuned", {}).get("adapter", {})
        about = {
            "base_model_name_or_path": self.target.name if self.target.folder is not None else None,
            "task_type": source.get("task_type"),
        }
        return pack(self.task_vector, self.target.module, base, scale=self.scale, rank=rank, energy=energy, about=about)


def transfer(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    scale: float | Rule | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Port a fine-tune of `source` to `target`: Algorithm 1 of the paper.

    `data` is a path or a Dataset, of which samples are drawn, or an iterable of batches for `loss`. The
    options are those of `prepare`; without a `scale`, the method's own is used. Trap: with very few samples a
    full-strength transfer can harm; `scale="auto"` chooses the strength on calibration samples, and may choose zero;
    `scale="safe"` does too, and goes beyond a quarter on evidence only.
    """
    strength = check_scale(scale, options.get("method", "bico"))
    job = prepare(source, finetuned, target, data, scored=isinstance(strength, str), **options)
    result = run(job, scale=strength, progress=progress)
    if not isinstance(job.batches, PairedBatches) or options.get("loss") is not None:
        return result  # counting would run a loss that is not ours once more
    return replace(result, record={**result.record, "cost": cost_of(job, result.record["samples"])})


def check_scale(scale: float | str | None, method: str | Method = "bico") -> float | Rule:
    """A finite number, or the name of a rule that chooses one; None is the method's own."""
    if scale is None:
        return (get_method(method) if isinstance(method, str) else method).usual_scale
    if scale in RULES:
        return scale
    try:
        number = float(scale)
    except ValueError:
        raise TuneportError(f"the scale must be a number, auto or safe, got {scale!r}.") from None
    if not math.isfinite(number):
        raise TuneportError(f"the scale must be a finite number, auto or safe, got {scale}.")
    return number


def run(
    job: Job,
    *,
    scale: float | Rule | None = None,
    progress: Progress | None = None,
    work: Work | None = None,
    passes: Passes | None = None,
) -> Result:
    """Measure both models, align, and carry the task vector over.

    `work` keeps what is measured, and gives back what an earlier run under the same conditions has measured.
    `passes` says which layers are measured together; a job with a memory budget makes its own. Without a `scale`, the
    method's own is used.
    """
    scale = check_scale(scale, job.method)
    at_once = job.method.signals and not job.method.by_layer
    if ranks().size > 1 and (isinstance(scale, str) or work is not None or at_once):
        raise TuneportError(
            "several processes share a transfer of layers one by one, at a fixed scale and without saves for --resume; "
            "pass a number as --scale, leave out --resume and methods that move all layers at once, or use one process."
        )
    started = time.perf_counter()
    choice, number = None, 0.0
    if passes is None and job.memory_budget is not None:
        passes = plan_passes(job, job.memory_budget)
    clock = _Clock()
    if isinstance(scale, str):
        if passes is not None and passes.placements is not None:
            raise TuneportError(
                "a scale is chosen on whole models, and these are larger than the memory budget: pass a number as the "
                "scale, or a larger --memory-budget."
            )
        moved, choice, counted = _move_auto(scale, halves(job), passes, clock, progress, work)
        number = choice.scale
    else:
        moved, counted = _move(job, passes, clock, progress, work)
        number = scale
    done = time.perf_counter()
    kept = not_transported_by(job, moved.task_vector, moved.kept)
    record = {
        **job.record,
        "scale": number,
        "samples": counted.samples,
        "seconds": round(done - started, 3),
        "fingerprint": fingerprint(_conditions(job, scale)),
        "seconds_by_stage": {
            "measure": round(clock.measuring, 3),
            "transport": round(done - started - clock.measuring, 3),
        },
        "passes": dict(counted.passes),
        "layers": _layer_entries(job, moved.records),
        "not_transported": [asdict(item) for item in kept],
        "left_behind": [asdict(item) for item in left_behind(job)],
    }
    if choice is not None:
        record["scale_choice"] = {
            "rule": choice.rule,
            "samples": choice.samples,
            "held_out": choice.held_out,
            "candidates": [
                {"scale": value, "loss": found.loss, "accuracy": found.accuracy, "sharpness": found.sharpness}
                for value, found in choice.scores.items()
            ],
        }
    return Result(job.target, moved.task_vector, moved.records, kept, number, record)


def _layer_entries(job: Job, records: Iterable[LayerRecord]) -> list[dict[str, Any]]:
    """The records of the layers, with where each stands and how wide its maps can be at most."""
    pairs = {pair.target.name: pair for pair in job.plan.pairs}
    entries = []
    for record in records:
        pair = pairs.get(record.target)
        place: dict[str, Any] = {}
        if pair is not None:
            ours, theirs = pair.source, pair.target
            place = {"role": theirs.role, "stack": theirs.stack, "block": theirs.block}
            place["width_in"] = min(ours.in_features, theirs.in_features)
            place["width_out"] = min(ours.out_features, theirs.out_features)
        entries.append({**asdict(record), **place})
    return entries


@dataclass
class _Clock:
    """Seconds spent measuring."""

    measuring: float = 0.0

    def measure(self, job: Job, progress: Progress | None, work: Work | None, stage: str) -> Statistics:
        started = time.perf_counter()
        statistics = measure_job(job, progress=progress, work=work, stage=stage)
        if (device := runs_on(job)).type == "cuda":
            torch.cuda.synchronize(device)
        self.measuring += time.perf_counter() - started
        return statistics


def _solve(job: Job, statistics: Statistics) -> Transfer:
    problem = problem_of(job, statistics)
    with within(job.memory_budget):
        return moved_by_all(problem, job.method.transfer) if job.method.by_layer else job.method.transfer(problem)


def _move(
    job: Job, passes: Passes | None, clock: _Clock, progress: Progress | None, work: Work | None
) -> tuple[Transfer, Statistics]:
    """Measure and move, group by group; also the count of samples and passes, without sums."""
    moved, counted = [], Statistics()
    ours, theirs = (passes.placements if passes is not None else None) or (None, None)
    with pinned(job.source.module, ours), pinned(job.target.module, theirs):
        for index, group in enumerate(groups := in_groups(job, passes)):
            statistics = clock.measure(group, progress, work, _stage("all", index, groups))
            if passes is not None and passes.shelved and ranks().size == 1:
                moved += [_shelved(_solve(block, statistics)) for block in in_blocks(group)]
            else:
                moved.append(_solve(group, statistics))
            counted = _count(counted, statistics)
            del statistics  # before the next group's are made
    return _together(moved), counted


def _shelved(moved: Transfer) -> Transfer:
    """The same with its dense entries in files of their own."""
    entries = {
        name: shelved(entry) if isinstance(entry, Tensor) else entry for name, entry in moved.task_vector.items()
    }
    return replace(moved, task_vector=TaskVector(entries))


def _move_auto(
    rule: Rule,
    sides: tuple[Job, Job],
    passes: Passes | None,
    clock: _Clock,
    progress: Progress | None,
    work: Work | None,
) -> tuple[Transfer, ScaleChoice, Statistics]:
    """As `_move`, with the scale chosen by the two halves of the samples."""
    groups = [in_groups(side, passes) for side in sides]
    names, held_out = ("first", "second", "whole"), sides[0] is not sides[1]
    moved: dict[str, list[Transfer]] = {name: [] for name in names}
    counted = Statistics()
    found: dict[str, Statistics] = {}
    for index, (first, second) in enumerate(zip(*groups, strict=True)):
        found["first"] = found["second"] = found["whole"] = clock.measure(
            first, progress, work, _stage("first", index, groups[0])
        )
        if held_out:
            found["second"] = clock.measure(second, progress, work, _stage("second", index, groups[0]))
            found["whole"] = found["first"] + found["second"]
        counted = _count(counted, found["whole"])
        if len(groups[0]) > 1:
            solved = {id(found[name]): _solve(first, found[name]) for name in names}
            for name in names:
                moved[name].append(solved[id(found[name])])
            found = {}  # before the next group's are made
    if len(groups[0]) == 1:
        parts = (found["first"], found["second"])
        return *transfer_auto(sides, lambda given: _solve(sides[0], given), parts, found["whole"], rule), counted
    done = {name: _together(parts) for name, parts in moved.items()}
    marks = {name: Statistics() for name in names}
    by_mark = {id(mark): name for name, mark in marks.items()}
    parts = (marks["first"], marks["second"])
    return *transfer_auto(sides, lambda given: done[by_mark[id(given)]], parts, marks["whole"], rule), counted


def _stage(name: str, index: int, groups: Sequence[Job]) -> str:
    return name if len(groups) == 1 else f"{name}-{index}"


def _count(counted: Statistics, more: Statistics) -> Statistics:
    """The passes of both and the samples of one: groups see the same samples."""
    passes = {name: counted.passes.get(name, 0) + count for name, count in more.passes.items()}
    return Statistics(samples=more.samples, passes=passes)


def _together(parts: Sequence[Transfer]) -> Transfer:
    if len(parts) == 1:
        return parts[0]
    entries = {name: entry for part in parts for name, entry in part.task_vector.items()}
    records = tuple(record for part in parts for record in part.records)
    return Transfer(TaskVector(entries), records, tuple(item for part in parts for item in part.kept))


def port(
    job: Job,
    out: str | Path,
    *,
    scale: float | Rule | None = None,
    kind: str = "model",
    rank: int | None = None,
    energy: float | None = None,
    overwrite: bool = False,
    resume: bool = False,
    save_every: float = SAVE_EVERY,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
    test: Dataset | None = None,
    verdict: Mapping[str, Any] | None = None,
    passes: Passes | None = None,
) -> dict[str, Any]:
    """Run a job, write its result to `out` and return the run record; a killed run can be resumed.

    What is measured is saved every so many seconds in a hidden folder beside `out`, which a finished run
    removes. With `resume`, a run goes on from there and ends in the same files as if it had never stopped.
    `note` gets a line where that is worth one. Accuracy on `test`, before and after, goes into the record, and so
    does the `verdict` of a pre-flight.
    """
    out, say = Path(out), note or (lambda _: None)
    scale = check_scale(scale, job.method)
    if test is not None and is_hollow(job.target.module):
        raise TuneportError(
            "the target is larger than the memory budget and cannot be scored with it: leave out --evaluate, and run "
            "'tuneport evaluate' afterwards."
        )
    conditions = _conditions(job, scale) | ({"rank": rank, "energy": energy} if kind == "adapter" else {})
    work = Work(out, conditions, save_every)
    several = ranks().size > 1
    with claimed(out):
        done = _finished(out, kind) if resume else None
        if done is not None and done.get("fingerprint") == fingerprint(conditions):
            work.remove()
            say(f"{out} was complete already")
            return done
        if kind == "model":
            size = sum(describe(job.target.tensors, name).nbytes for name in job.target.tensors)
            check_new_folder(out, overwrite, needed_bytes=size)
        elif kind == "adapter":
            check_new_folder(out, overwrite)
        else:
            check_new_file(out, overwrite)
        if resume:
            work.check()
            say("going on from what was measured before" if work.exists() else "nothing to resume: starting anew")
        elif work.exists():
            say(f"what an unfinished run for {out} has measured is dropped; --resume would have gone on from it")
            work.remove()
        try:
            result = run(job, scale=scale, progress=progress, work=None if several else work, passes=passes)
        except KeyboardInterrupt:
            if work.exists():
                say("what was measured is kept; the same command with --resume goes on from it")
            raise
        more: dict[str, Any] = {"cost": cost_of(job, result.record["samples"])}
        if test is not None:
            assert job.target_head is not None
            more["evaluation"] = before_and_after(job.target, result.apply(), job.target_head, test)
        if verdict is not None:
            more |= verdict
        result = replace(result, record={**result.record, **more})
        result.save(out, kind=kind, rank=rank, energy=energy, overwrite=overwrite)
        work.remove()
    if kind == "adapter":  # its record says more: ranks and what they cost
        written: dict[str, Any] = read_json(out / "tuneport.json", "a run record", limit=10**8)
        return written
    return {**result.record, "out": str(out), "as": kind}


def _conditions(job: Job, scale: float | str) -> dict[str, Any]:
    """Everything that shapes the result, as JSON values; where the inputs lie does not."""
    kept = ("tuneport", "method", "options", "versions")
    inputs = {key: dict(job.record[key]) for key in ("source", "finetuned", "target", "data")}
    for identity in inputs.values():
        identity.pop("path", None)
    plain: dict[str, Any] = json.loads(to_json({**{key: job.record[key] for key in kept}, **inputs, "scale": scale}))
    return plain


def _finished(out: Path, kind: str) -> dict[str, Any] | None:
    """The run record of an output that is there already."""
    try:
        if kind in ("model", "adapter"):
            record = read_json(out / "tuneport.json", "a run record", limit=10**8)
        else:
            record = json.loads(open_checkpoint(out).metadata["record"])
    except (TuneportError, KeyError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def check_adapter(job: Job, rank: int | None, energy: float | None) -> None:
    """Refuse, before anything is measured, a transfer whose result cannot be written as an adapter as asked."""
    check_truncation(rank, energy)
    if rank is None and energy is None:
        names = {pair.source.weight for pair in job.plan.pairs}
        dense = [name for name in names if job.task_vector.spec(name).rank is None]
        if dense:
            raise TuneportError(
                f"{len(dense)} of {len(names)} updates are not low-rank ({first_of(sorted(dense), 3)}): pass --rank R "
                "or --energy 0.95 to make an adapter of them (--energy 1 is exact)."
            )
        if not job.method.keeps_rank:
            raise TuneportError(f"method {job.record['method']} makes dense updates: pass --rank R or --energy 0.95.")
    weights = {pair.target.weight for pair in job.plan.pairs}
    homeless = no_place(job.target.module, weights)
    if len(homeless) == len(weights):
        reasons = first_of(f"{name}: {reason}" for name, reason in homeless.items())
        raise TuneportError(f"no layer of the target can be written as a LoRA ({reasons}). Use --as model.")


def _adapter_record(record: Mapping[str, Any], packed: Packed, target: Model) -> dict[str, Any]:
    """The record of a transfer that was written as an adapter: ranks, what they cost, what has no place in it."""
    kept = [{"tensor": target.file_names[name], "reason": reason} for name, reason in packed.kept.items()]
    weights = {layer.name: layer.weight for layer in target.layers}
    return {
        **record,
        "layers": [layer for layer in record["layers"] if weights.get(layer["target"]) not in packed.kept],
        "not_transported": [*record["not_transported"], *kept],
        "adapter": {"rank": packed.adapter.config["r"], "modules": [asdict(item) for item in packed.modules]},
    }


def extract(base: str | Path, finetuned: str | Path, *, exclude: Sequence[str] = ()) -> TaskVector:
    """The task vector `finetuned - base` of two checkpoints, read lazily, under their names in the files."""
    ours = open_stored(base).tensors
    finetuned = local(finetuned)
    if is_adapter(finetuned):
        return _extract_adapter(base, ours, open_adapter(finetuned), exclude)
    theirs = open_stored(finetuned).tensors
    vector = TaskVector.between(ours, theirs, exclude)
    check_finite(theirs, list(vector))
    check_finite(ours, list(vector))
    return vector


def _extract_adapter(
    base: str | Path, stored: Mapping[str, Tensor], adapter: Adapter, exclude: Sequence[str]
) -> TaskVector:
    """An adapter's change under the names in the base's files; the base is opened only where they differ."""
    try:
        vector = task_vector_of(adapter, stored)
    except CheckpointError:
        if not Path(base).is_dir():
            raise
        model = open_model(base)
        live = {name: file for name, file in model.file_names.items() if name not in stored}
        turned = {model.file_names[name] for name in transposed_weights(model.module)}
        vector = task_vector_of(adapter, stored, other_names=live, transposed=turned)
    return vector.subset(name for name in vector if not any(fnmatchcase(name, glob) for glob in exclude))


def apply(
    vector: TaskVector | str | Path, base: str | Path, out: str | Path, *, scale: float = 1.0, overwrite: bool = False
) -> Path:
    """Write `base + scale * vector` as a folder like the base's own; the vector may be a file."""
    file = None if isinstance(vector, TaskVector) else Path(vector)
    vector = vector if isinstance(vector, TaskVector) else load_task_vector(vector)
    base = local(base)
    stored = open_stored(base)
    tensors = vector.apply_to(stored.tensors, scale)
    size = sum(describe(stored.tensors, name).nbytes for name in stored.tensors)
    check_new_folder(out, overwrite, needed_bytes=size, inputs=[place_of(base)])
    with new_folder(out, overwrite=overwrite) as folder:
        copy_companions(stored.folder, folder)
        stored.write(folder, tensors)
        record = {
            "tuneport": package_version("tuneport"),
            "command": "apply",
            "out": str(out),
            "scale": scale,
            "tensors": len(vector),
            "base": _place(base, getattr(stored.tensors, "files", ())),
            "vector": _place(file, [file]) if file is not None else {"name": "TaskVector"},
            "versions": versions(),
        }
        write_record(folder / "tuneport.json", record)
    return Path(out)


def _place(path: Path, files: Iterable[Path]) -> dict[str, Any]:
    digests = {Path(name).name: digest for name, digest in file_digests(files).items()}
    return {"name": path.absolute().name, "path": str(path), "sha256": digests}


def left_behind(job: Job) -> tuple[Kept, ...]:
    """What the fine-tune changed in the source that no target tensor takes up."""
    taken = {pair.source.name for pair in job.plan.loose} if job.method.moves_loose else set()
    stays = [
        Kept(part.name, KEPT_BY_KIND[part.kind].replace("the target keeps its own", "not moved by this method"))
        for part in job.source.loose
        if part.name in job.task_vector and part.name not in taken and job.task_vector.changes(part.name)
    ]
    stays += [
        Kept(name, reason)
        for name, reason in job.source.outside.items()
        if name in job.task_vector and job.task_vector.changes(name)
    ]
    named = (Kept(job.source.file_names.get(item.tensor, item.tensor), item.reason) for item in stays)
    return (*job.plan.dropped, *named)


def not_transported_by(job: Job, moved: TaskVector, kept: Iterable[Kept]) -> tuple[Kept, ...]:
    """Every tensor of the target's files that stays as it was, with the reason, in the order of the files."""
    reasons: dict[str, str] = {}
    whole = {layer.name: layer.weight for layer in job.target.layers if layer.weight not in moved}
    for item in (*job.plan.kept, *kept):
        tensor = whole.get(item.tensor, item.tensor)  # all parts of a fused weight stay: name it once
        stored = job.target.file_names.get(tensor, tensor)
        if item.tensor not in moved:
            reasons.setdefault(stored, item.reason)
    changed = {job.target.file_names.get(name, name) for name in moved}
    listed = [Kept(name, reasons.pop(name, "not a parameter")) for name in job.target.tensors if name not in changed]
    return (*listed, *(Kept(name, reason) for name, reason in reasons.items()))
