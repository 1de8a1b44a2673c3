"""Task-vector arithmetic on whole models: what a fine-tune changed in its base, and a base with a change added.

A fine-tune comes as a model, an adapter or a task-vector file. A base is a model that has been opened (`change_of`,
under the names of its live parameters) or files alone (`extract` and `apply`, under the names there).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..io.checkpoint import open_checkpoint
from ..io.companions import copy_companions
from ..io.hub import local
from ..io.output import check_new_folder, new_folder
from ..io.tensors import describe, renamed
from ..io.validate import check_finite, check_unquantised
from ..models.base import Model, ModelLike
from ..models.open import describe_module, open_model, open_stored, path_of
from ..report.provenance import files_identity, package_version, versions
from ..report.record import write_record
from ..task_vectors.lora_format import Adapter, is_adapter, open_adapter
from ..task_vectors.lora_read import task_vector_of, transposed_weights
from ..task_vectors.vector import FORMAT, TaskVector, load_task_vector

Finetuned = ModelLike | Adapter | TaskVector


def opened(finetuned: ModelLike | TaskVector) -> Finetuned:
    """A fine-tune that is an adapter, opened; any other as it was given."""
    given = finetuned.module if isinstance(finetuned, Model) else finetuned
    return open_adapter(given) if not isinstance(given, TaskVector) and is_adapter(given) else finetuned


def change_of(source: Model, finetuned: Finetuned, exclude: Sequence[str] = ()) -> TaskVector:
    """What a fine-tune changes in the source, under the names of its live parameters; an adapter has been opened."""
    if isinstance(finetuned, Adapter):
        vector = _adapter_change(source, finetuned, exclude)
    else:
        vector = _stored_change(source, finetuned, exclude)
    known = vector.subset(name for name in vector if name in source.file_names)
    check_changes(known, (name for name in known if not source.matches(name, exclude)), exclude)
    return known


def every_layer(model: Model) -> TaskVector:
    """A change of every layer of a model, without values (on the meta device)."""
    shapes = {layer.weight: layer.weight_shape for layer in model.layers}
    shapes |= {layer.bias: (layer.out_features,) for layer in model.layers if layer.bias is not None and not layer.rows}
    return TaskVector({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def check_changes(vector: TaskVector, names: Iterable[str], exclude: Sequence[str], use: str = "transfer") -> None:
    """Refuse a task vector that is zero in all the tensors that are left of it."""
    if any(vector.changes(name) for name in names):
        return
    if exclude:
        raise CheckpointError(
            f"`exclude={list(exclude)}` leaves no tensor in which the fine-tuned model differs from its base: there is "
            f"nothing to {use}. Exclude less, or check the paths."
        )
    raise CheckpointError(
        f"the fine-tuned model equals its base in every tensor: there is nothing to {use}. Check the paths."
    )


def exclude_note(exclude: Sequence[str], *named: Iterable[str]) -> str | None:
    """What to say of patterns that match none of these names: a typing error, most likely."""
    names = [name for each in named for name in each] if exclude else []
    idle = [pattern for pattern in exclude if not any(fnmatchcase(name, pattern) for name in names)]
    return f"no tensor has a name like {' or '.join(map(repr, idle))} of `exclude`" if idle else None


def names_of(finetuned: Finetuned) -> Iterable[str]:
    """The names of a fine-tune's tensors in its files; an adapter has none but those of its base."""
    if isinstance(finetuned, (str, Path)):
        finetuned = local(finetuned)
    given = finetuned if isinstance(finetuned, Adapter) else opened(finetuned)
    return () if isinstance(given, Adapter) else _stored(given)


def _adapter_change(source: Model, adapter: Adapter, exclude: Sequence[str]) -> TaskVector:
    stored = {file: name for name, file in source.file_names.items()}
    base = source.stored_parameters()
    vector = task_vector_of(adapter, base, other_names=stored, transposed=transposed_weights(source.module))
    return vector.subset(name for name in vector if not source.matches(name, exclude))


def _stored_change(source: Model, finetuned: ModelLike | TaskVector, exclude: Sequence[str]) -> TaskVector:
    live = {stored: name for name, stored in source.file_names.items()}
    given = _stored(finetuned)
    if isinstance(given, TaskVector):
        vector = given
    else:
        tensors = _under_names_of(source.tensors, given)
        vector = TaskVector.between(source.tensors, tensors, exclude)
        check_finite(tensors, list(vector))
    return vector.rename({name: live[name] for name in vector if name in live})


def _stored(finetuned: ModelLike | TaskVector) -> TaskVector | Mapping[str, Tensor]:
    """A fine-tune's tensors, or what they are the change of where only that is known."""
    if isinstance(finetuned, TaskVector):
        return finetuned
    if isinstance(finetuned, (str, Path)):
        is_vector = Path(finetuned).is_file() and _is_task_vector(Path(finetuned))
        return load_task_vector(finetuned) if is_vector else open_stored(finetuned).tensors
    return (finetuned if isinstance(finetuned, Model) else describe_module(finetuned)).tensors


def _is_task_vector(path: Path) -> bool:
    return path.suffix == ".safetensors" and open_checkpoint(path).metadata.get("format") == FORMAT


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
    return renamed(finetuned, names)


_NORMS = {"gamma": "weight", "beta": "bias", "weight": "gamma", "bias": "beta"}


def _outer_name(bare: Iterable[str], inside: Iterable[str]) -> str:
    """What stands before the names of a bare model where it is part of another: `bert.`, or nothing."""
    outer = {name.partition(".")[2]: name.partition(".")[0] + "." for name in inside}
    return next((outer[name] for name in bare if name in outer), "")


def extract(base: str | Path, finetuned: str | Path, *, exclude: Sequence[str] = ()) -> TaskVector:
    """The task vector `finetuned - base` of two checkpoints, read lazily, under the names in the base's files."""
    base, finetuned = local(base), local(finetuned)
    base_tensors = open_stored(base).tensors
    if is_adapter(finetuned):
        vector = _extract_adapter(base, base_tensors, open_adapter(finetuned), exclude)
    else:
        tuned_tensors = _under_names_of(base_tensors, open_stored(finetuned).tensors)
        vector = TaskVector.between(base_tensors, tuned_tensors, exclude)
        check_finite(tuned_tensors, list(vector))
        check_finite(base_tensors, list(vector))
    check_changes(vector, vector, exclude, "extract")
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
    check_unquantised(stored.tensors, vector)
    tensors = vector.apply_to(stored.tensors, scale)
    size = sum(describe(stored.tensors, name).nbytes for name in stored.tensors)
    check_new_folder(out, overwrite, needed_bytes=size, inputs=[path_of(base)])
    with new_folder(out, overwrite=overwrite) as folder:
        copy_companions(stored.folder, folder)
        stored.write(folder, tensors)
        record = {
            "tuneport": package_version("tuneport"),
            "command": "apply",
            "out": str(out),
            "scale": scale,
            "tensors": len(vector),
            "base": files_identity(base, getattr(stored.tensors, "files", ())),
            "vector": files_identity(file, [file]) if file is not None else {"name": "TaskVector"},
            "versions": versions(),
        }
        write_record(folder / "tuneport.json", record)
    return Path(out)
