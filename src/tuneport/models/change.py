"""Task-vector arithmetic on whole models: the change that a fine-tune makes in its base, and a base plus a change.

A fine-tune is a model, an adapter or a task vector. `change_of` takes an opened base and uses the names of its live
parameters; `extract` and `apply` read only files and use the names in them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError, TuneportError
from ..io.checkpoint import open_checkpoint, read_record
from ..io.fingerprint import same_weights
from ..io.places import check_no_parts, local
from ..io.tensors import check_finite, renamed
from ..task_vectors.lora_format import Adapter, is_adapter, open_adapter
from ..task_vectors.lora_read import as_lora, task_vector_of, transposed_weights
from ..task_vectors.merge import merge
from ..task_vectors.vector import FORMAT, TaskVector, load_task_vector
from ..types import Sides
from .base import Model, ModelLike
from .open import describe_module, open_stored
from .vocabulary import AddedTokens, added_rows, cut_tables

Finetuned = ModelLike | Adapter | TaskVector


@dataclass(frozen=True, eq=False)
class Change:
    """What a fine-tune changed in the source, by live names.

    Args:
        vector: the change that is moved; a head that is fitted is no part of it.
        parts: the fine-tunes whose changes are added, as they were opened.
        whole: the change that makes the source its fine-tune, also in the tensors of `exclude`, if the fine-tune
            labels samples or its head is fitted.
        added: tokens that the fine-tune added.
        fits_head: whether the target's head is fitted to the scores of the fine-tune.
    """

    vector: TaskVector
    parts: tuple[Finetuned, ...] = ()
    whole: TaskVector | None = None
    added: AddedTokens | None = None
    fits_head: bool = False

    @property
    def teacher(self) -> TaskVector:
        """The change that makes the source the teacher of a head or of labels."""
        return self.vector if self.whole is None else self.whole

    @property
    def task_type(self) -> str | None:
        """peft's name of the task, if the fine-tune is an adapter."""
        return self.parts[0].task_type if self.parts and isinstance(self.parts[0], Adapter) else None


def opened(finetuned: Finetuned) -> Finetuned:
    """Fetch a fine-tune from the hub if it is there, and open it if it is an adapter."""
    if isinstance(finetuned, (Adapter, TaskVector)):
        return finetuned
    finetuned = local(finetuned) if isinstance(finetuned, (str, Path)) else finetuned
    given = finetuned.module if isinstance(finetuned, Model) else finetuned
    if is_adapter(given):
        return open_adapter(given)
    if isinstance(given, Path):
        check_no_parts(given)
    return finetuned


def change_of(source: Model, finetuned: Finetuned, exclude: Sequence[str] = ()) -> TaskVector:
    """The change that an `opened` fine-tune makes in the source, under the names of its live parameters."""
    if isinstance(finetuned, Adapter):
        stored = {file: name for name, file in source.weights.file_names.items()}
        base, turned = source.stored_parameters(), transposed_weights(source.module)
        whole = replace(finetuned, tensors=cut_tables(source, finetuned, finetuned.tensors))
        vector = task_vector_of(as_lora(whole, source.module), base, other_names=stored, transposed=turned)
        vector = vector.subset(name for name in vector if not source.matches(name, exclude))
    else:
        vector = _stored_change(source, finetuned, exclude)
    return vector.subset(name for name in vector if name in source.weights.file_names)


def added_by(models: Sides[Model], finetuned: Finetuned, exclude: Sequence[str] = ()) -> AddedTokens | None:
    """The rows of the tokens that an `opened` fine-tune added to the vocabulary of the source, for the target."""
    if not isinstance(finetuned, (str, Path, Adapter)):
        return None
    tensors = finetuned.tensors if isinstance(finetuned, Adapter) else _stored(finetuned)
    return None if isinstance(tensors, TaskVector) else added_rows(models, finetuned, tensors, exclude)


def sum_of_changes(source: Model, parts: Sequence[Finetuned], exclude: Sequence[str] = ()) -> TaskVector:
    """What several opened fine-tunes change together, under the names in the files of the source."""
    total = merge([change_of(source, part, exclude) for part in parts])
    return total.rename({name: source.weights.file_names[name] for name in total})


def every_layer(model: Model) -> TaskVector:
    """A change of every layer of a model, without values (on the meta device)."""
    layers = model.architecture.layers
    shapes = {layer.weight: layer.weight_shape for layer in layers}
    shapes |= {layer.bias: (layer.out_features,) for layer in layers if layer.bias is not None and not layer.rows}
    return TaskVector({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def stated_base(item: Path) -> str | None:
    """The model that an adapter or a task vector says that it changes."""
    if is_adapter(item):
        return open_adapter(item).config.get("base_model_name_or_path")
    metadata = open_checkpoint(item).metadata if is_task_vector(item) else {}
    try:
        return str(json.loads(metadata["record"])["target"]["path"])
    except (KeyError, ValueError, TypeError, RecursionError):
        return metadata.get("base")


def check_changes(vector: TaskVector, names: Iterable[str], exclude: Sequence[str], use: str = "transfer") -> None:
    """Refuse a task vector that is zero in all these tensors, which `exclude` leaves."""
    if any(vector.changes(name) for name in names):
        return
    found, advice = "the fine-tuned model equals its base in every tensor", "Check the paths"
    if exclude:
        found = f"`exclude={list(exclude)}` leaves no tensor in which the fine-tuned model differs from its base"
        advice = "Exclude less, or check the paths"
    raise CheckpointError(f"{found}: there is nothing to {use}. {advice}.")


def exclude_note(exclude: Sequence[str], *named: Iterable[str]) -> str | None:
    """A note on patterns that match none of these names, most likely by a typing error."""
    names = [name for each in named for name in each]
    idle = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in names)]
    return f"no tensor has a name like {' or '.join(map(repr, idle))} of `exclude`" if idle else None


def names_of(finetuned: Finetuned) -> Iterable[str]:
    """The names of a fine-tune's tensors in its files; an adapter has no names other than those of its base."""
    given = opened(finetuned)
    return () if isinstance(given, Adapter) else _stored(given)


def _stored_change(source: Model, finetuned: ModelLike | TaskVector, exclude: Sequence[str]) -> TaskVector:
    live = {stored: name for name, stored in source.weights.file_names.items()}
    given = _stored(finetuned)
    if isinstance(given, TaskVector):
        vector = given
    else:
        vector = between(source.weights.tensors, cut_tables(source, finetuned, given), exclude)
    return vector.rename({name: live[name] for name in vector if name in live})


def _stored(finetuned: ModelLike | TaskVector) -> TaskVector | Mapping[str, Tensor]:
    """The tensors of a fine-tune, or its task vector where only that is known."""
    if isinstance(finetuned, TaskVector):
        return finetuned
    if isinstance(finetuned, (str, Path)):
        vector = is_task_vector(Path(finetuned))
        return load_task_vector(finetuned) if vector else open_stored(finetuned).tensors
    return (finetuned if isinstance(finetuned, Model) else describe_module(finetuned)).weights.tensors


def is_task_vector(path: Path) -> bool:
    is_file = path.is_file() and path.suffix == ".safetensors"
    return is_file and open_checkpoint(path).metadata.get("format") == FORMAT


def between(base: Mapping[str, Tensor], finetuned: Mapping[str, Tensor], exclude: Sequence[str]) -> TaskVector:
    """The task vector of two models under the names of the base."""
    tensors = _under_names_of(base, finetuned)
    vector = TaskVector.between(base, tensors, exclude)
    check_finite(tensors, list(vector))
    return vector


def _under_names_of(base: Mapping[str, Tensor], finetuned: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The fine-tuned tensors under the names of the base.

    One of the two may be part of a class with a head (`bert.` before names), or name the parameters of its norms gamma
    and beta, as old files do.
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
    return renamed(finetuned, names)


_NORMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}


def _outer_name(bare: Iterable[str], inside: Iterable[str]) -> str:
    """The prefix of the names of a bare model inside another, such as `bert.`, or nothing."""
    outer = {name.partition(".")[2]: name.partition(".")[0] + "." for name in inside}
    return next((outer[name] for name in bare if name in outer), "")


def stated_fingerprint(finetuned: Finetuned) -> str:
    """The fingerprint of its base that a task-vector file, or an adapter by tuneport, has; else nothing."""
    try:
        if isinstance(finetuned, Adapter):
            record = read_record(finetuned.files[0].parent) if finetuned.files else {}
            return str(record.get("base_fingerprint", ""))
        if isinstance(finetuned, (str, Path)) and is_task_vector(Path(finetuned)):
            return open_checkpoint(Path(finetuned)).metadata.get("base_fingerprint", "")
    except (TuneportError, AttributeError):
        return ""
    return ""


def check_base(source: Model, finetuned: Finetuned) -> None:
    """Refuse a task-vector file or an adapter whose fingerprint is that of another base."""
    stated = stated_fingerprint(finetuned)
    if stated and same_weights(stated, source.weights.tensors) is False:
        name = finetuned.name if isinstance(finetuned, Adapter) else finetuned
        raise CheckpointError(
            f"{name} was made for other weights than those of {source.name}: give its own base as `source`, "
            "or pass `accept_unlikely=True`."
        )


def is_whole(source: Model, change: Change, exclude: Sequence[str]) -> bool:
    """Whether the fine-tuned source is known whole, and can run."""
    known = set(change.vector) <= {name for name, _ in source.module.named_parameters()}
    return known and not source.weights.offloaded and not exclude
