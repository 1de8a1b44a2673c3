"""Task-vector arithmetic on whole models in files: `extract`, `apply` and `merge`. Names are those in the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from ..config import ApplyConfig, ExtractConfig, MergeConfig
from ..errors import CheckpointError, first_of
from ..io.fingerprint import same_weights, weights_fingerprint
from ..io.output import check_new
from ..io.places import check_no_parts, local, path_of
from ..io.tensors import check_finite, describe
from ..measure.fitted_heads import is_head
from ..models.change import between, check_changes, exclude_note, names_of, one_table
from ..models.open import open_model, open_stored
from ..outputs import ModelOutput, output_of
from ..report.provenance import files_identity, identity_of, package_version, versions
from ..task_vectors.lora_format import Adapter
from ..task_vectors.lora_read import as_lora, task_vector_of, transposed_weights
from ..task_vectors.stored import StoredChange, stored_change, stored_task_vector
from ..task_vectors.vector import TaskVector, load_task_vector, save_task_vector
from ..task_vectors.vector import merge as merge_vectors
from ..types import Events
from .inputs import GO_ON, LEAST_LEFT, relation


def extract(base: str | Path, finetuned: str | Path, out: str | Path | None = None, **options: Any) -> TaskVector:
    """The task vector `finetuned - base` of two checkpoints, read lazily, under the names in the base's files.

    Args:
        base: the base model.
        finetuned: the fine-tuned model, or an adapter.
        out: a file to write the task vector to.
        options: the fields of `ExtractConfig`.
    """
    config = ExtractConfig.of(**options)
    if out is not None:
        extract_to_file(base, finetuned, out, config)
        return load_task_vector(out)
    return _extract(base, finetuned, config.exclude)


def extract_to_file(
    base: str | Path, finetuned: str | Path, out: str | Path, config: ExtractConfig, events: Events | None = None
) -> dict[str, Any]:
    """Write the task vector of two checkpoints; return the number of its tensors and its norm."""
    check_new(out, config.overwrite, suffix=".safetensors", inputs=[path_of(base), path_of(finetuned)])
    vector = _extract(base, finetuned, config.exclude)
    words = exclude_note(config.exclude, *map(names_of, (base, finetuned))) if config.exclude else None
    if words and events is not None:
        events.note(words)
    about = {"base": str(base), "finetuned": str(finetuned), "base_fingerprint": fingerprint_of(base)}
    norm = save_task_vector(out, vector, about, overwrite=config.overwrite)
    return {"out": str(out), "tensors": len(vector), "norm": norm}


def _extract(base: str | Path, finetuned: str | Path, exclude: Sequence[str]) -> TaskVector:
    finetuned = local(finetuned)
    stored = stored_change(finetuned)
    if stored is not None and isinstance(stored.change, TaskVector):
        raise CheckpointError(f"{finetuned} is a change of a model already: there is nothing to extract.")
    return _difference(finetuned, stored, base, exclude)


def _difference(
    finetuned: Path, stored: StoredChange | None, base: str | Path | None, exclude: Sequence[str]
) -> TaskVector:
    """What a fine-tune changes in a base, by the names in its files; a stored task vector needs no base."""
    change = None if stored is None else stored.change
    if isinstance(change, TaskVector):
        return _without(change, exclude)
    base = local(str(base))
    tensors = open_stored(base).tensors
    if change is not None:
        vector = _without(_extract_adapter(base, tensors, change, exclude), exclude)
    else:
        check_no_parts(finetuned)
        vector = between(tensors, open_stored(finetuned).tensors, exclude)
        check_finite(tensors, list(vector))
    check_changes(vector, vector, exclude, "extract")
    return vector


def _extract_adapter(
    base: str | Path, stored: Mapping[str, Tensor], adapter: Adapter, exclude: Sequence[str]
) -> TaskVector:
    """The change of an adapter under the names in the base's files.

    The base is opened only if they differ, or if the adapter may change one of two tables that the base ties.
    """
    factors = all(".lora_A" in key or ".lora_B" in key for key in adapter.tensors)
    try:
        vector = task_vector_of(adapter, stored)
        if factors or not Path(base).is_dir():
            return vector
    except CheckpointError:
        if not Path(base).is_dir():
            raise
    model = open_model(base)
    adapter, names = one_table(model, adapter, exclude), model.weights.file_names
    live = {name: file for name, file in names.items() if name not in stored}
    turned = {names[name] for name in transposed_weights(model.module)}
    return task_vector_of(as_lora(adapter, model.module), stored, other_names=live, transposed=turned)


def _without(vector: TaskVector, exclude: Sequence[str]) -> TaskVector:
    return vector.subset(name for name in vector if not any(fnmatchcase(name, glob) for glob in exclude))


def apply(
    vector: TaskVector | str | Path, base: str | Path, out: str | Path, *, events: Events | None = None, **options: Any
) -> Path:
    """Write `base + scale * vector` as a folder like that of the base; the vector may be a file.

    Args:
        vector: a task vector, or a file.
        base: the model that it belongs to.
        out: the folder to write.
        events: listens to the run.
        options: the fields of `ApplyConfig`.
    """
    config = ApplyConfig.of(**options)
    file = None if isinstance(vector, TaskVector) else Path(vector)
    check_new(out, config.overwrite, inputs=[*([] if file is None else [file]), path_of(base)])
    loaded = vector if isinstance(vector, TaskVector) else stored_task_vector(vector)
    stored = None if file is None else stored_change(file)
    about = {"name": "TaskVector"} if file is None or stored is None else files_identity(file, stored.files)
    record = {"command": "apply", "scale": config.scale, "vector": about, "out": str(out), "tensors": len(loaded)}
    record |= _made_of(base)
    written = ModelOutput().write_change(Path(out), loaded, str(base), record, config.overwrite, config.scale)
    for note in written.get("notes", ()):
        (events or Events()).note(note)
    stated = "" if stored is None else stored.base_fingerprint
    if stated and same_weights(stated, open_stored(local(base)).tensors) is False and events is not None:
        events.note(f"{vector} was made for other weights than those of {base}")
    return Path(out)


def fingerprint_of(base: str | Path) -> str:
    """The fingerprint of the weights of a base, for what is made of it."""
    return weights_fingerprint(open_stored(local(base)).tensors)


def _made_of(base: str | Path | None) -> dict[str, Any]:
    """The name and the SHA-256 of the weights of a base, if it is known, and the versions, for a record."""
    about: dict[str, Any] = {"tuneport": package_version("tuneport"), "versions": versions()}
    if base is None:
        return about
    place = local(base)
    return {"base": files_identity(place, getattr(open_stored(place).tensors, "files", ())), **about}


def merge(
    finetuned: Sequence[str | Path],
    out: str | Path,
    base: str | Path | None = None,
    *,
    events: Events | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Merge fine-tunes of one base, write the result and return its record.

    Args:
        finetuned: task-vector files, adapters and models.
        out: a file for a task vector, else a folder.
        base: the model that all of them change; by default what the first of them names.
        events: listens to the run.
        options: the fields of `MergeConfig`.
    """
    config = MergeConfig.of(**options)
    items, output = [local(item) for item in finetuned], output_of(config)
    paths = [path_of(item) for item in (*items, base) if item is not None]
    output.check_place(Path(out), config.overwrite, inputs=paths)
    stored = [stored_change(item) for item in items]
    base = base or next((found.base for found in stored if found is not None and found.base), None)
    need_base = any(found is None or isinstance(found.change, Adapter) for found in stored)
    if base is None and (output.asks_base or need_base):
        raise CheckpointError("the base that was fine-tuned is not known: pass it as `base`.")
    changes = [_difference(item, found, base, config.exclude) for item, found in zip(items, stored, strict=True)]
    both = zip(items, stored, strict=True)
    fingerprints = {item: _base_fingerprint(found) for item, found in both if found is not None}  # else a whole model
    if not config.accept_unlikely:
        _check_one_base(items, changes, base, fingerprints)
    vector = merge_vectors(changes, config.weights, rule=config.rule, density=config.density, seed=config.seed)
    record: dict[str, Any] = {
        "command": "merge",
        "as": config.as_,
        "rule": config.rule,
        "weights": list(config.weights) if config.weights is not None else [1.0] * len(items),
        "density": config.density,
        "seed": config.seed,
        "finetuned": [
            identity_of(found.change if found is not None and isinstance(found.change, Adapter) else item)
            for item, found in zip(items, stored, strict=True)
        ],
        "out": str(out),
        "tensors": len(vector),
        **_made_of(base),
    }
    notes = [f"{item} does not say which base it changes" for item, found in fingerprints.items() if not found]
    if notes := notes + _head_notes(items, stored, changes):
        record["notes"] = notes
    named = None if base is None else str(base)
    written = output.write_change(Path(out), vector, named, record, config.overwrite)
    for note in written.get("notes", ()):
        (events or Events()).note(note)
    return dict(written)


def _head_notes(
    items: Sequence[Path], stored: Sequence[StoredChange | None], changes: Sequence[TaskVector]
) -> list[str]:
    """Notes on heads: of adapters, that the base has no place for; of several fine-tunes, that are in one place."""
    notes, heads = [], {}
    for item, found in zip(items, stored, strict=True):
        if found is not None and isinstance(found.change, Adapter):
            heads[str(item)] = [name for name in found.change.tensors if is_head(name)]
    kept = {name for change in changes for name in change if is_head(name)}
    if lost := [name for name, own in heads.items() if own and not kept]:
        notes.append(f"the heads of {first_of(lost)} are left out: the base has no place for them")
    for name in sorted(kept):
        count = sum(name in change and change.changes(name) for change in changes)
        if count > 1:
            module = name.rpartition(".")[0]
            way = f'leave them out with `exclude=["{module}.*"]`'
            notes.append(f"{name} is the sum of {count} heads: if they are of different tasks, {way}")
    return notes


def _check_one_base(
    items: Sequence[Path], changes: Sequence[TaskVector], base: str | Path | None, fingerprints: Mapping[Path, str]
) -> None:
    """Refuse fine-tunes of different bases, by the fingerprints of their bases, or by what is left of the base."""
    stored = {} if base is None else open_stored(local(base)).tensors
    matrices = [name for name in stored if len(describe(stored, name).shape) > 1]
    known = {item: found for item, found in fingerprints.items() if found}
    for item, change in zip(items, changes, strict=True):
        if base is not None:
            other = item in known and same_weights(known[item], stored) is False
            if other or relation(stored, change, matrices)[1] < LEAST_LEFT:
                raise CheckpointError(f"{item} is no fine-tune of {base}: give fine-tunes of one base, {GO_ON}.")
        elif item in known and same_weights(known[first := next(iter(known))], known[item]) is False:
            raise CheckpointError(f"{first} and {item} change different bases: give fine-tunes of one base, {GO_ON}.")


def _base_fingerprint(stored: StoredChange) -> str:
    """Return the fingerprint of the base that a change is stored with, or of the base that it names."""
    if not stored.base_fingerprint and stored.base is not None and Path(stored.base).exists():
        return fingerprint_of(stored.base)
    return stored.base_fingerprint
