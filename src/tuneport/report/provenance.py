"""Provenance for run records: names, paths, SHA-256 of the files, licences, versions.

All values are JSON. Models and data in files are identified by the SHA-256 of the files that were read, since paths
differ between machines. A live module has only a name.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from torch import nn

from ..data.dataset import Dataset
from ..data.images import files_of
from ..io.fingerprint import file_digests
from ..io.places import README, companions, hub_name, local
from ..models.base import Model, ModelLike
from ..models.heads import Head
from ..models.open import open_stored
from ..task_vectors.lora_format import Adapter
from ..task_vectors.stored import stored_change
from ..task_vectors.vector import TaskVector

LARGEST_CARD = 2**18  # bytes of a model card that is searched for a licence


def identity_of(model: ModelLike | Adapter | TaskVector) -> dict[str, Any]:
    """The name and path of a model and the SHA-256 of each of its files."""
    if isinstance(model, Adapter):
        identity: dict[str, Any] = files_identity(model.name, model.files) if model.files else {"name": model.name}
        rank, base = model.config.get("r"), model.config.get("base_model_name_or_path")
        identity["adapter"] = {"rank": rank, "base_model": base, "task_type": model.task_type}
        return identity
    if isinstance(model, (nn.Module, TaskVector)):
        return {"name": type(model).__name__}
    held: object
    if isinstance(model, Model):
        reference, held = model.name, model.weights.tensors
    else:
        reference, held = str(model), stored_change(model) or open_stored(model).tensors
    files: Iterable[Path] = getattr(held, "files", ())  # a live module has no files
    if not files:
        return {"name": reference}
    path = Path(reference)
    kind, mark, place = reference.rpartition(":")
    if mark and not path.exists() and Path(place).exists():  # NAME:FILE
        return {**files_identity(reference, files), "name": f"{kind}:{Path(place).name}"}
    path = local(path)
    companion_files = companions(path, README) if path.is_dir() else []
    home = path if path.is_dir() else path.parent
    digests = file_digests([*files, *companion_files])
    identity = {
        "name": path.absolute().name,
        "path": str(path),
        "license": _licence(path / README),
        "sha256": {str(Path(file).relative_to(home)): digest for file, digest in digests.items()},
    }
    if known := hub_name(path):
        identity["name"], identity["revision"] = known
    return identity


def files_identity(path: str | Path, files: Iterable[Path]) -> dict[str, Any]:
    """The name of a folder or file, and the SHA-256 of the given files by their bare names."""
    digests = {Path(name).name: digest for name, digest in file_digests(files).items()}
    return {"name": Path(path).absolute().name, "path": str(path), "sha256": digests}


def base_note(adapter: Adapter, source: Model) -> str | None:
    """A note if the adapter names another base. Not an error: names of bases differ between machines."""
    stated = adapter.config.get("base_model_name_or_path")
    if not stated or source.weights.folder is None or Path(stated).name == source.weights.folder.absolute().name:
        return None
    return f"the adapter names {stated} as its base; it is read as one of {source.name}"


def _licence(card: Path) -> str | None:
    """The licence in the front matter of a model card; None if there is none, or if it cannot be read."""
    try:
        stated = (metadata_load(card) or {}).get("license") if card.stat().st_size <= LARGEST_CARD else None
    except Exception:  # a card is a stranger's: YAML tags alone can raise KeyError, IndexError or RecursionError
        return None
    return stated if isinstance(stated, str) and re.fullmatch(r"[A-Za-z0-9][\w.+-]{0,63}", stated) else None


def data_identity(
    data: Any, dataset: Dataset | None = None, indices: Any = None, heads: tuple[Head, ...] | None = None
) -> dict[str, Any]:
    """The name and path of the data and the SHA-256 of the files that were read."""
    identity: dict[str, Any] = {"name": dataset.name if dataset is not None else None}
    if isinstance(data, (str, Path)):
        path = Path(data)
        identity["path"] = str(data)
        if known := hub_name(path):
            identity |= {"name": known[0], "revision": known[1]}
        files = [*dataset.origin.files, *files_of(dataset.subset(indices))] if dataset is not None else []
        if path.is_file():
            files = [path, *files]
        digests = file_digests(dict.fromkeys(files))
        home = path.parent if path.is_file() else path
        identity["sha256"] = {os.path.relpath(file, home): digest for file, digest in digests.items()}
    if dataset is not None:
        identity |= {"split": dataset.origin.split, "classes": len(dataset.classes), "indices": indices.tolist()}
    if heads is not None:
        identity["heads"] = [head.name for head in heads]
    return identity


def versions() -> dict[str, str]:
    """The versions of the packages that a result depends on, and of Python."""
    names = ("torch", "transformers", "safetensors", "numpy")
    return {name: package_version(name) for name in names} | {"python": platform.python_version()}


@cache  # it stays as it was imported
def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
