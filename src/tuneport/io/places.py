"""What a user names: a path, or an id of the hub, `org/name` or a model's bare `name`, and what lies there.

A path that exists, or whose folder does, is never taken for a hub id. Weights are downloaded as safetensors where the
repository has them; no downloaded code is run. Without a network, the cache is used. No heavy library is needed.

Companions accompany a model's weights: configuration, tokenizer, processor, heads, pooling. Weights, tuneport's own
files and hidden ones are none; a link that points outside its folder is refused, since an output may be published.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError, DataError, brief, first_of

RepoKind = Literal["model", "dataset"]
PATIENCE = 10.0  # seconds in which the hub is to say whether it has a repository
ACCEPTED = "a model folder (transformers, open_clip, timm), open_clip's NAME:TAG or NAME:FILE, or timm:NAME[:FILE]"
CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot")
README = "README.md"
MODULES = "[1-9]_*"  # folders of the modules after the transformer of a sentence encoder: 1_Pooling, 2_Dense
OWN_FILES = (README, "tuneport.json", "report.html")  # written by tuneport

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


def path_of(reference: str | os.PathLike[str]) -> Path:
    """The path on disk that a reference means: itself, or FILE of NAME:FILE."""
    path, (_, mark, file) = Path(reference), str(reference).rpartition(":")
    return Path(file).expanduser() if mark and not path.exists() and Path(file).expanduser().exists() else path


def nearest_path(path: str | os.PathLike[str]) -> str:
    """A hint at the path next to a missing one whose name is most like it; else nothing."""
    place = Path(path)
    near: list[str] = []
    with suppress(OSError):
        near = difflib.get_close_matches(place.name, [item.name for item in place.parent.iterdir()], n=1)
    return f" Did you mean {place.parent / near[0]}?" if near else ""


def local(reference: str | os.PathLike[str], kind: RepoKind = "model", suffixes: tuple[str, ...] = ()) -> Path:
    """The path of a model or data set; a hub id, which ends in none of `suffixes`, is downloaded first."""
    if not looks_like_hub_id(reference, bare=kind == "model", suffixes=suffixes):
        return Path(reference)
    from huggingface_hub import snapshot_download

    name = os.fspath(reference)
    try:
        without = [*_PICKLES, *_OTHERS] if kind == "model" else list(_OTHERS)
        folder = Path(snapshot_download(name, repo_type=kind, ignore_patterns=without))
        if kind == "model" and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, repo_type=kind, ignore_patterns=list(_OTHERS)))
    except Exception as error:  # errors of the network, the hub and its cache share no base class
        raise (CheckpointError if kind == "model" else DataError)(_not_found(name, kind, error)) from error
    return folder


def why_unknown(reference: str, kind: RepoKind = "model") -> str:
    """Say that a hub id is neither in the cache nor on the hub; nothing if it is, and nothing is downloaded."""
    from huggingface_hub import HfApi, snapshot_download

    with suppress(Exception):
        snapshot_download(reference, repo_type=kind, local_files_only=True)
        return ""
    try:
        HfApi().repo_info(reference, repo_type=kind, timeout=PATIENCE)
    except Exception as error:
        return _not_found(reference, kind, error)
    return ""


def _not_found(name: str, kind: RepoKind, error: Exception) -> str:
    return (
        f"there is no path {name}, and the hub has no such {kind}, or it cannot be reached: "
        f"{brief(error).rstrip(':')}.{nearest_path(name)} Give a path that exists, or check the name and the network."
    )


def hub_name(path: Path) -> tuple[str, str] | None:
    """Id and revision of a folder in the hub's cache; None for any other path.

    >>> hub_name(Path("hub/models--openai--clip/snapshots/3d74acf"))
    ('openai/clip', '3d74acf')
    """
    kind, _, name = path.absolute().parent.parent.name.partition("--")
    if path.absolute().parent.name != "snapshots" or kind not in ("models", "datasets"):
        return None
    return name.replace("--", "/", 1), path.name


def why_no_model(reference: str | Path) -> str:
    """Say what a reference is that no family of models recognises, and what to give in its place."""
    path = Path(reference)
    if not path.exists():
        return f"there is no model at {reference}: no such folder.{nearest_path(path)} Give {ACCEPTED}."
    if (path / CONFIG).is_file():
        return (
            f"{reference} is an adapter, not a model. To port it, give it as `finetuned`, with its base as `source`; "
            f"to merge it into its base, run tuneport merge {shlex.quote(str(reference))} --base BASE --as model "
            "--out MODEL."
        )
    files = sorted(str(file) for file in path.glob("*.gguf"))
    adapters = sorted(str(file.parent) for file in path.glob(f"*/{CONFIG}"))  # peft writes those with names there
    wanted = f"one of the adapters in it ({first_of(adapters, 3)})" if adapters else ACCEPTED
    wanted = f"one of its GGUF files ({first_of(files, 3)})" if files else wanted
    return why_no_adapter(path) or f"{reference} is not a model: no config.json in it. Give {wanted}."


def why_no_adapter(path: Path) -> str:
    """Say what is missing where a path holds the weights of an adapter without its configuration; else nothing."""
    if (path / CONFIG).is_file():
        return ""
    for weights in (path, *(path / name for name in WEIGHTS)):
        if weights.suffix == ".safetensors" and weights.is_file():
            with suppress(OSError, SafetensorError), safe_open(weights, framework="np") as stored:
                if any(".lora_" in key for key in stored.keys()):  # noqa: SIM118
                    needed = (
                        f"the folder that holds it and {CONFIG}" if weights == path else f"a folder with its {CONFIG}"
                    )
                    return f"{path} holds the factors of a LoRA, not a model: give {needed}."
    return ""


def check_no_parts(path: Path) -> None:
    if words := why_no_adapter(path):
        raise CheckpointError(words)


def copy_companions(source: Path | None, folder: Path) -> None:
    """Copy the companions of the weights in `source`, if there is such a folder, to `folder`."""
    for file in _safe(source):
        place = folder / file.relative_to(source or folder)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)


def companion_bytes(source: Path | None) -> int:
    """The size of the companions; a CheckpointError if `copy_companions` would refuse one of them."""
    return sum(file.stat().st_size for file in _safe(source))


def companions(folder: Path, *more: str) -> list[Path]:
    """The companion files in a model's folder, and those of tuneport's own files that `more` names."""
    found = [
        item
        for item in sorted(folder.iterdir())
        if not item.name.startswith(".")
        and (item.name not in OWN_FILES or item.name in more)
        and not item.name.endswith((*WEIGHT_SUFFIXES, ".index.json"))
        and item.is_file()
    ]
    parts = (*folder.glob("heads/[!.]*.safetensors"), *folder.glob(f"{MODULES}/[!.]*"))
    return [*found, *sorted(file for file in parts if file.is_file())]


def _safe(folder: Path | None) -> list[Path]:
    """The companions, none of which is a link to outside the folder and the hub cache that the folder is in."""
    if folder is None:
        return []
    home, found = folder.resolve(), companions(folder)
    places = {home, home.parent.parent / "blobs"} if home.parent.name == "snapshots" else {home}
    for file in found:
        if places.isdisjoint((real := file.resolve()).parents):
            raise CheckpointError(
                f"{file} is a link to {real}, outside its folder, and is not copied to the output. "
                "Replace the link by the file."
            )
    return found
