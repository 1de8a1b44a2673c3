"""Changes of a base as they are stored: what the formats of outputs that hold one are read back by."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..io.checkpoint import open_checkpoint
from ..types import FORMATS, registered
from .lora_format import Adapter, is_adapter, open_adapter
from .vector import FORMAT, TaskVector, load_task_vector


@dataclass(frozen=True, eq=False)
class StoredChange:
    """A change, and what is stored with it of its base."""

    change: Adapter | TaskVector
    files: tuple[Path, ...]  # that hold it; the run record has their SHA-256
    base: str | None = None  # the model that it changes
    base_fingerprint: str = ""  # of the weights of that model (`io.fingerprint.weights_fingerprint`)


def stored_change(path: str | Path) -> StoredChange | None:
    """The change in a file or folder, in any format that is read back; None for a whole model, or if there is none."""
    readers = (registered(about.reader, __package__) for about in FORMATS.values() if about.reader)
    return next(filter(None, (read(Path(path)) for read in readers)), None)


def stored_task_vector(path: str | Path) -> TaskVector:
    """The change in a file, in any format but an adapter; an error that says why it holds none."""
    found = stored_change(path)
    return found.change if found is not None and isinstance(found.change, TaskVector) else load_task_vector(path)


def read_adapter(path: Path) -> StoredChange | None:
    if not is_adapter(path):
        return None
    adapter = open_adapter(path)
    return StoredChange(adapter, adapter.files, adapter.base, adapter.base_fingerprint)


def read_task_vector(path: Path) -> StoredChange | None:
    if path.suffix != ".safetensors" or not path.is_file():
        return None
    metadata = open_checkpoint(path).metadata
    if metadata.get("format") != FORMAT:
        return None
    base = metadata.get("base")
    with suppress(KeyError, ValueError, TypeError, RecursionError):
        base = str(json.loads(metadata["record"])["target"]["path"])
    return StoredChange(load_task_vector(path), (path,), base, metadata.get("base_fingerprint", ""))
