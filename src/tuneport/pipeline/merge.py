"""Merge several fine-tunes of one base, and write the result as a task vector, an adapter or a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError
from ..io.fingerprint import same_fingerprints, same_weights
from ..io.hub import local
from ..io.output import new_folder
from ..io.tensors import describe
from ..models.open import open_model, open_stored, path_of
from ..report.provenance import identity_of
from ..report.record import to_json, write_record
from ..task_vectors.lora_format import is_adapter, write_adapter
from ..task_vectors.lora_write import UNCUT, AdapterForm, pack
from ..task_vectors.merge import DENSITY, merge
from ..task_vectors.vector import TaskVector, load_task_vector, save_task_vector
from ..types import OutputKind
from .adapter import adapter_entry, adapter_facts
from .change import base_identity, extract, fingerprint_of, is_task_vector, made_by, opened, stated_base, write_model
from .result import check_output
from .sanity import GO_ON, LEAST_LEFT, relation, stated_fingerprint


def merge_finetunes(
    finetuned: Sequence[str | Path],
    out: str | Path,
    *,
    base: str | Path | None = None,
    weights: Sequence[float] | None = None,
    rule: str = "sum",
    density: float = DENSITY,
    seed: int = 0,
    kind: OutputKind = "task-vector",
    form: AdapterForm = UNCUT,
    accept_unlikely: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Merge fine-tunes of one base, write the result and return its record.

    Args:
        finetuned: task-vector files, adapters and models.
        out: a file for a task vector, else a folder.
        base: the model that all of them change; by default what the first of them names.
        weights, rule, density, seed: see `tuneport.task_vectors.merge.merge`.
        kind: what to write.
        form: of an adapter.
        accept_unlikely: merge also what looks like fine-tunes of different bases.
        overwrite: replace an existing output.
    """
    items = [local(item) for item in finetuned]
    check_output(out, kind, overwrite, inputs=[path_of(item) for item in (*items, base) if item is not None])
    form.check()
    base = base or next((found for item in items if (found := stated_base(item))), None)
    if base is None and (kind != "task-vector" or not all(map(is_task_vector, items))):
        raise CheckpointError("the base that was fine-tuned is not known: pass it as `base`.")
    changes = [_change(item, base) for item in items]
    if not accept_unlikely:
        _check_one_base(items, changes, base)
    vector = merge(changes, weights, rule=rule, density=density, seed=seed)
    record: dict[str, Any] = {
        "command": "merge",
        "as": kind,
        "rule": rule,
        "weights": list(weights) if weights is not None else [1.0] * len(items),
        "density": density,
        "seed": seed,
        "finetuned": [identity_of(opened(item)) for item in items],
        "out": str(out),
        "tensors": len(vector),
        **({} if base is None else {"base": base_identity(local(base))}),
        **made_by(),
    }
    if notes := [f"{item} does not say which base it changes" for item in items if not _known_base(item)]:
        record["notes"] = notes
    if kind == "task-vector":
        named = {} if base is None else {"base": str(base), "base_fingerprint": fingerprint_of(base)}
        save_task_vector(out, vector, {**named, "merged": to_json(record)}, overwrite=overwrite)
    elif kind == "model":
        assert base is not None
        write_model(vector, local(base), out, record, scale=1.0, overwrite=overwrite)
    else:
        assert base is not None
        record |= _write_adapter(vector, base, out, form, record, overwrite)
    return record


def _change(item: Path, base: str | Path | None) -> TaskVector:
    """The change of a fine-tune under the names in the base's files."""
    if is_task_vector(item):
        return load_task_vector(item)
    assert base is not None
    return extract(base, item)


def _check_one_base(items: Sequence[Path], changes: Sequence[TaskVector], base: str | Path | None) -> None:
    """Refuse fine-tunes of different bases, by the fingerprints of their bases, or by what is left of the base."""
    stored = None if base is None else open_stored(local(base)).tensors
    known = {item: found for item in items if (found := _base_fingerprint(item))}
    for item, change in zip(items, changes, strict=True):
        if stored is not None:
            other = item in known and same_weights(known[item], stored) is False
            other = other or relation(stored, change, _matrices(stored))[1] < LEAST_LEFT
            if other:
                raise CheckpointError(f"{item} is no fine-tune of {base}: give fine-tunes of one base, {GO_ON}.")
        elif item in known and same_fingerprints(known[first := next(iter(known))], known[item]) is False:
            raise CheckpointError(f"{first} and {item} change different bases: give fine-tunes of one base, {GO_ON}.")


def _base_fingerprint(item: Path) -> str:
    """Return the fingerprint of the base that a task vector or an adapter states, or of the base that it names."""
    found = stated_fingerprint(opened(item))
    named = None if found else stated_base(item)
    return fingerprint_of(named) if named is not None and Path(named).exists() else found


def _known_base(item: Path) -> bool:
    """Return whether it can be told which base a fine-tune changes; the weights of a whole model tell it."""
    return bool(_base_fingerprint(item)) or not (is_task_vector(item) or is_adapter(item))


def _matrices(stored: Mapping[str, Tensor]) -> list[str]:
    return [name for name in stored if len(describe(stored, name).shape) > 1]


def _write_adapter(
    vector: TaskVector, base: str | Path, out: str | Path, form: AdapterForm, record: dict[str, Any], overwrite: bool
) -> dict[str, Any]:
    model = open_model(base)
    live = {file: name for name, file in model.file_names.items()}
    vector = vector.rename({name: live[name] for name in vector if name in live})
    weights, facts = model.stored_parameters(), adapter_facts(model, None)
    packed = pack(vector, model.module, weights, form, about=facts)
    more = {"adapter": adapter_entry(packed)}
    with new_folder(out, overwrite=overwrite) as folder:
        write_adapter(folder, packed.adapter)
        write_record(folder / "tuneport.json", {**record, **more})
    return more
