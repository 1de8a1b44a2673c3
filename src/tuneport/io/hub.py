"""Hub ids: resolve `org/name`, or a model's bare `name`, to a local folder, which huggingface_hub downloads if needed.

A path that exists, or whose folder does, is never taken for a hub id. Weights are downloaded as safetensors where the
repository has them; no downloaded code is run. Without a network, the cache is used.
"""

from __future__ import annotations

import difflib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError, DataError, TuneportError, brief

RepoKind = Literal["model", "dataset"]
PATIENCE = 10.0  # seconds in which the hub is to say whether it has a repository

_ID = re.compile(r"([A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}")
_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".txt", ".gz", ".zip")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHERS = ("*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "*.tflite", "*.mlmodel", "*.zip", ".*")


def looks_like_hub_id(reference: str | os.PathLike[str], *, bare: bool = False, suffixes: tuple[str, ...] = ()) -> bool:
    """True if a reference has the form `org/name`, no folder `org` exists, and it does not end like a file.

    With `bare`, a name without an organisation counts too, as some old models have (`bert-base-uncased`). Files end
    like weights or archives, or in one of `suffixes`.
    """
    text = os.fspath(reference)
    is_file = text.lower().endswith((*_FILES, *suffixes))
    named = _ID.fullmatch(text) is not None and ".." not in text and not is_file
    return named and (bare or "/" in text) and not os.path.lexists(text) and not os.path.isdir(os.path.dirname(text))


def nearest_path(path: str | os.PathLike[str]) -> str:
    """A hint at the path next to a missing one whose name is most like it; else nothing."""
    place = Path(path)
    try:
        names = [item.name for item in place.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(place.name, names, n=1)
    return f" Did you mean {place.parent / near[0]}?" if near else ""


def local(reference: str | os.PathLike[str], kind: RepoKind = "model", suffixes: tuple[str, ...] = ()) -> Path:
    """The path of a model or data set; a hub id, which ends in none of `suffixes`, is downloaded first."""
    if not looks_like_hub_id(reference, bare=kind == "model", suffixes=suffixes):
        return Path(reference)
    name = os.fspath(reference)
    folder = _fetch(name, kind, (*_PICKLES, *_OTHERS) if kind == "model" else _OTHERS)
    if kind == "model" and not any(folder.glob("*.safetensors")):
        folder = _fetch(name, kind, _OTHERS)
    return folder


def why_unknown(reference: str, kind: RepoKind = "model") -> str:
    """Say that a hub id is neither in the cache nor on the hub; nothing if it is, and nothing is downloaded."""
    from huggingface_hub import HfApi, snapshot_download

    with suppress(Exception):
        snapshot_download(reference, repo_type=kind, local_files_only=True)
        return ""
    try:
        HfApi().repo_info(reference, repo_type=kind, timeout=PATIENCE)
    except Exception as error:  # errors of the network, the hub and its cache share no base class
        return _not_found(reference, kind, error)
    return ""


def hub_name(path: Path) -> tuple[str, str] | None:
    """Id and revision of a folder in the hub's cache; None for any other path.

    >>> hub_name(Path("hub/models--openai--clip/snapshots/3d74acf"))
    ('openai/clip', '3d74acf')
    """
    owner = path.absolute().parent.parent.name.partition("--")
    if path.absolute().parent.name != "snapshots" or owner[0] not in ("models", "datasets"):
        return None
    return owner[2].replace("--", "/", 1), path.name


def _fetch(name: str, kind: RepoKind, ignored: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, repo_type=kind, ignore_patterns=list(ignored)))
    except Exception as error:  # errors of the network, the hub and its cache share no base class
        wrong: type[TuneportError] = CheckpointError if kind == "model" else DataError
        raise wrong(_not_found(name, kind, error)) from error


def _not_found(name: str, kind: RepoKind, error: Exception) -> str:
    return (
        f"there is no path {name}, and the hub has no such {kind}, or it cannot be reached: "
        f"{brief(error).rstrip(':')}. Give a path that exists, or check the name and the network."
    )
