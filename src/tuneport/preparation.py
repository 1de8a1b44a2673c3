"""From what a user gives to a Job that has been checked whole: models, task vector, plan, samples, losses.

Everything that can be wrong with the input is found here, before the first forward pass, with one clear line.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .adapter import Adapter, is_adapter, open_adapter
from .alignment import Completion
from .batches import PairedBatch
from .calibration import select
from .checkpoint import file_digests, open_checkpoint
from .data import Dataset, align_labels, files_of, worded
from .errors import CheckpointError, DataError, PairingError, TuneportError, first_of
from .evaluation import features
from .families import (
    Encoded,
    Head,
    Model,
    can_outline,
    choose_head,
    describe_module,
    open_model,
    open_stored,
    outline_model,
)
from .hub import hub_name, local
from .labelling import agreement, check_labels, labelled_by
from .layers import Layer
from .lora import task_vector_of, transposed_weights
from .methods import METHODS, Method, get_method
from .objectives import Objective, batch_for, check_objective, forward_only, load_loss, objective_of
from .offload import Placement, block_paths, is_hollow, placed
from .pairing import DepthRule, Kept, LayerPair, Plan, check_pairs, count_blocks, nearest_block, pair_layers
from .report import README, companions
from .signals import NEEDS_BACKWARD, Loss
from .soundness import check_finite
from .task_vector import TaskVector, load_task_vector
from .tasks import read_data, split_reference
from .tensors import LazyTensors, describe
from .tokens import Coverage, Match, coverage, match_spans, match_tokens

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
    max_tokens: int | None = None
    memory_budget: int | None = None
    record: Mapping[str, Any] = field(default_factory=dict)
    device: torch.device | None = None  # where it is to run; None: where the models are
    placements: tuple[Placement, Placement] | None = None  # of both models while they run


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
    labels: str = "data",
    loss: str | Loss | tuple[Loss, Loss] | None = None,
    match: Match | None = None,
    pairs: Sequence[LayerPair] | None = None,
    roles: Mapping[str, str | None] | None = None,
    depth_rule: DepthRule = nearest_block,
    exclude: Sequence[str] = (),
    completion: Completion = "svd",
    max_tokens: int | None = None,
    memory_budget: int | None = None,
    batch_size: int = 32,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    extra_signals: Iterable[str] = (),
    scored: bool = False,
) -> Job:
    """Open everything, pair the layers and draw the samples: a Job in which nothing is left to go wrong.

    `samples` (100 unless given) or `shots` per class are drawn by `sampler` and `seed` from the training
    split; `head` names the zero-shot head; `labels` says whose labels they have, those of the "data" or, without
    looking at those, of the fine-tuned "source"; `loss` is the name of an objective, MODULE:FUNCTION, an own
    `loss(module, batch)`, or one for each model, in place of the one that data and models suggest; `pairs`,
    `roles` and `depth_rule` override the pairing; `exclude` holds name patterns of tensors to leave alone;
    `max_tokens` caps the tokens of all samples together that the maps are made from, and `memory_budget` the bytes
    that models, statistics and result may take on the `device`: models that do not fit stay in RAM or in their files,
    and live modules run on the `device` too. `dtype` is that in which models run. `extra_signals` prepares for
    methods that measure more, `scored` for a scale that is chosen on labelled samples.
    """
    method, name = (get_method(method), method) if isinstance(method, str) else (method, type(method).__name__)
    name = next((known for known, registered in METHODS.items() if registered == method), name)
    loss_name = loss if isinstance(loss, str) else None
    wanted = None if loss_name is None or ":" in loss_name else check_objective(loss_name)
    if isinstance(loss, str):
        loss = None if wanted else load_loss(loss)
    check_labels(labels, sampler, shots)
    where = pick_device(device)
    if max_tokens is not None and max_tokens < 1:
        raise TuneportError(f"max_tokens must be at least 1, got {max_tokens}. Leave it out to use every token.")
    if memory_budget is not None and memory_budget < 1:
        raise TuneportError(f"memory_budget must be a number of bytes, got {memory_budget}.")
    if isinstance(finetuned, (str, Path)):
        finetuned = local(finetuned)
    named = data  # TASK:PATH, of which the rest of the house sees the path
    if isinstance(data, (str, Path)):
        task, data = split_reference(data)
        named = data if task is None else named
    opening = _Opening(where, pick_dtype(dtype), memory_budget, trust_remote_code)
    ours, theirs = opening.both(source, target)
    adapter = _open_adapter(finetuned)
    vector = _adapter_vector(ours, adapter, exclude) if adapter else _task_vector(ours, finetuned, exclude)
    signals = method.signals | frozenset(extra_signals)
    if isinstance(data, (str, Path)) and not Path(data).exists():
        raise DataError(f"no data at {data}: no such file or folder.")
    gradients = bool(NEEDS_BACKWARD & signals) or scored
    dataset, heads, indices, objective = None, None, None, None
    if (signals or scored) and isinstance(named, (str, Path, Dataset)):
        dataset = named if isinstance(named, Dataset) else read_data(named, "train", labelled=False)
        _check_kind(dataset, ours, theirs)
        objective = objective_of(dataset, (ours, theirs), wanted)
        if loss is None and gradients and objective.name == "classification":
            if labels == "data" and not isinstance(named, Dataset):
                dataset = read_data(named, "train")  # says what is missing where there are no labels
            about = (dataset.name, dataset.classes, dataset.prompts, dataset.label_texts)
            heads = tuple(_head(model, head, about, where) for model in (ours, theirs))
            known = dataset
            if labels == "source":  # its labels are its head's classes
                known = Dataset((), np.zeros(0, dtype=np.int64), heads[0].classes, name=f"the head of {ours.name}")
            for one in heads:
                align_labels(known, one.classes)
    if labels == "source" and heads is None and gradients:
        raise DataError(
            "--labels source labels samples of classes: give data, not batches, and leave --loss out or classification."
        )
    plan = plan_of(ours, theirs, vector, pairs, roles, depth_rule, exclude)
    method.check(plan)
    batches: Iterable[Any] = ()
    count = 0
    losses: tuple[Loss, Loss] | tuple[None, None] = (None, None)
    if signals or scored:
        if data is None:
            raise DataError(f"method {name} needs calibration data: pass --data, or batches with a loss in Python.")
        losses = _losses(ours, theirs, objective, heads, loss, gradients)
        if dataset is not None:
            by_source = labels == "source" and heads is not None
            indices = select(
                replace(dataset, labels=None) if by_source else dataset,
                samples=samples,
                shots=shots,
                sampler=sampler,
                seed=seed,
                features=lambda chosen: _features(theirs, chosen, where),
            )
            count = len(indices)
            assert objective is not None
            batches = PairedBatches(ours, theirs, dataset, indices, heads, batch_size, objective)
            if by_source:
                whole = vector if not exclude else _whole_vector(ours, finetuned, adapter)
                batches = _labelled_by_source(batches, whole)
        else:
            assert not isinstance(data, (str, Path, Dataset))
            batches = data
    identity = data_identity(data, dataset, indices, heads)
    if dataset is not None and isinstance(batches, PairedBatches) and batches.dataset is not dataset:
        share = agreement(batches.dataset, dataset.subset(identity["indices"]))
        identity["labels"] = {"by": labels, "agreement": None if share is None else round(share, 4)}
    record = {
        "tuneport": package_version("tuneport"),
        "command": "transfer",
        "method": name,
        "options": {
            "samples": count or samples,
            "shots": shots,
            "sampler": sampler,
            "seed": seed,
            "head": head,
            "labels": "source" if "labels" in identity else "data",
            "loss": loss_name or (objective.name if objective is not None and gradients and loss is None else None),
            "completion": completion,
            "max_tokens": max_tokens,
            "memory_budget": memory_budget,
            "batch_size": batch_size,
            "exclude": list(exclude),
            "roles": dict(roles or {}),
            "device": str(where),
            "dtype": dtype,
        },
        "source": identity_of(ours),
        "finetuned": _adapter_identity(adapter) if adapter else identity_of(finetuned),
        "target": identity_of(theirs),
        "data": identity,
        "versions": versions(),
        "blocks": {"source": dict(plan.source_blocks), "target": dict(plan.target_blocks)},
    }
    if isinstance(batches, PairedBatches) and (found := batches.coverage()) is not None:
        record["tokens"] = {**asdict(found), "share": round(found.share, 4)}
    if adapter and (note := _base_note(adapter, ours)):
        record["notes"] = [note]
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
        max_tokens,
        memory_budget,
        record,
        where if memory_budget is not None else None,
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
    objective: Objective

    def __iter__(self) -> Iterator[PairedBatch]:
        for ours, theirs in self._encoded():
            yield self._paired(ours, theirs)

    def _paired(self, ours: Encoded, theirs: Encoded) -> PairedBatch:
        batches = [batch_for(model, side) for model, side in zip(self._sides, (ours, theirs), strict=True)]
        if ours.spans and theirs.spans:
            match = match_spans(ours.spans, theirs.spans)
        else:
            layouts = [
                model.layout(batch) if model.layout is not None else None
                for model, (batch, _) in zip(self._sides, batches, strict=True)
            ]
            match = match_tokens(*layouts)
        rows = len(next(iter(theirs.inputs.values())))
        size = len(theirs.labels) if theirs.labels is not None else rows
        part = None
        if rows == size and self.objective.by_sample:
            part = partial(self._part, ours, theirs)
        return PairedBatch(batches[0], batches[1], size=size, match=match, rows=rows, part=part)

    def _part(self, ours: Encoded, theirs: Encoded, start: int, stop: int) -> PairedBatch:
        return self._paired(ours.part(start, stop), theirs.part(start, stop))

    def coverage(self) -> Coverage | None:
        """How well the tokens of both models meet on all samples; None where they are not texts."""
        if self.source.reader is None or self.target.reader is None:
            return None
        return sum((coverage(ours.spans, theirs.spans) for ours, theirs in self._encoded()), Coverage())

    @property
    def _sides(self) -> tuple[Model, Model]:
        return self.source, self.target

    def _encoded(self) -> Iterator[tuple[Encoded, Encoded]]:
        chosen = [align_labels(self.dataset, self.heads[i].classes) if self.heads else self.dataset for i in range(2)]
        for start in range(0, len(self.indices), self.size):
            rows = self.indices[start : start + self.size]
            ours, theirs = (
                self.objective.encode(model, worded(data.subset(rows)) if model.prompted else data.subset(rows))
                for model, data in zip(self._sides, chosen, strict=True)
            )
            yield ours, theirs


def _whole_vector(source: Model, finetuned: ModelLike | TaskVector, adapter: Adapter | None) -> TaskVector:
    """All that the fine-tune changes, whatever a transfer is to leave alone."""
    try:
        return _adapter_vector(source, adapter, ()) if adapter else _task_vector(source, finetuned, ())
    except CheckpointError as error:
        raise CheckpointError(
            f"the fine-tuned source cannot label samples, for it does not fit its base: {error}"
        ) from error


def _labelled_by_source(batches: PairedBatches, vector: TaskVector) -> PairedBatches:
    """The same samples, labelled by the fine-tuned source."""
    assert batches.heads is not None
    chosen = batches.dataset.subset(batches.indices)
    labelled = labelled_by(batches.source, vector, batches.heads[0], chosen, batch_size=batches.size)
    return replace(batches, dataset=labelled, indices=np.arange(len(labelled)))


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


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_dtype(name: str) -> torch.dtype:
    """The dtype of that name, in which models run."""
    if name not in DTYPES:
        raise TuneportError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}.")
    return DTYPES[name]


@dataclass(frozen=True)
class _Opening:
    """How models are opened: on the device, in RAM for a smaller device, or as outlines where RAM is smaller too."""

    device: torch.device
    dtype: torch.dtype
    budget: int | None
    trust_remote_code: bool

    def both(self, source: ModelLike, target: ModelLike) -> tuple[Model, Model]:
        home, outlines = self.device, False
        if self.budget is not None:
            size = sum(self._size(model) for model in (source, target))
            home = torch.device("cpu") if size > self.budget // 4 else self.device
            outlines = size > (self.budget // 4 if self.device.type == "cpu" else free_memory())
        ours, theirs = (self._open(model, home, outlines) for model in (source, target))
        return ours, theirs

    def _size(self, model: ModelLike) -> int:
        """The bytes that a model in files would take."""
        if isinstance(model, (Model, nn.Module)):
            return 0
        stored = open_stored(model).tensors
        return sum(math.prod(describe(stored, name).shape) for name in stored) * self.dtype.itemsize

    def _open(self, model: ModelLike, home: torch.device, outlines: bool) -> Model:
        if isinstance(model, Model):
            return model
        if isinstance(model, nn.Module):
            if any(".lora_A." in name for name, _ in model.named_parameters()):
                raise TuneportError(
                    f"{type(model).__name__} still carries an adapter. Pass the bare base: a copy made before "
                    "get_peft_model, or peft_model.unload()."
                )
            return describe_module(model)
        if outlines and not self.trust_remote_code and can_outline(local(model)):
            return outline_model(model, dtype=self.dtype)
        return open_model(model, device=home, dtype=self.dtype, trust_remote_code=self.trust_remote_code)


def free_memory() -> float:
    """Bytes of RAM that are free for use; infinite where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return math.inf


def _head(model: Model, wanted: str | None, about: tuple[Any, ...], device: torch.device) -> Head:
    with placed(model.module, _at_hand(model, device)):
        return choose_head(model, wanted, *about)


def _features(model: Model, dataset: Dataset, device: torch.device) -> Tensor:
    with placed(model.module, _at_hand(model, device)):
        return features(model, dataset)


def _at_hand(model: Model, device: torch.device) -> Placement | None:
    """A way to run a model that holds no numbers itself, block by block."""
    if not is_hollow(model.module):
        return None
    blocks = block_paths(model.layers)
    return Placement(device, blocks, frozenset(blocks), model.parameters())


def _task_vector(source: Model, finetuned: ModelLike | TaskVector, exclude: Sequence[str]) -> TaskVector:
    """The source's task vector under the names of its live parameters."""
    live = {stored: name for name, stored in source.file_names.items()}
    if isinstance(finetuned, TaskVector):
        vector = finetuned
    elif isinstance(finetuned, (str, Path)) and Path(finetuned).is_file() and _is_task_vector(Path(finetuned)):
        vector = load_task_vector(finetuned)
    else:
        if isinstance(finetuned, (str, Path)):
            tensors = open_stored(finetuned).tensors
        else:
            tensors = (finetuned if isinstance(finetuned, Model) else describe_module(finetuned)).tensors
        tensors = _under_names_of(source.tensors, tensors)
        vector = TaskVector.between(source.tensors, tensors, exclude)
        check_finite(tensors, list(vector))
    named = vector.rename({name: live[name] for name in vector if name in live})
    return _known(source, named)


def _under_names_of(base: Mapping[str, Tensor], finetuned: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The fine-tuned tensors as the base calls them.

    One of the two may stand inside a class with a head (`bert.` before names), or call the numbers of its norms
    gamma and beta, as old files do.
    """
    prefix, removed = "", ""
    if not any(name in finetuned for name in base):
        removed = _outer_name(base, finetuned)
        prefix = "" if removed else _outer_name(finetuned, base)
    names = {}
    for name in finetuned:
        called = prefix + name.removeprefix(removed)
        stem, _, last = called.rpartition(".")
        other = f"{stem}.{_NORMS.get(last)}"
        names[other if called not in base and other in base else called] = name
    if all(called == name for called, name in names.items()):
        return finetuned
    return LazyTensors(names, lambda n: finetuned[names[n]], lambda n: describe(finetuned, names[n]))


_NORMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}


def _outer_name(bare: Iterable[str], inside: Iterable[str]) -> str:
    """What stands before the names of a bare model where it is part of another: `bert.`, or nothing."""
    outer = {name.partition(".")[2]: name.partition(".")[0] + "." for name in inside}
    return next((outer[name] for name in bare if name in outer), "")


def _open_adapter(finetuned: ModelLike | TaskVector) -> Adapter | None:
    given = finetuned.module if isinstance(finetuned, Model) else finetuned
    return open_adapter(given) if not isinstance(given, TaskVector) and is_adapter(given) else None


def _adapter_vector(source: Model, adapter: Adapter, exclude: Sequence[str]) -> TaskVector:
    """What an adapter changes in the source, under the names of its live parameters."""
    names = source.file_names
    base = LazyTensors(names, lambda n: source.tensors[names[n]], lambda n: describe(source.tensors, names[n]))
    stored = {file: name for name, file in names.items()}
    vector = task_vector_of(adapter, base, other_names=stored, transposed=transposed_weights(source.module))
    return _known(source, vector.subset(name for name in vector if not _excluded(name, source, exclude)))


def _known(source: Model, vector: TaskVector) -> TaskVector:
    """The entries for parameters of the source; at least one of them is not zero."""
    known = vector.subset(name for name in vector if name in source.file_names)
    if not any(known.changes(name) for name in known):
        raise CheckpointError(
            "the fine-tuned model equals its base in every tensor: there is nothing to transfer. Check the paths."
        )
    return known


def _excluded(name: str, model: Model, exclude: Sequence[str]) -> bool:
    return any(fnmatchcase(known, glob) for known in (name, model.file_names.get(name, name)) for glob in exclude)


def _is_task_vector(path: Path) -> bool:
    return path.suffix == ".safetensors" and open_checkpoint(path).metadata.get("format") == "tuneport-task-vector"


def plan_of(
    source: Model,
    target: Model,
    vector: TaskVector,
    pairs: Sequence[LayerPair] | None,
    roles: Mapping[str, str | None] | None,
    depth_rule: DepthRule,
    exclude: Sequence[str],
) -> Plan:
    """Pair the layers that a task vector changes, and say of every other tensor of the target why it stays."""

    def included(layer: Layer, model: Model) -> Layer:
        without = layer.bias is not None and (
            _excluded(layer.bias, model, exclude) or (model is source and layer.bias not in vector)
        )
        return replace(layer, bias=None) if without else layer

    ours = [
        included(layer, source)
        for layer in source.layers
        if layer.weight in vector and not _excluded(layer.weight, source, exclude)
    ]
    theirs = [included(layer, target) for layer in target.layers if not _excluded(layer.weight, target, exclude)]
    loose = [part for part in source.loose if part.name in vector and not _excluded(part.name, source, exclude)]
    if pairs is None:
        plan = pair_layers(
            ours,
            theirs,
            source_loose=loose,
            target_loose=[part for part in target.loose if not _excluded(part.name, target, exclude)],
            roles=roles,
            depth_rule=depth_rule,
            output_maps=_class_map(source, target),
            source_blocks=count_blocks(source.layers),
            target_blocks=count_blocks(target.layers),
        )
    else:
        check_pairs(pairs)
        unchanged = [pair.source.weight for pair in pairs if pair.source.weight not in vector]
        if unchanged or not pairs:
            found = f"the task vector has no {first_of(unchanged)}" if unchanged else "pairs is empty"
            raise PairingError(f"{found}: there is nothing to transfer. Pair layers that the fine-tune changed.")
        plan = Plan(tuple(pairs))
    left_out = [name for name in target.file_names if _excluded(name, target, exclude)]
    more = [*(Kept(name, "excluded") for name in left_out), *(Kept(*item) for item in target.outside.items())]
    if pairs is not None:
        more += [Kept(name, "not in the pairs that were given") for name in target.file_names]
    return replace(plan, kept=(*_unchanged(plan, source, vector), *more))


def _unchanged(plan: Plan, source: Model, vector: TaskVector) -> Iterator[Kept]:
    """What is kept, where the source has a partner after all and only the fine-tune left it as it was."""
    biased = {layer.name for layer in source.layers if layer.bias is not None and layer.bias not in vector}
    still = {pair.target.bias for pair in plan.pairs if pair.source.bias is None and pair.source.name in biased}
    roles = {f"the source has no layer with the role {layer.role}": layer.role for layer in source.layers}
    for item in plan.kept:
        if item.tensor in still:
            yield Kept(item.tensor, "the fine-tune did not change this bias")
        elif item.reason in roles:
            yield Kept(item.tensor, f"the fine-tune changed no layer with the role {roles[item.reason]}")
        else:
            yield item


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
    objective: Objective | None,
    heads: tuple[Head, ...] | None,
    loss: Loss | tuple[Loss, Loss] | None,
    gradients: bool,
) -> tuple[Loss, Loss]:
    if isinstance(loss, tuple):
        return loss
    if loss is not None:
        return loss, loss
    if objective is not None and (heads is not None or objective.name != "classification"):
        ours, theirs = heads or (None, None)
        return objective.loss(source, ours), objective.loss(target, theirs)
    for model in (source, target):
        if gradients or (model.features is None and model.logits is None):
            known = model.features is not None
            reason = "batches say nothing of the task" if known else f"{model.name} is a module tuneport does not know"
            raise TuneportError(f"{reason}: pass loss=lambda module, batch: ...")
    return forward_only(source), forward_only(target)


def _check_kind(dataset: Dataset, *models: Model) -> None:
    for model in models:
        if model.encode is None:
            raise TuneportError(model.unreadable)
        if model.kind != dataset.kind:
            raise DataError(f"{dataset.name} holds {dataset.kind}s, but {model.name} reads {model.kind}s.")


def identity_of(model: ModelLike | TaskVector) -> dict[str, Any]:
    """What a model is called, where it is, and the SHA-256 of each of its weight files."""
    if isinstance(model, (nn.Module, TaskVector)):
        return {"name": type(model).__name__}
    if isinstance(model, Model):
        reference, tensors = model.name, model.tensors
    else:
        reference, tensors = str(model), open_stored(model).tensors
    files: Iterable[Path] = getattr(tensors, "files", ())  # those of a live module or of a name have none
    if not files:
        return {"name": reference}
    path = Path(reference)
    kind, mark, place = reference.rpartition(":")
    if mark and not path.exists() and Path(place).exists():  # NAME:FILE
        digests = {Path(name).name: digest for name, digest in file_digests(files).items()}
        return {"name": f"{kind}:{Path(place).name}", "path": reference, "sha256": digests}
    path = local(path)
    beside = companions(path, README) if path.is_dir() else []
    home = path if path.is_dir() else path.parent
    digests = file_digests([*files, *beside])
    known = hub_name(path)
    return {
        "name": known[0] if known else path.absolute().name,
        "path": str(path),
        **({"revision": known[1]} if known else {}),
        "license": _licence(path / README),
        "sha256": {str(Path(file).relative_to(home)): digest for file, digest in digests.items()},
    }


def _adapter_identity(adapter: Adapter) -> dict[str, Any]:
    identity: dict[str, Any] = {"name": Path(adapter.name).absolute().name if adapter.files else adapter.name}
    if adapter.files:
        digests = file_digests(adapter.files)
        identity |= {"path": adapter.name, "sha256": {Path(name).name: digest for name, digest in digests.items()}}
    task = adapter.config.get("task_type")
    return {
        **identity,
        "adapter": {
            "rank": adapter.config.get("r"),
            "base_model": adapter.config.get("base_model_name_or_path"),
            "task_type": getattr(task, "value", task),
        },
    }


def _base_note(adapter: Adapter, source: Model) -> str | None:
    """Names of bases change with the machine, so that another name is worth a word and no more."""
    stated = adapter.config.get("base_model_name_or_path")
    if not stated or source.folder is None or Path(stated).name == source.folder.absolute().name:
        return None
    return f"the adapter names {stated} as its base; it is read as one of {source.name}"


def _licence(card: Path) -> str | None:
    """The licence that a model card states in its front matter; None where there is none or it is no plain word."""
    if not card.is_file():
        return None
    with card.open(encoding="utf-8", errors="replace") as file:
        text = file.read(2**16)
    front = re.match(r"---\r?\n(.*?)\n---", text, re.DOTALL)
    if front is None:
        return None
    found = re.search(r"^license:[ \t]*[\"']?([A-Za-z0-9][\w.+-]{0,63})[\"']?[ \t]*$", front[1], re.MULTILINE)
    return found[1] if found else None


def data_identity(data: Any, dataset: Dataset | None, indices: Any, heads: tuple[Head, ...] | None) -> dict[str, Any]:
    """What the data are called, where they are, and the SHA-256 of the files that were used."""
    identity: dict[str, Any] = {"name": dataset.name if dataset is not None else None}
    if isinstance(data, (str, Path)):
        path = Path(data)
        identity["path"] = str(data)
        if known := hub_name(path):
            identity |= {"name": known[0], "revision": known[1]}
        files = files_of(dataset.subset(indices)) if dataset is not None and indices is not None else []
        if path.is_file():
            files = [path, *files]
        elif not files:
            files = sorted(file for file in path.rglob("*") if file.is_file())
        digests = file_digests(dict.fromkeys(files))
        home = path.parent if path.is_file() else path
        identity["sha256"] = {os.path.relpath(file, home): digest for file, digest in digests.items()}
    if dataset is not None:
        identity |= {"split": dataset.split, "classes": len(dataset.classes), "indices": indices.tolist()}
    if heads is not None:
        identity["heads"] = [head.name for head in heads]
    return identity


def versions() -> dict[str, str]:
    """Of the packages that a result depends on, and of Python."""
    packages = ("torch", "transformers", "safetensors", "numpy")
    return {**{package: package_version(package) for package in packages}, "python": platform.python_version()}


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
