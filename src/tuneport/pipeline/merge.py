"""Merge several fine-tunes of one base, and write the result as a task vector, an adapter or a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..io.hub import local
from ..io.output import new_folder
from ..models.open import open_model, path_of
from ..report.provenance import identity_of
from ..report.record import to_json, write_record
from ..task_vectors.lora_format import write_adapter
from ..task_vectors.lora_write import UNCUT, AdapterForm, pack
from ..task_vectors.merge import DENSITY, merge
from ..task_vectors.vector import TaskVector, load_task_vector, save_task_vector
from ..types import OutputKind
from .adapter import adapter_entry, adapter_facts
from .change import base_identity, extract, fingerprint_of, is_task_vector, made_by, opened, stated_base, write_model
from .result import check_output


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
        overwrite: replace an existing output.
    """
    items = [local(item) for item in finetuned]
    check_output(out, kind, overwrite, inputs=[path_of(item) for item in (*items, base) if item is not None])
    form.check()
    base = base or next((found for item in items if (found := stated_base(item))), None)
    if base is None and (kind != "task-vector" or not all(map(is_task_vector, items))):
        raise CheckpointError("the base that was fine-tuned is not known: pass it as `base`.")
    vector = merge([_change(item, base) for item in items], weights, rule=rule, density=density, seed=seed)
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
