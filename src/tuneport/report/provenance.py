"""Where things come from, for run records: names, places, SHA-256 of the files, licences, versions.

Plain JSON values. Models and data in files are known by the SHA-256 of what was used of them, since places change with
the machine; a live module has a name and no more.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load
from torch import nn

from ..data.dataset import Dataset, files_of
from ..io.checkpoint import file_digests
from ..io.companions import README, companions
from ..io.hub import hub_name, local
from ..models.base import Model, ModelLike
from ..models.heads import Head
from ..models.open import open_stored
from ..task_vectors.lora_format import Adapter
from ..task_vectors.vector import TaskVector
from .record import Data, Input, Versions

LARGEST_CARD = 2**18  # bytes of a model card that is searched for a licence


def identity_of(model: ModelLike | Adapter | TaskVector) -> Input:
    """What a model is called, where it is, and the SHA-256 of each of its weight files."""
    if isinstance(model, Adapter):
        return _adapter_identity(model)
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
        return {"name": f"{kind}:{Path(place).name}", "path": reference, "sha256": _by_name(files)}
    path = local(path)
    beside = companions(path, README) if path.is_dir() else []
    home = path if path.is_dir() else path.parent
    digests = file_digests([*files, *beside])
    identity: Input = {
        "name": path.absolute().name,
        "path": str(path),
        "license": _licence(path / README),
        "sha256": {str(Path(file).relative_to(home)): digest for file, digest in digests.items()},
    }
    if known := hub_name(path):
        identity["name"], identity["revision"] = known
    return identity


def files_identity(path: str | Path, files: Iterable[Path]) -> Input:
    """What the folder or file at a path is called, and the SHA-256 of these files of it by their bare names."""
    return {"name": Path(path).absolute().name, "path": str(path), "sha256": _by_name(files)}


def _by_name(files: Iterable[Path]) -> dict[str, str]:
    return {Path(name).name: digest for name, digest in file_digests(files).items()}


def _adapter_identity(adapter: Adapter) -> Input:
    identity: Input = files_identity(adapter.name, adapter.files) if adapter.files else {"name": adapter.name}
    task = adapter.config.get("task_type")
    return {
        **identity,
        "adapter": {
            "rank": adapter.config.get("r"),
            "base_model": adapter.config.get("base_model_name_or_path"),
            "task_type": getattr(task, "value", task),
        },
    }


def base_note(adapter: Adapter, source: Model) -> str | None:
    """Names of bases change with the machine, so that another name is worth a word and no more."""
    stated = adapter.config.get("base_model_name_or_path")
    if not stated or source.folder is None or Path(stated).name == source.folder.absolute().name:
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
) -> Data:
    """What the data are called, where they are, and the SHA-256 of the files that were used."""
    identity: Data = {"name": dataset.name if dataset is not None else None}
    if isinstance(data, (str, Path)):
        path = Path(data)
        identity["path"] = str(data)
        if known := hub_name(path):
            identity |= {"name": known[0], "revision": known[1]}
        files = [*dataset.files, *files_of(dataset.subset(indices))] if dataset is not None else []
        if path.is_file():
            files = [path, *files]
        digests = file_digests(dict.fromkeys(files))
        home = path.parent if path.is_file() else path
        identity["sha256"] = {os.path.relpath(file, home): digest for file, digest in digests.items()}
    if dataset is not None:
        identity |= {"split": dataset.split, "classes": len(dataset.classes), "indices": indices.tolist()}
    if heads is not None:
        identity["heads"] = [head.name for head in heads]
    return identity


def versions() -> Versions:
    """Of the packages that a result depends on, and of Python."""
    return {
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
        "safetensors": package_version("safetensors"),
        "numpy": package_version("numpy"),
        "python": platform.python_version(),
    }


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
