"""A transfer from end to end: open, plan, measure, transport (Algorithm 1 of the paper), hand back a Result.

Everything that can be wrong with the input is found by `prepare`, before the first forward pass. Works on
paths and on live modules; nothing given is changed.
"""

from __future__ import annotations

import copy
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .alignment import Completion, Statistics
from .calibration import batches as sample_batches
from .calibration import select
from .capture import NEEDS_BACKWARD, Loss, Match, PairedBatch, Progress, frozen, match_tokens, measure
from .checkpoint import (
    check_finite,
    check_new_folder,
    describe,
    file_digests,
    new_folder,
    open_checkpoint,
    write_checkpoint,
)
from .data import Dataset, align_labels, read_data
from .errors import CheckpointError, DataError, PairingError, TuneportError, first_of
from .evaluation import features
from .families import Head, Model, choose_head, describe_module, open_model
from .layers import Layer
from .methods import METHODS, LayerRecord, Method, Problem, Transfer, get_method
from .pairing import DepthRule, Kept, LayerPair, Plan, check_pairs, nearest_block, pair_layers
from .report import copy_companions, model_card, report_page, write_record
from .scaling import HOLD_OUT, ScaleChoice, Scaled, Score, choose_scale, fitting_samples
from .task_vector import TaskVector, load_task_vector, save_task_vector

ModelLike = Model | nn.Module | str | Path


@dataclass(frozen=True, eq=False)
class Job:
    """A transfer that has been checked whole: what will be moved, and how it will be measured."""

    source: Model
    target: Model
    task_vector: TaskVector
    plan: Plan
    method: Method
    completion: Completion = "svd"
    batches: Iterable[Any] = ()
    samples: int = 0
    source_loss: Loss | None = None
    target_loss: Loss | None = None
    match: Match | None = None
    target_head: Head | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


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
        """A copy of the target with the skill, holding exactly the numbers that `save` writes."""
        module = copy.deepcopy(self.target.module)
        tensors = self.tensors(scale)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name in self.task_vector:
                    parameter.copy_(tensors[self.target.file_names[name]])
        return module

    def save(self, out: str | Path, *, kind: str = "model", overwrite: bool = False) -> Path:
        """Write the new model as a folder that from_pretrained loads, or the task vector as one file."""
        out = Path(out)
        record = {**self.record, "out": str(out)}
        if kind == "task-vector":
            names = {name: self.target.file_names[name] for name in self.task_vector}
            save_task_vector(out, self.task_vector.rename(names), {"record": _compact(record)}, overwrite=overwrite)
            return out
        if kind != "model":
            raise TuneportError(f"a transfer can be saved as model or task-vector, not as {kind!r}.")
        with new_folder(out, overwrite=overwrite) as folder:
            write_checkpoint(folder, self.tensors())
            copy_companions(self.target.folder, folder, self.target.module)
            (folder / "README.md").write_text(model_card(record), encoding="utf-8")
            (folder / "report.html").write_text(report_page(record), encoding="utf-8")
            write_record(folder / "tuneport.json", record)
        return out


def transfer(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    scale: float | Literal["auto"] = 1.0,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Port a fine-tune of `source` to `target`: Algorithm 1 of the paper.

    `data` is a path or a Dataset, of which samples are drawn, or an iterable of batches for `loss`. The
    options are those of `prepare`. Trap: with very few samples a full-strength transfer can harm;
    `scale="auto"` chooses the strength on part of the calibration samples, and may choose zero.
    """
    check_scale(scale)
    job = prepare(source, finetuned, target, data, scored=scale == "auto", **options)
    return run(job, scale=scale, progress=progress)


def check_scale(scale: float | str) -> float | Literal["auto"]:
    """A finite number, or "auto"."""
    if scale == "auto":
        return "auto"
    try:
        number = float(scale)
    except ValueError:
        raise TuneportError(f"the scale must be a number or auto, got {scale!r}.") from None
    if not math.isfinite(number):
        raise TuneportError(f"the scale must be a finite number or auto, got {scale}.")
    return number


def run(job: Job, *, scale: float | Literal["auto"] = 1.0, progress: Progress | None = None) -> Result:
    """Measure both models, align, and carry the task vector over."""
    started = time.perf_counter()
    choice = None

    def solve(statistics: Statistics) -> Transfer:
        return job.method.transfer(problem_of(job, statistics))

    if scale == "auto":
        fit, rest = split_samples(job)
        part = measure_job(fit, progress=progress)
        statistics = part if rest is fit else part + measure_job(rest, progress=progress)
        measured = time.perf_counter()
        moved, choice = transfer_auto(rest, solve, part, statistics, held_out=rest is not fit)
        number = choice.scale
    else:
        statistics, number = measure_job(job, progress=progress), scale
        measured = time.perf_counter()
        moved = solve(statistics)
    done = time.perf_counter()
    kept = _not_transported(job, moved.task_vector, moved.kept)
    record = {
        **job.record,
        "scale": number,
        "samples": statistics.samples,
        "seconds": round(done - started, 3),
        "seconds_by_stage": {"measure": round(measured - started, 3), "transport": round(done - measured, 3)},
        "passes": dict(statistics.passes),
        "layers": [asdict(layer) for layer in moved.records],
        "not_transported": [asdict(item) for item in kept],
        "left_behind": [asdict(item) for item in job.plan.dropped],
    }
    if choice is not None:
        record["scale_choice"] = {
            "samples": choice.samples,
            "held_out": choice.held_out,
            "candidates": [{"scale": value, **asdict(found)} for value, found in choice.scores.items()],
        }
    return Result(job.target, moved.task_vector, moved.records, kept, number, record)


def split_samples(job: Job) -> tuple[Job, Job]:
    """The job with the samples that make the maps, and with those that choose the scale (the same where few)."""
    if isinstance(job.batches, PairedBatches):
        count = fitting_samples(len(job.batches.indices))
        if count == len(job.batches.indices):
            return job, job
        first, rest = np.split(job.batches.indices, [count])
        sides = (replace(job.batches, indices=first), replace(job.batches, indices=rest))
        return tuple(replace(job, batches=side, samples=len(side.indices)) for side in sides)  # type: ignore[return-value]
    batches = list(job.batches)
    if not batches:
        raise DataError("choosing a scale needs labelled calibration data; pass --data, or a number as the scale.")
    held_out = int(len(batches) * HOLD_OUT)
    if held_out == 0:
        return (whole := replace(job, batches=batches)), whole
    return replace(job, batches=batches[:-held_out]), replace(job, batches=batches[-held_out:])


def transfer_auto(
    rest: Job, solve: Callable[[Statistics], Transfer], part: Statistics, whole: Statistics, *, held_out: bool
) -> tuple[Transfer, ScaleChoice]:
    """Choose the scale of a transfer on the samples of the job `rest`, which maps from `part` have not seen.

    The maps that ship come from the `whole` statistics, unless those score below the target itself on `rest`;
    then the maps from `part` stand.
    """
    batches = [batch.target if isinstance(batch, PairedBatch) else batch for batch in rest.batches]
    moved = solve(part)
    with Scaled(rest.target.module, moved.task_vector) as scaled:
        choice = choose_scale(
            lambda scale: _score(rest, scaled, scale, batches), samples=rest.samples, held_out=held_out
        )
    if choice.scale == 0 or part is whole:
        return moved, choice
    final = solve(whole)
    with Scaled(rest.target.module, final.task_vector) as scaled:
        found, floor = _score(rest, scaled, choice.scale, batches), choice.scores[0.0]
    worse = found.loss > floor.loss or (found.accuracy or 0.0) < (floor.accuracy or 0.0)
    return (moved if worse else final), choice


def _score(job: Job, scaled: Scaled, scale: float, batches: Sequence[Any]) -> Score:
    """Mean loss and accuracy of the target at one scale, forward passes only."""
    scaled.set(scale)
    assert job.target_loss is not None
    loss, right, samples = 0.0, 0, 0
    with frozen(scaled.module), torch.no_grad():
        for batch in batches:
            loss += float(job.target_loss(scaled.module, batch))
            size = len(batch[1]) if isinstance(batch, (tuple, list)) and len(batch) == 2 else 1
            samples += size
            if job.target_head is not None:
                scores = job.target_head.scores(job.target, scaled.module, batch[0])
                right += int((scores.argmax(-1) == batch[1]).sum())
    return Score(loss / max(samples, 1), right / max(samples, 1) if job.target_head is not None else None)


def problem_of(job: Job, statistics: Statistics) -> Problem:
    """What the job's method, or any other on the same job, is to solve."""
    return Problem(
        job.plan,
        job.task_vector,
        statistics,
        job.completion,
        source_weights=dict(job.source.module.named_parameters()),
        target_weights=dict(job.target.module.named_parameters()),
    )


def measure_job(job: Job, *, signals: Iterable[str] | None = None, progress: Progress | None = None) -> Statistics:
    """The statistics that a job's method needs (or the given signals, to serve several methods at once)."""
    wanted = frozenset(job.method.signals if signals is None else signals)
    if not wanted:
        return Statistics()
    assert job.source_loss is not None
    assert job.target_loss is not None
    return measure(
        job.source.module,
        job.target.module,
        job.plan.pairs,
        job.batches,
        signals=wanted,
        source_loss=job.source_loss,
        target_loss=job.target_loss,
        match=job.match,
        progress=progress,
    )


def prepare(
    source: ModelLike,
    finetuned: ModelLike | TaskVector,
    target: ModelLike,
    data: str | Path | Dataset | Iterable[Any] | None = None,
    *,
    method: str | Method = "bico",
    samples: int | None = None,
    shots: int | None = None,
    sampler: str = "random",
    seed: int = 0,
    head: str | None = None,
    loss: Loss | tuple[Loss, Loss] | None = None,
    match: Match | None = None,
    pairs: Sequence[LayerPair] | None = None,
    roles: Mapping[str, str | None] | None = None,
    depth_rule: DepthRule = nearest_block,
    exclude: Sequence[str] = (),
    completion: Completion = "svd",
    batch_size: int = 32,
    device: str = "auto",
    trust_remote_code: bool = False,
    extra_signals: Iterable[str] = (),
    scored: bool = False,
) -> Job:
    """Open everything, pair the layers and draw the samples: a Job in which nothing is left to go wrong.

    `samples` (100 unless given) or `shots` per class are drawn by `sampler` and `seed` from the training
    split; `head` names the zero-shot head; `loss(module, batch)`, or one for each model, replaces the
    classification loss; `pairs`, `roles` and `depth_rule` override the pairing; `exclude` holds name
    patterns of tensors to leave alone. `extra_signals` prepares for methods that measure more, `scored` for a
    scale that is chosen on labelled samples.
    """
    method, name = (get_method(method), method) if isinstance(method, str) else (method, type(method).__name__)
    name = next((known for known, registered in METHODS.items() if registered == method), name)
    where = pick_device(device)
    ours, theirs = (_open(model, where, trust_remote_code) for model in (source, target))
    vector = _task_vector(ours, finetuned, exclude)
    signals = method.signals | frozenset(extra_signals)
    gradients = bool(NEEDS_BACKWARD & signals) or scored
    dataset, heads, indices = None, None, None
    if (signals or scored) and isinstance(data, (str, Path, Dataset)):
        dataset = data if isinstance(data, Dataset) else read_data(data, "train", labelled=gradients and loss is None)
        if loss is None and gradients:
            heads = tuple(choose_head(model, head, dataset.name, dataset.classes) for model in (ours, theirs))
            for one in heads:
                align_labels(dataset, one.classes)
    plan = _plan(ours, theirs, vector, pairs, roles, depth_rule, exclude)
    method.check(plan)
    batches: Iterable[Any] = ()
    count = 0
    losses: tuple[Loss, Loss] | tuple[None, None] = (None, None)
    if signals or scored:
        if data is None:
            raise DataError(f"method {name} needs calibration data: pass --data, or batches with a loss in Python.")
        losses = _losses(ours, theirs, heads, loss, gradients)
        if dataset is not None:
            _check_kind(dataset, ours, theirs)
            indices = select(
                dataset,
                samples=samples,
                shots=shots,
                sampler=sampler,
                seed=seed,
                features=lambda chosen: features(theirs, chosen),
            )
            count = len(indices)
            batches = PairedBatches(ours, theirs, dataset, indices, heads, batch_size)
        else:
            assert not isinstance(data, (str, Path, Dataset))
            batches = data
    record = {
        "tuneport": _version("tuneport"),
        "method": name,
        "options": {
            "samples": count or samples,
            "shots": shots,
            "sampler": sampler,
            "seed": seed,
            "head": head,
            "completion": completion,
            "batch_size": batch_size,
            "exclude": list(exclude),
            "roles": dict(roles or {}),
            "device": str(where),
        },
        "source": _identity(ours),
        "finetuned": _identity(finetuned),
        "target": _identity(theirs),
        "data": _data_identity(data, dataset, indices, heads),
        "versions": {package: _version(package) for package in ("torch", "transformers", "safetensors", "numpy")}
        | {"python": platform.python_version()},
        "blocks": {"source": dict(plan.source_blocks), "target": dict(plan.target_blocks)},
    }
    return Job(
        ours,
        theirs,
        vector,
        plan,
        method,
        completion,
        batches,
        count,
        losses[0],
        losses[1],
        match,
        heads[1] if heads else None,
        record,
    )


@dataclass(frozen=True, eq=False)
class PairedBatches:
    """The chosen samples as both models want them, prepared batch by batch; can be gone through again."""

    source: Model
    target: Model
    dataset: Dataset
    indices: np.ndarray[Any, np.dtype[np.int64]]
    heads: tuple[Head, ...] | None
    size: int

    def __iter__(self) -> Iterator[PairedBatch]:
        sides = (self.source, self.target)
        chosen = [align_labels(self.dataset, self.heads[i].classes) if self.heads else self.dataset for i in range(2)]
        streams = [sample_batches(data, self.indices, self.size) for data in chosen]
        for (inputs, source_labels), (_, target_labels) in zip(*streams, strict=True):
            batches = []
            for model, labels in zip(sides, (source_labels, target_labels), strict=True):
                assert model.encode is not None
                encoded = {key: value.to(model.device) for key, value in model.encode(inputs).items()}
                batches.append((encoded, labels.to(model.device)))
            layouts = [
                model.layout(batch) if model.layout is not None else None
                for model, (batch, _) in zip(sides, batches, strict=True)
            ]
            yield PairedBatch(batches[0], batches[1], size=len(inputs), match=match_tokens(*layouts))


def classification_loss(model: Model, head: Head) -> Loss:
    """Sum over samples of the cross-entropy of the head's class scores."""

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        inputs, labels = batch
        return F.cross_entropy(head.scores(model, module, inputs), labels, reduction="sum")

    return loss


def forward_only(model: Model) -> Loss:
    """Run the model for its activations; the number means nothing."""

    def loss(module: nn.Module, batch: tuple[dict[str, Tensor], Tensor]) -> Tensor:
        forward = model.logits or model.features
        assert forward is not None
        return forward(module, batch[0]).sum()

    return loss


def pick_device(name: str) -> torch.device:
    """`auto` is a GPU where there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise TuneportError(f"device '{name}' is not available: {reason}. Pass auto, cpu or cuda.") from error
    return device


def extract(base: str | Path, finetuned: str | Path, *, exclude: Sequence[str] = ()) -> TaskVector:
    """The task vector `finetuned - base` of two checkpoints, read lazily, under their names in the files."""
    ours, theirs = open_checkpoint(base), open_checkpoint(finetuned)
    vector = TaskVector.between(ours, theirs, exclude)
    check_finite(theirs, list(vector))
    check_finite(ours, list(vector))
    return vector


def apply(
    vector: TaskVector, base: str | Path, out: str | Path, *, scale: float = 1.0, overwrite: bool = False
) -> Path:
    """Write `base + scale * vector` as a folder like the base's own."""
    stored = open_checkpoint(base)
    tensors = vector.apply_to(stored, scale)
    size = sum(describe(stored, name).nbytes for name in stored)
    check_new_folder(out, overwrite, needed_bytes=size, inputs=[base])
    folder_of_base = Path(base) if Path(base).is_dir() else None
    with new_folder(out, overwrite=overwrite) as folder:
        write_checkpoint(folder, tensors)
        copy_companions(folder_of_base, folder, None)
        record = {
            "tuneport": _version("tuneport"),
            "command": "apply",
            "out": str(out),
            "scale": scale,
            "tensors": len(vector),
            "base": {"path": str(base), "sha256": file_digests(stored.files)},
        }
        write_record(folder / "tuneport.json", record)
    return Path(out)


def _open(model: ModelLike, device: torch.device, trust_remote_code: bool) -> Model:
    if isinstance(model, Model):
        return model
    if isinstance(model, nn.Module):
        return describe_module(model)
    return open_model(model, device=device, trust_remote_code=trust_remote_code)


def _task_vector(source: Model, finetuned: ModelLike | TaskVector, exclude: Sequence[str]) -> TaskVector:
    """The source's task vector under the names of its live parameters."""
    live = {stored: name for name, stored in source.file_names.items()}
    if isinstance(finetuned, TaskVector):
        vector = finetuned
    elif isinstance(finetuned, (str, Path)) and Path(finetuned).is_file() and _is_task_vector(Path(finetuned)):
        vector = load_task_vector(finetuned)
    else:
        if isinstance(finetuned, (str, Path)):
            tensors: Mapping[str, Tensor] = open_checkpoint(finetuned)
        else:
            tensors = (finetuned if isinstance(finetuned, Model) else describe_module(finetuned)).tensors
        vector = TaskVector.between(source.tensors, tensors, exclude)
        check_finite(tensors, list(vector))
    named = vector.rename({name: live[name] for name in vector if name in live})
    known = named.subset(name for name in named if name in source.file_names)
    if not any(bool(known.dense(name).any()) for name in known):
        raise CheckpointError(
            "the fine-tuned model equals its base in every tensor: there is nothing to transfer. Check the paths."
        )
    return known


def _is_task_vector(path: Path) -> bool:
    return path.suffix == ".safetensors" and open_checkpoint(path).metadata.get("format") == "tuneport-task-vector"


def _plan(
    source: Model,
    target: Model,
    vector: TaskVector,
    pairs: Sequence[LayerPair] | None,
    roles: Mapping[str, str | None] | None,
    depth_rule: DepthRule,
    exclude: Sequence[str],
) -> Plan:
    def excluded(name: str, model: Model) -> bool:
        return any(fnmatchcase(known, glob) for known in (name, model.file_names.get(name, name)) for glob in exclude)

    def included(layer: Layer, model: Model) -> Layer:
        without = layer.bias is not None and (
            excluded(layer.bias, model) or (model is source and layer.bias not in vector)
        )
        return replace(layer, bias=None) if without else layer

    ours = [
        included(layer, source)
        for layer in source.layers
        if layer.weight in vector and not excluded(layer.weight, source)
    ]
    theirs = [included(layer, target) for layer in target.layers if not excluded(layer.weight, target)]
    loose = [part for part in source.loose if part.name in vector and not excluded(part.name, source)]
    if pairs is None:
        plan = pair_layers(
            ours,
            theirs,
            source_loose=loose,
            target_loose=[part for part in target.loose if not excluded(part.name, target)],
            roles=roles,
            depth_rule=depth_rule,
            output_maps=_class_map(source, target),
        )
    else:
        check_pairs(pairs)
        unchanged = [pair.source.weight for pair in pairs if pair.source.weight not in vector]
        if unchanged or not pairs:
            found = f"the task vector has no {first_of(unchanged)}" if unchanged else "pairs is empty"
            raise PairingError(f"{found}: there is nothing to transfer. Pair layers that the fine-tune changed.")
        plan = Plan(tuple(pairs))
    left_out = [name for name in target.file_names if excluded(name, target)]
    more = [*(Kept(name, "excluded") for name in left_out), *(Kept(*item) for item in target.outside.items())]
    if pairs is not None:
        more += [Kept(name, "not in the pairs that were given") for name in target.file_names]
    return replace(plan, kept=(*plan.kept, *more))


def _class_map(source: Model, target: Model) -> dict[str, Tensor]:
    """Class logits of one label set are one space: the map only puts the classes in the target's order."""
    ours, theirs = source.classes, target.classes
    if not ours or sorted(ours) != sorted(theirs) or len(set(ours)) != len(ours):
        return {}
    matrix = torch.zeros(len(ours), len(theirs), dtype=torch.float64)
    for index, name in enumerate(ours):
        matrix[index, theirs.index(name)] = 1.0
    return {"classifier": matrix}


def _losses(
    source: Model,
    target: Model,
    heads: tuple[Head, ...] | None,
    loss: Loss | tuple[Loss, Loss] | None,
    gradients: bool,
) -> tuple[Loss, Loss]:
    if isinstance(loss, tuple):
        return loss
    if loss is not None:
        return loss, loss
    if heads is not None:
        return classification_loss(source, heads[0]), classification_loss(target, heads[1])
    for model in (source, target):
        if gradients or (model.features is None and model.logits is None):
            known = model.features is not None
            reason = "batches say nothing of the task" if known else f"{model.name} is a module tuneport does not know"
            raise TuneportError(f"{reason}: pass loss=lambda module, batch: ...")
    return forward_only(source), forward_only(target)


def _check_kind(dataset: Dataset, *models: Model) -> None:
    for model in models:
        if model.encode is None:
            raise TuneportError(f"{model.name} cannot read raw samples; pass batches and loss=, or a model folder.")
        if model.kind != dataset.kind:
            raise DataError(f"{dataset.name} holds {dataset.kind}s, but {model.name} reads {model.kind}s.")


def _not_transported(job: Job, moved: TaskVector, kept: Iterable[Kept]) -> tuple[Kept, ...]:
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


def _identity(model: ModelLike | TaskVector) -> dict[str, Any]:
    if isinstance(model, Model) and model.folder is None:
        return {"name": model.name}
    if isinstance(model, (nn.Module, TaskVector)):
        return {"name": type(model).__name__}
    path = Path(model.name if isinstance(model, Model) else model)
    stored = open_checkpoint(path)
    digests = {Path(name).name: digest for name, digest in file_digests(stored.files).items()}
    return {"name": path.absolute().name, "path": str(path), "sha256": digests}


def _data_identity(data: Any, dataset: Dataset | None, indices: Any, heads: tuple[Head, ...] | None) -> dict[str, Any]:
    identity: dict[str, Any] = {"name": dataset.name if dataset is not None else None}
    if isinstance(data, (str, Path)):
        identity["path"] = str(data)
        if Path(data).is_file():
            identity["sha256"] = next(iter(file_digests([data]).values()))
    if dataset is not None:
        identity |= {"split": dataset.split, "classes": len(dataset.classes), "indices": indices.tolist()}
    if heads is not None:
        identity["heads"] = [head.name for head in heads]
    return identity


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _compact(record: Mapping[str, Any]) -> str:
    import json

    return json.dumps(
        {key: record[key] for key in ("method", "scale", "source", "finetuned", "target") if key in record}
    )


def expected(job: Job) -> dict[str, Any]:
    """What a job would do and cost, from shapes alone: the pairing, what stays, bytes of statistics, FLOPs.

    FLOPs follow the paper's cost model: 2 P per token forward and 4 P backward for each model, and for each map
    2 M d_A d_B to accumulate, about 4 min(d)^2 max(d) to solve, and the two products of the transport.
    """
    tokens = job.samples * _tokens_per_sample(job)
    statistics_bytes, alignment = 0, 0
    for pair in job.plan.pairs:
        sides = (
            (pair.source.in_features, pair.target.in_features, pair.input_map, {"input", "input_gradient"}),
            (pair.source.out_features, pair.target.out_features, pair.output_map, {"output", "output_gradient"}),
        )
        for ours, theirs, fixed, names in sides:
            if fixed is None and names & job.method.signals:
                statistics_bytes += 8 * ours * theirs
                alignment += 2 * tokens * ours * theirs + 4 * min(ours, theirs) ** 2 * max(ours, theirs)
        alignment += 2 * pair.source.out_features * pair.target.out_features * pair.source.in_features
        alignment += 2 * pair.target.out_features * pair.source.in_features * pair.target.in_features
    weights = [
        sum(layer.in_features * layer.out_features for layer in model.layers) for model in (job.source, job.target)
    ]
    per_token = 0 if not job.method.signals else 6 if NEEDS_BACKWARD & job.method.signals else 2
    kept = _not_transported(
        job,
        TaskVector(
            {pair.target.weight: torch.empty(0) for pair in job.plan.pairs}
            | {pair.target.bias: torch.empty(0) for pair in job.plan.pairs if pair.target.bias and pair.source.bias}
        ),
        (),
    )
    return {
        "method": job.record["method"],
        "samples": job.samples,
        "layers": [
            {
                "target": pair.target.name,
                "target_shape": [pair.target.out_features, pair.target.in_features],
                "source": pair.source.name,
                "source_shape": [pair.source.out_features, pair.source.in_features],
            }
            for pair in job.plan.pairs
        ],
        "not_transported": [asdict(item) for item in kept],
        "left_behind": [asdict(item) for item in job.plan.dropped],
        "expected": {
            "statistics_bytes": statistics_bytes,
            "flops": per_token * tokens * sum(weights),
            "alignment_flops": alignment,
        },
    }


def _tokens_per_sample(job: Job) -> int:
    """Tokens of one sample in the target, found by preparing one batch (no forward pass)."""
    if not isinstance(job.batches, PairedBatches) or job.target.layout is None:
        return 1
    first = next(iter(replace(job.batches, indices=job.batches.indices[:1])))
    layout = job.target.layout(first.target[0])
    return layout.prefix + layout.grid[0] * layout.grid[1]
